"""Mixtures with windows in some layers: K-EXAONE, Flint, Kolibri, Laguna."""

from __future__ import annotations

from dataclasses import replace

from plait.checkpoint.names import NameMap, Rules
from plait.families.common.registry import family
from plait.families.common.spec_builders import gqa, norm, require, sigmoid_router
from plait.families.config.normalize import FULL, SLIDING, Config
from plait.families.exaone import windows_of_exaone
from plait.families.gguf.arch import FILE, Metadata, check_router, gguf_arch, windows
from plait.families.moe_kin import FFN, MLP, SILU, L, build_shared_moe
from plait.spec.model import BranchSpec, ModelSpec, RouterSpec


@family(
    "ExaoneMoeForCausalLM",
    model_types=("exaone_moe",),
    defaults={
        "norm_eps": 1e-5,
        "hidden_act": "silu",
        "sliding_window": 4096,
        "sliding_window_pattern": 4,
        "first_k_dense_replace": 1,
        "routed_scaling_factor": 2.5,
        "num_shared_experts": 1,
        "num_experts_per_tok": 8,
    },
    honours=("sliding_window",),
)
def exaone_moe(c: Config) -> tuple[ModelSpec, NameMap]:
    """K-EXAONE: DeepSeek-V3's experts; where some layers have windows, those without have no positions."""
    each = norm(c)
    attns = [
        BranchSpec("attn", gqa(c, kind, qk_norm=each, **_positions(c, kind)), each)
        for kind in c["layer_types"]
    ]
    return build_shared_moe(c, "exaone_moe", attns, sigmoid_router(c))


@family(
    "FlintForCausalLM",
    model_types=("flint",),
    defaults={
        **SILU,
        "sliding_window": 513,
        "layer_cycle": [SLIDING, FULL, SLIDING, SLIDING],
        "first_layers": [FULL, FULL],
        "last_layer": FULL,
        "num_experts_per_tok": 6,
        "mlp_only_layers": [0, 1],
        "num_shared_experts": 1,
        "shared_intermediate_size": 1024,
    },
    honours=("sliding_window",),
)
def flint(c: Config) -> tuple[ModelSpec, NameMap]:
    """Flint: sinks in every layer, positions in those with windows; sigmoid scores without a correction."""
    each = norm(c)
    attns = [
        BranchSpec("attn", gqa(c, kind, qk_norm=each, sinks=True, **_positions(c, kind)), each)
        for kind in c["layer_types"]
    ]
    router = RouterSpec("sigmoid", c.get("norm_topk_prob", True))
    own: Rules = {
        "layers.{i}.attn.sinks": (f"{L}.self_attn.sinks", f"{L}.self_attn.softmax_offset"),
        f"{FFN}.shared.{{x}}": f"{MLP}.shared_expert.{{x}}_proj",
    }
    return build_shared_moe(c, "flint", attns, router, own, c["shared_intermediate_size"])


@family(
    "Kolibri1ForCausalLM",
    model_types=("kolibri1",),
    defaults={
        **SILU,
        "head_dim": 128,
        "sliding_window": 513,
        "sliding_window_pattern": 5,
        "num_experts_per_tok": 6,
        "num_shared_experts": 1,
        "shared_intermediate_size": 512,
    },
    honours=("sliding_window",),
)
def kolibri(c: Config) -> tuple[ModelSpec, NameMap]:
    """Kolibri 1: norms around the mixers; experts are chosen by logits, and weighed by their sigmoids."""
    each = norm(c)
    attns = [
        BranchSpec("attn", gqa(c, kind, qk_norm=each, **_positions(c, kind)), each, each)
        for kind in c["layer_types"]
    ]
    router = RouterSpec("sigmoid", c.get("norm_topk_prob", False), by_logits=True)
    own: Rules = {
        "layers.{i}.attn.post_norm": (f"{L}.post_attn_norm", f"{L}.post_self_attn_layernorm"),
        f"{FFN}.post_norm": (f"{L}.post_ffn_norm", f"{L}.post_mlp_layernorm"),
        f"{FFN}.router_bias": (f"{L}.moe.router.expert_bias", f"{MLP}.gate.e_score_correction_bias"),
    }
    spec, names = build_shared_moe(c, "kolibri1", attns, router, own, c["shared_intermediate_size"])
    layers = tuple((attn, replace(ffn, post_norm=each)) for attn, ffn in spec.layers)
    return replace(spec, layers=layers), names


@family(
    "LagunaForCausalLM",
    model_types=("laguna",),
    defaults={
        **SILU,
        "head_dim": 128,
        "sliding_window": 512,
        "layer_cycle": [FULL],
        "rope_parameters": {
            FULL: {"rope_type": "default", "rope_theta": 5e5, "partial_rotary_factor": 0.5},
            SLIDING: {"rope_type": "default", "rope_theta": 1e4},
        },
        "num_experts_per_tok": 8,
        "gating": True,
        "num_shared_experts": 1,
        "shared_intermediate_size": 512,
        "routed_scaling_factor": 1.0,
        "first_k_dense_replace": 1,
    },
    honours=("sliding_window", "partial_rotary_factor"),
)
def laguna(c: Config) -> tuple[ModelSpec, NameMap]:
    """Laguna: a softplus gate for each head; layers may have more heads than others."""
    require(c, "Laguna", gating=(True, "per-head"), moe_router_logit_softcapping=(0, 0.0))
    require(c, "Laguna", moe_apply_router_weight_on_input=(False,))
    each, count = norm(c), len(c["layer_types"])
    heads = c.get("num_attention_heads_per_layer") or [c["num_attention_heads"]] * count
    attns = [
        BranchSpec("attn", gqa(c, kind, num_heads=n, qk_norm=each, head_gate="softplus"), each)
        for kind, n in zip(c["layer_types"], heads, strict=True)
    ]
    router = RouterSpec("sigmoid", True, 0.0, float(c["routed_scaling_factor"]))
    shared = (f"{MLP}.shared_experts.{{x}}_proj", f"{MLP}.shared_expert.{{x}}_proj")
    places = (f"{MLP}.gate", f"{MLP}.experts", MLP)
    own: Rules = {
        "layers.{i}.attn.head_gate": f"{L}.self_attn.g_proj",
        f"{FFN}.shared.{{x}}": shared,
        f"{FFN}.router_bias": tuple(f"{at}.e_score_correction_bias" for at in places),
    }
    return build_shared_moe(c, "laguna", attns, router, own, c["shared_intermediate_size"])


def _positions(c: Config, kind: str) -> dict[str, None]:
    """Layers without a window turn nothing, where others have one."""
    return {"rope": None} if kind == FULL and c.get("sliding_window") else {}


@gguf_arch("exaone-moe", "ExaoneMoeForCausalLM")
def _exaone_in_gguf(m: Metadata) -> None:
    windows_of_exaone(m)
    check_router(m, "sigmoid", renormalizes=None)


@gguf_arch(
    "laguna",
    "LagunaForCausalLM",
    names=lambda c: {"layers.{i}.attn.head_gate": "blk.{i}.attn_gate"},
    by_layer={"attention.head_count": "num_attention_heads_per_layer"},
)
def _laguna_in_gguf(m: Metadata) -> None:
    """One layer in four is whole, the first of them; without a window all are. Windows turn otherwise."""
    check_router(m, "sigmoid", renormalizes=True)
    count, dim = m.config["num_hidden_layers"], m.config["head_dim"]
    has_windows, told = bool(m.config.get("sliding_window")), m.values.get("attention.sliding_window_pattern")
    if isinstance(told, list):
        windows(m, 4)
    else:
        kinds = [SLIDING if i % 4 and has_windows else FULL for i in range(count)]
        m.put("layer_types", kinds, "default (the laguna format)")
    turned = m.values.get("rope.dimension_count_swa", dim) / dim
    full = {
        "partial_rotary_factor": m.config.get("partial_rotary_factor", 1.0),
        **m.config.get("rope_scaling", {}),
    }
    base = m.values.get("rope.freq_base_swa", m.config["rope_theta"])
    near = {"rope_theta": base, "partial_rotary_factor": turned}
    m.put("rope_parameters", {FULL: full, SLIDING: near}, f"{FILE} {m.prefix}rope")
