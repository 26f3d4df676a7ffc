"""Text models that transformers has only inside others: names of files, of the model in memory, and keys."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file
from torch import Tensor

from plait.checkpoint.adapters.adapter_file import AdapterFile, FactorPair
from plait.errors import UnsupportedModel, UnusedTensor
from plait.families.common.inside import find_body, note_unread
from plait.families.common.registry import build_spec
from plait.loading.adapters.place import match_adapter
from plait.spec.model import AttentionSpec
from tests.families import tiny
from tests.families.parity import Memory, decoder, resolved, whole, worst
from tests.families.test_inside import EYE, IDS
from tests.families.tiny import MLA
from tests.families.tiny_inside import ERNIE, QWEN2_OMNI, QWEN3_OMNI, WRAPPERS
from tests.families.tiny_latest import TEXT

ONE_GROUP = {"n_shared_experts": 1, "n_group": 1, "topk_group": 1}
QWEN3 = {"model_type": "qwen3", **TEXT, "head_dim": 8}
SAM = {
    "hidden_size": 16,
    "output_channels": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "mlp_dim": 24,
    "image_size": 64,
    "patch_size": 16,
    "global_attn_indexes": [0],
}
# Wrappers of text models that stand alone, too.
OTHERS: dict[str, tuple[str, dict[str, Any]]] = {
    "got_ocr2": ("GotOcr2", {"text_config": {"model_type": "qwen2", **TEXT}, "vision_config": SAM}),
    "lighton_ocr": (
        "LightOnOcr",
        {"text_config": QWEN3, "vision_config": {**EYE, "model_type": "pixtral", "head_dim": 8}},
    ),
    "qianfan_ocr": (
        "QianfanOCR",
        {"text_config": QWEN3, "vision_config": {**EYE, "image_size": [8, 8], "patch_size": [4, 4]}},
    ),
    "kimi_k25": (
        "Kimi_K25",
        {
            "text_config": {"model_type": "deepseek_v3", **TEXT, **MLA, "q_lora_rank": 12, **ONE_GROUP},
            "vision_config": {**EYE, "patch_size": 4},
        },
    ),
}
TALKERS = {"qwen2_5_omni": ("Qwen2_5Omni", QWEN2_OMNI), "qwen3_omni": ("Qwen3OmniMoe", QWEN3_OMNI)}


def make(kind: str, keys: dict[str, Any], folder: Path) -> tuple[dict[str, Any], Any, dict[str, Tensor]]:
    """(config.json, the oracle, the tensors of its file)."""
    config = getattr(transformers, f"{kind}Config")(**json.loads(json.dumps(keys)))
    model = getattr(transformers, f"{kind}ForConditionalGeneration")._from_config(
        config, dtype=torch.float32, attn_implementation="eager"
    )
    tiny.randomize(model.eval(), one_plus=False)
    model.save_pretrained(folder)
    return json.loads((folder / "config.json").read_text()), model, load_file(folder / "model.safetensors")


def check(config: Mapping[str, Any], stored: Mapping[str, Tensor], want: Tensor) -> list[str]:
    """The note on what is not read, of a model that answers `want`."""
    checkpoint = Memory(stored)
    found = resolved(checkpoint, config)
    assert worst(whole(decoder(found, checkpoint), IDS), want) < 1e-4
    return note_unread(found.names, stored)


@torch.no_grad()
def answer(model: Any) -> Tensor:
    return model(input_ids=IDS[None]).logits[0]


@pytest.mark.parametrize("name", {**WRAPPERS, **OTHERS})
def test_names_of_files_and_of_memory_are_read(name: str, tmp_path: Path) -> None:
    config, model, files = make(*{**WRAPPERS, **OTHERS}[name], tmp_path)
    # As published: transformers writes layers of these texts as if they were eyes.
    theirs = {"qianfan_ocr": ".encoder.layers.", "kimi_k25": ".blocks."}.get(name, ".layers.")
    text = "language_model.model"
    published = {key.replace(f"{text}{theirs}", f"{text}.layers."): t for key, t in files.items()}
    for stored in (files, published, dict(model.state_dict())):
        (note,) = check(config, stored, answer(model))
        assert note.startswith("text alone: ")


@pytest.mark.parametrize("name", ["ernie_vl", "granite4_vision", "glm_ocr", "qwen3_vl", "paddleocr"])
def test_an_adapter_may_have_names_of_files_or_of_memory(name: str, tmp_path: Path) -> None:
    """As it was trained by an older or a newer transformers, whatever names the files have."""
    config, model, files = make(*WRAPPERS[name], tmp_path)
    memory = dict(model.state_dict())
    where = "layers.1.self_attn.q_proj.weight"
    bodies = ("model.", "model.language_model.", "language_model.model.")
    weight = next(tensor for key, tensor in memory.items() if key.endswith(f"language_model.{where}"))
    pair = FactorPair(torch.zeros(2, weight.shape[1]), torch.zeros(weight.shape[0], 2), 1.0)
    for stored in (files, memory):
        opened: Any = SimpleNamespace(resolved=resolved(Memory(stored), config), metadata=None)
        for body in bodies:
            match = match_adapter(opened, AdapterFile(tmp_path, "hf", {f"{body}{where}": pair}, ""))
            assert match.take("layers.1.attn.q") is not None
            match.check_all_used()
        eyes = AdapterFile(tmp_path, "hf", {"model.visual.blocks.0.attn.qkv.weight": pair}, "")
        with pytest.raises(UnusedTensor, match=r"visual.blocks.0.attn.qkv"):
            match_adapter(opened, eyes).check_all_used()


@pytest.mark.parametrize("name", TALKERS)
def test_a_thinker_is_read_and_what_talks_is_not(name: str, tmp_path: Path) -> None:
    """Text is found by its place next to a talker, under names of files and of memory."""
    kind, thinker = TALKERS[name]
    config, model, files = make(kind, {"thinker_config": thinker, "enable_audio_output": False}, tmp_path)
    talker = {"talker.model.layers.0.mlp.up_proj.weight": torch.zeros(2), "code2wav.x.weight": torch.zeros(2)}
    for stored, body in (
        (files, "thinker.model."),
        (dict(model.state_dict()), "thinker.model.language_model."),
    ):
        assert find_body(stored) == body
        (note,) = check(config, {**stored, **talker}, answer(model.thinker))
        assert all(part in note for part in ("audio_tower", "visual", "talker", "code2wav"))
    assert "thinker" not in note


def test_a_thinker_may_be_saved_alone(tmp_path: Path) -> None:
    config, model, files = make("Qwen3OmniMoeThinker", QWEN3_OMNI, tmp_path)
    assert find_body(files) is None
    (note,) = check({**config, "architectures": None}, files, answer(model))
    assert "audio_tower, visual" in note


def test_published_keys_of_ernie_list_text_and_images(tmp_path: Path) -> None:
    """One config without a nested one, of which lists have numbers for text and for images."""
    config, model, files = make("Ernie4_5_VLMoe", ERNIE, tmp_path)
    text = config["text_config"]
    turns = text.pop("rope_parameters")
    assert text.pop("mlp_layer_types") == ["dense", "sparse", "sparse"]
    flat = {
        **text,
        "architectures": config["architectures"],
        "model_type": "ernie4_5_moe_vl",
        "tie_word_embeddings": False,
        "moe_num_experts": [6, 6],
        "moe_layer_start_index": [1, 1],
        "moe_layer_end_index": [29, 28],
        "moe_layer_interval": 1,
        "rope_theta": turns["rope_theta"],
        "rope_3d": True,
        "freq_allocation": 2,
        "vision_config": config["vision_config"],
    }
    (note,) = check(flat, files, answer(model))
    eyes = sum("vision_model" in key or "resampler_model" in key for key in files)
    parts = "mlp.experts, mlp.gate, resampler_model, vision_model"
    assert note == f"text alone: {eyes + 2 * (6 * 3 + 1)} tensors of {parts} are not read"


def test_published_keys_of_deepseek_ocr_2(tmp_path: Path) -> None:
    config, model, files = make(*WRAPPERS["deepseek_ocr2"], tmp_path)
    text = {k: v for k, v in config["text_config"].items() if k not in ("mlp_layer_types", "model_type")}
    inner = {
        **text,
        "architectures": ["DeepseekV2ForCausalLM"],
        "model_type": "deepseek_v2",
        "use_mla": False,
    }
    published = {
        "architectures": ["DeepseekOCR2ForCausalLM"],
        "model_type": "deepseek_vl_v2",
        "language_config": {**inner, "first_k_dense_replace": 1, "qk_nope_head_dim": 0, "kv_lora_rank": None},
    }
    check(published, files, answer(model))


def test_what_writes_videos_next_to_cosmos_is_not_read(tmp_path: Path) -> None:
    config, model, files = make(*WRAPPERS["cosmos3_edge"], tmp_path)
    others = (
        *(
            "action_modality_embed",
            "action_proj_in.fc.weight",
            "time_embedder.linear_1.weight",
            "proj_in.bias",
        ),
        *(
            "norm_moe_gen.weight",
            "layers.0.mlp_moe_gen.up_proj.weight",
            "layers.0.self_attn.to_add_out.weight",
        ),
        *("layers.1.input_layernorm_moe_gen.weight", "layers.1.self_attn.norm_added_q.weight"),
    )
    more = dict.fromkeys(others, torch.zeros(2))
    inside = {f"model.language_model.{name}": tensor for name, tensor in more.items()}
    for stored in ({**files, **more}, {**model.state_dict(), **inside}):
        (note,) = check(config, stored, answer(model))
        assert "mlp_moe_gen.up_proj" in note


def test_a_layer_that_drafts_may_be_behind_those_of_glm_ocr(tmp_path: Path) -> None:
    config, model, files = make(*WRAPPERS["glm_ocr"], tmp_path)
    more = {**files, "model.language_model.layers.3.eh_proj.weight": torch.zeros(2)}
    with pytest.raises(UnusedTensor, match=r"layers\.3\.eh_proj"):
        check(config, more, answer(model))
    config["text_config"]["num_nextn_predict_layers"] = 1
    check(config, more, answer(model))


@pytest.mark.parametrize(
    ("keys", "why"),
    [
        ({"model_type": "voxtral_realtime"}, "a piece of sound with every token"),
        ({"model_type": "unlimited_ocr"}, "logits depend on where a prompt ends"),
        ({"model_type": "glm_image"}, "it writes images"),
        ({"model_type": "molmo2", **TEXT, "tie_word_embeddings": True}, "heads are shorter"),
        ({"model_type": "molmo2", **TEXT, "qk_norm_type": "olmo3"}, "qk_norm_type = 'olmo3'"),
        ({"model_type": "hunyuan_vl", **TEXT, "use_qk_norm": False}, "use_qk_norm = False"),
        ({"model_type": "qwen3_omni_moe", **TEXT, "use_qk_norm": False}, "use_qk_norm = False"),
        ({"model_type": "qwen3_omni_moe", **TEXT, "sliding_window": 8}, "sliding_window = 8"),
        (
            {"model_type": "deepseek_ocr2", **TEXT, "topk_method": "group_limited_greedy"},
            "topk_method = 'group_limited_greedy'",
        ),
        (
            {
                "model_type": "ernie4_5_vl_moe",
                **TEXT,
                "moe_num_experts": 6,
                "moe_intermediate_size": 20,
                "rope_scaling": {"rope_type": "linear", "factor": 2.0},
            },
            "rope_type 'linear'",
        ),
    ],
)
def test_what_a_text_model_cannot_have_is_refused_by_name(keys: dict[str, Any], why: str) -> None:
    with pytest.raises(UnsupportedModel, match=why):
        build_spec(keys)


def test_interleaved_is_known_next_to_sections_alone() -> None:
    turns = {"rope_type": "default", "rope_theta": 1e4, "interleaved": True}
    with pytest.raises(UnsupportedModel, match="'interleaved'"):
        build_spec({"model_type": "llama", **TEXT, "rope_parameters": turns})


@pytest.mark.parametrize(
    ("kind", "theta"),
    [("qwen2_vl", 1e6), ("qwen2_5_vl", 1e6), ("qwen3_vl", 5e5), ("qwen2", 1e4), ("qwen3", 1e4)],
)
def test_models_that_see_have_a_base_of_rotations_of_their_own(kind: str, theta: float) -> None:
    """As transformers has it where a config says none."""
    spec, _ = build_spec({"model_type": kind, **TEXT})
    assert {m.rope.theta for m in spec.mixers_of(AttentionSpec) if m.rope} == {theta}
    config = transformers.AutoConfig.for_model(kind).get_text_config()
    assert config.rope_parameters["rope_theta"] == theta
