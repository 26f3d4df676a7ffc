"""From descriptions to compiled grammars, within limits: tried out in the front, compiled in the engine."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from concurrent.futures import Future

from plait.errors import BadGrammar, OutOfMemory
from plait.request import Grammar
from plait.resource_limits import is_free
from plait.text.grammar.library import GrammarLimits, compile_grammar, readable
from plait.text.grammar.state import CompiledGrammar
from plait.text.grammar.trial_pool import TrialPool, Verdict, apply_verdict, too_late
from plait.text.grammar.vocabulary import Vocabulary, ends_of, special_of, vocabulary_of
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


class GrammarCompiler:
    """Compiles the grammars of one model. Thread-safe; meant for worker threads, as compiling blocks.

    A grammar without a form is tried out first. The vocabulary's table is made when it is first needed.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        vocab_size: int | None = None,
        *,
        ends: Iterable[int] = (),
        limits: GrammarLimits | None = None,
    ) -> None:
        self.checker = GrammarChecker(tokenizer, vocab_size, ends=ends, limits=limits)
        self.tokenizer, self.limits = tokenizer, self.checker.limits
        self._lock = threading.Lock()
        self._vocabulary: Vocabulary | None = None

    @property
    def vocabulary(self) -> Vocabulary:
        with self._lock:
            if self._vocabulary is None:
                checker = self.checker
                self._vocabulary = vocabulary_of(self.tokenizer, checker.vocab_size, checker.ends)
            return self._vocabulary

    def compile(self, grammar: Grammar) -> CompiledGrammar:
        """Raises BadGrammar, with the reason, for one that is wrong, not supported or too costly.

        CapacityError when it could not be tried out just now, OutOfMemory where memory is too short for it.
        """
        form = self.checker.check(grammar).form
        check_memory(self.limits.headroom_bytes)
        vocabulary = self.vocabulary
        matcher = compile_grammar(vocabulary.table, form, self.limits)
        if matcher.is_error():
            reason = readable(matcher.get_error())
            raise BadGrammar(f"the grammar cannot be honoured: {reason}", grammar.param)
        return CompiledGrammar(matcher, vocabulary, self.limits, grammar.param)

    def close(self) -> None:
        """Ends the trying processes. A later grammar starts new ones."""
        self.checker.close()


def check_memory(nbytes: int) -> None:
    """Raises OutOfMemory where a limit leaves less than that: the library would end the process."""
    if not is_free(nbytes):
        raise OutOfMemory(
            f"the limit on this process's memory (ulimit -v) leaves less than the {nbytes >> 20} MiB that a "
            "grammar may need; raise it, or ask for free text"
        )
