"""Llama 4 Scout and Maverick, text: tokens are scaled before their expert, whole layers have no positions."""

from __future__ import annotations

from dataclasses import replace

from plait.checkpoint.names import NameMap, Rules
from plait.errors import UnsupportedModel
from plait.families.common.hf_config import LOCAL, HfConfig, Values
from plait.families.common.recipes import (
    TEXT_PREFIXES,
    VISION,
    at,
    text_tensors,
    transformer,
    unused_patterns,
)
from plait.families.common.registry import family
from plait.families.common.spec_builders import gqa, make_chunks, mlp, model, norm, rope
from plait.families.config.normalize import CHUNKED, FULL, Config, rotates
from plait.families.gguf.arch import FILE, Metadata, gguf_arch
from plait.families.moe import turn_experts
from plait.spec.model import AttentionSpec, BranchSpec, ModelSpec, MoeSpec, NormSpec, RouterSpec
from plait.spec.positions import TemperatureSpec

FFN, EYES = "layers.{i}.ffn", r"^(model\.)?vision_model\."
CHUNK = 8192  # tokens, in every published model


def _hf_chunks(config: Config, spec: ModelSpec) -> Values:
    """Which layers have chunks, and how long those are."""
    chunks = [mixer.chunk for mixer in spec.mixers_of(AttentionSpec)]
    return {
        "layer_types": [CHUNKED if chunk else FULL for chunk in chunks],
        "attention_chunk_size": next((chunk for chunk in chunks if chunk), None),
    }


@family(
    *("Llama4ForCausalLM", "Llama4ForConditionalGeneration"),
    model_types=("llama4_text", "llama4"),
    defaults={
        "norm_eps": 1e-5,
        "hidden_act": "silu",
        "head_dim": 128,
        "rope_theta": 5e5,
        "intermediate_size_mlp": 16_384,
        "num_experts_per_tok": 1,
        "interleave_moe_layer_step": 1,
        "use_qk_norm": True,
        "no_rope_layer_interval": 4,
        "attention_chunk_size": CHUNK,
        "attn_temperature_tuning": True,
        "attn_scale": 0.1,
        "floor_scale": 8192,
    },
    honours=("use_qk_norm", "no_rope_layers", "no_rope_layer_interval", "attention_chunk_size"),
    hf=HfConfig(words=LOCAL, extra=_hf_chunks),
)
def llama4(c: Config) -> tuple[ModelSpec, NameMap]:
    """Layers with positions see the tokens of a query's chunk, and all others see all."""
    if (chosen := c["num_experts_per_tok"]) != 1:
        raise UnsupportedModel(f"num_experts_per_tok = {chosen} is not implemented for Llama 4; known: 1")
    each, count, size = norm(c), len(c["layer_types"]), c["intermediate_size"]
    if c.get("layer_words") and (unknown := {*c["layer_types"]} - {FULL, CHUNKED}):
        raise UnsupportedModel(f"layer_types has {min(unknown)}; Llama 4 has {FULL} and {CHUNKED}")
    step, sparse = c["interleave_moe_layer_step"], c.get("moe_layers")
    sparse = range(step - 1, count, step) if sparse is None else sparse
    router = RouterSpec("sigmoid", renormalize=False)
    moe = MoeSpec(c["num_experts"], 1, mlp(c, size), router, shared=mlp(c, size), weigh_input=True)
    dense, routed = BranchSpec("ffn", mlp(c, c["intermediate_size_mlp"]), each), BranchSpec("ffn", moe, each)
    layers = [
        (BranchSpec("attn", _attention(c, i), each), routed if i in sparse else dense) for i in range(count)
    ]
    usual = text_tensors(transformer)
    names = at(TEXT_PREFIXES, lambda prefix: _names(prefix, c, size))
    unused = unused_patterns(c, *VISION, EYES)
    return model(c, "llama4_text", layers), NameMap(names, usual, ignored=unused)


def _attention(c: Config, i: int) -> AttentionSpec:
    if rotates(c, i):
        lengths = NormSpec(c["norm_eps"], weight=False) if c["use_qk_norm"] else None
        turned = rope(c, c["head_dim"], interleaved=True)
        if lengths and turned.scaling:  # norms behind it divide away what it multiplies by
            turned = replace(turned, scaling={**turned.scaling, "attention_factor": 1.0})
        return gqa(c, FULL, rope=turned, qk_norm=lengths, **_chunks(c, i))
    grown = TemperatureSpec(float(c["attn_scale"]), float(c["floor_scale"]), 1.0)
    temperature = grown if c["attn_temperature_tuning"] else None
    return gqa(c, FULL, rope=None, temperature=temperature, **_chunks(c, i))


def _chunks(c: Config, i: int) -> dict[str, int]:
    """What limits a layer's attention, if its word says so; without words, its positions do."""
    key, words = "attention_chunk_size", c.get("layer_words")
    has_chunks = words[i] == CHUNKED if words else rotates(c, i) and bool(c[key])
    return make_chunks(c, key, c[key]) if has_chunks else {}


def _names(prefix: str, c: Config, size: int) -> Rules:
    theirs = f"{prefix}layers.{{i}}.feed_forward"
    return {
        f"{FFN}.norm": f"{prefix}layers.{{i}}.post_attention_layernorm",
        f"{FFN}.router": f"{theirs}.router",
        f"{FFN}.shared.{{x}}": f"{theirs}.shared_expert.{{x}}_proj",
        **turn_experts(FFN, theirs, c, size),
        f"{FFN}.{{x}}": f"{theirs}.{{x}}_proj",
    }


@gguf_arch("llama4", "Llama4ForCausalLM")
def _llama4_in_gguf(m: Metadata) -> None:
    """Maverick, of 128 experts, has no norms of q and k."""
    m.put("intermediate_size_mlp", m.config["intermediate_size"], f"{FILE} {m.prefix}feed_forward_length")
    m.put("intermediate_size", m.config["moe_intermediate_size"], f"{FILE} expert_feed_forward_length")
    m.put("use_qk_norm", m.config["num_experts"] != 128, f"{FILE} {m.prefix}expert_count")
    routed = [i for i, has in enumerate(m.layers("ffn_gate_inp.weight")) if has]
    m.put("moe_layers", routed, "the tensors of each layer")
    _read_window(m)


def _read_window(m: Metadata) -> None:
    """A window of 0 means: no chunks, and positions in all layers. Raises UnsupportedModel."""
    key, size = "attention.sliding_window", m.config.get("sliding_window")
    count, why = m.config["num_hidden_layers"], f"{FILE} {m.prefix}{key}"
    if size not in (None, 0, CHUNK):
        raise UnsupportedModel(f"{why} is {size!r:.40}; known of Llama 4: 0 and {CHUNK}")
    if size == 0:
        m.put("layer_types", [FULL] * count, why)
        m.put("no_rope_layer_interval", count + 1, why)
    if size is not None:
        m.put("sliding_window", None, why)
