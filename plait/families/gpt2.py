"""GPT-2 and its kin: learned positions, layer norms, a plain feed-forward. GPT-BigCode, GPT-Neo."""

from __future__ import annotations

from dataclasses import replace

from plait.checkpoint.names import NameMap, Rules, Source
from plait.errors import UnsupportedModel
from plait.families.common.recipes import (
    split_grouped_qkv,
    split_qkv,
    split_turned_qkv,
    turn,
    unused_patterns,
)
from plait.families.common.registry import family
from plait.families.common.spec_builders import gqa, model, norm, plain_mlp
from plait.families.config.normalize import FULL, SLIDING, Config
from plait.families.gguf.arch import plain_arch
from plait.spec.model import AttentionSpec, BranchSpec, ModelSpec

ATTN, FFN, H = "layers.{i}.attn", "layers.{i}.ffn", "transformer.h.{i}"
USUAL = {"norm_eps": 1e-5, "hidden_act": "gelu_pytorch_tanh", "tie_word_embeddings": True}


@family(
    "GPT2LMHeadModel",
    model_types=("gpt2", "gpt-sw3"),
    defaults={**USUAL, "scale_attn_weights": True, "scale_attn_by_inverse_layer_idx": False},
    honours=("scale_attn_by_inverse_layer_idx",),
)
def gpt2(c: Config) -> tuple[ModelSpec, NameMap]:
    """GPT-2: weight matrices are stored the other way round."""
    usual = _attention(c)
    scales = [usual.scale] * len(c["layer_types"])
    if c["scale_attn_by_inverse_layer_idx"]:
        scales = [scale / (i + 1) for i, scale in enumerate(scales)]
    own: dict[str, Source] = {
        f"{ATTN}.o.weight": turn(f"{H}.attn.c_proj.weight"),
        f"{FFN}.up.weight": turn(f"{H}.mlp.c_fc.weight"),
        f"{FFN}.down.weight": turn(f"{H}.mlp.c_proj.weight"),
        **split_turned_qkv(c["hidden_size"], ATTN, f"{H}.attn.c_attn"),
    }
    return _gpt(c, "gpt2", [replace(usual, scale=scale) for scale in scales], own)


@family(
    "GPTBigCodeForCausalLM",
    model_types=("gpt_bigcode",),
    defaults={**USUAL, "scale_attn_weights": True, "multi_query": True},
)
def gpt_bigcode(c: Config) -> tuple[ModelSpec, NameMap]:
    """SantaCoder, StarCoder 1: GPT-2 with one head of keys and values for all."""
    if c["multi_query"]:
        c["num_key_value_heads"] = 1
    own = split_grouped_qkv(c, ATTN, f"{H}.attn.c_attn")
    return _gpt(c, "gpt_bigcode", [_attention(c)] * len(c["layer_types"]), own)


@family("GPTNeoForCausalLM", model_types=("gpt_neo",), defaults={**USUAL, "window_size": 256})
def gpt_neo(c: Config) -> tuple[ModelSpec, NameMap]:
    """GPT-Neo: every other layer has a window; the scores are not scaled."""
    c["num_attention_heads"] = c["num_key_value_heads"] = c["num_heads"]
    c["head_dim"], c["sliding_window"] = c["hidden_size"] // c["num_heads"], c["window_size"]
    cycles = c.get("attention_types") or [[["global", "local"], len(c["layer_types"]) // 2]]
    words = c.get("attention_layers") or [word for cycle, times in cycles for word in cycle * times]
    if len(words) != (count := len(c["layer_types"])):
        raise UnsupportedModel(f"attention_types lists {len(words)} layers, and the config has {count}")
    kinds = {"global": FULL, "local": SLIDING}
    mixers = [gqa(c, kinds[word], scale=1.0, rope=None) for word in words]
    own: Rules = {
        f"{ATTN}.o": f"{H}.attn.attention.out_proj",
        f"{ATTN}.{{x}}": f"{H}.attn.attention.{{x}}_proj",
    }
    return _gpt(c, "gpt_neo", mixers, own)


def _attention(c: Config) -> AttentionSpec:
    return gqa(c, rope=None, scale=c["head_dim"] ** -0.5 if c["scale_attn_weights"] else 1.0)


def _gpt(c: Config, name: str, mixers: list[AttentionSpec], own: Rules) -> tuple[ModelSpec, NameMap]:
    each = norm(c, "layer")
    ffn = BranchSpec("ffn", plain_mlp(c), each)
    names: Rules = {
        "embed.positions": "transformer.wpe",
        "embed": "transformer.wte",
        "norm": "transformer.ln_f",
        "head": "lm_head",
        f"{ATTN}.norm": f"{H}.ln_1",
        f"{FFN}.norm": f"{H}.ln_2",
    }
    usual: Rules = {
        f"{ATTN}.o": f"{H}.attn.c_proj",
        f"{FFN}.up": f"{H}.mlp.c_fc",
        f"{FFN}.down": f"{H}.mlp.c_proj",
    }
    layers = [(BranchSpec("attn", mixer, each), ffn) for mixer in mixers]
    spec = model(c, name, layers, norm=each, positions=c["max_position_embeddings"])
    ignored = unused_patterns(c, r"\.attn\.(attention\.)?(bias|masked_bias)$")
    return spec, NameMap(names, own, usual, ignored=ignored)


def _gguf_names(c: Config) -> Rules:
    own: Rules = {
        "embed.positions.weight": "position_embd.weight",
        **split_qkv(c, ATTN, "blk.{i}.attn_qkv"),
    }
    return own


plain_arch("gpt2", "GPT2LMHeadModel", names=_gguf_names)
plain_arch("starcoder", "GPTBigCodeForCausalLM", names=_gguf_names)
