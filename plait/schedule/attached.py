"""What some sequences have with them: a guide of their tokens, or a sum of their hidden states."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from msgspec import Struct

from plait.errors import EngineError
from plait.request import Pooling


class Guide(Protocol):
    """Constrains the tokens of one sequence, see `engine.grammar_guide.GrammarGuide`. Nothing raises."""

    is_wanted: bool

    @property
    def error(self) -> Exception | None: ...
    @property
    def is_ready(self) -> bool: ...
    @property
    def is_finished(self) -> bool: ...
    def masks(self, draft: tuple[int, ...] = ()) -> tuple[bytes, ...]: ...
    def accept(self, token_id: int) -> bool: ...
    def find_forced(self) -> tuple[int, ...]: ...


class PooledHidden(Struct):
    """The sum of a sequence's hidden states so far: of its first `length` tokens ("mean"), or its last one.

    `first`: how many tokens at its beginning a mean leaves out.
    """

    kind: Pooling
    first: int = 0
    total: tuple[float, ...] = ()
    length: int = 0

    @property
    def needs_all_tokens(self) -> bool:
        """Whether tokens with known state must be computed too, because hidden states are not kept."""
        return self.kind == "mean"

    def count_new(self, start: int, end: int, num_tokens: int) -> int:
        """How many hidden states, at its end, a chunk start..end of so many tokens must give."""
        if self.kind == "last":
            return int(end == num_tokens)
        return max(end - max(start, self.length, self.first), 0)

    def add(self, total: Sequence[float], end: int) -> None:
        """Add the sum of the chunk that ended at `end`. Raises EngineError if it is empty or misshapen."""
        if not total or (self.total and len(self.total) != len(total)):
            raise EngineError(f"{len(total)} numbers of hidden state arrived, after {len(self.total)}")
        if self.kind == "last":
            self.total, self.length = tuple(total), 1
        else:
            before = self.total or (0.0,) * len(total)
            self.total, self.length = tuple(a + b for a, b in zip(before, total, strict=True)), end

    def vector(self) -> tuple[float, ...]:
        """The pooled hidden state, as long as the model is wide."""
        count = self.length - self.first if self.kind == "mean" else 1
        return tuple(value / count for value in self.total)
