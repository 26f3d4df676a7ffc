"""xLSTM's mLSTM layer: a matrix memory for each head, with exponential gates (Beck et al. 2024)."""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from plait.checkpoint.weights import Weights
from plait.memory import SlotState, State
from plait.model.layers.layers import Batch, Norm
from plait.model.mixers.registry import mixer
from plait.ops.activation import gate, rescale
from plait.ops.mlstm import mlstm_scan
from plait.partition import Cut, Division, Rank, join_ranges, scale_range, shift_range, sum_of, width
from plait.spec.recurrent import MlstmSpec
from plait.state.store import StateStore


def _words(m: MlstmSpec) -> str:
    return f"mLSTM, {m.num_heads} heads × ({m.key_dim} × {m.value_dim})"


def _divide(s: MlstmSpec, rank: Rank, hidden_size: int) -> Division:
    """Heads are divided, with all that is theirs."""
    heads = join_ranges(rank.divide(s.num_heads, "heads"))
    keys, values = Cut((scale_range(heads, s.key_dim),)), Cut((scale_range(heads, s.value_dim),))
    cuts = {"q": keys, "k": keys, "v": values, "gate": values, "gated_norm": values}
    cuts["gates"] = Cut((heads, shift_range(heads, s.num_heads)))
    cuts["o"] = Cut(cols=sum_of(rank.divide(s.num_heads, "heads", s.value_dim)))
    return Division(replace(s, num_heads=width(heads)), cuts)


@mixer(MlstmSpec, _words, _divide)
class Mlstm:
    """`gates` has a row for each head's input gate, then one for each head's forget gate."""

    def __init__(self, s: MlstmSpec, w: Weights) -> None:
        self.spec, self.name, heads = s, w.prefix, s.num_heads
        hidden, keys, values = w.target.hidden_size, heads * s.key_dim, heads * s.value_dim
        self._sizes = [keys, keys, values, values]
        self.into = w.linear("q", "k", "v", "gate", in_size=hidden, out_sizes=tuple(self._sizes))
        self.gates = w.linear("gates", in_size=hidden, out_sizes=(2 * heads,))
        self.out = w.linear("o", in_size=values, out_sizes=(hidden,))
        self.norm = Norm(s.norm, w.scope("gated_norm"), values, heads)
        self._scan = w.bind(mlstm_scan, heads=heads, key_dim=s.key_dim, dim=s.value_dim)
        self._rescale, self._gate = w.bind(rescale), w.bind(gate)
        shapes = {"memory": (heads, s.key_dim, s.value_dim), "norms": (heads, s.key_dim), "largest": (heads,)}
        state = SlotState({name: (shape, "float32") for name, shape in shapes.items()})
        self.states: dict[str, State] = {self.name: state}

    def __call__(self, x: Tensor, batch: Batch, store: StateStore) -> Tensor:
        """x: [T, hidden] -> [T, hidden]."""
        s, state = self.spec, store[self.name]
        q, k, v, closing = self.into(x).split(self._sizes, -1)
        q, k, v = (part.unflatten(-1, (s.num_heads, -1)) for part in (q, k, v))
        enter, forget = self._rescale(self.gates(x), 1.0, s.gate_cap).chunk(2, -1)
        states = (state["memory"], state["norms"], state["largest"])
        where = (batch.state_slots, batch.query_start, batch.has_history, batch.num_decodes)
        y = self._scan(q, k, v, enter, forget, *states, *where, s.eps)
        return self.out(self._gate(self.norm(y.flatten(1)), closing))
