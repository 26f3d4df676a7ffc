"""Hidden states of a prompt as one vector, gathered over the steps that compute it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from plait.errors import EngineError
from plait.request import Pooling


@dataclass(slots=True)
class Pool:
    """Of one sequence: the sum so far, of `length` tokens: its first ones ("mean") or its last ("last")."""

    kind: Pooling
    total: tuple[float, ...] = ()
    length: int = 0

    @property
    def needs_all_tokens(self) -> bool:
        """Whether tokens whose state is known already must be computed: hidden states are not kept."""
        return self.kind == "mean"

    def wanted(self, start: int, end: int, num_tokens: int) -> int:
        """How many hidden states, at its end, a chunk start..end of so many tokens must give."""
        if self.kind == "last":
            return int(end == num_tokens)
        return max(end - max(start, self.length), 0)

    def add(self, total: Sequence[float], end: int) -> None:
        """What the chunk that ended there gave. Raises EngineError if it is nothing, or of another size."""
        if not total or (self.total and len(self.total) != len(total)):
            raise EngineError(f"{len(total)} numbers of hidden state arrived, after {len(self.total)}")
        if self.kind == "last":
            self.total, self.length = tuple(total), 1
        else:
            before = self.total or (0.0,) * len(total)
            self.total, self.length = tuple(a + b for a, b in zip(before, total, strict=True)), end

    def vector(self) -> tuple[float, ...]:
        """The pooled hidden state, as long as the model is wide."""
        return tuple(value / self.length for value in self.total)
