"""K2 Horizon, and xLLM before it: norms in groups, gates of attention, mixtures of values and of experts."""

from __future__ import annotations

from dataclasses import fields

import torch

from plait.checkpoint.names import NameMap, Rules, Source
from plait.errors import UnsupportedModel
from plait.families.common.recipes import (
    expert,
    expert_tensors,
    plus_one,
    reorder_rows,
    transformer,
    unused_patterns,
)
from plait.families.common.registry import family
from plait.families.common.row_orders import order_of_heads
from plait.families.common.spec_builders import gqa, mlp, model, norm, require, require_silu, rope, shared_moe
from plait.families.config.normalize import FULL, Config
from plait.spec.attention import RoutedValuesSpec
from plait.spec.model import AttentionSpec, BranchSpec, ModelSpec, MoeSpec, NormSpec, RouterSpec

ATTN, FFN, L = "layers.{i}.attn", "layers.{i}.ffn", "model.layers.{i}"
SCORES, GATES = ("sigmoid", "softmax"), (None, "silu", "softplus")


@family(
    *("K2HorizonForCausalLM", "XllmForCausalLM"),
    model_types=("k2_horizon", "xllm"),
    defaults={"norm_eps": 1e-6, "hidden_act": "silu", "rope_theta": 1e4, "norm_topk_prob": True}
    | {"router_score_func": "sigmoid", "routed_scaling_factor": 1.0, "layernorm_num_groups": 1},
)
def k2_horizon(c: Config) -> tuple[ModelSpec, NameMap]:
    """K2 Horizon. Its sparse layers mix values, too, where the config counts experts of these."""
    require_silu(c, "K2 Horizon")
    require(c, "K2 Horizon", router_score_func=SCORES)
    kinds = c["mlp_layer_types"] if c.get("num_experts") else ["dense"] * len(c["layer_types"])
    if set(c["layer_types"]) - {FULL}:
        raise UnsupportedModel("K2 Horizon with windows of keys is not known; all of its layers see all keys")
    groups, turned = c["layernorm_num_groups"] or 1, c.get("rope_head_dim") or c["head_dim"]
    if groups < 1 or c["hidden_size"] % groups:
        raise UnsupportedModel(
            f"layernorm_num_groups is {groups}: not a divisor of hidden_size {c['hidden_size']}"
        )
    if turned % 2 or c["head_dim"] % 2 or not 0 < turned <= c["head_dim"]:
        raise UnsupportedModel(
            f"rope_head_dim is {turned} of head_dim {c['head_dim']}: known are even numbers, up to a head's"
        )
    each = NormSpec(c["norm_eps"], groups=groups)
    layers = [
        (
            BranchSpec("attn", _attention(c, turned, kind == "sparse"), each),
            BranchSpec("ffn", _experts(c) if kind == "sparse" else mlp(c), each),
        )
        for kind in kinds
    ]
    names = NameMap(_names(c, turned), transformer(), ignored=unused_patterns(c))
    return model(c, "k2_horizon", layers, norm=each), names


def _count_values(c: Config) -> int | None:
    """Experts of values; xLLM calls them otherwise. Raises UnsupportedModel if both words differ."""
    found = [c[key] for key in ("mova_num_experts", "num_values") if c.get(key)]
    if len({*map(str, found)}) > 1:
        raise UnsupportedModel(f"mova_num_experts is {found[0]!r:.40}, and num_values {found[1]!r:.40}")
    return found[0] if found else None


def _attention(c: Config, turned: int, is_sparse: bool) -> AttentionSpec:
    gate, count = c.get("attention_gate_func"), _count_values(c) if is_sparse else None
    if gate is not None and c.get("apply_attn_gate") is False:
        raise UnsupportedModel(f"attention_gate_func is {gate!r:.40}, and apply_attn_gate is false")
    if gate is None and c.get("apply_attn_gate"):
        gate = c.get("attn_gate_func") or "silu"
    if gate not in GATES:
        raise UnsupportedModel(f"attention_gate_func {gate!r:.40} is not known; known: silu, softplus")
    qk = norm(c) if c.get("query_key_norm") else None
    usual = gqa(c, rope=rope(c, turned), qk_norm=qk, qk_norm_over="each")
    if gate is None and count is None:
        return usual
    taken = c.get("mova_num_experts_per_tok") or c.get("num_values_per_tok") or 0
    if count is not None and not 0 < taken <= count:
        raise UnsupportedModel(f"mova_num_experts_per_tok is {taken}, of {count} experts")
    if count is not None:
        require(c, "K2 Horizon with mixtures of values", norm_topk_prob=(True,))
    router = RouterSpec(c["router_score_func"], taken > 1, scale=float(c["routed_scaling_factor"]))
    told = {field.name: getattr(usual, field.name) for field in fields(AttentionSpec)}
    return RoutedValuesSpec(**told, num_experts=count, top_k=taken or 1, router=router, activation=gate)


def _experts(c: Config) -> MoeSpec:
    scale = float(c["routed_scaling_factor"])
    return shared_moe(c, RouterSpec(c["router_score_func"], c["norm_topk_prob"], scale=scale))


def _names(c: Config, turned: int) -> Rules:
    theirs, count, values = f"{L}.self_attn", c.get("num_experts") or 1, _count_values(c)
    names: dict[str, Source | tuple[Source, ...]] = {
        f"{ATTN}.router.weight": f"{theirs}.v_router.weight",
        f"{ATTN}.router_bias": f"{theirs}.v_router.bias",
        f"{ATTN}.experts.{{e}}.v.weight": (
            f"{theirs}.v_experts.{{e}}.weight",
            expert(values or 1, f"{theirs}.v_experts.weight"),
        ),
        f"{FFN}.router_bias": f"{L}.mlp.gate.bias",
        f"{FFN}.router.weight": f"{L}.mlp.gate.weight",
        f"{FFN}.shared.{{x}}": f"{L}.mlp.shared_experts.{{x}}_proj",
        **expert_tensors(FFN, f"{L}.mlp", count),
        **_order_heads(c, turned, theirs),
    }
    if c.get("model_type") == "xllm" and values:
        around = {"norm": "model.norm", f"{ATTN}.norm": f"{L}.input_layernorm"}
        around[f"{FFN}.norm"] = f"{L}.post_attention_layernorm"
        names |= {f"{ours}.weight": plus_one(f"{theirs}.weight") for ours, theirs in around.items()}
    return names


def _order_heads(c: Config, turned: int, theirs: str) -> Rules:
    """The first of both halves of a head turn. Ours are pairs within the first `turned` numbers."""
    half, few = c["head_dim"] // 2, turned // 2
    if few == half:
        return {}
    places = ((0, few), (half, half + few), (few, half), (half + few, 2 * half))
    order = torch.cat([torch.arange(start, stop) for start, stop in places])
    found = dict[str, Source]()
    for x, heads in (("q", c["num_attention_heads"]), ("k", c["num_key_value_heads"])):
        rows = order_of_heads(order, heads)
        for end in ("proj.weight", "proj.bias", "norm.weight"):
            ours = f"{ATTN}.{x}_{end}" if end.startswith("norm") else f"{ATTN}.{x}{end.removeprefix('proj')}"
            found[ours] = reorder_rows(rows, f"{theirs}.{x}_{end}")
    return found
