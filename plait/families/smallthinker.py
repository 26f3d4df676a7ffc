"""SmallThinker: experts that are chosen before attention, and windows in layers with positions."""

from __future__ import annotations

from plait.checkpoint.names import NameMap, Rules
from plait.errors import UnsupportedModel
from plait.families.common.recipes import attention_tensors, ends, unused_patterns
from plait.families.common.registry import family
from plait.families.common.spec_builders import gqa, mlp, model, norm, rope
from plait.families.config.normalize import Config
from plait.families.gguf.arch import FILE, Metadata, gguf_arch
from plait.families.gguf.names import attention_names
from plait.spec.model import BranchSpec, ModelSpec, RouterSpec
from plait.spec.moe import EarlyMoeSpec, EarlyRouterSpec

L, ATTN, FFN = "model.layers.{i}", "layers.{i}.attn", "layers.{i}.ffn"
INNER = f"{ATTN}.inner"


@family(
    "SmallThinkerForCausalLM",
    model_types=("smallthinker",),
    defaults={
        "norm_eps": 1e-6,
        "hidden_act": "relu",
        "head_dim": 128,
        "rope_theta": 1e6,
        "moe_primary_router_apply_softmax": False,
    },
    honours=("sliding_window",),
)
def smallthinker(c: Config) -> tuple[ModelSpec, NameMap]:
    """SmallThinker 4B-A0.6B and 21B-A3B: the router reads what attention reads, before its norm."""
    each, count = norm(c), c["num_hidden_layers"]
    turns, near = (_flags(c, f"{key}_layout", usual) for key, usual in (("rope", 1), ("sliding_window", 0)))
    experts, chosen = c["moe_num_primary_experts"], c["moe_num_active_primary_experts"]
    router = RouterSpec("softmax" if c["moe_primary_router_apply_softmax"] else "sigmoid")
    moe = EarlyMoeSpec(experts, chosen, mlp(c, c["moe_ffn_hidden_size"]), router)
    layers = []
    for i in range(count):
        window = int(c["sliding_window_size"]) if near[i] else None
        mixer = gqa(c, rope=rope(c, c["head_dim"]) if turns[i] else None, window=window)
        attn = EarlyRouterSpec({"inner": mixer}, num_experts=experts, norm=each)
        layers.append((BranchSpec("attn", attn, None), BranchSpec("ffn", moe, each)))
    theirs = f"{L}.block_sparse_moe"
    names: Rules = {
        **ends(),
        f"{ATTN}.norm": f"{L}.input_layernorm",
        f"{FFN}.norm": f"{L}.post_attention_layernorm",
        f"{ATTN}.router": f"{theirs}.primary_router",
        **attention_tensors(INNER, f"{L}.self_attn"),
        f"{FFN}.experts.{{e}}.{{x}}": f"{theirs}.experts.{{e}}.{{x}}",
    }
    return model(c, "smallthinker", layers), NameMap(names, ignored=unused_patterns(c))


def _flags(c: Config, key: str, usual: int) -> list[int]:
    """One flag for each layer. Raises UnsupportedModel."""
    count = c["num_hidden_layers"]
    flags = c.get(key) or [usual] * count
    if not isinstance(flags, list) or len(flags) != count:
        raise UnsupportedModel(f"{key} is {flags!r:.80}; expected is a list of {count} flags")
    return flags


def _gguf_names(c: Config) -> Rules:
    return {
        f"{ATTN}.router": "blk.{i}.ffn_gate_inp",
        f"{ATTN}.norm": "blk.{i}.attn_norm",
        **attention_names(INNER, "blk.{i}", c),
    }


@gguf_arch("smallthinker", "SmallThinkerForCausalLM", names=_gguf_names, is_written=False)
def _smallthinker_in_gguf(m: Metadata) -> None:
    """With windows, every fourth layer from the first on has none; it has no positions, either."""
    count, found = m.config["num_hidden_layers"], m.config.pop("sliding_window", None)
    period = int(m.values.get("attention.sliding_window_pattern", 4)) if found else 0
    why = f"{FILE} {m.prefix}attention.sliding_window"
    m.put("sliding_window_size", found, why)
    m.put("sliding_window_layout", [int(bool(period) and i % period != 0) for i in range(count)], why)
    m.put("rope_layout", [int(not period or i % 4 != 0) for i in range(count)], why)
    for ours, theirs in (
        ("moe_num_primary_experts", "num_experts"),
        ("moe_num_active_primary_experts", "num_experts_per_tok"),
        ("moe_ffn_hidden_size", "moe_intermediate_size"),
    ):
        m.put(ours, m.config[theirs], m.why.get(theirs, FILE))
    score = m.values.get("expert_gating_func", 1)
    if score not in (1, 2):
        raise UnsupportedModel(
            f"{m.prefix}expert_gating_func is {score!r:.40}; SmallThinker's is 1 (softmax) or 2 (sigmoid)"
        )
    m.put("moe_primary_router_apply_softmax", score == 1, f"{FILE} {m.prefix}expert_gating_func")
