"""oxidizr's Mamba3: a trapezoidal input term, rotated B and C, optional MIMO and short convolution."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from plait.checkpoint.weights import Weights
from plait.memory import SlotState, State
from plait.model.layers.kept_state import float_state_dtype
from plait.model.layers.layers import Batch, GatedNorm
from plait.model.mixers.mamba2 import DepthwiseConv, divide_ssd, ssd_words
from plait.model.mixers.registry import BetweenLinears, LinearEnds, mixer
from plait.ops.activation import activate, step_sizes
from plait.ops.mamba3 import map_each_head, norm_for_heads, raw_mamba3_scan
from plait.ops.ssm_exact import mamba3_exact
from plait.partition import Cut, Division, Rank, scale_range, width
from plait.spec.recurrent import Mamba3Spec
from plait.state.store import StateStore


def _divide(s: Mamba3Spec, rank: Rank, hidden_size: int) -> Division:
    heads, groups, cuts = divide_ssd(s, rank)
    each = Cut((heads,))
    cuts |= {
        "lambda": each,
        "theta": Cut((scale_range(heads, s.state_size // 2),)),
        "b_bias": each,
        "c_bias": each,
    }
    part = replace(s, num_heads=width(heads), num_groups=width(groups))
    return Division(part, cuts, gathers=2)


@mixer(Mamba3Spec, ssd_words, _divide)
class Mamba3(BetweenLinears):
    def __init__(self, s: Mamba3Spec, w: Weights) -> None:
        self.spec, self.name = s, w.prefix
        hidden, heads, per_head = w.target.hidden_size, s.num_heads, (s.num_heads, s.state_size)
        inner, bc = heads * s.head_dim, s.num_groups * s.state_size
        self.sizes = [inner, inner + 2 * bc, heads]  # the gate; x, B and C; step sizes
        self.width = s.head_dim * max(s.mimo_rank, 1)  # of a head inside the scan
        turns = heads * s.state_size // 2
        widths = {"in": sum(self.sizes), "lambda": heads, **({"theta": turns} if s.complex_rope else {})}
        self.into = w.linear(*widths, in_size=hidden, out_sizes=tuple(widths.values()))
        self.sizes += [heads, *([turns] if s.complex_rope else [])]  # how B's terms blend; angles
        self.out = w.linear("out", in_size=inner, out_sizes=(hidden,))
        self.conv = DepthwiseConv(w, inner + 2 * bc, s.conv_kernel) if s.conv_kernel else None
        mimo = (self.width, s.head_dim)
        self.mimo_up = w.linear("mimo_up", in_size=mimo[1], out_sizes=mimo[:1]) if s.mimo_rank else None
        self.mimo_down = w.linear("mimo_down", in_size=mimo[0], out_sizes=mimo[1:]) if s.mimo_rank else None
        self.A, self.D, self.dt_bias = (
            w.tensor(name, (heads,), torch.float32) for name in ("A", "D", "dt_bias")
        )
        self.bias = torch.cat([w.tensor(name, per_head) for name in ("b_bias", "c_bias")])
        self.bc_weight = w.tensor("bc_norm.weight", (s.state_size,))
        self._map = w.bind(map_each_head, heads=heads) if s.mimo_rank else None
        # Without a convolution SiLU follows at once: before a head's width is mapped, or within the scan.
        self._activation = None if self.conv else "silu"
        self._silu = w.bind(activate, kind="silu", gated=False) if self._activation and s.mimo_rank else None
        self._scan = _Whole(s, w, self.width) if s.mode == "exact" else _Recurrent(s, w, self.width)
        self._gate = GatedNorm(s.gated_norm, w, inner, 1)
        self.states: dict[str, State] = (
            {} if s.mode == "exact" else {self.name: self._memory(float_state_dtype(w.target, "Mamba3"))}
        )

    def _memory(self, state_dtype: str) -> SlotState:
        s = self.spec
        shapes: dict[str, tuple[tuple[int, ...], str]] = {
            "ssm": ((s.num_heads, self.width, s.state_size), state_dtype),
            "prev_b": ((s.num_heads, s.state_size), "float32"),
            "prev_x": ((s.num_heads, self.width), "float32"),
        }
        if s.complex_rope:
            shapes["angle"] = ((s.num_heads, s.state_size // 2), "float32")
        if self.conv:
            shapes["conv"] = (self.conv.tail_shape, "model")
        return SlotState(shapes)

    def ends(self) -> LinearEnds:
        return LinearEnds(self.into, "", self.out)

    def middle(self, first: Tensor, batch: Batch, store: StateStore) -> Tensor:
        """From x's projections to what the last linear layer is given."""
        s, state = self.spec, store[self.name] if self.states else {}
        gate, mixed, dt, blend, *turns = first.split(self.sizes, -1)
        mixed = self.conv(mixed, batch, state.get("conv")) if self.conv else mixed
        u, bc = mixed[:, : self.sizes[0]], mixed[:, self.sizes[0] :].unflatten(-1, (-1, s.state_size))
        u = (self._silu(u, "silu", False) if self._silu else u).unflatten(-1, (s.num_heads, -1))
        u = self._map(u, self.mimo_up) if self._map else u
        theta = turns[0].unflatten(-1, (s.num_heads, -1)) if turns else None
        parts = (self.A, self.D, self.dt_bias, self.bc_weight, self.bias)
        activation = None if self._silu else self._activation
        y = self._scan((u, dt, blend, theta, bc), parts, activation, state, batch)
        y = self._map(y, self.mimo_down) if self._map else y
        return self._gate(y.flatten(1), gate)


class _Recurrent:
    """The recurrence, from what the linear layers give to what a head puts out."""

    def __init__(self, s: Mamba3Spec, w: Weights, width: int) -> None:
        self.spec = s
        self._scan = w.bind(raw_mamba3_scan, heads=s.num_heads, dim=width, state=s.state_size)

    def __call__(
        self,
        inputs: tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor],
        parts: tuple[Tensor, ...],
        activation: str | None,
        state: Mapping[str, Tensor],
        batch: Batch,
    ) -> Tensor:
        """inputs: x, dt, blend, theta, groups of B and C; parts: A, D, biases and the norm's weight."""
        s, where = self.spec, (batch.state_slots, batch.query_start, batch.has_history, batch.num_decodes)
        memory = (state["ssm"], state.get("angle"), state["prev_b"], state["prev_x"])
        how = (s.bc_norm.eps, s.dt_limit, activation, s.chunk_size, batch.positions)
        y: Tensor = self._scan(*inputs, *parts, *memory, *where, *how)
        return y


class _Whole:
    """The trainer's scan of whole sequences: no state, and no causality."""

    def __init__(self, s: Mamba3Spec, w: Weights, width: int) -> None:
        self.spec = s
        self._scan = w.bind(mamba3_exact, heads=s.num_heads, dim=width, state=s.state_size)
        self._norm = w.bind(norm_for_heads, size=s.state_size)
        self._step_sizes = w.bind(step_sizes, heads=s.num_heads)
        self._sigmoid = w.bind(activate, kind="sigmoid", gated=False)
        self._silu = w.bind(activate, kind="silu", gated=False)

    def __call__(
        self,
        inputs: tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor],
        parts: tuple[Tensor, ...],
        activation: str | None,
        state: Mapping[str, Tensor],
        batch: Batch,
    ) -> Tensor:
        """As `_Recurrent`."""
        (x, dt, blend, theta, bc), s = inputs, self.spec
        A, D, dt_bias, weight, bias = parts
        if activation:
            x = self._silu(x.flatten(1), activation, False).unflatten(-1, x.shape[1:])
        B, C = self._norm(bc, weight, bias, s.bc_norm.eps).chunk(2, 1)
        dt, blend = self._step_sizes(dt, dt_bias, *s.dt_limit), self._sigmoid(blend, "sigmoid", False)
        y: Tensor = self._scan(x, dt, blend, theta, A, B, C, D, batch.query_start, s.chunk_size)
        return y
