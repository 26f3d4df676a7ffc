"""What the shapes of an oxidizr checkpoint say about its Mamba layers.

A kind is measured on the first layer that has it; what a tensor says and what the config says must agree.
"""

from __future__ import annotations

from plait.errors import ConfigError, UnsupportedModel
from plait.families.oxidizr.view import BranchPart, Tensors, View, linear
from plait.spec.model import NormSpec
from plait.spec.recurrent import Mamba1Spec, Mamba2Spec, Mamba3Spec

EPS = 1e-6  # of every norm in and before a Mamba2 and Mamba3
STATE_LIMIT = 30.0  # of Mamba1, in which A is positive: the clamp is part of the model


def _conv(view: View, channels: int, *, bias: bool) -> tuple[int, Tensors]:
    """(kernel width, tensors)"""
    stored = view.shape("conv.weight", 2, 3)
    view.measure("mamba2_conv_kernel", stored[-1], "conv.weight")
    shape = (channels, 1, stored[-1]) if len(stored) == 3 else (channels, stored[-1])
    return stored[-1], {"conv.weight": (shape, True), "conv.bias": ((channels,), bias)}


def _heads(view: View) -> tuple[int, int, int]:
    """(heads, their width, both multiplied) of a Mamba2 or Mamba3."""
    heads = view.measure("mamba2_num_heads", view.shape("A_log", 1)[0], "A_log")
    inner = view.shape("out.weight", 2)[1]
    dim = view.divide(inner, heads, "out.weight", "mamba2_head_dim")
    view.measure("mamba2_head_dim", dim, "out.weight")
    expand = inner / view.hidden
    if expand.is_integer() or view.facts.find("mamba2_expand"):
        view.measure("mamba2_expand", int(expand) if expand.is_integer() else expand, "out.weight")
    return heads, dim, inner


def _groups(view: View, both: int, heads: int, leaf: str) -> tuple[int, int]:
    """(groups, state size) out of their product; a config that knows neither means one group."""
    size = view.facts.find("mamba2_state_size")
    if size and (both % size or heads % (both // size)):
        where = view.facts.provenance["mamba2_state_size"]
        raise UnsupportedModel(
            f"{where} says mamba2_state_size = {size}, but {view.theirs(leaf)} holds groups × states "
            f"= {both} with {heads} heads; correct {where}, or run with --set mamba2_state_size={both}"
        )
    if size:
        groups = both // size
    else:
        groups = view.facts.default("mamba2_n_groups", 1)
        size = view.divide(both, groups, leaf, "mamba2_state_size")
    view.measure("mamba2_n_groups", groups, leaf)
    view.measure("mamba2_state_size", size, leaf)
    return groups, size


def _chunk_size(view: View) -> int:
    if view.ssm_mode == "exact" and not view.facts.find("mamba2_chunk_size"):
        raise ConfigError(
            "ssm_mode exact needs mamba2_chunk_size: it changes what this mode computes, the config does not "
            "give it and no tensor shows it; run with --set mamba2_chunk_size=… (the trainer's examples have "
            "64 and 32)"
        )
    size: int = view.facts.default("mamba2_chunk_size", 256)
    return size


def _before(view: View, *, trainer: bool) -> tuple[NormSpec, Tensors]:
    """The norm in front of a Mamba2 or Mamba3: a layer norm if it has a bias, as the trainer writes."""
    tensors: Tensors = {"norm.weight": ((view.hidden,), True), "norm.bias": ((view.hidden,), trainer)}
    return (NormSpec(EPS, "layer") if "norm.bias" in view else view.rms()), tensors


def mamba2(view: View) -> BranchPart:
    heads, dim, inner = _heads(view)
    channels = view.shape("conv.weight", 2, 3)[0]
    both = view.divide(channels - inner, 2, "conv.weight", "groups × states")
    groups, size = _groups(view, both, heads, "conv.weight")
    trainer = "mamba2." in view.theirs("A_log")
    kernel, conv = _conv(view, channels, bias=trainer)
    norm, before = _before(view, trainer=trainer)
    low, high = view.facts.default("time_step_limit", [1e-3, 0.1], "the trainer's")
    eps = view.facts.default("mamba2_norm_eps", EPS, "the trainer's")
    mixer = Mamba2Spec(
        heads, dim, size, groups, kernel,
        chunk_size=_chunk_size(view),
        dt_limit=(float(low), float(high)),
        gated_norm=NormSpec(eps) if trainer or "gated_norm.weight" in view else None,
        mode=view.ssm_mode,
    )  # fmt: skip
    tensors: Tensors = {
        **before,
        **linear("in", 2 * inner + 2 * both + heads, view.hidden, bias=trainer),
        **linear("out", view.hidden, inner, bias=trainer),
        **conv,
        "A_log": ((heads,), True),
        "D": ((heads,), trainer or view.ssm_mode == "exact"),
        "dt_bias": ((heads,), trainer),
        "gated_norm.weight": ((inner,), mixer.gated_norm is not None),
    }
    return BranchPart(mixer, norm, tensors)


def mamba3(view: View) -> BranchPart:
    facts = view.facts
    heads, dim, inner = _heads(view)
    size = view.measure("mamba2_state_size", view.shape("bc_norm.weight", 1)[0], "bc_norm.weight")
    rows = view.shape("in.weight", 2)[0]
    both = view.divide(rows - 2 * inner - heads, 2, "in.weight", "groups × states")
    groups = view.divide(both, size, "in.weight", "mamba2_n_groups")
    view.measure("mamba2_n_groups", groups, "in.weight")
    turned = view.measure("mamba3_complex_rope", "theta.weight" in view, "theta.weight")
    convolved = view.measure("mamba3_use_conv", "conv.weight" in view, "conv.weight")
    kernel, conv = _conv(view, inner + 2 * both, bias=True) if convolved else (None, Tensors())
    rank = 0
    if "mimo_up.weight" in view:
        rank = view.divide(view.shape("mimo_up.weight", 2)[0], dim, "mimo_up.weight", "mamba3_mimo_rank")
    view.measure("mamba3_mimo_rank", rank, "mimo_up.weight")
    norm, before = _before(view, trainer=True)
    low, high = facts.default("time_step_limit", [1e-3, 0.1], "the trainer's")
    gated = NormSpec(facts.default("mamba2_norm_eps", EPS, "the trainer's"))
    mixer = Mamba3Spec(
        heads, dim, size, groups, kernel, turned, rank, _chunk_size(view), (float(low), float(high)),
        gated_norm=gated, mode=view.ssm_mode,
    )  # fmt: skip
    tensors: Tensors = {
        **before,
        **linear("in", rows, view.hidden, bias=True),
        **linear("out", view.hidden, inner, bias=True),
        **linear("lambda", heads, view.hidden, bias=True),
        **(linear("theta", heads * size // 2, view.hidden, bias=True) if turned else {}),
        **conv,
        **dict.fromkeys(("A_log", "D", "dt_bias"), ((heads,), True)),
        **dict.fromkeys(("b_bias", "c_bias"), ((heads, size), True)),
        "bc_norm.weight": ((size,), True),
        "gated_norm.weight": ((inner,), True),
        **(linear("mimo_up", dim * rank, dim, bias=True) if rank else {}),
        **(linear("mimo_down", dim, dim * rank, bias=True) if rank else {}),
    }
    return BranchPart(mixer, norm, tensors)


def mamba1(view: View) -> BranchPart:
    inner, size = view.shape("A_log", 2)
    stored = view.shape("conv.weight", 2, 3)
    rank = view.divide(view.shape("x.weight", 2)[0] - 2 * size, 1, "x.weight", "the width of dt")
    tensors: Tensors = {
        "norm.weight": ((view.hidden,), True),
        **linear("in", 2 * inner, view.hidden),
        **linear("x", rank + 2 * size, inner),
        **linear("dt", inner, rank, bias=True),
        **linear("out", view.hidden, inner),
        "conv.weight": ((inner, *stored[1:]), True),
        "conv.bias": ((inner,), True),
        "A_log": ((inner, size), True),
        "D": ((inner,), True),
    }
    return BranchPart(Mamba1Spec(inner, size, rank, stored[-1], STATE_LIMIT), view.rms(), tensors)
