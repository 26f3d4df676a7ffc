"""Snowflake Arctic: experts that read what attention reads, next to attention and a feed-forward."""

from __future__ import annotations

from plait.checkpoint.names import NameMap, Rules
from plait.families.common.recipes import attention_tensors, ends, mixtral_experts, unused_patterns
from plait.families.common.registry import family
from plait.families.common.spec_builders import gqa, mlp, model, norm, require, softmax_moe
from plait.families.config.normalize import Config
from plait.families.gguf.arch import Metadata, check_router, gguf_arch
from plait.families.gguf.names import feed_forward_names
from plait.spec.branches import ShortcutSpec
from plait.spec.model import BranchSpec, ModelSpec

L, ATTN, MOE, MLP = "model.layers.{i}", "layers.{i}.mix.attn", "layers.{i}.mix.moe", "layers.{i}.ffn.mlp"


@family(
    "ArcticForCausalLM",
    model_types=("arctic",),
    defaults={"norm_eps": 1e-5, "hidden_act": "silu", "num_experts": 8, "num_experts_per_tok": 1},
    honours=("sliding_window",),
)
def arctic(c: Config) -> tuple[ModelSpec, NameMap]:
    """Arctic: x + attention(norm x) + experts(norm x), and an MLP as wide as x that reads the first two."""
    require(c, "Arctic", moe_layer_frequency=(1,), parallel_attn_mlp_res=(True,), use_residual=(True,))
    each, moe, narrow = norm(c), softmax_moe(c), mlp(c, c["hidden_size"])
    layers = [
        (
            BranchSpec(
                "mix", ShortcutSpec({"attn": gqa(c, kind), "moe": moe}, {"attn": each, "moe": each}), None
            ),
            BranchSpec("ffn", ShortcutSpec({"mlp": narrow}), each),
        )
        for kind in c["layer_types"]
    ]
    names: Rules = {
        **ends(),
        f"{ATTN}.norm": f"{L}.input_layernorm",
        f"{MOE}.norm": f"{L}.post_attention_layernorm",
        "layers.{i}.ffn.norm": f"{L}.residual_layernorm",
        f"{MOE}.router": f"{L}.block_sparse_moe.gate",
        **mixtral_experts(MOE, f"{L}.block_sparse_moe", c["num_experts"]),
        **{f"{MLP}.{x}": f"{L}.residual_mlp.{w}" for x, w in (("gate", "w1"), ("down", "w2"), ("up", "w3"))},
        **attention_tensors(ATTN, f"{L}.self_attn"),
    }
    return model(c, "arctic", layers), NameMap(names, ignored=unused_patterns(c))


def _gguf_names(c: Config) -> Rules:
    return {
        f"{ATTN}.norm": "blk.{i}.attn_norm",
        f"{MOE}.norm": "blk.{i}.ffn_norm_exps",
        **feed_forward_names(MOE, "blk.{i}", c["num_experts"]),
        **feed_forward_names(MLP, "blk.{i}", 1),
    }


@gguf_arch(
    "arctic",
    "ArcticForCausalLM",
    constants={"rope_interleave": True, "moe_layer_frequency": 1},
    names=_gguf_names,
    is_written=False,
)
def _arctic_in_gguf(m: Metadata) -> None:
    check_router(m, "softmax", renormalizes=True, scales=False)
