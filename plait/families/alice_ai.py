"""Alice AI: Kimi Delta Attention, gated attention every few layers, experts, attention residuals."""

from __future__ import annotations

from collections.abc import Mapping

from plait.checkpoint.names import NameMap, Rules, Source
from plait.errors import UnsupportedModel
from plait.families.common.depth import LAST, over_depth, score_weights
from plait.families.common.hyper import move_inside
from plait.families.common.recipes import TEXT_PREFIXES, at, conv, plus_one, text_tensors, unused_patterns
from plait.families.common.registry import family
from plait.families.common.spec_builders import gqa, mlp, model, norm, require
from plait.families.config.normalize import FULL, LINEAR, Config
from plait.families.config.values import is_set, require_given
from plait.families.kimi import FACTORS, build_kda, negative_exp_flat
from plait.families.linear_attention import check_silu, join_conv
from plait.families.qwen3_next import name_tensors
from plait.spec.model import BranchSpec, ModelSpec, MoeSpec, RouterSpec

KDA, ATTN, FFN = "layers.{i}.delta", "layers.{i}.attn", "layers.{i}.ffn"
BLOCK = "block_attn_res_block_size"
# Of null and absent ones no code says what is meant.
SAID: Mapping[str, tuple[object, ...]] = {
    "kda_allow_negative_eigenvalues": (False,),
    "router_score_function": ("sigmoid",),
    "router_bias_correction": (True,),
}
NORM = "norm_weight"  # how its name ends, next to what scores blocks of layers


@family(
    "AliceAIForCausalLM",
    model_types=("alice_ai",),
    defaults={
        "norm_eps": 1e-6,
        "hidden_act": "silu",
        "partial_rotary_factor": 1.0,
        "linear_conv_kernel_dim": 4,
        "attn_output_gate": True,
        "norm_topk_prob": True,
        **dict.fromkeys(SAID),
    },
    honours=("attn_output_gate", BLOCK),
)
def alice_ai(c: Config) -> tuple[ModelSpec, NameMap]:
    """Alice AI. What drafts a second token is in its files, in a layout that no code has published."""
    _check(c)
    each = norm(c)
    heads, dim = c["linear_num_key_heads"], c["linear_key_head_dim"]
    c |= {"linear_num_heads": heads, "linear_head_dim": dim}
    mixers = {LINEAR: BranchSpec("delta", build_kda(c), each)}
    ffn = BranchSpec("ffn", _moe(c), each)
    layers = [
        (mixers.get(kind) or BranchSpec("attn", gqa(c, kind, qk_norm=each, gate=True), each), ffn)
        for kind in c["layer_types"]
    ]
    names = text_tensors(lambda prefix: _names(c, prefix))
    inside = move_inside(names, ("delta", "attn", "ffn"))
    rules = {**at(TEXT_PREFIXES, _outer_names), **inside}
    spec = over_depth(model(c, "alice_ai", layers), c[BLOCK])
    return spec, NameMap(rules, ignored=unused_patterns(c, r"^mtp\."))


def _check(c: Config) -> None:
    check_silu(c)
    name = "Alice AI"
    require(c, name, attn_output_gate=(True,), routed_scaling_factor=(1, 1.0), n_group=(1,), topk_group=(1,))
    require(c, name, scoring_func=("sigmoid",))
    require_given(c, name, **SAID)
    for word in ("num_{}_heads", "{}_head_dim"):
        key, value = (c[f"linear_{word.format(x)}"] for x in ("key", "value"))
        if key != value:
            raise UnsupportedModel(
                f"Kimi Delta Attention has keys and values alike, and the config says {key} and {value} as "
                f"linear_{word.format('key')} and linear_{word.format('value')}"
            )
    if wrong := set(c["layer_types"]) - {LINEAR, FULL}:
        raise UnsupportedModel(f"layer_types of {name} has {min(wrong)!r}; known: {LINEAR}, {FULL}")
    if set(c.get("mlp_layer_types", ())) != {"sparse"}:
        raise UnsupportedModel(f"layers without experts are not implemented for {name}")


def _moe(c: Config) -> MoeSpec:
    router = RouterSpec("sigmoid", is_set(c, "norm_topk_prob"))
    size = c.get("shared_intermediate_size")
    expert = mlp(c, c["moe_intermediate_size"])
    shared = mlp(c, size) if size else None
    return MoeSpec(
        c["num_experts"], c["num_experts_per_tok"], expert, router, shared=shared, shared_gate=bool(size)
    )


def _outer_names(prefix: str) -> Rules:
    """What stays around a mixer: norms, and what scores blocks of layers."""
    layer = f"{prefix}layers.{{i}}"
    return {
        f"{FFN}.norm.weight": plus_one(f"{layer}.post_attention_layernorm.weight"),
        "layers.{i}.{branch}.norm.weight": plus_one(f"{layer}.input_layernorm.weight"),
        **dict.fromkeys((f"{KDA}.source", f"{ATTN}.source"), score_weights(f"{layer}.attn_res", NORM)),
        f"{FFN}.source": score_weights(f"{layer}.mlp_res", NORM),
        f"layers.{{i}}.{LAST}.source": score_weights(f"{prefix}attnres_final.res", NORM),
    }


def _names(c: Config, prefix: str) -> Rules:
    """What mixers have, and the ends: of Qwen3-Next but for Kimi Delta Attention."""
    theirs, width = f"{prefix}layers.{{i}}.linear_attn", c["linear_num_heads"] * c["linear_head_dim"]
    kda: dict[str, Source | tuple[Source, ...]] = {
        f"{KDA}.conv.weight": (
            join_conv((width,) * 3, [f"{theirs}.{x}_conv1d.weight" for x in "qkv"]),
            conv(f"{theirs}.conv1d.weight"),
        ),
        f"{KDA}.A": (negative_exp_flat(f"{theirs}.a_log_bias"), negative_exp_flat(f"{theirs}.A_log")),
        f"{KDA}.dt_bias": f"{theirs}.dt_bias",
        f"{KDA}.beta": f"{theirs}.b_proj",
        **{f"{KDA}.{ours}": f"{theirs}.{factor}_proj" for ours, factor in FACTORS.items()},
        f"{KDA}.gated_norm": f"{theirs}.o_norm",
        f"{KDA}.{{x}}": f"{theirs}.{{x}}_proj",
    }
    others = name_tensors(c, prefix, lambda c, theirs: {})
    bias = {f"{FFN}.router_bias": f"{prefix}layers.{{i}}.mlp.gate.e_score_correction_bias"}
    return {**kda, **bias, **{ours: source for ours, source in others.items() if not ours.startswith(KDA)}}
