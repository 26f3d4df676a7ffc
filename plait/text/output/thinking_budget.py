"""The thinking budget: counts a reply's tokens of thinking, and forces their end when it is used up."""

from __future__ import annotations

from collections.abc import Callable
from copy import copy

from plait.request import ThinkingBudget


class ThinkingWatch:
    """Follows one reply, token by token. `token_bytes`: what a token stands for."""

    def __init__(self, budget: ThinkingBudget, token_bytes: Callable[[int], bytes]) -> None:
        self._budget, self._token_bytes = budget, token_bytes
        self._opening, self._closing = budget.opening.encode(), budget.closing.encode()
        self._is_open, self._used, self._tail = budget.is_open, 0, b""
        self._may_begin = True  # nothing but thinking and white space so far
        self._due: tuple[int, ...] = ()
        self._demand()

    @property
    def due(self) -> tuple[int, ...]:
        """The tokens that must come now, one after the other; none while the reply is free."""
        return self._due

    def push(self, token_id: int) -> None:
        """The reply has this token now."""
        self._due = self._due[1:] if self._due[:1] == (token_id,) else ()
        self._used += self._is_open
        self._tail += self._token_bytes(token_id)
        while self._turn():
            pass
        self._tail = self._tail[-max(len(self._opening), len(self._closing)) :]
        if not self._due:
            self._demand()

    def copy(self) -> ThinkingWatch:
        """Another reply with the same beginning."""
        return copy(self)

    def _turn(self) -> bool:
        """Take the next marker out of the text, if it is there: thinking begins or ends."""
        if not self._is_open and not self._budget.anywhere:
            self._tail = self._tail.lstrip() if self._may_begin else b""
            goes_on = self._tail[: len(self._opening)] == self._opening[: len(self._tail)]
            self._may_begin = self._may_begin and goes_on
            if not self._may_begin:
                return False
        _, marker, rest = self._tail.partition(self._closing if self._is_open else self._opening)
        if marker:
            self._is_open, self._tail = not self._is_open, rest
        return bool(marker)

    def _demand(self) -> None:
        if self._is_open and self._used >= self._budget.num_tokens:
            self._due = self._budget.closing_ids
