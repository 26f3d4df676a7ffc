"""Switches of families with attention layers: honoured in every spelling, or refused; packed experts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from plait.checkpoint.quantized.packed import QuantizedCheckpoint
from plait.checkpoint.readers.safetensors import SafetensorsFiles
from plait.errors import UnsupportedModel
from plait.families.common.registry import build_spec
from plait.families.gguf.config import gguf_config
from plait.spec.model import AttentionSpec, MoeSpec, ParallelSpec
from tests.families import tiny
from tests.families.as_gguf import converted
from tests.families.parity import Memory, decoder, in_pieces, resolved, whole, worst

SMALL = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_hidden_layers": 4,
    "vocab_size": 100,
    "max_position_embeddings": 512,
}


def attention(architecture: str, **keys: Any) -> list[AttentionSpec]:
    """The attention of every layer of such a config."""
    spec, _ = build_spec({"architectures": [architecture], **SMALL, **keys})
    return list(spec.mixers_of(AttentionSpec))


def test_a_command_model_says_in_old_words_where_its_windows_are() -> None:
    words = {"layer_switch": 4, "sliding_window_pattern": 4, "position_embedding_type": "rope_gptj"}
    layers = attention("Cohere2ForCausalLM", **words, rotary_pct=1.0, sliding_window=128)
    assert [a.window for a in layers] == [128, 128, 128, None]
    assert [a.rope is not None and a.rope.interleaved for a in layers] == [True, True, True, False]
    with pytest.raises(UnsupportedModel, match="position_embedding_type 'alibi'"):
        attention("Cohere2ForCausalLM", position_embedding_type="alibi")


def test_olmo_7b_clips_queries_keys_and_values(tmp_path: Path) -> None:
    tiny.write("olmo", tmp_path, tiny.Variant("OlmoConfig", {"clip_qkv": 0.4}))
    config, tensors, oracle = tiny.read(tmp_path)
    checkpoint = Memory(tensors)
    model = decoder(resolved(checkpoint, config), checkpoint)
    for found, wanted in zip(in_pieces(model, oracle["ids"]), oracle["logits"], strict=True):
        assert worst(found, wanted) <= 1e-4
    plain = decoder(resolved(checkpoint, {**config, "clip_qkv": None}), checkpoint)
    assert worst(whole(plain, oracle["ids"][0]), oracle["logits"][0]) > 0.1


def test_windows_of_smollm3_are_where_positions_are_not() -> None:
    layers = attention(
        "SmolLM3ForCausalLM", use_sliding_window=True, sliding_window=9, no_rope_layer_interval=2
    )
    assert [a.window for a in layers] == [None, 9, None, 9]
    assert [a.rope is None for a in layers] == [False, True, False, True]
    told = {"layer_types": ["sliding_attention"] * 4, "no_rope_layers": [1, 1, 0, 1]}
    layers = attention("SmolLM3ForCausalLM", use_sliding_window=True, sliding_window=9, **told)
    assert [(a.window, a.rope is None) for a in layers] == [(9, i == 2) for i in range(4)]
    assert {a.window for a in attention("SmolLM3ForCausalLM", sliding_window=9, **told)} == {None}
    with pytest.raises(UnsupportedModel, match="no_rope_layers has 2 entries for 4 layers"):
        attention("SmolLM3ForCausalLM", no_rope_layers=[1, 0])


def test_positions_of_olmo_3_are_stretched_in_full_layers_alone() -> None:
    scaling = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 64}
    layers = attention("Olmo3ForCausalLM", rope_scaling=scaling)
    assert [a.window for a in layers] == [4096, 4096, 4096, None]
    assert [bool(a.rope and a.rope.scaling) for a in layers] == [False, False, False, True]
    assert {a.rope.theta for a in layers if a.rope} == {5e5}


def test_phi_3_called_its_divisors_by_other_names_once() -> None:
    lists = {"short_factor": [1.0] * 8, "long_factor": [2.0] * 8}
    for name in ("su", "yarn", "longrope"):
        scaling = {"type": name, **lists}
        layers = attention("Phi3ForCausalLM", rope_scaling=scaling, original_max_position_embeddings=128)
        assert {a.rope.scaling["rope_type"] for a in layers if a.rope} == {"longrope"}
        assert {a.rope.scaling["original_max_position_embeddings"] for a in layers if a.rope} == {128}


@pytest.mark.parametrize(
    ("key", "value"), [("swiglu_limit", 5.0), ("swiglu_alpha", 1.0), ("hidden_act", "gelu")]
)
def test_gpt_oss_has_one_activation(key: str, value: Any) -> None:
    with pytest.raises(UnsupportedModel, match=key):
        attention("GptOssForCausalLM", num_local_experts=4, **{key: value})


def test_command_r_norms_each_head_by_itself_where_its_config_says_so() -> None:
    assert {a.qk_norm for a in attention("CohereForCausalLM")} == {None}
    layers = attention("CohereForCausalLM", use_qk_norm=True)
    assert {(a.qk_norm_over, a.qk_norm.kind) for a in layers if a.qk_norm} == {("each", "layer")}
    spec, _ = build_spec({"architectures": ["CohereForCausalLM"], **SMALL})
    assert isinstance(spec.layers[0][0].mixer, ParallelSpec)


def test_scores_of_glm_that_are_no_sigmoids_are_refused() -> None:
    keys = {"block_count": 1, "embedding_length": 64, "attention.head_count": 4, "expert_gating_func": 1}
    metadata = {"general.architecture": "glm4moe", **{f"glm4moe.{key}": value for key, value in keys.items()}}
    with pytest.raises(UnsupportedModel, match="expert_gating_func 1"):
        gguf_config(metadata, {}, dict[str, Any]().__getitem__)


def test_converters_may_fuse_what_glm_has_apart(tmp_path: Path) -> None:
    tiny.write("glm_plain", tmp_path)
    config, tensors, oracle = tiny.read(tmp_path)
    metadata, stored = converted("chatglm", config, tensors)
    for i in range(config["num_hidden_layers"]):
        for kind in ("weight", "bias"):
            parts = [stored.pop(f"blk.{i}.attn_{x}.{kind}") for x in "qkv"]
            stored[f"blk.{i}.attn_qkv.{kind}"] = torch.cat(parts)
    checkpoint = Memory(stored)
    model = decoder(resolved(checkpoint, gguf=metadata), checkpoint)
    assert worst(whole(model, oracle["ids"][0]), oracle["logits"][0]) <= 1e-4


def test_experts_of_gpt_oss_stay_in_four_bits(tmp_path: Path) -> None:
    """As published: gate and up alternate among the packed rows; the decoded twin is transposed."""
    changes = tiny.VARIANTS["gpt_oss"].changes
    variant = tiny.Variant("GptOssConfig", {**changes, "intermediate_size": 64})
    tiny.write("gpt_oss", tmp_path, variant)
    config, tensors, oracle = tiny.read(tmp_path)
    packed, plain = {}, dict(tensors)
    for name, tensor in tensors.items():
        if not name.endswith("_proj") or ".experts." not in name:
            packed[name] = tensor
            continue
        count, cols, rows = tensor.shape
        blocks = torch.randint(0, 256, (count, rows, cols // 32, 16), dtype=torch.uint8)
        scales = torch.randint(122, 126, (count, rows, cols // 32), dtype=torch.uint8)
        packed |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        plain[name] = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
    save_file(packed, tmp_path / "model.safetensors")
    checkpoint = QuantizedCheckpoint(SafetensorsFiles(tmp_path / "model.safetensors"))
    found, twin = resolved(checkpoint, config), Memory(plain)
    assert isinstance(found.spec.layers[0][1].mixer, MoeSpec)
    ids, want = oracle["ids"], decoder(resolved(twin, config), twin)
    model = decoder(found, checkpoint)
    assert worst(whole(model, ids[0]), whole(want, ids[0])) <= 1e-4
    for a, b in zip(in_pieces(model, ids), in_pieces(want, ids), strict=True):
        assert worst(a, b) <= 1e-4
