"""Grammars are tried out in the front, before an engine gets them. Loads no numpy: a front starts without."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from concurrent.futures import Future

from plait.errors import BadGrammar
from plait.request import Grammar
from plait.text.grammar.library import GrammarLimits
from plait.text.grammar.trial_pool import TrialPool, Verdict, apply_verdict, too_late
from plait.text.tokenizers.tokenizer import Tokenizer


class GrammarChecker:
    """Has the grammars of one model tried out. Thread-safe. Processes start when needed, or by `start`."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        vocab_size: int | None = None,
        *,
        ends: Iterable[int] = (),
        limits: GrammarLimits | None = None,
    ) -> None:
        self.limits = limits or GrammarLimits()
        self.tokenizer, self.ends = tokenizer, frozenset(ends)
        self.vocab_size = tokenizer.vocab_size if vocab_size is None else vocab_size
        self._lock = threading.Lock()
        self._pool: TrialPool | None = None

    def start(self) -> None:
        """Starts the trying processes now. Raises BadGrammar (no reply could end) and CapacityError."""
        self._trials().start()

    def submit(self, grammar: Grammar, key: str = "") -> Future[Verdict]:
        """The verdict on a grammar, see `TrialPool.submit`. Raises BadGrammar for one that is too large."""
        self.check_size(grammar)
        return self._trials().submit(grammar, key)

    def check(self, grammar: Grammar, timeout_s: float | None = None) -> Grammar:
        """The same grammar, tried out; blocks. Raises BadGrammar with the reason if it is not good.

        CapacityError when it could not be tried out in `timeout_s`, or `limits.wait_s`.
        """
        if grammar.form:
            return grammar
        future = self.submit(grammar)
        try:
            return apply_verdict(grammar, future.result(timeout_s or self.limits.wait_s))
        except TimeoutError as error:
            future.cancel()
            raise too_late(timeout_s or self.limits.wait_s) from error

    def check_size(self, grammar: Grammar) -> None:
        """Raises BadGrammar for a grammar that is too large to be tried."""
        try:
            size = len(grammar.source.encode())
        except UnicodeEncodeError as error:
            raise BadGrammar(
                "the grammar holds half of a surrogate pair, which is not a character", grammar.param
            ) from error
        if size > self.limits.max_bytes:
            raise BadGrammar(
                f"the grammar has {size} bytes; at most {self.limits.max_bytes} are allowed", grammar.param
            )

    def close(self) -> None:
        """Ends the trying processes. A later grammar starts new ones."""
        with self._lock:
            if self._pool is not None:
                self._pool.close()

    def _trials(self) -> TrialPool:
        with self._lock:
            if self._pool is None:
                ends = ends_of(self.tokenizer, self.vocab_size, self.ends)
                described = {
                    "size": self.vocab_size,
                    "special": dict(special_of(self.tokenizer, self.vocab_size, ends)),
                    "ends": sorted(ends),
                }
                self._pool = TrialPool(described, self.limits)
            return self._pool


def ends_of(tokenizer: Tokenizer, size: int, more: Iterable[int] = ()) -> frozenset[int]:
    """The ids below `size` that end a reply, `more` among them. Raises BadGrammar if there are none."""
    found = frozenset(i for i in tokenizer.eos_token_ids | set(more) if 0 <= i < size)
    if not found:
        raise BadGrammar("this model's vocabulary has no token that ends a reply, so no grammar can be kept")
    return found


def special_of(tokenizer: Tokenizer, size: int, ends: frozenset[int]) -> dict[int, str]:
    """The texts of the control tokens below `size`, those that end a reply among them."""
    return {i: tokenizer.token_text(i) for i in sorted(tokenizer.special_ids | ends) if i < size}
