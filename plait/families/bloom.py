"""Models with ALiBi in place of positions: BLOOM and BLOOMZ, MPT."""

from __future__ import annotations

from dataclasses import replace

from plait.checkpoint.names import NameMap, Rules
from plait.families.common.alibi import spread_slopes, thin_slopes
from plait.families.common.recipes import at, split_grouped_qkv, split_qkv, unused_patterns
from plait.families.common.registry import family
from plait.families.common.spec_builders import gqa, model, norm, plain_mlp, require
from plait.families.config.normalize import Config
from plait.families.gguf.arch import Metadata, gguf_arch
from plait.spec.model import AttentionSpec, BranchSpec, ModelSpec, NormSpec

ATTN, FFN = "layers.{i}.attn", "layers.{i}.ffn"


@family(
    "BloomForCausalLM",
    model_types=("bloom",),
    defaults={"norm_eps": 1e-5, "hidden_act": "gelu_pytorch_tanh", "tie_word_embeddings": True},
)
def bloom(c: Config) -> tuple[ModelSpec, NameMap]:
    """BLOOM: a norm of the embeddings, layer norms, a plain feed-forward four times as wide."""
    require(c, "BLOOM", apply_residual_connection_post_layernorm=(False,))
    heads, theirs = c["num_attention_heads"], "h.{i}"
    each, attn = norm(c, "layer"), gqa(c, rope=None, slopes=spread_slopes(heads))
    prefixes = ("transformer.", "")  # checkpoints of 2022 have none
    names: Rules = {
        "embed.norm": tuple(f"{p}word_embeddings_layernorm" for p in prefixes),
        "embed": tuple(f"{p}word_embeddings" for p in prefixes),
        "norm": tuple(f"{p}ln_f" for p in prefixes),
        "head": "lm_head",
        f"{ATTN}.norm": tuple(f"{p}{theirs}.input_layernorm" for p in prefixes),
        f"{FFN}.norm": tuple(f"{p}{theirs}.post_attention_layernorm" for p in prefixes),
        f"{ATTN}.o": tuple(f"{p}{theirs}.self_attention.dense" for p in prefixes),
        f"{FFN}.up": tuple(f"{p}{theirs}.mlp.dense_h_to_4h" for p in prefixes),
        f"{FFN}.down": tuple(f"{p}{theirs}.mlp.dense_4h_to_h" for p in prefixes),
        **at(prefixes, lambda p: split_grouped_qkv(c, ATTN, f"{p}{theirs}.self_attention.query_key_value")),
    }
    spec = _layers(c, "bloom", attn, each)
    return spec, NameMap(names, ignored=unused_patterns(c, r"\.self_attention\.(attn_)?bias$"))


@family(
    "MPTForCausalLM",
    "MptForCausalLM",
    model_types=("mpt",),
    defaults={"norm_eps": 1e-5, "hidden_act": "gelu", "tie_word_embeddings": True},
    honours=("clip_qkv", "alibi", "logit_scale"),
)
def mpt(c: Config) -> tuple[ModelSpec, NameMap]:
    """MPT: norms without biases; queries, keys and values may be clipped."""
    own = Config({"alibi": True, "clip_qkv": None, "alibi_bias_max": 8})
    own |= {k: c[k] for k in ("clip_qkv", "alibi_bias_max") if k in c} | (c.get("attn_config") or {})
    require(own, "MPT", alibi=(True,), qk_ln=(False,), prefix_lm=(False,), attn_type=("multihead_attention",))
    require(c, "MPT", expansion_ratio=(4,), norm_type=("low_precision_layernorm",), logit_scale=(1, 1.0))
    slopes = thin_slopes(c["num_attention_heads"], own["alibi_bias_max"])
    attn = gqa(c, rope=None, slopes=slopes, clip=own["clip_qkv"] or None)
    if own.get("softmax_scale"):
        attn = replace(attn, scale=float(own["softmax_scale"]))
    theirs = "transformer.blocks.{i}"
    names: Rules = {
        "embed": "transformer.wte",
        "norm": "transformer.norm_f",
        "head": "lm_head",
        f"{ATTN}.norm": f"{theirs}.norm_1",
        f"{FFN}.norm": f"{theirs}.norm_2",
        f"{ATTN}.o": f"{theirs}.attn.out_proj",
        f"{FFN}.up": f"{theirs}.ffn.up_proj",
        f"{FFN}.down": f"{theirs}.ffn.down_proj",
        **split_qkv(c, ATTN, f"{theirs}.attn.Wqkv"),
    }
    return _layers(c, "mpt", attn, norm(c, "layer")), NameMap(names, ignored=unused_patterns(c))


def _layers(c: Config, name: str, attn: AttentionSpec, each: NormSpec) -> ModelSpec:
    c["intermediate_size"] = 4 * c["hidden_size"]
    layer = (BranchSpec("attn", attn, each), BranchSpec("ffn", plain_mlp(c), each))
    embed_norm = each if name == "bloom" else None
    longest = c.get("seq_length") if name == "bloom" else None
    c.setdefault("max_position_embeddings", longest)
    return model(c, name, [layer] * len(c["layer_types"]), norm=each, embed_norm=embed_norm)


def _gguf_names(c: Config) -> Rules:
    """llama.cpp puts the rows of all queries in front, then those of keys and values."""
    own: Rules = {"embed.norm": "token_embd_norm", **split_qkv(c, ATTN, "blk.{i}.attn_qkv")}
    return own


@gguf_arch("bloom", "BloomForCausalLM", names=_gguf_names)
def _bloom(m: Metadata) -> None:
    """The keys say it all."""


@gguf_arch("mpt", "MPTForCausalLM", names=_gguf_names)
def _mpt(m: Metadata) -> None:
    why = f"GGUF metadata {m.prefix}attention.max_alibi_bias"
    if most := m.values.get("attention.max_alibi_bias"):
        m.put("alibi_bias_max", most, why)
    elif most is not None:  # positions are learned in such a model
        m.put("attn_config", {"alibi": False}, why)
