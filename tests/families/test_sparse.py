"""Sparse flagships by the configs and names they are published with, and what of them is refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from plait.errors import CheckpointError, UnsupportedModel
from plait.families.common.registry import build_spec
from plait.families.config.checks import check_spec
from plait.model.divide import divide_model
from plait.partition import Rank
from plait.spec.branches import HyperBranchSpec
from plait.spec.model import AttentionSpec, Mixer, MlaSpec, ModelSpec
from plait.spec.moe import TableMoeSpec
from plait.spec.sparse import BlockSparseSpec, CompressedSpec
from tests.families import tiny
from tests.families.parity import Memory, decoder, resolved

TEXT: dict[str, Any] = {
    "hidden_size": 6144,
    "intermediate_size": 3072,
    "num_attention_heads": 64,
    "num_hidden_layers": 5,
    "vocab_size": 200064,
    "max_position_embeddings": 1048576,
}
M3: dict[str, Any] = {
    "architectures": ["MiniMaxM3SparseForConditionalGeneration"],
    "model_type": "minimax_m3_vl",
    "text_config": {
        **TEXT,
        "model_type": "minimax_m3_vl_text",
        "num_key_value_heads": 4,
        "head_dim": 128,
        "hidden_act": "swigluoai",
        "swiglu_alpha": 1.702,
        "swiglu_limit": 7.0,
        "use_gemma_norm": True,
        "use_qk_norm": True,
        "qk_norm_type": "per_head",
        "scoring_func": "sigmoid",
        "rope_theta": 5000000,
        "rotary_dim": 64,
        "partial_rotary_factor": 0.5,
        "num_local_experts": 128,
        "moe_layer_freq": [0, 0, 1, 1, 1],
        "sparse_attention_config": {
            "use_sparse_attention": True,
            "sparse_index_dim": 128,
            "sparse_num_index_heads": 4,
            "sparse_topk_blocks": 16,
            "sparse_block_size": 128,
            "sparse_score_type": "max",
            "sparse_init_block": 0,
            "sparse_local_block": 1,
            "sparse_attention_freq": [0, 0, 1, 1, 1],
        },
    },
}
V4: dict[str, Any] = {
    "architectures": ["DeepseekV4ForCausalLM"],
    "model_type": "deepseek_v4",
    **TEXT,
    "num_key_value_heads": 1,
    "head_dim": 512,
    "qk_rope_head_dim": 64,
    "moe_intermediate_size": 2048,
    "n_routed_experts": 256,
    "num_hash_layers": 3,
    "compress_ratios": [0, 128, 4, 128, 4, 0],
    "compress_rope_theta": 160000,
    "rope_theta": 10000,
    "rope_scaling": {
        "type": "yarn",
        "factor": 16,
        "original_max_position_embeddings": 65536,
        "beta_fast": 32,
        "beta_slow": 1,
    },
    "num_nextn_predict_layers": 1,
}
DOTS: dict[str, Any] = {
    "architectures": ["Dots3NoteForConditionalGeneration"],
    "model_type": "dots3_note",
    **TEXT,
    "kv_lora_rank": 512,
    "q_lora_rank": 1024,
    "qk_nope_head_dim": 192,
    "qk_rope_head_dim": 64,
    "v_head_dim": 256,
    "n_routed_experts": 16,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 1536,
    "swa_num_attention_heads": 48,
    "swa_kv_lora_rank": 1024,
}


def mixers(spec: ModelSpec, name: str = "attn") -> list[Any]:
    found: list[Mixer] = [b.mixer for layer in spec.layers for b in layer if b.name == name]
    return [m.parts["inner"] if isinstance(m, HyperBranchSpec) else m for m in found]


def test_minimax_m3_as_it_was_published() -> None:
    attns = mixers(build_spec(M3)[0])
    assert [type(a) for a in attns] == [*[AttentionSpec] * 2, *[BlockSparseSpec] * 3]
    index = attns[-1].indexer
    assert (index.dim, index.size, index.top_k, index.local, index.rope.dim) == (128, 128, 16, 1, 64)
    assert {m.expert.activation for m in mixers(build_spec(M3)[0], "ffn")[2:]} == {"swiglu_oai"}


def test_deepseek_v4_as_it_was_published() -> None:
    spec = build_spec(V4)[0]
    attns = mixers(spec)
    rates = [(a.compressor.rate, a.compressor.parts) if a.compressor else None for a in attns]
    assert rates == [None, (128, 1), (4, 2), (128, 1), (4, 2)]
    assert [a.indexer is not None for a in attns] == [False, False, True, False, True]
    assert (attns[0].rope.theta, dict(attns[0].rope.scaling), attns[0].rope.dim) == (1e4, {}, 64)
    assert (attns[1].rope.theta, attns[1].rope.scaling["attention_factor"]) == (160_000.0, 1.0)
    assert [isinstance(m, TableMoeSpec) for m in mixers(spec, "ffn")] == [True] * 3 + [False] * 2


def test_dots3_note_in_its_first_words() -> None:
    attns: list[MlaSpec] = mixers(build_spec(DOTS)[0])
    assert [a.window for a in attns] == [None, None, 512, 512, 512]
    assert [a.indexer is not None for a in attns] == [True, True, False, False, False]
    assert [(a.num_heads, a.kv_rank, a.rope and a.rope.theta) for a in attns[1:3]] == [
        (64, 512, 8e7),
        (48, 1024, 5e4),
    ]
    assert not any(a.indexer for a in mixers(build_spec({**DOTS, "use_dsa": False})[0]))


@pytest.mark.parametrize(
    ("config", "change", "why"),
    [
        (
            M3["text_config"],
            {"sparse_attention_config": {"sparse_num_index_heads": 2}},
            "2 index heads for 4",
        ),
        (M3["text_config"], {"swiglu_limit": 5.0}, "swiglu_limit = 5.0"),
        (
            M3["text_config"],
            {"index_local_blocks": 99, "sparse_attention_config": {}},
            "last blocks among them",
        ),
        (V4, {"compress_ratios": [0, 8, 4, 128, 4]}, "'8'.* are not known for DeepSeek-V4"),
        (V4, {"o_groups": 7}, "64 heads are in 7 groups"),
        (V4, {"hc_mult": 4096}, "4096 residual streams"),
        (V4, {"hc_sinkhorn_iters": 0}, "rounds is 0"),
        (DOTS, {"per_layer_config": {"0": {"sliding": 3}}}, r"per_layer_config has \['sliding'\]"),
    ],
)
def test_what_a_config_cannot_mean_is_refused_by_name(
    config: dict[str, Any], change: dict[str, Any], why: str
) -> None:
    with pytest.raises(UnsupportedModel, match=why):
        check_spec(build_spec({**config, **change})[0])


def test_ranks_divide_blocks_and_streams_and_heads_by_the_groups_of_their_outputs() -> None:
    half = Rank(index=0, size=2, shares=2)
    spec, cuts = divide_model(build_spec(M3)[0], half)
    assert (mixers(spec)[-1].num_heads, mixers(spec)[-1].num_kv_heads) == (32, 2)
    assert cuts["layers.4.attn.index.q"].rows == ((0, 256),)
    whole = build_spec(V4)[0]
    v4, cuts = divide_model(whole, Rank(index=1, size=2, shares=2))
    first, part = mixers(whole)[0], mixers(v4)[0]
    assert (part.num_heads, part.groups) == (first.num_heads // 2, first.groups // 2)
    rows, cols = first.num_heads * first.head_dim, first.groups * first.out_rank
    assert cuts["layers.0.attn.inner.q_b"].rows == ((rows // 2, rows),)
    assert cuts["layers.0.attn.inner.o_b"].cols == (((cols // 2, cols),),)


def test_a_table_with_an_expert_that_is_not_there_is_refused(tmp_path: Path) -> None:
    variant = tiny.VARIANTS["deepseek_v4"]
    few = {"num_hidden_layers": 1, "layer_types": ["sliding_attention"], "mlp_layer_types": ["hash_moe"]}
    tiny.write("deepseek_v4", tmp_path, replace(variant, changes={**variant.changes, **few}))
    config, tensors, _ = tiny.read(tmp_path)
    name = next(n for n in tensors if n.endswith("tid2eid"))
    tensors[name] = torch.full_like(tensors[name], 6)
    checkpoint = Memory(tensors)
    with pytest.raises(CheckpointError, match="has experts 6 to 6; there are 6"):
        decoder(resolved(checkpoint, config), checkpoint)
    assert any(isinstance(m, CompressedSpec) for m in mixers(resolved(checkpoint, config).spec))
