"""Falcon 7B, 40B, 180B, Falcon 2: attention and a plain feed-forward side by side; q, k, v in one tensor."""

from __future__ import annotations

from plait.checkpoint.names import NameMap, Rules
from plait.errors import UnsupportedModel
from plait.families.common.recipes import split_grouped_qkv, unused_patterns
from plait.families.common.registry import family
from plait.families.common.spec_builders import gqa, model, norm, plain_mlp, side_by_side
from plait.families.config.normalize import Config
from plait.spec import ModelSpec

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
        "new_decoder_architecture": False,
    },
    honours=("parallel_attn",),
)
def falcon(c: Config) -> tuple[ModelSpec, NameMap]:
    """Falcon: one head of keys and values for all, or some; the 40B has two norms in a layer."""
    if not c["parallel_attn"] and not c["new_decoder_architecture"]:
        raise UnsupportedModel("parallel_attn = false is not implemented for Falcon; only Falcon-RW has it")
    heads, grouped = c["num_attention_heads"], c["new_decoder_architecture"]
    usual = c.get("num_kv_heads") or heads
    c["num_key_value_heads"] = usual if grouped or not c["multi_query"] else 1
    apart = (c.get("num_ln_in_parallel_attn") or (2 if grouped else 1)) == 2
    each = norm(c, "layer")
    layers = [side_by_side(gqa(c), plain_mlp(c), each, apart=apart)] * len(c["layer_types"])
    names: Rules = {
        "embed": "transformer.word_embeddings",
        "norm": "transformer.ln_f",
        "head": "lm_head",
        f"{MIX}.norm": f"{L}.input_layernorm",
        f"{MIX}.attn.norm": f"{L}.ln_attn",
        f"{MIX}.ffn.norm": f"{L}.ln_mlp",
        f"{MIX}.attn.o": f"{L}.self_attention.dense",
        f"{MIX}.ffn.up": f"{L}.mlp.dense_h_to_4h",
        f"{MIX}.ffn.down": f"{L}.mlp.dense_4h_to_h",
        **split_grouped_qkv(c, f"{MIX}.attn", f"{L}.self_attention.query_key_value"),
    }
    return model(c, "falcon", layers, norm=each), NameMap(names, ignored=unused_patterns(c))
