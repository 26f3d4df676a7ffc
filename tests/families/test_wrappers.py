"""Models that also see, by names of their own with a config of a text model: they are read as that."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from plait.errors import UnsupportedModel
from plait.families.common.refused import why_refused
from plait.families.common.registry import build_spec, families_by_name, find
from plait.families.config.wrappers import WRAPPERS
from plait.spec.model import AttentionSpec
from tests.families import tiny
from tests.families.parity import Memory, decoder, resolved, whole

IDS = torch.arange(17) * 31 % 90


def _write_config(name: str, folder: Path) -> dict[str, Any]:
    tiny.write(name, folder)
    return dict(tiny.read(folder)[0])


@pytest.mark.parametrize("name", WRAPPERS)
def test_a_wrapper_is_read_as_its_text_model(name: str) -> None:
    text = families_by_name()[WRAPPERS[name]].name
    assert name not in families_by_name()
    assert find({"architectures": [name]}).name == text
    assert find({"model_type": name}).name == text


def test_a_text_model_that_a_config_names_comes_before_that_of_its_wrapper() -> None:
    named = {"architectures": ["PixtralForConditionalGeneration"], "text_config": {"model_type": "qwen3"}}
    assert find(named).name == "qwen3"


@pytest.mark.parametrize(
    ("kind", "arch", "eye", "prefix"),
    [
        ("qwen2", "DotsOCRForCausalLM", "vision_tower.blocks.0.attn.qkv.weight", "model."),
        ("qwen2", "LlavaQwenForCausalLM", "model.mm_projector.0.weight", "model."),
        ("qwen3", "KeyeForConditionalGeneration", "mlp_AR.linear_1.weight", "model."),
        ("qwen3", "IsaacForConditionalGeneration", "model.vision_embedding.1.weight", "model.text_model."),
        ("qwen2", "BagelForConditionalGeneration", "vit_model.head.weight", "language_model.model."),
        ("qwen3", "Alpamayo2Super", "vlm.model.visual.weight", "vlm.model.language_model."),
        ("qwen3", "BailingMM2NativeForConditionalGeneration", "model.vision.patch.weight", "model.model."),
        *(
            (kind, "DeepseekVLV2ForCausalLM", "projector.layers.0.weight", "language.model.")
            for kind in ("deepseek_v2", "deepseek_v3")
        ),
    ],
)
def test_tensors_of_eyes_are_not_read(kind: str, arch: str, eye: str, prefix: str, tmp_path: Path) -> None:
    tiny.write(kind, tmp_path)
    config, stored, _ = tiny.read(tmp_path)
    want = whole(decoder(resolved(Memory(stored), config), Memory(stored)), IDS)
    outer = {
        "vlm.model.language_model.": "vlm.",
        "language.model.": "language.",
        "model.model.": "model.",
    }.get(prefix, "")
    theirs = {
        name.replace("model.", prefix, 1) if name.startswith("model.") else f"{outer}{name}": tensor
        for name, tensor in stored.items()
    }
    theirs[eye] = torch.ones(3)
    if kind == "qwen3" or "Bagel" in arch:
        theirs[f"{prefix}layers.0.mlp_moe_gen.up_proj.weight"] = torch.ones(3)
    wrapped = Memory(theirs)
    chosen = {"topk_method": "noaux_tc", "scoring_func": "sigmoid"} if kind == "deepseek_v3" else {}
    found = resolved(wrapped, {**config, "architectures": [arch], **chosen})
    assert torch.equal(whole(decoder(found, wrapped), IDS), want)
    assert found.names.is_beside(eye)


@pytest.mark.parametrize(
    "name",
    [
        *(
            "DeepSeekMTPModel",
            "Glm4MoeForCausalLMNextN",
            "EagleMiniCPMForCausalLM",
            "DFlashLagunaForCausalLM",
        ),
        *("Eagle3Qwen3ForCausalLM", "PeagleLlamaForCausalLM", "IQuestQ1MTP", "LiLiCorrDraftModel"),
    ],
)
def test_heads_that_draft_are_known_by_their_names(name: str) -> None:
    with pytest.raises(UnsupportedModel, match=f"{name}' is not implemented: it drafts for another model"):
        find({"architectures": [name], "model_type": "llama"})
    assert not any(why_refused(built) for built in families_by_name())
    assert why_refused("Eagle2_5_VLForConditionalGeneration") is None


def test_bagel_norms_queries_and_keys_if_it_says_so(tmp_path: Path) -> None:
    tiny.write("qwen3", tmp_path)
    config, stored, _ = tiny.read(tmp_path)
    want = whole(decoder(resolved(Memory(stored), config), Memory(stored)), IDS)
    text = {key: value for key, value in config.items() if key != "architectures"}
    outer = {"architectures": ["BagelForConditionalGeneration"], "model_type": "bagel"}
    theirs = Memory({f"language_model.{name}": tensor for name, tensor in stored.items()})
    found = resolved(theirs, {**outer, "llm_config": {**text, "model_type": "qwen2", "qk_norm": True}})
    assert torch.equal(whole(decoder(found, theirs), IDS), want)
    spec, _ = build_spec({**outer, "llm_config": {**text, "model_type": "qwen2"}})
    assert {mixer.qk_norm for mixer in spec.mixers_of(AttentionSpec)} == {None}


def test_keys_that_are_not_done_are_refused_by_the_name_of_their_model(tmp_path: Path) -> None:
    config = _write_config("deepseek_v3", tmp_path)
    named = {**config, "architectures": ["DeepseekVLV2ForCausalLM"], "topk_method": "noaux_tc"}
    for keys, why in (
        ({}, "scoring_func 'softmax' with topk_method noaux_tc is not known for DeepSeek-VL2"),
        ({"use_mla": False}, "use_mla = False is not implemented for DeepSeek-VL2 with topk_method noaux_tc"),
        ({"use_mla": False, "topk_method": "x"}, "topk_method = 'x' is not implemented for DeepSeek-VL2;"),
    ):
        with pytest.raises(UnsupportedModel, match=why):
            build_spec({**named, "scoring_func": "softmax", **keys})


def test_a_config_of_large_3_that_says_too_little_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModel, match="says less than its params"):
        find({"architectures": ["MistralLarge3ForCausalLM"], "model_type": "deepseek_v3"})
    config = _write_config("deepseek_v3", tmp_path)
    growth = {"beta": 0.1, "original_max_position_embeddings": 8192}
    with pytest.raises(UnsupportedModel, match="llama_4_scaling = "):
        build_spec({**config, "llama_4_scaling": growth})
