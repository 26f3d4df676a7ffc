"""Later passes over layers that run several times (Inkling 2 Mini): gates mix in messages of the last one."""

from __future__ import annotations

from functools import reduce
from typing import Any

import torch
from torch import Tensor

from plait.checkpoint.weights import Weights
from plait.model.layers.layers import Batch, Norm
from plait.model.mixers.depth import BLOCKS, DepthBranch
from plait.model.mixers.registry import INNER, describe, divide_inside, mixer
from plait.ops.activation import combine, multiply, rescale
from plait.ops.rows import join
from plait.ops.streams import mix_sources
from plait.spec.branches import MessageSpec
from plait.state.store import StateStore

SENT = "blocks of the pass before"  # in `Batch.step`


def _words(m: MessageSpec) -> str:
    again = ", a pass begins" if m.restarts is not None else ""
    many = "a message" if m.messages == 1 else f"{m.messages} messages"
    return (
        f"{describe(m.parts[INNER])}, over {m.sources} earlier blocks, {many} of {m.sent} blocks of the pass "
        f"before by gates of rank {m.rank}{again}"
    )


class MessageGate:
    """(1 - forget) x + gain · message; both gates are tanh of a low-rank layer over x and message, normed.

    `down` [rank, 2 hidden], `forget` and `gain` [hidden, rank].
    """

    def __init__(self, s: MessageSpec, w: Weights) -> None:
        hidden = w.target.hidden_size
        self._down = w.linear("down", in_size=2 * hidden, out_sizes=(s.rank,))
        self._open = w.linear("forget", "gain", in_size=s.rank, out_sizes=(hidden, hidden))
        self._join, self._tanh = w.bind(join), w.bind(rescale)
        self._multiply, self._combine = w.bind(multiply), w.bind(combine)

    def __call__(self, x: Tensor, message: Tensor, normed: tuple[Tensor, Tensor]) -> Tensor:
        """x, message: [T, hidden], normed: both after their norm -> [T, hidden]."""
        gates = self._tanh(self._open(self._down(self._join(*normed))), 1.0, 1.0)
        forget, gain = gates.chunk(2, -1)
        kept = self._combine(x, self._multiply(x, forget), -1.0)
        mixed: Tensor = self._combine(kept, self._multiply(message, gain), 1.0)
        return mixed


@mixer(MessageSpec, _words, divide_inside)
class MessageBranch(DepthBranch):
    """`messages` [messages, hidden]: their queries; `gates.0` and on: `MessageGate`, one for each."""

    spec: MessageSpec

    def __init__(self, s: MessageSpec, w: Weights) -> None:
        super().__init__(s, w)
        self._hidden = w.target.hidden_size
        self._queries = w.tensor("messages", (s.messages, self._hidden), torch.float32)
        self._send = w.bind(mix_sources, sources=s.sent, reads=s.messages, size=self._hidden)
        self._gate_norm = Norm(s.gate_norm, w, self._hidden)
        self._gates = [MessageGate(s, w.scope(f"gates.{n}")) for n in range(s.messages)]
        self._join = w.bind(join)

    def __call__(self, x: Tensor, batch: Batch, store: StateStore) -> Tensor:
        """As `DepthBranch`; where a pass begins, x is what the pass before gave."""
        if self.spec.restarts is not None:
            x = _restart(x, batch.step, self.spec.restarts)
        return super().__call__(x, batch, store)

    def _mean(self, x: Tensor, batch: Batch) -> Tensor:
        """x: [T, hidden] -> [T, messages · hidden], each mean with its message."""
        s, mean = self.spec, super()._mean(x, batch)
        message = self._send(self._queries, s.eps, True, *batch.step[SENT])
        reads, messages = (t.split(self._hidden, -1) for t in (mean, message))
        normed = [self._gate_norm(read) for read in reads]
        many = s.messages // s.reads
        rows = zip(self._gates, reads * many, messages, normed * many, strict=True)
        mixed = (gate(read, told, (same, self._gate_norm(told))) for gate, read, told, same in rows)
        return reduce(self._join, mixed)

    def _normed(self, read: Tensor) -> Tensor:
        """Of three inputs, each with the one norm of a layer that reads one mean."""
        if self.spec.messages == self.spec.reads:
            return super()._normed(read)
        return super()._normed(read.view(-1, self._hidden)).view(read.shape)


def _restart(x: Tensor, step: dict[object, Any], first: int) -> Tensor:
    """What the first pass read, and blocks as they were in front of it. What the last pass made is sent."""
    ended: list[Tensor] = step[BLOCKS]
    begun, *others = ended[first:]
    step[SENT] = [*others, x]
    del ended[first:]
    return begun
