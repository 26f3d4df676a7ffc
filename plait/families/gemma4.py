"""Gemma 4, dense: wider heads in the layers without windows, where keys may be values, too."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from plait.checkpoint.names import NameMap, Rules
from plait.errors import UnsupportedModel
from plait.families.common.recipes import TEXT_PREFIXES, VISION, at, transformer, unused_patterns
from plait.families.common.registry import family
from plait.families.common.spec_builders import gqa, mlp, model, norm, require, rope
from plait.families.config.normalize import FULL, Config
from plait.spec import AttentionSpec, BranchSpec, ModelSpec, NormSpec

OTHERS = (r"^(model\.)?(embed_vision|embed_audio|audio_tower)\.",)  # what is for images and sounds
OWN = {"head_dim", "num_key_value_heads"}  # what layers may have otherwise


@family(
    *("Gemma4ForCausalLM", "Gemma4ForConditionalGeneration"),
    model_types=("gemma4_text", "gemma4"),
    defaults={
        "norm_eps": 1e-6,
        "hidden_act": "gelu_pytorch_tanh",
        "head_dim": 256,
        "sliding_window": 512,
        "sliding_window_pattern": 6,
        "global_head_dim": 512,
        "attention_k_eq_v": False,
        "tie_word_embeddings": True,
    },
    honours=(
        *("sliding_window", "per_layer_config", "final_logit_softcapping"),
        "use_bidirectional_attention",
    ),
)
def gemma4(c: Config) -> tuple[ModelSpec, NameMap]:
    """Gemma 4 31B. Those with experts, shared keys or embeddings for each layer are refused."""
    require(c, "Gemma 4", enable_moe_block=(False,), use_bidirectional_attention=("vision",))
    each = norm(c)
    kinds = [*c["layer_types"][:-1], FULL]
    ffn = BranchSpec("ffn", mlp(c), each, each, factor=True)
    layers = [(BranchSpec("attn", _attention(c, i, kind), each, each), ffn) for i, kind in enumerate(kinds)]
    spec = model(
        c,
        "gemma4_text",
        layers,
        embed_scale=c["hidden_size"] ** 0.5,
        logit_softcap=c.get("final_logit_softcapping"),
    )
    usual = at(TEXT_PREFIXES, transformer)
    usual["head"] = ("lm_head", "language_model.lm_head")
    return spec, NameMap(at(TEXT_PREFIXES, _names), usual, ignored=unused_patterns(c, *VISION, *OTHERS))


def _attention(c: Config, i: int, kind: str) -> AttentionSpec:
    own, each = _own_sizes(c, i, kind), norm(c)
    dim, heads = own.get("head_dim", c["head_dim"]), own.get("num_key_value_heads", c["num_key_value_heads"])
    values = NormSpec(c["norm_eps"], weight=False)
    changes = {"head_dim": dim, "num_kv_heads": heads, "rope": rope(c, dim, kind)}
    return gqa(c, kind, scale=1.0, qk_norm=each, v_norm=values, **changes)


def _own_sizes(c: Config, i: int, kind: str) -> Mapping[str, Any]:
    """What this layer has otherwise than the config's sizes."""
    if (given := c.get("per_layer_config")) is not None:
        own: Mapping[str, Any] = given.get(str(i)) or given.get(i) or {}
        if unknown := set(own) - OWN:
            raise UnsupportedModel(f"per_layer_config has {sorted(unknown)}; known: {sorted(OWN)}")
        return own
    if kind != FULL:
        return {}
    heads = c.get("num_global_key_value_heads") if c["attention_k_eq_v"] else None
    return {"head_dim": c["global_head_dim"]} | ({} if heads is None else {"num_key_value_heads": heads})


def _names(prefix: str) -> Rules:
    layer = f"{prefix}layers.{{i}}"
    return {
        "layers.{i}.attn.post_norm": f"{layer}.post_attention_layernorm",
        "layers.{i}.attn.v": (f"{layer}.self_attn.v_proj", f"{layer}.self_attn.k_proj"),
        "layers.{i}.ffn.norm": f"{layer}.pre_feedforward_layernorm",
        "layers.{i}.ffn.post_norm": f"{layer}.post_feedforward_layernorm",
        "layers.{i}.ffn.factor": f"{layer}.layer_scalar",
    }
