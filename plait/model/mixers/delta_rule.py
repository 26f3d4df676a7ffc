"""Linear attention by the gated delta rule: Gated DeltaNet and Kimi Delta Attention are one mixer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from plait.checkpoint.weights import Weights
from plait.memory import SlotState, State
from plait.model.layers.kept_state import float_state_dtype
from plait.model.layers.layers import Batch, Norm
from plait.model.mixers.mamba2 import DepthwiseConv
from plait.model.mixers.registry import BetweenLinears, LinearEnds, mixer
from plait.ops.activation import activate, gate, sigmoid_steps
from plait.ops.delta import delta_scan_from_gates, gated_delta_scan
from plait.ops.norm import gated_rms_norm
from plait.partition import Cut, Division, Range, Rank, join_ranges, scale_range, shift_range, sum_of, width
from plait.spec.recurrent import DeltaNetSpec
from plait.state.store import StateStore


def _words(m: DeltaNetSpec) -> str:
    kind = "Kimi delta attention" if m.decay == "channel" else "gated DeltaNet"
    shared = f", {m.num_key_heads} key" if m.num_key_heads != m.num_heads else ""
    return f"{kind}, {m.num_heads} heads{shared} × ({m.key_dim} × {m.value_dim})"


def _divide(s: DeltaNetSpec, rank: Rank, hidden_size: int) -> Division:
    """Heads are divided, each with its key head. The first factors of decay and gate are whole."""
    heads, keys, shares = _divide_heads(s, rank)
    qk, whole = scale_range(keys, s.key_dim), s.num_key_heads * s.key_dim
    values = tuple(scale_range(piece, s.value_dim) for piece in heads)
    steps = tuple(scale_range(piece, s.key_dim if s.decay == "channel" else 1) for piece in heads)
    conv = (qk, shift_range(qk, whole), *(shift_range(piece, 2 * whole) for piece in values))
    cuts = {"q": Cut((qk,)), "k": Cut((qk,)), "v": Cut(values), "conv": Cut(conv)}
    cuts |= {name: Cut(heads) for name in ("beta", "A")}
    cuts |= {"dt_bias": Cut(steps), "decay_b" if s.decay_rank else "decay": Cut(steps)}
    cuts |= {"gate_b" if s.gate_rank else "gate": Cut(values)}
    cuts["o"] = Cut(cols=tuple(tuple(scale_range(piece, s.value_dim) for piece in share) for share in shares))
    count = sum(width(piece) for piece in heads)
    return Division(replace(s, num_heads=count, num_key_heads=width(keys)), cuts)


def _divide_heads(
    s: DeltaNetSpec, rank: Rank
) -> tuple[tuple[Range, ...], Range, tuple[tuple[Range, ...], ...]]:
    """A rank's heads, its key heads, and the heads of each share. Tiled heads go with their key head."""
    if not s.tiled:
        ranges = rank.divide(s.num_heads, "heads")
        keys = rank.divide_for_heads(s.num_key_heads, s.num_heads, "key heads")
        return (join_ranges(ranges),), keys, sum_of(ranges)
    ranges, rounds = rank.divide(s.num_key_heads, "key heads"), s.num_heads // s.num_key_heads
    keys = join_ranges(ranges)

    def heads_of(some: Range) -> tuple[Range, ...]:
        return tuple(shift_range(some, turn * s.num_key_heads) for turn in range(rounds))

    return heads_of(keys), keys, tuple(heads_of(piece) for piece in ranges)


@mixer(DeltaNetSpec, _words, _divide)
class DeltaNet(BetweenLinears):
    def __init__(self, s: DeltaNetSpec, w: Weights) -> None:
        self.spec, self.name = s, w.prefix
        hidden, keys, values = w.target.hidden_size, s.num_key_heads * s.key_dim, s.num_heads * s.value_dim
        steps = s.num_heads * (s.key_dim if s.decay == "channel" else 1)
        parts = {"q": keys, "k": keys, "v": values, "beta": s.num_heads}
        parts |= {"decay_a": s.decay_rank} if s.decay_rank else {"decay": steps}
        parts |= {"gate_a": s.gate_rank} if s.gate_rank else {"gate": values}
        self.sizes = [2 * keys + values, *list(parts.values())[3:]]
        self.into = w.linear(*parts, in_size=hidden, out_sizes=tuple(parts.values()))
        self.decay = w.linear("decay_b", in_size=s.decay_rank, out_sizes=(steps,)) if s.decay_rank else None
        self.gate = w.linear("gate_b", in_size=s.gate_rank, out_sizes=(values,)) if s.gate_rank else None
        self.out = w.linear("o", in_size=values, out_sizes=(hidden,))
        self.conv = DepthwiseConv(w, self.sizes[0], s.conv_kernel)
        self.heads = [s.num_key_heads, s.num_key_heads, s.num_heads]
        self.A = w.tensor("A", (s.num_heads,), torch.float32)
        self.dt_bias = w.optional("dt_bias", (steps,), torch.float32)
        self._close = OutputGate(s, w)
        sizes = {"heads": s.num_heads, "key_dim": s.key_dim, "value_dim": s.value_dim}
        if s.decay_floor is None:
            self._scan = w.bind(delta_scan_from_gates, **sizes, kind="sigmoid", gated=False)
        else:
            self._scan = BoundedScan(s, w, self.A, self.dt_bias, sizes)
        ssm = (s.num_heads, s.key_dim, s.value_dim)
        state = SlotState(
            {
                "conv": (self.conv.tail_shape, "model"),
                "ssm": (ssm, float_state_dtype(w.target, "the delta rule")),
            }
        )
        self.states: dict[str, State] = {self.name: state}

    def ends(self) -> LinearEnds:
        return LinearEnds(self.into, "", self.out)

    def middle(self, first: Tensor, batch: Batch, store: StateStore) -> Tensor:
        """From x's projections to what the last linear layer is given."""
        s, state = self.spec, store[self.name]
        mixed, beta, decay, closing = first.split(self.sizes, -1)
        decay = self.decay(decay) if self.decay else decay
        closing = self.gate(closing) if self.gate else closing
        mixed = self.conv(mixed, batch, state["conv"])
        q, k, v = mixed.split([n * d for n, d in zip(self.heads, self._dims, strict=True)], -1)
        q, k, v = (m.unflatten(-1, (n, -1)) for m, n in zip((q, k, v), self.heads, strict=True))
        operands = (q, k, v, decay, self.dt_bias, self.A, beta, state["ssm"])
        where = (batch.state_slots, batch.query_start, batch.has_history, batch.num_decodes)
        y = self._scan(*operands, *where, s.beta_scale, s.tiled, batch.positions)
        closed: Tensor = self._close(y, closing)
        return closed

    @property
    def _dims(self) -> tuple[int, int, int]:
        return self.spec.key_dim, self.spec.key_dim, self.spec.value_dim


class BoundedScan:
    """`delta_scan_from_gates` where the log of a decay is a lowest number times a sigmoid (Ling 3)."""

    def __init__(
        self, s: DeltaNetSpec, w: Weights, A: Tensor, bias: Tensor | None, sizes: Mapping[str, int]
    ) -> None:
        each = s.key_dim if s.decay == "channel" else 1
        self._shape, self._rate = (s.num_heads, each), (-A).repeat_interleave(each)
        self._bias = torch.zeros_like(self._rate) if bias is None else bias
        self._floor = torch.full_like(A, s.decay_floor or 0.0)
        self._steps, self._scan = w.bind(sigmoid_steps), w.bind(gated_delta_scan, **sizes)
        self._activate = w.bind(activate, kind="sigmoid", gated=False)

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, decay: Tensor, bias: Tensor | None, A: Tensor, beta: Tensor,
        *rest: object,
    ) -> Tensor:  # fmt: skip
        """As the op; A and the bias are what this was made with."""
        step = self._steps(decay, self._bias, self._rate)
        step = step.unflatten(-1, self._shape) if self._shape[1] > 1 else step
        out: Tensor = self._scan(q, k, v, step, self._floor, self._activate(beta, "sigmoid", False), *rest)
        return out


class OutputGate:
    """The norm of each head's output, one weight for all, times the gate's activation."""

    def __init__(self, s: DeltaNetSpec, w: Weights) -> None:
        self.spec, size = s, s.num_heads * s.value_dim
        if s.gate == "silu":
            weight = w.tensor("gated_norm.weight", (s.value_dim,))
            self._weight = weight.repeat(s.num_heads)
            self._norm_and_gate = w.bind(gated_rms_norm, size=size, groups=s.num_heads)
        else:
            self._norm, self._gate = Norm(s.norm, w.scope("gated_norm"), s.value_dim), w.bind(gate)

    def __call__(self, y: Tensor, closing: Tensor) -> Tensor:
        """y: [T, heads, value_dim], closing: [T, heads · value_dim] -> like closing."""
        s = self.spec
        if s.gate == "silu":
            args = (y.flatten(1), closing, self._weight, s.norm.eps, s.num_heads, True)
            return self._norm_and_gate(*args)  # type: ignore[no-any-return]
        return self._gate(self._norm(y).flatten(1), closing)  # type: ignore[no-any-return]
