"""ZAYA1: attention over convolved queries and keys, experts by a router with a state, scaled residuals."""

from __future__ import annotations

import torch
from torch import Tensor

from plait.checkpoint.names import Back, Derived, NameMap, Rules, Source
from plait.errors import UnsupportedModel
from plait.families.common.detection import Detection, Marker
from plait.families.common.recipes import Stored, conv, ends, expert_tensors, repeat_each, unused_patterns
from plait.families.common.registry import family
from plait.families.common.spec_builders import mlp, model, norm, rope
from plait.families.common.tensors import Tensors
from plait.families.config.normalize import Config
from plait.quant.weight import as_tensor
from plait.spec.attention import CcaSpec
from plait.spec.branches import ScaledSpec
from plait.spec.model import BranchSpec, ModelSpec, NormSpec, RouterSpec
from plait.spec.moe import StateMoeSpec

L, ATTN, FFN = "model.layers.{i}", "layers.{i}.attn", "layers.{i}.ffn"
QKV = "self_attn.qkv_proj"
UNIT = NormSpec(1e-14)  # lengths of queries and keys, which no number is added to
ROPES = {
    kind: {"rope_type": "default", "rope_theta": theta, "partial_rotary_factor": 0.5}
    for kind, theta in (("hybrid", 5e6), ("hybrid_sliding", 1e4))
}


def _infer_sizes(t: Tensors) -> None:
    """The convolution within heads shows how wide they are, and a number for each key head how many."""
    temperatures, taps = t.need("self_attn.qk_norm.temp"), t.need(f"{QKV}.conv_qk_grouped.weight")
    queries, before = t.need(f"{QKV}.q_proj.weight"), t.need(f"{QKV}.conv_qk_depthwise.weight")
    t.size("head_dim", dim := taps[1][1], taps)
    t.size("num_key_value_heads", temperatures[1][0], temperatures)
    t.size("num_attention_heads", queries[1][0] // max(dim, 1), queries)
    t.size("cca_time0", before[1][-1], before)
    t.size("cca_time1", taps[1][-1], taps)
    stacked = t.need("mlp.experts.down_proj")
    t.size("num_experts", stacked[1][0], stacked)
    t.size("moe_intermediate_size", stacked[1][-1], stacked)
    router = t.need("mlp.gate.down_proj.weight")
    t.size("router_hidden_size", router[1][0], router)


@family(
    "ZayaForCausalLM",
    model_types=("zaya",),
    defaults={"norm_eps": 1e-5, "hidden_act": "silu", "head_dim": 128, "tie_word_embeddings": True}
    | {"num_experts_per_tok": 1, "router_hidden_size": 256, "cca_time0": 2, "cca_time1": 2}
    | {"rope_parameters": ROPES},
    honours=("sliding_window", "partial_rotary_factor"),
    detection=Detection(
        markers=(Marker(("self_attn.qkv_proj.conv_qk_depthwise.weight",), order=16),),
        words={"self_attn.qkv_proj.conv_qk_depthwise.weight": "hybrid"},
        sizes=_infer_sizes,
    ),
)
def zaya(c: Config) -> tuple[ModelSpec, NameMap]:
    """ZAYA1 8B. One expert of each layer is none: its tokens keep what they are."""
    heads, groups, each = c["num_attention_heads"], c["num_key_value_heads"], norm(c)
    if groups < 1 or heads % groups or groups * c["head_dim"] % 2 or c["num_experts_per_tok"] != 1:
        raise UnsupportedModel(
            f"ZAYA has as many query heads for each key head, an even number of value channels, one expert "
            f"per token; got {heads} heads, {groups} key heads × {c['head_dim']}, "
            f"{c['num_experts_per_tok']} experts"
        )
    layers: list[tuple[BranchSpec, ...]] = []
    for i, kind in enumerate(c["layer_types"]):
        attn, ffn = _attention(c, kind), _experts(c, is_first=i == 0)
        layers.append(
            (
                BranchSpec("attn", ScaledSpec({"inner": attn}, norm=each), None),
                BranchSpec("ffn", ScaledSpec({"inner": ffn}, norm=each), None),
            )
        )
    layers[0] = (BranchSpec("start", ScaledSpec({}), None), *layers[0])
    names = NameMap(_names(c), ends(), ignored=unused_patterns(c))
    return model(c, "zaya", layers), names


def _attention(c: Config, kind: str) -> CcaSpec:
    dim, taps = c["head_dim"], (c["cca_time0"], c["cca_time1"])
    if min(taps) < 2:
        raise UnsupportedModel(
            f"cca_time0 and cca_time1 are {taps}; convolutions of two tokens or more are known"
        )
    return CcaSpec(
        num_heads=c["num_attention_heads"],
        num_kv_heads=c["num_key_value_heads"],
        head_dim=dim,
        scale=dim**-0.5,
        rope=rope(c, dim, kind),
        qk_norm=UNIT,
        qk_norm_over="each",
        window=int(c["sliding_window"]) if kind == "hybrid_sliding" else None,
        taps=taps,
    )


def _experts(c: Config, *, is_first: bool) -> StateMoeSpec:
    expert = mlp(c, c["moe_intermediate_size"])
    sizes = {"router_size": c["router_hidden_size"], "norm": norm(c), "first": is_first}
    return StateMoeSpec(c["num_experts"], 1, expert, RouterSpec(renormalize=False), identities=1, **sizes)


def _names(c: Config) -> Rules:
    qkv, gate = f"{L}.self_attn.qkv_proj", f"{L}.mlp.gate"
    heads, groups, dim = c["num_attention_heads"], c["num_key_value_heads"], c["head_dim"]
    experts = expert_tensors(f"{FFN}.inner", f"{L}.mlp", c["num_experts"])
    names: dict[str, Source | tuple[Source, ...]] = {
        **_affine("layers.0.start.stays", "model.input_hidden_states"),
        f"{ATTN}.norm": f"{L}.input_layernorm",
        f"{FFN}.norm": f"{L}.post_attention_layernorm",
        **{f"{ATTN}.inner.{x}": f"{qkv}.{x}_proj" for x in "qk"},
        f"{ATTN}.inner.v": f"{qkv}.v_proj_current",
        f"{ATTN}.inner.v_last": f"{qkv}.v_proj_delayed",
        f"{ATTN}.inner.o": f"{L}.self_attn.o_proj",
        f"{ATTN}.inner.conv.weight": conv(f"{qkv}.conv_qk_depthwise.weight"),
        **_split_taps(f"{ATTN}.inner.heads", qkv, heads + groups),
        f"{ATTN}.inner.q_norm.weight": _ones(heads * dim, f"{L}.self_attn.qk_norm.temp"),
        f"{ATTN}.inner.k_norm.weight": repeat_each(dim, f"{L}.self_attn.qk_norm.temp"),
        f"{FFN}.inner.router_bias": f"{gate}.balancing_biases",
        f"{FFN}.inner.router.enter": f"{gate}.down_proj",
        f"{FFN}.inner.router.scale": f"{gate}.router_states_scale",
        f"{FFN}.inner.router.norm": f"{gate}.router_mlp.norm",
        f"{FFN}.inner.router.first": f"{gate}.router_mlp.fc1",
        f"{FFN}.inner.router.second": f"{gate}.router_mlp.fc2",
        f"{FFN}.inner.router.last": f"{gate}.router_mlp.out_proj",
        **{ours: ways[::-1] for ours, ways in experts.items()},  # stacked ones are usual
    }
    for ours, theirs in ((ATTN, f"{L}.post_attention_residual_scale"), (FFN, f"{L}.post_mlp_residual_scale")):
        for x, kind in (("stays", "residual"), ("added", "hidden_states")):
            names |= _affine(f"{ours}.{x}", f"{theirs}.{kind}")
    return names


def _affine(ours: str, theirs: str) -> Rules:
    """A scale, and what is added after scaling, where theirs is added before."""

    def scaled(scale: Stored, bias: Stored, **_: str) -> Tensor:
        return as_tensor(scale).float() * as_tensor(bias).float()

    def unscaled(shift: Tensor, scale: Tensor) -> Tensor:
        return torch.where(scale == 0, torch.zeros_like(shift), shift / scale)

    sources, parts = (f"{theirs}_scale", f"{theirs}_bias"), [Back(at=n, of=2, join=unscaled) for n in (0, 1)]
    return {
        f"{ours}.shift": Derived(scaled, sources, (None, parts[0])),
        f"{ours}.scale": Derived(lambda scale, bias, **_: as_tensor(scale), sources, (Back(), parts[1])),
    }


def _split_taps(ours: str, qkv: str, heads: int) -> Rules:
    """The convolution within heads, [heads · d, d, taps]: a matrix of each head, which reads all taps."""
    theirs, before = f"{qkv}.conv_qk_grouped", f"{qkv}.conv_qk_depthwise.bias"

    def apart(w: Stored) -> Tensor:
        by_head: Tensor = as_tensor(w).unflatten(0, (heads, -1))
        return by_head.transpose(2, 3)  # [heads, d out, taps, d in]

    def with_bias(bias: Stored, w: Stored, depthwise: Stored, **_: str) -> Tensor:
        added = as_tensor(depthwise).float().view(heads, 1, 1, -1)
        return as_tensor(bias).float() + (apart(w).float() * added).sum((2, 3)).flatten()

    def together(w: Tensor) -> Tensor:
        by_head: Tensor = w.unflatten(2, (-1, w.shape[1]))
        return by_head.transpose(2, 3).flatten(0, 1)

    added = (f"{theirs}.bias", f"{theirs}.weight", before)
    return {  # written again, all of the bias is behind the second convolution
        f"{ours}.weight": Derived(
            lambda w, **_: apart(w).flatten(2), (f"{theirs}.weight",), (Back(together),)
        ),
        f"{ours}.bias": Derived(with_bias, added, (Back(), None, Back(torch.zeros_like))),
    }


def _ones(count: int, source: str) -> Derived:
    """So many, where the file has a number for other channels."""
    return Derived(lambda w, **_: torch.ones(count), (source,), (None,))
