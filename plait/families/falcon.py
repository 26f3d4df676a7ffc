"""Falcon 7B, 40B, 180B, Falcon 2, and Falcon-RW, which has ALiBi; q, k and v are one tensor."""

from __future__ import annotations

from plait.checkpoint.names import NameMap, Rules
from plait.families.common.alibi import spread_slopes
from plait.families.common.recipes import split_grouped_qkv, split_qkv, unused_patterns
from plait.families.common.registry import family
from plait.families.common.spec_builders import gqa, model, norm, plain_mlp, side_by_side
from plait.families.config.normalize import Config
from plait.families.gguf.arch import Metadata, gguf_arch
from plait.spec.model import BranchSpec, ModelSpec

MIX, L = "layers.{i}.mix", "transformer.h.{i}"


@family(
    "FalconForCausalLM",
    model_types=("falcon", "RefinedWeb", "RefinedWebModel"),
    defaults={
        "norm_eps": 1e-5,
        "hidden_act": "gelu",
        "tie_word_embeddings": True,
        "parallel_attn": True,
        "multi_query": True,
        "new_decoder_architecture": None,
        "max_position_embeddings": 2048,
    },
    honours=("parallel_attn", "alibi"),
)
def falcon(c: Config) -> tuple[ModelSpec, NameMap]:
    """Falcon: one head of keys and values for all, or some; the 40B has two norms in a layer.

    Attention and feed-forward are side by side, but in Falcon-RW.
    """
    heads, grouped = c["num_attention_heads"], c["new_decoder_architecture"]
    if grouped is None:  # RefinedWeb, as the 40B was first called, has groups if it counts them
        grouped = bool(c.get("n_head_kv"))
    usual = c.get("num_kv_heads") or c.get("n_head_kv") or heads
    c["num_key_value_heads"] = usual if grouped or not c["multi_query"] else 1
    apart = (c.get("num_ln_in_parallel_attn") or (2 if grouped else 1)) == 2
    each = norm(c, "layer")
    attn, ffn = gqa(c), plain_mlp(c)
    if c.get("alibi"):  # the scores are scaled with what is added to them
        slopes = [slope * c["head_dim"] ** -0.5 for slope in spread_slopes(heads)]
        attn = gqa(c, rope=None, slopes=tuple(slopes))
    is_in_turn = not c["parallel_attn"] and not grouped
    layer: tuple[BranchSpec, ...] = (BranchSpec("attn", attn, each), BranchSpec("ffn", ffn, each))
    if not is_in_turn:
        layer = side_by_side(attn, ffn, each, apart=apart)
    ours = "layers.{i}" if is_in_turn else MIX
    names: Rules = {
        "embed": "transformer.word_embeddings",
        "norm": "transformer.ln_f",
        "head": "lm_head",
        f"{MIX}.norm": f"{L}.input_layernorm",
        f"{ours}.attn.norm": f"{L}.input_layernorm" if is_in_turn else f"{L}.ln_attn",
        f"{ours}.ffn.norm": f"{L}.post_attention_layernorm" if is_in_turn else f"{L}.ln_mlp",
        f"{ours}.attn.o": f"{L}.self_attention.dense",
        f"{ours}.ffn.up": f"{L}.mlp.dense_h_to_4h",
        f"{ours}.ffn.down": f"{L}.mlp.dense_4h_to_h",
        **split_grouped_qkv(c, f"{ours}.attn", f"{L}.self_attention.query_key_value"),
    }
    return model(c, "falcon", [layer] * len(c["layer_types"]), norm=each), NameMap(
        names, ignored=unused_patterns(c)
    )


def _gguf_names(c: Config) -> Rules:
    """llama.cpp puts the rows of all queries in front; of two norms that of attention comes second."""
    return {
        f"{MIX}.attn.norm": "blk.{i}.attn_norm_2",
        f"{MIX}.ffn.norm": "blk.{i}.attn_norm",
        **split_qkv(c, f"{MIX}.attn", "blk.{i}.attn_qkv"),
    }


@gguf_arch("falcon", "FalconForCausalLM", names=_gguf_names)
def _read_falcon(m: Metadata) -> None:
    """The 40B's layers have two norms. Falcon-RW has no architecture."""
    kv, why = m.config.get("num_key_value_heads", 1), f"GGUF metadata {m.prefix}attention.head_count_kv"
    m.put("num_kv_heads", kv, why)
    m.put("new_decoder_architecture", kv != 1, why)
    has_two = any(name.endswith("attn_norm_2.weight") for name in m.shapes)
    m.put("num_ln_in_parallel_attn", 2 if has_two else 1, "tensors attn_norm_2")
