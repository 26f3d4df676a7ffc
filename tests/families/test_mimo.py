"""MiMo-V2.5 and V2-Flash as they are published: the logits of transformers, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from plait.checkpoint.quantized.packed import QuantizedCheckpoint
from plait.checkpoint.quantized.scheme import find_scheme
from plait.errors import ShapeMismatch, UnsupportedModel
from plait.families.common.registry import build_spec
from plait.spec.model import AttentionSpec, MoeSpec
from tests.checkpoint.quantized.packings import InMemory
from tests.families.gguf.published import as_published
from tests.families.gguf.recorded import read_checkpoint
from tests.families.parity import Memory, decoder, in_pieces, resolved, whole, worst

BLOCK = 20  # of which two shards of 44 rows need six, and both together five
PATTERN = [0, *[1] * 4, *[0, *[1] * 5] * 7, 0]  # of MiMo-V2.5 and V2-Flash
MIMO_V2_5: dict[str, Any] = {
    "architectures": ["MiMoV2ForCausalLM"], "model_type": "mimo_v2", "attention_bias": False,
    "attention_chunk_size": 128, "attention_value_scale": 0.707, "attention_projection_layout": "fused_qkv",
    "add_full_attention_sink_bias": False, "add_swa_attention_sink_bias": True, "audio_config": {"out": 1},
    "swa_num_key_value_heads": 8, "swa_num_attention_heads": 64, "swa_head_dim": 192, "swa_v_head_dim": 128,
    "head_dim": 192, "hidden_act": "silu", "hidden_size": 4096, "hybrid_block_size": None,
    "hybrid_layer_pattern": PATTERN, "intermediate_size": 16384, "layernorm_epsilon": 1e-05,
    "max_position_embeddings": 1048576, "moe_intermediate_size": 2048, "moe_layer_freq": [0, *[1] * 47],
    "n_group": 1, "n_routed_experts": 256, "n_shared_experts": None, "norm_topk_prob": True,
    "num_attention_heads": 64, "num_experts_per_tok": 8, "num_hidden_layers": 48, "num_key_value_heads": 4,
    "partial_rotary_factor": 0.334, "processor_config": {"fps": 1.0}, "rope_theta": 10000000,
    "rope_scaling": {"rope_type": "default", "type": "default"}, "routed_scaling_factor": None,
    "scoring_func": "sigmoid", "sliding_window": 128, "sliding_window_size": 128, "swa_rope_theta": 10000,
    "tie_word_embeddings": False, "topk_group": 1, "topk_method": "noaux_tc", "v_head_dim": 128,
    "vision_config": {"depth": 28, "hidden_size": 1280}, "vocab_size": 152576,
}  # fmt: skip


def published(folder: Path) -> tuple[dict[str, Any], dict[str, Tensor], Any]:
    given, stored, oracle = read_checkpoint("mimo_v2", folder)
    config, stored = as_published("mimo_v2", dict(given), stored)
    return json.loads(json.dumps(config)), stored, oracle


def test_shards_of_mimo_v2_5_give_the_logits_of_transformers(tmp_path: Path) -> None:
    config, stored, oracle = published(tmp_path)
    stored["visual.merger.ln_q.weight"] = stored["audio_encoder.projection.mlp.0.weight"] = torch.zeros(3)
    memory = Memory({**stored, "speech_embeddings.0.weight": torch.zeros(3, 2)})
    model = decoder(resolved(memory, config), memory)
    assert worst(whole(model, oracle["ids"][0]), oracle["logits"][0]) <= 1e-4
    for logits, want in zip(in_pieces(model, oracle["ids"]), oracle["logits"], strict=True):
        assert worst(logits, want) <= 1e-4


def test_blocks_in_fp8_end_with_each_shard(tmp_path: Path) -> None:
    config, stored, oracle = published(tmp_path)
    codes, plain = dict(stored), dict(stored)
    name = "model.layers.1.self_attn.qkv_proj.weight"
    shards = stored[name].unflatten(0, (config["num_key_value_heads"], -1))
    rows = -(-shards.shape[1] // BLOCK)
    scale = torch.rand(len(shards), rows, 1) * 0.02 + 0.01
    each = scale.repeat_interleave(BLOCK, 1)[:, : shards.shape[1]]
    made = (shards / each).to(torch.float8_e4m3fn)
    codes |= {name: made.flatten(0, 1), f"{name}_scale_inv": scale.flatten(0, 1)}
    plain[name] = (made.float() * each).flatten(0, 1)
    quantized = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [BLOCK, 32]}
    scheme = find_scheme({"quantization_config": quantized})
    file, memory = QuantizedCheckpoint(InMemory(codes), scheme), Memory(plain)
    found = whole(
        decoder(resolved(file, {**config, "quantization_config": quantized}), file), oracle["ids"][0]
    )
    wanted = whole(decoder(resolved(memory, config), memory), oracle["ids"][0])
    assert worst(found, wanted) <= 0.02  # products of codes round inputs
    assert worst(wanted, oracle["logits"][0]) > 1e-4


def test_a_tensor_that_is_no_shards_is_refused(tmp_path: Path) -> None:
    config, stored, _ = published(tmp_path)
    name = "model.layers.1.self_attn.qkv_proj.weight"
    memory = Memory({**stored, name: stored[name][:-3]})
    with pytest.raises(ShapeMismatch, match="85 rows are no 2 shards of queries, keys and values"):
        decoder(resolved(memory, config), memory)


@pytest.mark.parametrize("name", ["MiMoV2ForCausalLM", "MiMoV2FlashForCausalLM"])
def test_a_published_config_says_which_layers_have_windows(name: str) -> None:
    spec = build_spec({**MIMO_V2_5, "architectures": [name]})[0]
    found = list(spec.mixers_of(AttentionSpec))
    assert [int(m.window == 129) for m in found] == PATTERN
    assert [int(m.sinks) for m in found] == PATTERN
    assert {(m.num_kv_heads, m.rope and m.rope.theta, m.rope and m.rope.dim) for m in found} == {
        (4, 1e7, 64), (8, 1e4, 64)
    }  # fmt: skip
    assert len(list(spec.mixers_of(MoeSpec))) == 47
    assert (spec.norm.eps, spec.max_len, spec.mtp is not None) == (1e-5, 1_048_576, True)


def test_a_block_of_layers_ends_with_one_that_sees_all() -> None:
    blocks = {"hybrid_layer_pattern": None, "hybrid_block_size": 6, "sliding_window_size": None}
    found = list(build_spec({**MIMO_V2_5, **blocks})[0].mixers_of(AttentionSpec))
    assert [m.window for m in found] == [*[128] * 5, None] * 8


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"swa_head_dim": 128}, "swa_head_dim = 128 is not implemented for MiMo-V2; known: 192"),
        ({"swa_num_attention_heads": 32}, "swa_num_attention_heads = 32 is not implemented"),
        ({"attention_projection_layout": "fused_kv"}, "'fused_kv' is not implemented for MiMo-V2.5"),
        (
            {"hybrid_layer_pattern": [0, 1]},
            r"hybrid_layer_pattern is \[0, 1\]; expected is 0 or 1 for each",
        ),
        ({"hybrid_layer_pattern": [2] * 48}, "expected is 0 or 1 for each of 48 layers"),
        ({"n_shared_experts": 1}, "n_shared_experts = 1 is not implemented for MiMo-V2"),
    ],
)
def test_what_mimo_v2_does_not_have_is_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(UnsupportedModel, match=words):
        build_spec({**MIMO_V2_5, **changes})
