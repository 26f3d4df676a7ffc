"""Mamba2 (Dao & Gu 2024): short convolution, state-space duality, gated norm."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from plait.checkpoint.weights import Weights
from plait.memory import SlotState, State
from plait.model.layers.kept_state import state_columns
from plait.model.layers.layers import Batch, GatedNorm
from plait.model.mixers.registry import BetweenLinears, LinearEnds, mixer
from plait.ops.activation import step_sizes
from plait.ops.conv import causal_conv
from plait.ops.ssm import mamba2_scan_from_dt
from plait.ops.ssm_exact import mamba2_exact
from plait.partition import Cut, Division, Range, Rank, join_ranges, scale_range, shift_range, sum_of, width
from plait.spec.recurrent import Mamba2Spec, Mamba3Spec
from plait.state.store import StateStore

# Of taps to which 1 was added for the input itself: bfloat16 near 1 would round a small tap away.
WITH_INPUT = torch.float32


class DepthwiseConv:
    """The depthwise convolution of one mixer; its tail is in the store, or nowhere for whole sequences.

    `activation`: what follows it, "silu" or None. `dtype`: of its taps, if not the model's.
    """

    def __init__(
        self,
        w: Weights,
        channels: int,
        kernel: int,
        activation: str | None = "silu",
        dtype: torch.dtype | None = None,
    ) -> None:
        self._activation = activation
        self.weight = w.tensor("conv.weight", (channels, kernel), dtype)
        if w.target.platform == "cuda":  # there neighbours in memory are channels, as those of x are
            self.weight = self.weight.T.contiguous().T
        self.bias = w.optional("conv.bias", (channels,))
        self.tail_shape = (kernel - 1, channels)
        self._conv = w.bind(causal_conv, channels=channels, kernel=kernel)

    def __call__(self, x: Tensor, batch: Batch, tail: Tensor | None) -> Tensor:
        """x: [T, C] -> [T, C]. `tail` None: every sequence of the batch is whole, and nothing is kept."""
        slots, history = batch.state_slots, batch.has_history
        if tail is None:
            tail, slots = x.new_zeros(len(slots), *self.tail_shape), torch.arange(len(slots), device=x.device)
            history = torch.zeros_like(history)
        where = (tail, slots, batch.query_start, history)
        out: Tensor = self._conv(x, self.weight, self.bias, *where, self._activation)
        return out


def ssd_words(m: Mamba2Spec | Mamba3Spec) -> str:
    """Mamba2 and Mamba3 have the same sizes."""
    groups = f", {m.num_groups} groups" if m.num_groups > 1 else ""
    mode = f", {m.mode}" if m.mode != "ssd" else ""
    name = type(m).__name__.removesuffix("Spec")
    return f"{name}, {m.num_heads} heads × {m.head_dim}, state {m.state_size}{groups}{mode}"


def stack_ranges(sizes: Sequence[int], ranges: Sequence[Range]) -> tuple[Range, ...]:
    """The ranges of a fused matrix's rows, given those of its parts; `sizes`: rows of the parts."""
    starts = (sum(sizes[:at]) for at in range(len(sizes)))
    return tuple(shift_range(piece, start) for piece, start in zip(ranges, starts, strict=True))


def divide_ssd(s: Mamba2Spec | Mamba3Spec, rank: Rank) -> tuple[Range, Range, dict[str, Cut]]:
    """Heads, groups of B and C, and the cuts that Mamba2 and Mamba3 have in common."""
    ranges = rank.divide(s.num_heads, "heads", s.head_dim)
    heads, inner = join_ranges(rank.divide(s.num_heads, "heads")), join_ranges(ranges)
    groups = rank.divide_for_heads(s.num_groups, s.num_heads, "groups")
    bc, whole, bc_size = (
        scale_range(groups, s.state_size),
        s.num_heads * s.head_dim,
        s.num_groups * s.state_size,
    )
    conv = stack_ranges([whole, bc_size, bc_size], [inner, bc, bc])
    into = stack_ranges([whole, whole, bc_size, bc_size, s.num_heads], [inner, inner, bc, bc, heads])
    cuts = {name: Cut((heads,)) for name in ("A", "D", "dt_bias")}
    cuts |= {"in": Cut(into), "conv": Cut(conv), "out": Cut(cols=sum_of(ranges))}
    return heads, groups, cuts


def _divide(s: Mamba2Spec, rank: Rank, hidden_size: int) -> Division:
    heads, groups, cuts = divide_ssd(s, rank)
    part = replace(s, num_heads=width(heads), num_groups=width(groups))
    is_gathered = s.gated_norm is not None and s.norm_groups % rank.size != 0
    return Division(part, cuts, gathers=2 * is_gathered)


@mixer(Mamba2Spec, ssd_words, _divide)
class Mamba2(BetweenLinears):
    def __init__(self, s: Mamba2Spec, w: Weights) -> None:
        self.spec, self.name = s, w.prefix
        hidden, heads = w.target.hidden_size, (s.num_heads,)
        inner, bc = s.num_heads * s.head_dim, s.num_groups * s.state_size
        self.sizes = [inner, inner + 2 * bc, s.num_heads]
        self.in_proj = w.linear("in", in_size=hidden, out_sizes=(sum(self.sizes),))
        self.out = w.linear("out", in_size=inner, out_sizes=(hidden,))
        self.conv = DepthwiseConv(w, inner + 2 * bc, s.conv_kernel)
        self.A = w.tensor("A", heads, torch.float32)
        self.D = w.optional("D", heads, torch.float32)
        self.dt_bias = w.optional("dt_bias", heads, torch.float32)
        sizes = {"heads": s.num_heads, "dim": s.head_dim, "state": s.state_size, "groups": s.num_groups}
        self._scan = w.bind(mamba2_exact if s.mode == "exact" else mamba2_scan_from_dt, **sizes)
        self._gate = GatedNorm(s.gated_norm, w, inner, s.norm_groups, s.norm_before_gate)
        self._step_sizes = w.bind(step_sizes, heads=s.num_heads) if s.mode == "exact" else None
        self.states: dict[str, State] = {}
        if s.mode == "ssd":
            ssm = (s.num_heads, s.head_dim, state_columns(w.target, s.state_size))
            conv = self.conv.tail_shape
            self.states[self.name] = SlotState({"conv": (conv, "model"), "ssm": (ssm, w.target.state_dtype)})

    def ends(self) -> LinearEnds:
        return LinearEnds(self.in_proj, "", self.out)

    def middle(self, first: Tensor, batch: Batch, store: StateStore) -> Tensor:
        """From x's projections to what the last linear layer is given."""
        s = self.spec
        gate, xbc, dt = first.split(self.sizes, -1)
        state = store[self.name] if self.states else None
        xbc = self.conv(xbc, batch, state["conv"] if state else None)
        bc, shape = s.num_groups * s.state_size, (s.num_groups, s.state_size)
        h, B, C = xbc.split([self.sizes[0], bc, bc], -1)
        h, B, C = h.unflatten(-1, (s.num_heads, -1)), B.unflatten(-1, shape), C.unflatten(-1, shape)
        if self._step_sizes:
            dt = self._step_sizes(dt, self.dt_bias, *s.dt_limit)
            y = self._scan(h, dt, self.A, B, C, self.D, batch.query_start, s.chunk_size)
        else:
            args = (h, dt, self.dt_bias, s.dt_limit, self.A, B, C, self.D, store[self.name]["ssm"])
            where = (batch.state_slots, batch.query_start, batch.has_history, batch.num_decodes)
            y = self._scan(*args, *where, s.chunk_size, batch.positions)
        return self._gate(y.flatten(1), gate)
