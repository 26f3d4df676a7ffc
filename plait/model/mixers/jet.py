"""JetBlock (Jet-Nemotron; Gu et al. 2025): a gated delta rule over values with a convolution of their own."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from plait.checkpoint.weights import Weights
from plait.memory import SlotState, State
from plait.model.layers.kept_state import float_state_dtype
from plait.model.layers.layers import Batch
from plait.model.mixers.delta_rule import OutputGate
from plait.model.mixers.registry import mixer
from plait.ops.activation import activate
from plait.ops.delta import delta_scan_from_gates
from plait.ops.dynamic_conv import dynamic_conv
from plait.partition import Cut, Division, Rank, join_ranges, scale_range, shift_range, sum_of, width
from plait.spec.recurrent import JetSpec
from plait.state.store import StateStore


def _words(m: JetSpec) -> str:
    return f"JetBlock, {m.num_heads} heads × ({m.key_dim} × {m.value_dim}), convolution by rank {m.rank}"


def _divide(s: JetSpec, rank: Rank, hidden_size: int) -> Division:
    """Heads are divided; what leads to the taps' rank is whole."""
    heads = join_ranges(rank.divide(s.num_heads, "heads"))
    keys, values = scale_range(heads, s.key_dim), scale_range(heads, s.value_dim)
    cuts = {name: Cut((heads,)) for name in ("decay", "beta", "A", "dt_bias")}
    cuts |= {"q": Cut((keys,)), "k": Cut((keys,)), "v": Cut((values,)), "gate": Cut((values,))}
    taps = (shift_range(values, n * s.num_heads * s.value_dim) for n in range(s.conv_kernel))
    cuts |= {"taps.up": Cut(tuple(taps))}
    cuts["o"] = Cut(cols=sum_of(rank.divide(s.num_heads, "heads", s.value_dim)))
    return Division(replace(s, num_heads=width(heads), num_key_heads=width(heads)), cuts)


@mixer(JetSpec, _words, _divide)
class JetBlock:
    """`taps.down` and `taps.up` make a token's taps, [taps, channels]."""

    def __init__(self, s: JetSpec, w: Weights) -> None:
        self.spec, self.name, hidden, heads = s, w.prefix, w.target.hidden_size, s.num_heads
        keys, values = heads * s.key_dim, heads * s.value_dim
        parts = {"q": keys, "k": keys, "v": values, "decay": heads, "beta": heads, "gate": values}
        self._sizes = [2 * keys, *list(parts.values())[2:]]
        self.into = w.linear(*parts, in_size=hidden, out_sizes=tuple(parts.values()))
        taps = w.scope("taps")
        self.narrow = taps.linear("down", in_size=hidden, out_sizes=(s.rank,))
        self.widen = taps.linear("up", in_size=s.rank, out_sizes=(s.conv_kernel * values,))
        self.out = w.linear("o", in_size=values, out_sizes=(hidden,))
        self.A = w.tensor("A", (heads,), torch.float32)
        self.dt_bias = w.optional("dt_bias", (heads,), torch.float32)
        self._close = OutputGate(s, w)
        self._activate = w.bind(activate, kind="silu", gated=False)
        self._conv = w.bind(dynamic_conv, channels=values, kernel=s.conv_kernel)
        sizes = {"heads": heads, "key_dim": s.key_dim, "value_dim": s.value_dim}
        self._scan = w.bind(delta_scan_from_gates, **sizes, kind="sigmoid", gated=False)
        ssm = (heads, s.key_dim, s.value_dim)
        state = SlotState(
            {
                "conv": ((s.conv_kernel - 1, values), "model"),
                "ssm": (ssm, float_state_dtype(w.target, "JetBlock")),
            }
        )
        self.states: dict[str, State] = {self.name: state}

    def __call__(self, x: Tensor, batch: Batch, store: StateStore) -> Tensor:
        """x: [T, hidden] -> [T, hidden]."""
        state, heads = store[self.name], self.spec.num_heads
        qk, v, decay, beta, closing = self.into(x).split(self._sizes, -1)
        q, k = self._activate(qk, "silu", False).unflatten(-1, (2 * heads, -1)).chunk(2, 1)
        taps = self.widen(self._activate(self.narrow(x), "silu", False))
        slots = (batch.state_slots, batch.query_start, batch.has_history)
        v = self._conv(v, taps, state["conv"], *slots).unflatten(-1, (heads, -1))
        how = (batch.num_decodes, self.spec.beta_scale, False, batch.positions)
        y = self._scan(q, k, v, decay, self.dt_bias, self.A, beta, state["ssm"], *slots, *how)
        return self.out(self._close(y, closing))
