"""GigaChat 3.5: gated DeltaNet, gated latent attention every few layers, experts, norms with gates."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from torch import Tensor

from plait.checkpoint.names import Back, Derived, NameMap, Rules, Source
from plait.errors import UnsupportedModel
from plait.families.common.mtp import DEEPSEEK, mtp_names
from plait.families.common.recipes import Stored, plus_one, unused_patterns
from plait.families.common.registry import family
from plait.families.common.spec_builders import (
    mlp,
    model,
    norm,
    require,
    require_silu,
    shared_moe,
    sigmoid_router,
)
from plait.families.config.normalize import FULL, LINEAR, Config
from plait.families.config.values import is_set, read_number, require_given
from plait.families.deepseek import SPARSE, latent_attention, latent_names
from plait.families.linear_attention import DELTA, delta_net, delta_tensors
from plait.families.qwen3_next import group_rules
from plait.quant.weight import as_tensor
from plait.spec.branches import GatedNormSpec
from plait.spec.model import (
    Activation,
    BranchSpec,
    Mixer,
    MlaSpec,
    ModelSpec,
    MtpSpec,
    NormSpec,
)
from plait.spec.recurrent import DeltaNetSpec

NAME = "GigaChat 3.5"
CENTERED = ("ZeroCenteredGatedNorm", "ZeroCenteredRMSNorm")  # norm_type of weights that are stored around 0
GATED = ("ZeroCenteredGatedNorm", "GatedNorm")
RANK = 16  # of a norm's gate: no key of a config says it
CLAMPED: Mapping[float, Activation] = {0.0: "silu", 7.0: "swiglu_cut_7", 10.0: "swiglu_cut_10"}
PLACES = {"pre": (True, False), "post": (False, True), "pre_post": (True, True)}  # norms before, norms behind
FLAGS = ("gated_attention", "use_mla_scaling_factor", "nextn_is_sparse", "rope_interleave", "norm_topk_prob")
FACTORS, LEAST, MOST = ("layernorm_gating_weight", "linear_sigmoid_gate_scale"), 1e-6, 1e6
GATES = {"sigmoid": "sigmoid", "silu": "silu", "swish": "silu", None: "silu"}


@family(
    "GigaChat35ForCausalLM",
    model_types=("gigachat3_5",),
    defaults={
        **SPARSE,
        **DELTA,
        "rope_theta": 1e5,
        "rope_interleave": True,
        "max_position_embeddings": 4096,
        "q_lora_rank": 1536,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "num_experts_per_tok": 6,
        "num_shared_experts": 2,
        "first_k_dense_replace": 1,
        "linear_num_key_heads": 8,
        "linear_num_value_heads": 16,
        "linear_sigmoid_gate_scale": 2.0,
        "linear_gating_type": "",
        "output_gate_type": "sigmoid",
        "norm_type": "ZeroCenteredGatedNorm",
        "layernorm_type": "pre_post",
        "layernorm_gating_weight": 2.0,
        "gated_attention": True,
        "use_mla_scaling_factor": True,
        "swiglu_limit": None,
        "nextn_is_sparse": False,
        **dict.fromkeys(("full_attention_layers", "use_shared_expert_sigmoid", "linear_attention_type")),
    },
    honours=("swiglu_limit", "gated_attention", "use_mla_scaling_factor"),
)
def gigachat(c: Config) -> tuple[ModelSpec, NameMap]:
    """Norms lie before branches, behind them, or both; a head for a second token attends to latents."""
    _check(c)
    each, count = _norm(c), len(c["layer_types"])
    before, behind = (each if has else None for has in PLACES[c["layernorm_type"]])
    sorts = c["mlp_layer_types"] if c.get("num_experts") else ["dense"] * count
    mixers: dict[str, Mixer] = {LINEAR: _delta(c), FULL: _latent(c)}

    def layer(kind: str, sort: str) -> tuple[BranchSpec, BranchSpec]:
        name = "delta" if kind == LINEAR else "attn"
        return (
            BranchSpec(name, mixers[kind], before, behind),
            BranchSpec("ffn", _feed_forward(c, sort), before, behind),
        )

    layers = [layer(kind, sort) for kind, sort in zip(c["layer_types"], sorts, strict=True)]
    num_mtp = c.get("num_nextn_predict_layers") or 0
    head = layer(FULL, "sparse" if is_set(c, "nextn_is_sparse") else "dense")
    mtp = MtpSpec((head,), each, first=count, passes_normed=False) if num_mtp else None
    unused = [rf"^model\.layers\.{count + k}\." for k in range(num_mtp or 1)]  # the first one drafts
    unused += [] if before else [r"\.(input|post_attention)_layernorm\."]
    spec = model(c, "gigachat3_5", layers, norm=each, mtp=mtp)
    return spec, NameMap(_names(c), ignored=unused_patterns(c, *unused))


def _check(c: Config) -> None:
    require_silu(c, NAME)
    norms = (*GATED, "ZeroCenteredRMSNorm", "LlamaRMSNorm")
    require_given(c, NAME, norm_type=norms, layernorm_type=tuple(PLACES))
    require(
        c,
        NAME,
        output_gate_type=tuple(GATES),
        scoring_func=("sigmoid",),
        topk_method=("noaux_tc",),
        use_shared_expert_sigmoid=(False,),
        linear_attention_type=("Qwen3NextGatedDeltaNet",),
    )
    for key in FLAGS:
        is_set(c, key)
    for key in FACTORS:
        read_number(c, key, LEAST, MOST)
    if c["use_mla_scaling_factor"] and c["norm_type"] not in GATED:
        raise UnsupportedModel(
            f"use_mla_scaling_factor with norm_type {c['norm_type']} is not implemented for {NAME}, of which "
            "no code scales such a norm; if the model is right without it, --set use_mla_scaling_factor=false"
        )
    if (limit := _limit(c)) not in CLAMPED:
        raise UnsupportedModel(f"swiglu_limit {limit:g} is not implemented for {NAME}; known: 7 and 10")
    if not c.get("layer_words"):
        c["layer_types"] = _list_kinds(c, len(c["layer_types"]))
    if wrong := set(c["layer_types"]) - {LINEAR, FULL}:
        raise UnsupportedModel(f"layer_types of {NAME} has {min(wrong)!r}; known: {LINEAR}, {FULL}")


def _list_kinds(c: Config, count: int) -> list[str]:
    """The kind of each layer of a config that lists those with full attention. Raises UnsupportedModel."""
    listed = c.get("full_attention_layers")
    if not isinstance(listed, list) or not all(type(i) is int and 0 <= i < count for i in listed):
        raise UnsupportedModel(
            f"{NAME} wants layer_types, or full_attention_layers, a list of numbers below {count}, and the "
            f"config has {listed!r:.80} (--set full_attention_layers=[…] corrects it)"
        )
    return [FULL if i in listed else LINEAR for i in range(count)]


def _norm(c: Config, scale: float = 1.0) -> NormSpec:
    """The norm of branches, of latents and of the head, in the last of which gates have a scale, too."""
    if c["norm_type"] not in GATED:
        return norm(c)
    return GatedNormSpec(c["norm_eps"], rank=RANK, scale=float(c["layernorm_gating_weight"]) * scale)


def _delta(c: Config) -> DeltaNetSpec:
    kind = "silu" if GATES[c["output_gate_type"]] == "silu" else "sigmoid"
    return delta_net(c, gate=kind)


def _latent(c: Config) -> MlaSpec:
    """Latents times the root of how much smaller than a hidden state they are, if the config says so.

    What normed queries are multiplied by is in the scale of scores, next to what the norm has too much.
    """
    mixer, own = latent_attention(c), 1.0
    if c["use_mla_scaling_factor"]:
        keys, queries = ((c["hidden_size"] / rank) ** 0.5 for rank in (mixer.kv_rank, mixer.q_rank or 1))
        own = keys
        mixer = replace(mixer, scale=mixer.scale * queries / keys) if mixer.q_rank else mixer
    return replace(mixer, latent_norm=_norm(c, own), out_gate=bool(c["gated_attention"]))


def _feed_forward(c: Config, sort: str) -> Mixer:
    if sort == "sparse":
        c = c | {"hidden_act": _activation(c)}
        return shared_moe(c, sigmoid_router(c))
    return replace(mlp(c), activation=_activation(c))


def _activation(c: Config) -> Activation:
    """Gates at most `swiglu_limit`, and what they are multiplied with within ± it; 0 and less: no limit."""
    return CLAMPED[_limit(c)]


def _limit(c: Config) -> float:
    """What `swiglu_limit` says; 0: none."""
    return 0.0 if c["swiglu_limit"] is None else max(read_number(c, "swiglu_limit", -MOST, MOST), 0.0)


def _names(c: Config) -> Rules:
    layer, head = "model.layers.{i}", f"model.layers.{len(c['layer_types'])}"
    attn, delta = f"{layer}.self_attn", "layers.{i}.delta"
    norms = {
        "layers.{i}.ffn.norm": f"{layer}.post_attention_layernorm",
        "layers.{i}.{branch}.norm": f"{layer}.input_layernorm",
        "layers.{i}.ffn.post_norm": f"{layer}.post_feedforward_layernorm",
        "layers.{i}.{branch}.post_norm": f"{layer}.post_self_attn_layernorm",
        "layers.{i}.attn.{x}_a_norm": f"{attn}.{{x}}_a_layernorm",
    }
    inside: Rules = {
        **_norm_names(c, norms),
        "layers.{i}.attn.out_gate": (f"{attn}.gate_proj", f"{attn}.attn_gate"),
        **group_rules(c, attn),
        **delta_tensors(delta, attn),
        f"{delta}.gated_norm.weight": _scale(c, f"{attn}.norm.weight"),
        f"{delta}.o": f"{attn}.out_proj",
        **{ours: x for ours, x in latent_names(c, "model.").items() if not ours.startswith("mtp.")},
    }
    ends = {"norm": "model.norm", "mtp.norm": f"{head}.shared_head.norm"}
    ends |= {f"mtp.{x}_norm": f"{head}.{DEEPSEEK[f'{x}_norm']}" for x in ("embed", "hidden")}
    return {**_norm_names(c, ends), **inside, **mtp_names({"fc": f"{head}.{DEEPSEEK['fc']}"}, inside)}


def _norm_names(c: Config, places: Mapping[str, str]) -> Rules:
    """The tensors of norms: their weights, and the two linear layers of a gate, under either name."""
    found = dict[str, Source | tuple[Source, ...]]()
    for ours, theirs in places.items():
        weight = f"{theirs}.weight"
        found[f"{ours}.weight"] = plus_one(weight) if c["norm_type"] in CENTERED else weight
        for way, word in (("narrow", "up"), ("widen", "down")):
            found[f"{ours}.{way}"] = tuple(f"{theirs}.gate_{word}_{x}" for x in ("projection", "lowrank"))
    return found


def _scale(c: Config, source: str) -> Derived:
    """The norm of a delta rule's heads: its gate is multiplied by a number."""
    by = float(c["linear_sigmoid_gate_scale"])
    shift = float("zero_centered" in str(c["linear_gating_type"]).lower())

    def scaled(w: Stored, **_: str) -> Tensor:
        return by * (as_tensor(w).float() + shift)

    return Derived(scaled, (source,), (Back(lambda w: w / by - shift),))
