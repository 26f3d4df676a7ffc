"""The metadata that says in GGUF what a model is: from the spec, in the words that llama.cpp reads."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType
from typing import Any

import torch

from plait.errors import UnsupportedFormat
from plait.ops.rope import frequencies, yarn_mscale
from plait.spec.model import AttentionSpec, Mixer, MlaSpec, MlpSpec, ModelSpec, MoeSpec, ParallelSpec
from plait.spec.positions import RopeSpec
from plait.spec.recurrent import (
    ChannelMixSpec,
    DeltaNetSpec,
    LightningSpec,
    Mamba1Spec,
    Mamba2Spec,
    ShortConvSpec,
    Wkv6Spec,
    Wkv7Spec,
)

Values = dict[str, Any]
SOFTMAX, SIGMOID = 1, 2  # expert_gating_func
LARGEST = 1 << 31  # what llama.cpp takes as a context


def model_keys(arch: str, spec: ModelSpec, config: Mapping[str, object]) -> Values:
    """Every key behind the architecture's prefix. `config`: the source's, for what no spec says."""
    values: Values = {
        "block_count": len(spec.layers),
        "context_length": min(spec.max_len, LARGEST),
        "embedding_length": spec.hidden_size,
        "vocab_size": spec.vocab_size,
        f"attention.layer_norm_{'rms_' if spec.norm.kind == 'rms' else ''}epsilon": spec.norm.eps,
        "feed_forward_length": _widths(spec, config),
        **_attention(spec),
        **_latent(spec),
        **_experts(spec, config),
        **_recurrent(spec),
    }
    if spec.logit_softcap:
        values["final_logit_softcapping"] = float(spec.logit_softcap)
    values |= _PARTICULARS[arch](spec) if arch in _PARTICULARS else {}
    return {f"{arch}.{key}": value for key, value in values.items()}


def _parts(layer: Iterable[Any]) -> list[Mixer]:
    """The mixers of a layer, those of a `ParallelSpec` one by one."""
    found: list[Mixer] = []
    for branch in layer:
        mixer = branch.mixer
        found += mixer.parts.values() if isinstance(mixer, ParallelSpec) else [mixer]
    return found


def _each(spec: ModelSpec, kind: Any) -> list[Any]:
    """For each layer its mixer of this kind, or None."""
    return [next((m for m in _parts(layer) if isinstance(m, kind)), None) for layer in spec.layers]


def _same(values: list[object], what: str) -> Any:
    found = list(dict.fromkeys(v for v in values if v is not None))
    if len(found) > 1:
        raise UnsupportedFormat(f"GGUF has one {what} for all layers; this model has {found}")
    return found[0] if found else None


def _per_layer(values: list[int]) -> int | list[int]:
    """One number if all layers have it, else one for each."""
    return values[0] if len(set(values)) == 1 else values


def _widths(spec: ModelSpec, config: Mapping[str, Any]) -> int | list[int]:
    widths = [m.size if m else 0 for m in _each(spec, MlpSpec)]
    if any(widths):
        return _per_layer(widths if _has_holes(spec) else [max(widths)] * len(widths))
    moe = next(spec.mixers_of(MoeSpec), None)
    if moe is None:
        return 0
    one = int(config.get("intermediate_size") or moe.expert.size)
    return _per_layer([one if m else 0 for m in _each(spec, MoeSpec)] if _has_holes(spec) else [one])


def _has_holes(spec: ModelSpec) -> bool:
    """Whether some layers have nothing that feeds forward."""
    return any(not any(isinstance(m, (MlpSpec, MoeSpec)) for m in _parts(layer)) for layer in spec.layers)


def _attention(spec: ModelSpec) -> Values:
    each: list[AttentionSpec | None] = _each(spec, AttentionSpec)
    found = [m for m in each if m]
    if not found:
        return {} if any(spec.mixers_of(MlaSpec)) else {"attention.head_count": 0}
    dim = _same([m.head_dim for m in found], "head size")
    values: Values = {
        "attention.head_count": _same([m.num_heads for m in found], "number of heads"),
        "attention.head_count_kv": _kv_heads(spec, each),
        "attention.key_length": dim,
        "attention.value_length": dim,
    }
    if window := _same([m.window for m in found if not m.chunk], "window"):  # of chunks no file says it
        values["attention.sliding_window"] = window
    if cap := _same([m.softcap for m in found], "softcap"):
        values["attn_logit_softcapping"] = float(cap)
    full = next((m.rope for m in found if m.rope and not m.window), None)
    rope = full or next((m.rope for m in found if m.rope), None)
    return values | (rope_keys(rope, spec.max_len) if rope else {"rope.dimension_count": dim})


def _kv_heads(spec: ModelSpec, each: list[AttentionSpec | None]) -> Any:
    """A 0 marks a layer that does not attend; not where llama.cpp names those layers by an interval."""
    if _has_interval(spec):
        return _same([m.num_kv_heads for m in each if m], "number of key heads")
    return _per_layer([m.num_kv_heads if m else 0 for m in each])


def _has_interval(spec: ModelSpec) -> bool:
    deltas = spec.mixers_of(DeltaNetSpec)
    return any(spec.mixers_of(LightningSpec)) or any(m.decay == "head" for m in deltas)


def rope_keys(rope: RopeSpec, max_len: int, *, latent: bool = False) -> Values:
    """The keys of rotary positions; divisors per frequency are tensors, not keys."""
    values: Values = {"rope.dimension_count": rope.dim, "rope.freq_base": rope.theta}
    p = rope.scaling
    match p.get("rope_type", "default"):
        case "linear":
            values |= {"rope.scaling.type": "linear", "rope.scaling.factor": float(p["factor"])}
        case "yarn":
            values |= _yarn(p)
            above = frequencies(rope, max_len)[1] / yarn_mscale(values["rope.scaling.factor"], 1.0)
            if not latent and not math.isclose(above, 1.0, rel_tol=1e-6):
                values["rope.scaling.attn_factor"] = above  # llama.cpp multiplies both
            if latent and p.get("mscale_all_dim"):
                values["rope.scaling.yarn_log_multiplier"] = 0.1 * p["mscale_all_dim"]
        case "longrope":
            values |= {
                "rope.scaling.type": "longrope",
                "rope.scaling.original_context_length": int(p["original_max_position_embeddings"]),
                "rope.scaling.attn_factor": frequencies(rope, max_len)[1],
            }
        case "dynamic":
            values |= _dynamic(rope, max_len)
    return values  # divisors, and llama3's, are tensors


def _dynamic(rope: RopeSpec, max_len: int) -> Values:
    """Plait's own key: llama.cpp does not read it, and is right up to the context that the file names."""
    plain = RopeSpec(rope.dim, rope.theta)
    if not torch.equal(frequencies(rope, max_len)[0], frequencies(plain, max_len)[0]):
        raise UnsupportedFormat("positions that are stretched by length (dynamic NTK) have no word")
    original = int(rope.scaling["original_max_position_embeddings"])
    return {
        "rope.scaling.dynamic_factor": float(rope.scaling["factor"]),
        "rope.scaling.original_context_length": original,
    }


def _yarn(p: Mapping[str, Any]) -> Values:
    original = p["original_max_position_embeddings"]
    values: Values = {
        "rope.scaling.type": "yarn",
        "rope.scaling.factor": float(p.get("factor") or p["max_position_embeddings"] / original),
        "rope.scaling.original_context_length": int(original),
    }
    for ours, theirs in (("beta_fast", "yarn_beta_fast"), ("beta_slow", "yarn_beta_slow")):
        if p.get(ours):
            values[f"rope.scaling.{theirs}"] = float(p[ours])
    return values


def _latent(spec: ModelSpec) -> Values:
    mla = next(spec.mixers_of(MlaSpec), None)
    if mla is None:
        return {}
    values: Values = {
        "attention.head_count": mla.num_heads,
        "attention.head_count_kv": _per_layer([1 if m else 0 for m in _each(spec, MlaSpec)]),
        "attention.kv_lora_rank": mla.kv_rank,
        "attention.key_length": mla.kv_rank + mla.rope_dim,
        "attention.value_length": mla.kv_rank,
        "attention.key_length_mla": mla.nope_dim + mla.rope_dim,
        "attention.value_length_mla": mla.v_dim,
        "rope.dimension_count": mla.rope_dim,
    }
    if mla.rope:
        values |= rope_keys(mla.rope, spec.max_len, latent=True)
    return values | ({"attention.q_lora_rank": mla.q_rank} if mla.q_rank else {})


def _experts(spec: ModelSpec, config: Mapping[str, Any]) -> Values:
    each: list[MoeSpec | None] = _each(spec, MoeSpec)
    moe = next((m for m in each if m), None)
    if moe is None:
        return {}
    router = moe.router
    values: Values = {
        "expert_count": moe.num_experts,
        "expert_used_count": moe.top_k,
        "expert_feed_forward_length": moe.expert.size,
        "expert_gating_func": SIGMOID if router.score == "sigmoid" else SOFTMAX,
        "expert_weights_norm": router.renormalize,
        "expert_weights_scale": router.scale,
    }
    if router.groups > 1:
        values |= {"expert_group_count": router.groups, "expert_group_used_count": router.top_groups}
    if moe.shared:
        values["expert_shared_feed_forward_length"] = moe.shared.size
        shared = config.get("num_shared_experts") or config.get("n_shared_experts")
        values["expert_shared_count"] = int(shared or max(1, moe.shared.size // moe.expert.size))
    dense = next((i for i, m in enumerate(each) if m), 0)
    if dense and not any(isinstance(m, (Mamba1Spec, Mamba2Spec)) for _, m in spec.mixers()):
        values["leading_dense_block_count"] = dense
    return values


def _recurrent(spec: ModelSpec) -> Values:
    kinds = (Mamba1Spec, Mamba2Spec, DeltaNetSpec, LightningSpec, ShortConvSpec)
    found = next((m for _, m in spec.mixers() if isinstance(m, kinds)), None)
    match found:
        case ShortConvSpec():
            return {"shortconv.l_cache": found.kernel}
        case DeltaNetSpec(decay="channel"):
            return {"kda.head_dim": found.key_dim, "ssm.conv_kernel": found.conv_kernel}
        case DeltaNetSpec():
            return {
                "ssm.conv_kernel": found.conv_kernel,
                "ssm.inner_size": found.num_heads * found.value_dim,
                "ssm.state_size": found.key_dim,
                "ssm.time_step_rank": found.num_heads,
                "ssm.group_count": found.num_key_heads,
                **_interval(spec),
            }
        case LightningSpec():
            return _interval(spec)
        case Mamba2Spec():
            return {
                "ssm.conv_kernel": found.conv_kernel,
                "ssm.inner_size": found.num_heads * found.head_dim,
                "ssm.state_size": found.state_size,
                "ssm.time_step_rank": found.num_heads,
                "ssm.group_count": found.num_groups,
            }
        case Mamba1Spec():
            return {
                "ssm.conv_kernel": found.conv_kernel,
                "ssm.inner_size": found.inner_size,
                "ssm.state_size": found.state_size,
                "ssm.time_step_rank": found.dt_rank,
                "ssm.dt_b_c_rms": bool(found.norm and not found.norm.weight),
            }
        case _:
            return {}


def _interval(spec: ModelSpec) -> Values:
    """One layer in how many has full attention; also a list of the others, if no interval fits."""
    attends = [m is not None for m in _each(spec, AttentionSpec)]
    interval = attends.index(True) + 1 if any(attends) else len(attends) + 1
    values: Values = {"full_attention_interval": interval}
    if attends != [(i + 1) % interval == 0 for i in range(len(attends))]:
        values["attention.recurrent_layers"] = [not found for found in attends]
    return values


def _granite(spec: ModelSpec) -> Values:
    attention = next(spec.mixers_of(AttentionSpec), None)
    scale = next((b.scale for _, b in spec.branches()), 1.0)
    values: Values = {
        "embedding_scale": spec.embed_scale,
        "residual_scale": scale,
        "logit_scale": 1 / spec.logit_scale,
        "rope.scaling.finetuned": bool(attention and attention.rope),
    }
    return values | ({"attention.scale": attention.scale} if attention else {})


def _gemma3(spec: ModelSpec) -> Values:
    local = next((m.rope for m in spec.mixers_of(AttentionSpec) if m.window and m.rope), None)
    return {"rope.freq_base_swa": local.theta} if local else {}


def _olmo(spec: ModelSpec) -> Values:
    """OLMo 3 has its windows in most layers, OLMo 2 has none."""
    windows = [bool(m and m.window) for m in _each(spec, AttentionSpec)]
    return {"attention.sliding_window_pattern": windows} if any(windows) else {}


def _nemotron(spec: ModelSpec) -> Values:
    return {"attention.layer_norm_epsilon": spec.norm.eps}


def _sections(spec: ModelSpec) -> Values:
    """Frequencies of time, height and width, in turns; llama.cpp rotates no others, of text either."""
    rope = next((m.rope for m in spec.mixers_of(AttentionSpec) if m.rope), None)
    if rope is None:
        return {}
    return {"rope.dimension_sections": [len(range(first, rope.dim // 2, 3)) for first in range(3)] + [0]}


def _cohere(spec: ModelSpec) -> Values:
    return {"logit_scale": spec.logit_scale}


def _minimax(spec: ModelSpec) -> Values:
    return {"residual_scale": next((b.keep for _, b in spec.branches() if b.keep), 1.0)}


def _minicpm3(spec: ModelSpec) -> Values:
    """llama.cpp runs these heads as they are, not as one head of latents."""
    mla = next(spec.mixers_of(MlaSpec))
    return {"attention.key_length": mla.nope_dim + mla.rope_dim, "attention.value_length": mla.v_dim}


def _ernie_moe(spec: ModelSpec) -> Values:
    """Behind the dense layers one in how many has experts, which llama.cpp must be given."""
    sparse = [i for i, moe in enumerate(_each(spec, MoeSpec)) if moe]
    return {"interleave_moe_layer_step": sparse[1] - sparse[0] if len(sparse) > 1 else 1}


def _llama4(spec: ModelSpec) -> Values:
    """From the first layer on, one in how many has experts. Chunks and temperatures are llama.cpp's own."""
    sparse = [i for i, moe in enumerate(_each(spec, MoeSpec)) if moe]
    step = sparse[0] + 1 if sparse else 0
    if sparse != list(range(step - 1, len(spec.layers), step or 1)):
        raise UnsupportedFormat(f"experts in the layers {sparse}; llama.cpp has them at equal distances")
    return {"interleave_moe_layer_step": step}


def _plamo2(spec: ModelSpec) -> Values:
    """PLaMo 2's number of heads is a rank elsewhere; layers without attention have 0 heads of both kinds."""
    ssm = next(spec.mixers_of(Mamba1Spec), None)
    heads = _per_layer([m.num_heads if m else 0 for m in _each(spec, AttentionSpec)])
    values: Values = {"attention.head_count": heads, "ssm.group_count": 0}
    return values | ({"ssm.time_step_rank": ssm.num_heads} if ssm else {})


def _limit_keys(spec: ModelSpec) -> Values:
    """The limit of queries, keys and values; MPT's smallest slope says how far its slopes go."""
    attention = next(spec.mixers_of(AttentionSpec))
    values = {"attention.clamp_kqv": float(attention.clip)} if attention.clip else {}
    if attention.slopes:
        values["attention.max_alibi_bias"] = -math.log2(min(attention.slopes))
    return values


def _neox_keys(spec: ModelSpec) -> Values:
    return {"use_parallel_residual": any(isinstance(b.mixer, ParallelSpec) for _, b in spec.branches())}


def _rwkv6(spec: ModelSpec) -> Values:
    mixer = next(spec.mixers_of(Wkv6Spec))
    shares, decays = mixer.ranks or (0, 0)
    values = {"time_mix_extra_dim": shares, "time_decay_extra_dim": decays, "rescale_every_n_layers": 0}
    return {**values, "wkv.head_size": mixer.key_dim, **_channel_mixing(spec)}


def _rwkv7(spec: ModelSpec) -> Values:
    mixer = list(spec.mixers_of(Wkv7Spec))[-1]  # the first one has no share of values
    words = ("decay", "iclr", "gate", "value_residual_mix")
    ranks = {f"attention.{word}_lora_rank": n or 0 for word, n in zip(words, mixer.ranks, strict=True)}
    return {**ranks, "wkv.head_size": mixer.head_dim, **_channel_mixing(spec)}


def _channel_mixing(spec: ModelSpec) -> Values:
    return {"feed_forward_length": next(spec.mixers_of(ChannelMixSpec)).size}


_PARTICULARS: Mapping[str, Callable[[ModelSpec], Values]] = MappingProxyType(
    {
        **dict.fromkeys(("granitehybrid", "granite", "granitemoe"), _granite),
        **dict.fromkeys(("nemotron_h", "nemotron_h_moe"), _nemotron),
        **dict.fromkeys(("command-r", "cohere2"), _cohere),
        **dict.fromkeys(("qwen35", "qwen35moe"), _sections),
        **dict.fromkeys(("dbrx", "mpt"), _limit_keys),
        "gptneox": _neox_keys,
        "gemma3": _gemma3,
        "olmo2": _olmo,
        "minimax-01": _minimax,
        "plamo2": _plamo2,
        "minicpm3": _minicpm3,
        "ernie4_5-moe": _ernie_moe,
        "llama4": _llama4,
        "rwkv6": _rwkv6,
        "rwkv7": _rwkv7,
    }
)
