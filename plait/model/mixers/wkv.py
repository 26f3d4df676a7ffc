"""RWKV's time mixing: of RWKV-4, an average for each channel, and of RWKV-6 and 7, a matrix for each head."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from plait.checkpoint.weights import Weights
from plait.memory import SlotState, State
from plait.model.layers.layers import Batch, Norm
from plait.model.layers.token_shift import SHIFT, MovedShift, TokenShift
from plait.model.mixers.registry import mixer
from plait.ops.activation import activate, combine, gate, multiply, rescale, scale_rows
from plait.ops.wkv import wkv4_scan, wkv6_scan, wkv7_scan
from plait.partition import Cut, Division, Rank, join_ranges, scale_range, sum_of, width
from plait.spec.recurrent import Wkv4Spec, Wkv6Spec, Wkv7Spec
from plait.state.store import StateStore

FIRST = "values of the first layer"  # in `Batch.step`


def _words4(m: Wkv4Spec) -> str:
    return f"RWKV-4 time mixing, {m.size} channels"


def _divide4(s: Wkv4Spec, rank: Rank, hidden_size: int) -> Division:
    ranges = rank.divide(s.size, "channels")
    own = join_ranges(ranges)
    cuts = {name: Cut((own,)) for name in ("k", "v", "gate", "decay", "first")}
    return Division(replace(s, size=width(own)), cuts | {"o": Cut(cols=sum_of(ranges))})


@mixer(Wkv4Spec, _words4, _divide4)
class Wkv4:
    def __init__(self, s: Wkv4Spec, w: Weights) -> None:
        self.name, hidden, size = w.prefix, w.target.hidden_size, (s.size,)
        self.shift = TokenShift(w, "k", "v", "gate")
        self.k, self.v, self.gate = (w.linear(x, in_size=hidden, out_sizes=size) for x in ("k", "v", "gate"))
        self.out = w.linear("o", in_size=s.size, out_sizes=(hidden,))
        self.decay, self.first = (w.tensor(name, size, torch.float32) for name in ("decay", "first"))
        self._scan, self._gate = w.bind(wkv4_scan, size=s.size), w.bind(gate)
        kept = dict.fromkeys(("sums", "weights", "largest"), (size, "float32"))
        self.states: dict[str, State] = {self.name: SlotState({SHIFT: self.shift.shape, **kept})}

    def __call__(self, x: Tensor, batch: Batch, store: StateStore) -> Tensor:
        """x: [T, hidden] -> [T, hidden]."""
        state = store[self.name]
        to_k, to_v, to_gate = self.shift(x, batch, state)
        states = (state["sums"], state["weights"], state["largest"])
        where = (batch.state_slots, batch.query_start, batch.has_history, batch.num_decodes)
        y = self._scan(self.k(to_k), self.v(to_v), self.decay, self.first, *states, *where)
        return self.out(self._gate(y, self.gate(to_gate)))


def _words6(m: Wkv6Spec) -> str:
    kind = f"RWKV-{6 if m.ranks else 5} time mixing" if m.norm else "gated linear attention with token shift"
    return f"{kind}, {m.num_heads} heads × {m.key_dim}, {m.num_kv_heads} kv of {m.value_dim}"


def _divide6(s: Wkv6Spec, rank: Rank, hidden_size: int) -> Division:
    """Heads are divided, with all that is theirs; token shift is whole."""
    heads = join_ranges(rank.divide(s.num_heads, "heads"))
    kv = rank.divide_for_heads(s.num_kv_heads, s.num_heads, "key-value heads")
    keys, values = Cut((scale_range(heads, s.key_dim),)), Cut((scale_range(heads, s.value_dim),))
    cuts = {"r": keys, "gate": values, "gated_norm": values, "bonus": Cut((heads,))}
    cuts |= {"decay.up": keys} if s.ranks else {"decay": Cut((heads,))}
    cuts |= {"k": Cut((scale_range(kv, s.key_dim),))}
    cuts |= {"v": Cut((scale_range(kv, s.value_dim),))}
    cuts["o"] = Cut(cols=sum_of(rank.divide(s.num_heads, "heads", s.value_dim)))
    return Division(replace(s, num_heads=width(heads), num_kv_heads=width(kv)), cuts)


@mixer(Wkv6Spec, _words6, _divide6)
class Wkv6:
    """`bonus` [heads, key_dim]: of a token's key. `decay`: its like, or linear layers `down` and `up`."""

    def __init__(self, s: Wkv6Spec, w: Weights) -> None:
        self.spec, self.name, hidden = s, w.prefix, w.target.hidden_size
        inputs = ("k", "v", "r", "gate")
        self.shift = MovedShift(w, s.ranks[0], "decay", *inputs) if s.ranks else TokenShift(w, *inputs)
        keys, values = s.num_heads * s.key_dim, s.num_heads * s.value_dim
        sizes = {
            "r": keys,
            "k": s.num_kv_heads * s.key_dim,
            "v": s.num_kv_heads * s.value_dim,
            "gate": values,
        }
        self.r, self.k, self.v, self.gate = (
            w.linear(name, in_size=hidden, out_sizes=(size,)) for name, size in sizes.items()
        )
        if s.ranks:
            low, rank = w.scope("decay"), s.ranks[1]
            narrow = low.linear("down", in_size=hidden, out_sizes=(rank,))
            self._low = narrow, low.linear("up", in_size=rank, out_sizes=(keys,))
        else:
            self.decay = w.tensor("decay", (s.num_heads, s.key_dim), torch.float32)
        self.out = w.linear("o", in_size=values, out_sizes=(hidden,))
        self.bonus = w.tensor("bonus", (s.num_heads, s.key_dim), torch.float32) if s.norm else None
        self.norm = Norm(s.norm, w.scope("gated_norm"), values, s.num_heads) if s.norm else None
        self._scan = w.bind(wkv6_scan, heads=s.num_heads, dim=s.value_dim, key_dim=s.key_dim)
        self._tanh, self._silu = w.bind(rescale), w.bind(activate, kind="silu", gated=False)
        self._gate, self._multiply = w.bind(gate), w.bind(multiply)
        kept = {"memory": ((s.num_heads, s.key_dim, s.value_dim), "float32"), SHIFT: self.shift.shape}
        self.states: dict[str, State] = {self.name: SlotState(kept)}

    def __call__(self, x: Tensor, batch: Batch, store: StateStore) -> Tensor:
        """x: [T, hidden] -> [T, hidden]."""
        state, (keys, values) = store[self.name], ((-1, self.spec.key_dim), (-1, self.spec.value_dim))
        *to_decay, to_k, to_v, to_r, to_gate = self.shift(x, batch, state)
        decay = self._make_decays(*to_decay) if to_decay else self.decay.expand(len(x), -1, -1)
        r, k, v = self.r(to_r).unflatten(-1, keys), self.k(to_k).unflatten(-1, keys), self.v(to_v)
        where = (batch.state_slots, batch.query_start, batch.has_history, batch.num_decodes)
        y = self._scan(r, decay, k, v.unflatten(-1, values), self.bonus, state["memory"], *where).flatten(1)
        if self.norm is None:
            return self.out(self._gate(y, self.gate(to_gate)))
        closing = self._silu(self.gate(to_gate), "silu", False)
        return self.out(self._multiply(self.norm(y), closing))

    def _make_decays(self, x: Tensor) -> Tensor:
        """x: [T, hidden] -> [T, heads, key_dim]."""
        narrow, widen = self._low
        made: Tensor = widen(self._tanh(narrow(x), 1.0, 1.0)).unflatten(-1, (-1, self.spec.key_dim))
        return made


def _words7(m: Wkv7Spec) -> str:
    return f"RWKV-7 time mixing, {m.num_heads} heads × {m.head_dim}"


def _divide7(s: Wkv7Spec, rank: Rank, hidden_size: int) -> Division:
    """Heads are divided, with all that is theirs; what leads to the small ranks is whole."""
    heads = join_ranges(rank.divide(s.num_heads, "heads"))
    own = Cut((scale_range(heads, s.head_dim),))
    names = ("r", "k", "v", "decay.up", "rate.up", "gate.up", "share.up", "gated_norm")
    cuts = dict.fromkeys(names, own) | {name: Cut((heads,)) for name in ("long", "less", "bonus")}
    cuts["o"] = Cut(cols=sum_of(rank.divide(s.num_heads, "heads", s.head_dim)))
    return Division(replace(s, num_heads=width(heads)), cuts)


@mixer(Wkv7Spec, _words7, _divide7)
class Wkv7:
    """`decay`, `rate`, `share` and `gate` have two linear layers each, `down` and `up`.

    `long`, `less` and `bonus` are [heads, d]: what keys are multiplied by to become the direction that is
    removed, how much the rate weakens them, and what adds a value to its own token's output.
    """

    def __init__(self, s: Wkv7Spec, w: Weights) -> None:
        self.spec, self.name, size = s, w.prefix, s.num_heads * s.head_dim
        hidden = w.target.hidden_size
        self.shift = TokenShift(w, "r", "decay", "k", "v", "rate", *(["gate"] if s.ranks[2] else []))
        self.r, self.k, self.v = (w.linear(x, in_size=hidden, out_sizes=(size,)) for x in "rkv")
        self.out = w.linear("o", in_size=size, out_sizes=(hidden,))
        self._low = {
            name: (
                w.scope(name).linear("down", in_size=hidden, out_sizes=(rank,)),
                w.scope(name).linear("up", in_size=rank, out_sizes=(size,)),
            )
            for name, rank in zip(("decay", "rate", "gate", "share"), s.ranks, strict=True)
            if rank
        }
        each = (s.num_heads, s.head_dim)
        self.scales = torch.stack([w.tensor(x, each, torch.float32) for x in ("long", "less", "bonus")])
        self.norm = Norm(s.norm, w.scope("gated_norm"), size, s.num_heads) if s.norm else None
        self._scan = w.bind(wkv7_scan, heads=s.num_heads, dim=s.head_dim)
        self._sigmoid, self._rescale = w.bind(activate, kind="sigmoid", gated=False), w.bind(rescale)
        self._combine, self._gate, self._multiply = w.bind(combine), w.bind(gate), w.bind(multiply)
        self._scale_rows = w.bind(scale_rows)
        kept = {SHIFT: self.shift.shape, "memory": ((s.num_heads, s.head_dim, s.head_dim), "float32")}
        self.states: dict[str, State] = {self.name: SlotState(kept)}

    def __call__(self, x: Tensor, batch: Batch, store: StateStore) -> Tensor:
        """x: [T, hidden] -> [T, hidden]."""
        state, heads = store[self.name], (self.spec.num_heads, -1)
        to_r, to_decay, to_k, to_v, to_rate, *to_gate = self.shift(x, batch, state)
        narrow, widen = self._low["decay"]
        decay = widen(self._rescale(narrow(to_decay), 1.0, 1.0))  # a tanh between
        v = self._mix_values(self.v(to_v), to_v, batch)
        parts = (self.r(to_r), decay, self.k(to_k), v, self._project("rate", to_rate))
        where = (batch.state_slots, batch.query_start, batch.has_history, batch.num_decodes)
        apart = [part.unflatten(-1, heads) for part in parts]
        y, bonus = self._scan(*apart, self.scales, state["memory"], *where)
        own = self._scale_rows(apart[3], bonus).flatten(1)
        y = self._combine(self.norm(y.flatten(1)) if self.norm else y.flatten(1), own, 1.0)
        if to_gate:
            narrow, widen = self._low["gate"]
            y = self._multiply(y, widen(self._sigmoid(narrow(to_gate[0]), "sigmoid", False)))
        return self.out(y)

    def _project(self, name: str, x: Tensor) -> Tensor:
        narrow, widen = self._low[name]
        return widen(narrow(x))

    def _mix_values(self, v: Tensor, x: Tensor, batch: Batch) -> Tensor:
        """Values take a share of those of the first layer, which it leaves for all others."""
        if "share" not in self._low:
            batch.step[FIRST] = v
            return v
        change = self._combine(batch.step[FIRST], v, -1.0)
        mixed: Tensor = self._combine(v, self._gate(change, self._project("share", x)), 1.0)
        return mixed
