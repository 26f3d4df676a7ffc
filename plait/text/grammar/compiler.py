"""From descriptions to compiled grammars, within limits, in the engine."""

from __future__ import annotations

import threading
from collections.abc import Iterable

from plait.errors import BadGrammar, OutOfMemory
from plait.request import Grammar
from plait.resource_limits import is_free
from plait.text.grammar.checker import GrammarChecker
from plait.text.grammar.library import GrammarLimits, compile_grammar, readable
from plait.text.grammar.state import CompiledGrammar
from plait.text.grammar.vocabulary import Vocabulary, vocabulary_of
from plait.text.tokenizers.tokenizer import Tokenizer


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
