"""Later passes over layers that run several times (Inkling 2 Mini): gates mix in messages of the last one."""

from __future__ import annotations

import torch
from torch import Tensor

from plait.checkpoint.weights import Weights
from plait.model.layers.layers import Batch, Norm
from plait.model.layers.streams import Repeat
from plait.model.mixers.depth import BLOCKS, DepthBranch
from plait.model.mixers.registry import INNER, describe, divide_inside, mixer
from plait.ops.activation import rescale
from plait.ops.heads import map_heads
from plait.ops.rows import join
from plait.ops.streams import mix_sources
from plait.ops.wkv import mix_shift
from plait.spec.branches import DepthSpec, MessageSpec
from plait.state.store import StateStore

SENT = "blocks of the pass before"  # in `Batch.step`


def _words(m: MessageSpec) -> str:
    again = ", a pass begins" if m.restarts is not None else ""
    many = "a message" if m.messages == 1 else f"{m.messages} messages"
    return (
        f"{describe(m.parts[INNER])}, over {m.sources} earlier blocks, {many} of {m.sent} blocks of the pass "
        f"before by gates of rank {m.rank}{again}"
    )


class MessageGates:
    """(1 - f) x + g · message, side by side for each message; f and g are tanh of what both, normed, make.

    A matrix for each message, in one tensor: `down` [messages, rank, 2 hidden], `gain` [messages, hidden,
    rank], and `keep`, its like, which makes -f.
    """

    def __init__(self, s: MessageSpec, w: Weights) -> None:
        count, hidden, bind = s.messages, w.target.hidden_size, w.bind
        self.count, self._norm = count, Norm(s.gate_norm, w, 2 * count * hidden, 2 * count)
        self._down = w.tensor("down", (count, s.rank, 2 * hidden))
        self._wide = [w.tensor(x, (count, hidden, s.rank)) for x in ("keep", "gain")]
        self._join, self._map = bind(join), bind(map_heads, heads=count)
        self._tanh, self._mix = bind(rescale), bind(mix_shift)

    def __call__(self, x: Tensor, message: Tensor) -> Tensor:
        """x, message: [T, messages · hidden] -> its like."""
        both = self._join(*(t.unflatten(-1, (self.count, -1)) for t in (x, message)))
        narrow = self._map(self._norm(both.flatten(1)).view(both.shape), self._down)
        keep, gain = (self._tanh(self._map(narrow, wide).flatten(1), 1.0, 1.0) for wide in self._wide)
        mixed: Tensor = self._mix(self._mix(x, x, keep), message, gain)
        return mixed


@mixer(MessageSpec, _words, divide_inside)
class MessageBranch(DepthBranch):
    """`messages` [messages, hidden]: their queries; `gates`: `MessageGates`."""

    def __init__(self, s: MessageSpec, w: Weights) -> None:
        super().__init__(s, w)
        hidden, self._restarts = w.target.hidden_size, s.restarts
        self._queries = w.tensor("messages", (s.messages, hidden), torch.float32)
        self._send = w.bind(mix_sources, sources=s.sent, reads=s.messages, size=hidden)
        self._gates = MessageGates(s, w.scope("gates"))
        self._each = Repeat(s.messages, w) if s.messages > s.reads else None

    def _build_norm(self, s: DepthSpec, w: Weights) -> Norm | None:
        """Of a layer that reads one mean: one norm for each of the inputs."""
        if not isinstance(s, MessageSpec) or s.norm is None or s.messages == s.reads:
            return super()._build_norm(s, w)
        return Norm(s.norm, w.scope("norm"), s.messages * w.target.hidden_size, s.messages, is_same=True)

    def __call__(self, x: Tensor, batch: Batch, store: StateStore) -> Tensor:
        """As `DepthBranch`; where a pass begins, x is what the pass before gave."""
        if self._restarts is not None:
            x = _restart(x, batch, self._restarts)
        return super().__call__(x, batch, store)

    def _mean(self, x: Tensor, batch: Batch) -> Tensor:
        """x: [T, hidden] -> [T, messages · hidden], each mean with its message."""
        mean = super()._mean(x, batch)
        message = self._send(self._queries, self.spec.eps, True, *batch.step[SENT])
        return self._gates(self._each(mean) if self._each else mean, message)


def _restart(x: Tensor, batch: Batch, first: int) -> Tensor:
    """What the first pass read, and blocks as they were in front of it. What the last pass made is sent."""
    begun, *others = batch.step[BLOCKS][first:]
    batch.step[SENT] = [*others, x]
    del batch.step[BLOCKS][first:]
    read: Tensor = begun
    return read
