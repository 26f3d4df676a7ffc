"""Gated memory units (Ren et al. 2025; SambaY), and the Mamba1 that they read.

A unit has no state: what it reads is of the step's own tokens, which the scan has computed before.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from torch import Tensor

from plait.checkpoint.weights import Weights
from plait.errors import UnsupportedModel
from plait.memory import State
from plait.model.layers.layers import Batch, Norm
from plait.model.mixers.mamba1 import Mamba1, describe_mamba1, divide_mamba1
from plait.model.mixers.registry import mixer
from plait.ops.activation import activate, step_sizes
from plait.ops.rows import join
from plait.ops.ssm import mamba1_scan
from plait.partition import Cut, Division, Rank, join_ranges, sum_of, width
from plait.spec.branches import MemoryUnitSpec
from plait.spec.model import UNLIMITED
from plait.spec.recurrent import Mamba1Spec, RememberedMamba1Spec
from plait.state.store import StateStore


def _describe_remembered(m: RememberedMamba1Spec) -> str:
    return f"{describe_mamba1(m)}, remembered"


def _words(m: MemoryUnitSpec) -> str:
    return f"gated memory unit, {m.size} of {m.source}"


def _divide(s: MemoryUnitSpec, rank: Rank, hidden_size: int) -> Division:
    """The channels that the rank's part of the scan gives."""
    ranges = rank.divide(s.size, "channels")
    own = join_ranges(ranges)
    return Division(replace(s, size=width(own)), {"in": Cut((own,)), "out": Cut(cols=sum_of(ranges))})


class _Gated:
    """silu(gate) · y, side by side as an MLP's halves are."""

    def __init__(self, w: Weights) -> None:
        self._join, self._activate = w.bind(join), w.bind(activate, kind="silu", gated=True)

    def __call__(self, gate: Tensor, y: Tensor) -> Tensor:
        gated: Tensor = self._activate(self._join(gate, y), "silu", True)
        return gated


class _RememberedScan:
    """The scan with a step and a decay for each channel; what it gives stays in `Batch.step`."""

    def __init__(self, s: RememberedMamba1Spec, w: Weights) -> None:
        if s.norm or s.num_heads:
            raise UnsupportedModel(f"{w.prefix}: a remembered scan has neither norms nor heads")
        self.state_shape: tuple[int, ...] = (s.inner_size, s.state_size)
        self._name, self._limit, self._gate = w.prefix, s.state_limit, _Gated(w)
        self._step_sizes = w.bind(step_sizes, heads=s.inner_size)
        self._scan = w.bind(mamba1_scan, inner=s.inner_size, state=s.state_size)

    def __call__(self, h: Tensor, gate: Tensor, operands: tuple[Tensor, ...], batch: Batch) -> Tensor:
        """h: [T, inner]; its gate; dt as it is mapped, A, B, C, D and the state -> [T, inner]."""
        dt, *before, state = operands
        dt = self._step_sizes(dt, None, 0.0, UNLIMITED)
        where = (batch.state_slots, batch.query_start, batch.has_history, batch.num_decodes)
        y: Tensor = self._scan(h, dt, *before, state, *where, self._limit, batch.positions)
        batch.step[self._name] = y
        return self._gate(gate, y)


@mixer(RememberedMamba1Spec, _describe_remembered, divide_mamba1)
class RememberedMamba1(Mamba1):
    def _build_scan(self, s: Mamba1Spec, w: Weights, norms: Sequence[Norm | None]) -> _RememberedScan:
        assert isinstance(s, RememberedMamba1Spec)
        return _RememberedScan(s, w)


@mixer(MemoryUnitSpec, _words, _divide)
class MemoryUnit:
    def __init__(self, s: MemoryUnitSpec, w: Weights) -> None:
        self._source, self.states, hidden = s.source, dict[str, State](), w.target.hidden_size
        self.into = w.linear("in", in_size=hidden, out_sizes=(s.size,))
        self.out, self._gate = w.linear("out", in_size=s.size, out_sizes=(hidden,)), _Gated(w)

    def __call__(self, x: Tensor, batch: Batch, store: StateStore) -> Tensor:
        """x: [T, hidden] -> [T, hidden]."""
        memory = batch.step[self._source]
        assert isinstance(memory, Tensor)
        return self.out(self._gate(self.into(x), memory))
