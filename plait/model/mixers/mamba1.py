"""Mamba1 (Gu & Dao 2023): short convolution, input-dependent step, B and C, elementwise scan.

Jamba and Falcon-Mamba norm the step, B and C; PLaMo 2 has one step and one decay for each head, which makes
the scan Mamba2's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol

import torch
from torch import Tensor

from plait.checkpoint.weights import Weights
from plait.errors import UnsupportedModel
from plait.memory import SlotState, State
from plait.model.layers.kept_state import float_state_dtype
from plait.model.layers.layers import Batch, Norm
from plait.model.mixers.mamba2 import DepthwiseConv, stack_ranges
from plait.model.mixers.registry import BetweenLinears, LinearEnds, mixer
from plait.ops.activation import step_sizes
from plait.ops.norm import gated_rms_norm
from plait.ops.ranks import sum_ranks
from plait.ops.ssm import gated_mamba1_scan, mamba2_scan
from plait.partition import Cut, Division, Rank, join_ranges, sum_of, width
from plait.spec.model import UNLIMITED
from plait.spec.recurrent import Mamba1Spec
from plait.state.store import StateStore


def describe_mamba1(m: Mamba1Spec) -> str:
    heads = "" if m.num_heads is None else f", {m.num_heads} heads"
    return f"Mamba1, inner {m.inner_size}, state {m.state_size}{heads}"


def divide_mamba1(s: Mamba1Spec, rank: Rank, hidden_size: int) -> Division:
    """Channels are divided, or heads of them. What `x` makes of them is summed within the mixer."""
    if s.num_heads:
        ranges = rank.divide(s.num_heads, "heads", s.inner_size // s.num_heads)
        steps = join_ranges(rank.divide(s.num_heads, "heads"))
    else:
        ranges = rank.divide(s.inner_size, "channels")
        steps = join_ranges(ranges)
    own = join_ranges(ranges)
    cuts = {name: Cut((steps,)) for name in ("dt", "A", "D")}
    cuts |= {"in": Cut(stack_ranges([s.inner_size] * 2, [own] * 2)), "conv": Cut((own,))}
    cuts |= {"x": Cut(cols=sum_of(ranges)), "out": Cut(cols=sum_of(ranges))}
    part = replace(s, inner_size=width(own), num_heads=width(steps) if s.num_heads else None)
    return Division(part, cuts, sums=1)


class _Scan(Protocol):
    """What is between the convolution and the last linear layer, gate included."""

    state_shape: tuple[int, ...]

    def __call__(self, h: Tensor, gate: Tensor, operands: tuple[Tensor, ...], batch: Batch) -> Tensor: ...


@mixer(Mamba1Spec, describe_mamba1, divide_mamba1)
class Mamba1(BetweenLinears):
    """`in` has the rows of x and then of the gate; `x` those of the step, B and C; `dt` has a bias."""

    def __init__(self, s: Mamba1Spec, w: Weights) -> None:
        self.spec, self.name, self._comm = s, w.prefix, w.target.comm
        hidden, inner, steps = w.target.hidden_size, s.inner_size, s.num_heads or s.inner_size
        self.in_proj = w.linear("in", in_size=hidden, out_sizes=(2 * inner,))
        self.x_proj = w.linear("x", in_size=inner, out_sizes=(s.dt_rank + 2 * s.state_size,))
        self.dt_proj = w.linear("dt", in_size=s.dt_rank, out_sizes=(steps,))
        self.out = w.linear("out", in_size=inner, out_sizes=(hidden,))
        self.conv = DepthwiseConv(w, inner, s.conv_kernel)
        self.A = w.tensor("A", (steps,) if s.num_heads else (inner, s.state_size), torch.float32)
        self.D = w.tensor("D", (steps,), torch.float32)
        self.sizes = {"dt": s.dt_rank, "B": s.state_size, "C": s.state_size}
        norms = (
            [Norm(s.norm, w.scope(f"{x}_norm"), n) for x, n in self.sizes.items()] if s.norm else [None] * 3
        )
        self.step_norm = norms[0]
        self._scan = self._build_scan(s, w, norms[1:])
        ssm, conv = self._scan.state_shape, self.conv.tail_shape
        state = SlotState({"conv": (conv, "model"), "ssm": (ssm, float_state_dtype(w.target, "Mamba1"))})
        self.states: dict[str, State] = {self.name: state}

    def _build_scan(self, s: Mamba1Spec, w: Weights, norms: Sequence[Norm | None]) -> _Scan:
        return _PerHead(s, w, norms) if s.num_heads else _PerChannel(s, w, norms)

    def ends(self) -> LinearEnds:
        return LinearEnds(self.in_proj, "", self.out)

    def scan(self, x: Tensor, batch: Batch, store: StateStore) -> Tensor:
        """x: [T, hidden] -> [T, inner], what the last linear layer reads."""
        return Mamba1.middle(self, self.in_proj(x), batch, store)

    def middle(self, first: Tensor, batch: Batch, store: StateStore) -> Tensor:
        """From x's projections to what the last linear layer is given."""
        state = store[self.name]
        h, gate = first.chunk(2, -1)
        h = self.conv(h, batch, state["conv"])
        mapped = sum_ranks(self.x_proj(h), self._comm, h.dtype)
        step, B, C = mapped.split(list(self.sizes.values()), -1)
        dt = self.dt_proj(self.step_norm(step) if self.step_norm else step)
        return self._scan(h, gate, (dt, self.A, B, C, self.D, state["ssm"]), batch)


class _PerChannel:
    """The scan with a step and a decay for each channel. RMS norms of B and C are a part of it."""

    def __init__(self, s: Mamba1Spec, w: Weights, norms: Sequence[Norm | None]) -> None:
        if s.norm and s.norm.kind != "rms":
            raise UnsupportedModel(
                f"{w.prefix}: Mamba1 knows RMS norms of B and C, not {s.norm.kind!r} norms"
            )
        self.state_shape: tuple[int, ...] = (s.inner_size, s.state_size)
        self._scan, self._limit = (
            w.bind(gated_mamba1_scan, inner=s.inner_size, state=s.state_size),
            s.state_limit,
        )
        self._norms, self._eps = [norm and norm.weight for norm in norms], s.norm.eps if s.norm else 0.0

    def __call__(self, h: Tensor, gate: Tensor, operands: tuple[Tensor, ...], batch: Batch) -> Tensor:
        """h: [T, inner]; its gate; dt as it is mapped, A, B, C, D and the state -> [T, inner]."""
        *before, state = operands
        where = (batch.state_slots, batch.query_start, batch.has_history, batch.num_decodes)
        dt, *rest = before
        y: Tensor = self._scan(
            h, dt, gate, *rest, *self._norms, state, *where, self._limit, self._eps, batch.positions
        )
        return y


class _PerHead:
    """The scan with a step and a decay for each head, which is Mamba2's with one group."""

    def __init__(self, s: Mamba1Spec, w: Weights, norms: Sequence[Norm | None]) -> None:
        heads = s.num_heads or 1
        self.state_shape: tuple[int, ...] = (heads, s.inner_size // heads, s.state_size)
        sizes = {"heads": heads, "dim": s.inner_size // heads, "state": s.state_size, "groups": 1}
        self._scan, self._norms = w.bind(mamba2_scan, **sizes), norms
        self._step_sizes = w.bind(step_sizes, heads=heads)
        self._gate = w.bind(gated_rms_norm, size=s.inner_size, groups=1)

    def __call__(self, h: Tensor, gate: Tensor, operands: tuple[Tensor, ...], batch: Batch) -> Tensor:
        """h: [T, inner]; its gate; dt as it is mapped, A, B, C, D and the state -> [T, inner]."""
        dt, A, B, C, D, state = operands
        B, C = (norm(m) if norm else m for norm, m in zip(self._norms, (B, C), strict=True))
        dt = self._step_sizes(dt, None, 0.0, UNLIMITED)
        x, B, C = h.unflatten(-1, self.state_shape[:2]), B[:, None], C[:, None]
        where = (batch.state_slots, batch.query_start, batch.has_history, batch.num_decodes)
        y: Tensor = self._scan(x, dt, A, B, C, D, state, *where, positions=batch.positions)
        gated: Tensor = self._gate(y.flatten(1), gate, None)
        return gated
