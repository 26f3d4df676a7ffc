"""Text models inside ones that also see or hear: logits of text are those of transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file
from torch import Tensor

from plait.cli.info import checkpoint_facts
from plait.config import EngineConfig
from plait.errors import UnusedTensor
from plait.families.common.inside import find_body, note_unread
from plait.loading.open_model import linear_dtypes, open_model, stored_dtypes
from tests.families import tiny
from tests.families.parity import Memory, decoder, resolved, whole, worst
from tests.families.tiny_latest import GLM4V, GLM_EYE, GLM_ROPE, HY_VL, LARGE4, QWEN3_VL_MOE, SPARK, TEXT

IDS = torch.arange(17) * 31 % 90  # below what stands for pictures and sound
EYE = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2} | {
    "image_size": 8,
    "patch_size": 4,
}
LLAMA = {"model_type": "llama", **TEXT}
QWEN2 = {"model_type": "qwen2", **TEXT}
WHOLE = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]}}
# A wrapper's config and its keys.
WRAPPERS: dict[str, tuple[str, dict[str, Any]]] = {
    "llava": (
        "LlavaConfig",
        {
            "text_config": LLAMA,
            "vision_config": {"model_type": "clip_vision_model", **EYE, "projection_dim": 8},
        },
    ),
    "llava_next": (
        "LlavaNextConfig",
        {
            "text_config": LLAMA,
            "vision_config": {"model_type": "clip_vision_model", **EYE, "projection_dim": 8},
        },
    ),
    "idefics3": ("Idefics3Config", {"text_config": LLAMA, "vision_config": EYE, "scale_factor": 1}),
    "smolvlm": ("SmolVLMConfig", {"text_config": LLAMA, "vision_config": EYE, "scale_factor": 1}),
    "lfm2_vl": (
        "Lfm2VlConfig",
        {
            "text_config": {
                "model_type": "lfm2",
                **TEXT,
                "layer_types": ["conv", "full_attention", "conv"],
                "block_auto_adjust_ff_dim": False,
            },
            "vision_config": {"model_type": "siglip2_vision_model", **EYE, "num_patches": 4},
        },
    ),
    "qwen2_audio": (
        "Qwen2AudioConfig",
        {
            "text_config": QWEN2,
            "audio_config": {
                "model_type": "qwen2_audio_encoder",
                "d_model": 16,
                "encoder_layers": 1,
                "encoder_attention_heads": 2,
                "encoder_ffn_dim": 24,
                "num_mel_bins": 8,
                "max_source_positions": 20,
            },
        },
    ),
    "glm4v": ("Glm4vConfig", GLM4V),
    "glm4v_whole_heads": ("Glm4vConfig", {**GLM4V, "text_config": {**GLM4V["text_config"], **WHOLE}}),
    "glm4v_moe": (
        "Glm4vMoeConfig",
        {
            "text_config": {
                "model_type": "glm4v_moe_text",
                **TEXT,
                "head_dim": 8,
                "n_routed_experts": 6,
                "num_experts_per_tok": 2,
                "moe_intermediate_size": 20,
                "rope_parameters": GLM_ROPE,
            },
            "vision_config": GLM_EYE,
        },
    ),
    "muse_spark": ("MuseSparkConfig", SPARK),
    "mistral_large4": ("MistralLarge4Config", LARGE4),
    "hy_v4_vl": ("HYV4VLConfig", HY_VL),
    "qwen3_vl_moe": ("Qwen3VLMoeConfig", QWEN3_VL_MOE),
    "voxtral": (
        "VoxtralConfig",
        {
            "text_config": LLAMA,
            "audio_config": {
                "hidden_size": 16,
                "intermediate_size": 24,
                "num_hidden_layers": 1,
                "num_attention_heads": 2,
                "num_mel_bins": 8,
                "max_source_positions": 20,
            },
        },
    ),
}


def make(name: str) -> tuple[Any, Tensor]:
    """(the oracle, its logits of text)."""
    kind, keys = WRAPPERS[name]
    config = getattr(transformers, kind)(**keys)
    config.tie_word_embeddings = config.text_config.tie_word_embeddings = False
    model = getattr(transformers, kind.replace("Config", "ForConditionalGeneration"))._from_config(
        config, dtype=torch.float32, attn_implementation="eager"
    )
    tiny.randomize(model.eval(), one_plus=False)
    with torch.no_grad():
        return model, model(input_ids=IDS[None]).logits[0]


def logits(config: dict[str, Any], stored: dict[str, Tensor]) -> Tensor:
    checkpoint = Memory(stored)
    return whole(decoder(resolved(checkpoint, config), checkpoint), IDS)


def turn(name: str, tensor: Tensor) -> Tensor:
    """Stacks of experts as Qwen3-VL was published."""
    return tensor.mT.contiguous() if ".experts." in name and tensor.ndim == 3 else tensor


@pytest.mark.parametrize("name", WRAPPERS)
def test_text_is_that_of_transformers(name: str, tmp_path: Path) -> None:
    """Under the names that files have, and under those of the model in memory."""
    model, want = make(name)
    model.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    files, memory = load_file(tmp_path / "model.safetensors"), dict(model.state_dict())
    published = {key: turn(key, tensor) for key, tensor in files.items()} if "qwen3_vl" in name else files
    for stored in (files, memory, published):
        assert note_unread(resolved(Memory(stored), config).names, stored)
        assert worst(logits(config, stored), want) < 1e-4


def test_a_tensor_of_the_text_model_itself_may_not_stay_unused() -> None:
    model, _ = make("llava")
    stored = {**model.state_dict(), "model.language_model.layers.0.self_attn.extra": torch.zeros(3)}
    with pytest.raises(UnusedTensor, match=r"model.language_model.layers.0.self_attn.extra"):
        logits(json.loads(model.config.to_json_string(use_diff=False)), stored)


def test_what_is_no_wrapper_has_no_body() -> None:
    assert find_body(["model.embed_tokens.weight", "lm_head.weight", "backbone.language_model.x"]) is None
    assert find_body(["language_model.model.norm.weight", "vision_tower.x"]) == "language_model."


def test_a_note_names_what_is_not_read() -> None:
    model, _ = make("llava")
    config, stored = json.loads(model.config.to_json_string(use_diff=False)), dict(model.state_dict())
    (note,) = note_unread(resolved(Memory(stored), config).names, stored)
    count = sum("vision_tower" in name or "multi_modal_projector" in name for name in stored)
    assert note == f"text alone: {count} tensors of vision_tower, multi_modal_projector are not read"
    text = {name.replace("language_model.", ""): tensor for name, tensor in stored.items()}
    assert note_unread(resolved(Memory(text), config).names, text) == [note]
    alone = {name: tensor for name, tensor in text.items() if "vision" not in name and "multi" not in name}
    assert note_unread(resolved(Memory(alone), config).names, alone) == []


def test_sizes_are_those_of_the_text_model(tmp_path: Path) -> None:
    model, _ = make("llava")
    model.model.vision_tower.to(torch.bfloat16)
    model.save_pretrained(tmp_path)
    opened = open_model(str(tmp_path), EngineConfig())
    text = sum(p.numel() for n, p in model.named_parameters() if "language_model" in n or "lm_head" in n)
    facts = checkpoint_facts(opened)
    assert facts["parameters"] == text < sum(p.numel() for p in model.parameters())
    assert (facts["nbytes"], facts["tensors"]) == (4 * text, len(opened.tensors))
    assert {*stored_dtypes(opened), *linear_dtypes(opened)} == {"float32"}
