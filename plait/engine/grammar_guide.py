"""Guides of structured output, followed token by token: a reply's grammar and its thinking budget.

Grammars are compiled on a thread of their own, and tenants take turns. A sequence waits in the queue until
its guide is ready, and no step waits for it. A guide that can no longer be followed ends its own sequence,
which never goes on without its grammar.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from copy import copy

import numpy as np

from plait.errors import InvalidField, OutOfMemory
from plait.fair_queue import Lanes
from plait.request import Request, ThinkingBudget
from plait.text.grammar.compiler import GrammarCompiler
from plait.text.grammar.state import GrammarState, allows

ANYTHING = b""  # the mask of a token that is free


class GrammarGuide:
    """Masks of allowed tokens for one sequence; `schedule.sequence.Guide` is the scheduler's view of it.

    Made ready by one thread and used by another. Nothing raises: `error` is why it cannot be followed.
    `is_wanted` False: its reply has ended, so it need not be made ready any more.
    """

    def __init__(self, vocab_size: int) -> None:
        self.error: Exception | None = None
        self.is_ready, self.is_wanted = False, True
        self._num_words = (vocab_size + 31) // 32
        self._grammar: GrammarState | None = None
        self._watch: ThinkingWatch | None = None
        self._known: tuple[tuple[int, ...], tuple[bytes, ...]] | None = None  # draft, masks

    def begin(
        self, grammar: GrammarState | None, watch: ThinkingWatch | None, so_far: Sequence[int] = ()
    ) -> None:
        """Make the guide ready. `so_far`: tokens that the reply has already."""
        self._grammar, self._watch = grammar, watch
        for token_id in so_far:
            self.accept(token_id)
        self.is_ready = True

    @property
    def is_finished(self) -> bool:
        """Whether nothing but the end may follow."""
        return self.error is None and self._grammar is not None and self._grammar.is_finished

    def masks(self, draft: Sequence[int] = ()) -> tuple[bytes, ...]:
        """Masks of the next token, and of the token after each allowed token of `draft`.

        So the draft must be cut to one less than there are masks. (): anything is allowed, or nothing more.
        """
        if self.error is not None:
            return ()
        draft = tuple(draft)
        if self._known is None or self._known[0][: len(draft)] != draft:
            try:
                masks = self._masks(draft)
            except Exception as error:
                self.error = error
                return ()
            self._known = draft[: len(masks) - 1], masks
        return self._known[1][: len(draft) + 1]

    def accept(self, token_id: int) -> bool:
        """Record the reply's next token. Returns whether the reply must end with it."""
        self._known = None
        try:
            if self._grammar is not None and self.error is None:
                self._grammar.accept(token_id)
            if self._watch is not None:
                self._watch.push(token_id)
            return self.is_finished
        except Exception as error:
            self.error = error
            return True

    def find_forced(self) -> tuple[int, ...]:
        """Tokens that must come next: a draft that is always accepted."""
        if self.error is not None:
            return ()
        if self._watch is not None and self._watch.due:
            return self._watch.due
        try:
            return self._grammar.find_forced() if self._grammar is not None else ()
        except Exception as error:
            self.error = error
            return ()

    def _masks(self, draft: tuple[int, ...]) -> tuple[bytes, ...]:
        rows = (ANYTHING,) * (len(draft) + 1) if self._grammar is None else self._grammar.masks(draft)
        if self._watch is None:
            return rows
        watch, found = self._watch.copy(), []
        for i, row in enumerate(rows):
            must = next(iter(watch.due), None)
            if must is not None and row and not allows(np.frombuffer(row, np.uint32), must):
                must = None
            found.append(row if must is None else self._only(must))
            if i == len(draft) or (must is not None and draft[i] != must):
                break
            watch.push(draft[i])
        return tuple(found)

    def _only(self, token_id: int) -> bytes:
        words = np.zeros(self._num_words, np.uint32)
        words[token_id >> 5] = np.uint32(1 << (token_id & 31))
        return words.tobytes()


class Guides:
    """Makes the guides of one model's requests.

    `find` gives the compiler when one is first needed; if it raises, the request ends with that error.
    """

    def __init__(self, find: Callable[[], GrammarCompiler], vocab_size: int) -> None:
        self._find, self._vocab_size = find, vocab_size
        self._compiler: GrammarCompiler | None = None
        self._lock = threading.Lock()
        self._worker: ThreadPoolExecutor | None = None
        self._turns: Lanes[tuple[Request, list[GrammarGuide]]] = Lanes()

    def open(self, request: Request) -> list[GrammarGuide]:
        """A guide for each choice of a request with a grammar or a thinking budget, not ready yet."""
        guides = [GrammarGuide(self._vocab_size) for _ in range(request.params.n)]
        with self._lock:
            if self._worker is None:
                self._worker = ThreadPoolExecutor(1, "plait-grammar")
            self._turns.put(request.tenant, (request, guides))
            try:
                self._worker.submit(self._begin_next)
            except RuntimeError as error:  # the system gives no thread
                self._turns.drop(request.tenant, (request, guides))
                self._worker = None
                for guide in guides:
                    guide.error = OutOfMemory(f"no thread can be started that compiles grammars: {error}")
        return guides

    def close(self) -> None:
        """Stop the thread and the process that tries grammars; waiting grammars are not compiled."""
        with self._lock:
            if self._worker is not None:
                self._worker.shutdown(wait=False, cancel_futures=True)
                self._worker = None
        if self._compiler is not None:
            self._compiler.close()

    def _begin_next(self) -> None:
        with self._lock:
            found = self._turns.take()
        if found is not None:
            self._begin(*found[1])

    def _begin(self, request: Request, guides: Sequence[GrammarGuide]) -> None:
        if not any(guide.is_wanted for guide in guides):
            return
        try:
            compiler = self._compiler = self._compiler or self._find()
            grammar = None if request.grammar is None else compiler.compile(request.grammar)
            for guide, so_far in zip(guides, request.resumed or ((),) * len(guides), strict=True):
                budget = request.thinking
                watch = None if budget is None else ThinkingWatch(budget, compiler.tokenizer.token_bytes)
                guide.begin(None if grammar is None else grammar.state(), watch, so_far or ())
        except Exception as error:
            for guide in guides:
                guide.error = error


def refuse_guides(request: Request) -> list[GrammarGuide]:
    """For an engine without a vocabulary: raises InvalidField, because a request needs a guide."""
    name = "thinking_token_budget" if request.grammar is None else "grammar"
    raise InvalidField(f"{name}: this engine has no vocabulary, so it cannot hold a reply to it", name)


class ThinkingWatch:
    """Counts a reply's tokens of thinking, and demands their end when the budget is used up.

    `token_bytes`: what a token stands for.
    """

    def __init__(self, budget: ThinkingBudget, token_bytes: Callable[[int], bytes]) -> None:
        self._budget, self._token_bytes = budget, token_bytes
        self._opening, closing = budget.opening.encode(), budget.closing.encode()
        self._closings, self._own = (closing, *(text.encode() for text in budget.closings)), (closing,)
        self._until = tuple(text.encode() for text in budget.until)
        self._longest = max(map(len, (self._opening, *self._closings, *self._until)))
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
        self._tail = self._tail[-self._longest :]
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
        markers = (*self._closings, *self._until) if self._is_open else (self._opening,)
        found = min(((at, text) for text in markers if (at := self._tail.find(text)) >= 0), default=None)
        if found is None:
            return False
        at, text = found
        self._tail = self._tail[at + (0 if text in self._until else len(text)) :]
        self._is_open, self._closings = not self._is_open, self._own
        return True

    def _demand(self) -> None:
        if self._is_open and self._used >= self._budget.num_tokens:
            self._due = self._budget.closing_ids
