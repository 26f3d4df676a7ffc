"""From descriptions to compiled grammars, within limits, before a request is admitted."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import replace

from plait.errors import BadGrammar
from plait.text.grammar.grammar import Grammar, GrammarLimits
from plait.text.grammar.library import PARTS, compiled, readable, with_parts
from plait.text.grammar.state import CompiledGrammar
from plait.text.grammar.trial import Trial
from plait.text.grammar.vocabulary import Vocabulary, vocabulary_of
from plait.text.tokenizer import Tokenizer


class GrammarCompiler:
    """Compiles the grammars of one model. Thread-safe; meant for worker threads, as compiling blocks.

    The vocabulary's table and the trying process are made when they are first needed, or by `start`.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        vocab_size: int | None = None,
        *,
        ends: Iterable[int] = (),
        limits: GrammarLimits | None = None,
    ) -> None:
        self.limits = limits or GrammarLimits()
        self.tokenizer, self._vocab_size, self._ends = tokenizer, vocab_size, frozenset(ends)
        self._lock = threading.Lock()
        self._made: tuple[Vocabulary, Trial] | None = None
        self._verdicts = _Verdicts(self.limits.remembered_bytes)

    def start(self) -> None:
        """Makes the vocabulary's table and the trying process now."""
        self._parts()[1].start()

    @property
    def vocabulary(self) -> Vocabulary:
        return self._parts()[0]

    def compile(self, grammar: Grammar) -> CompiledGrammar:
        """Raises BadGrammar, with the reason, for one that is wrong, not supported or too costly.

        CapacityError when it could not be tried out just now.
        """
        self._check_size(grammar)
        vocabulary, trial = self._parts()
        matcher = compiled(vocabulary.table, self._form(grammar, trial), self.limits)
        if matcher.is_error():
            reason = readable(matcher.get_error())
            raise BadGrammar(f"the grammar cannot be honoured: {reason}", grammar.param)
        return CompiledGrammar(matcher, vocabulary, self.limits, grammar.param)

    def close(self) -> None:
        """Ends the trying process. A later grammar starts a new one."""
        with self._lock:
            if self._made is not None:
                self._made[1].close()

    def _parts(self) -> tuple[Vocabulary, Trial]:
        with self._lock:
            if self._made is None:
                vocabulary = vocabulary_of(self.tokenizer, self._vocab_size, self._ends)
                described = {
                    "size": vocabulary.size,
                    "special": dict(vocabulary.special),
                    "ends": sorted(vocabulary.ends),
                }
                self._made = vocabulary, Trial(described, self.limits)
            return self._made

    def _check_size(self, grammar: Grammar) -> None:
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

    def _form(self, grammar: Grammar, trial: Trial) -> str:
        """What the library compiles. A grammar is tried once; the verdict is remembered.

        It is tried without what the server put beside it: no trial would get through a block of thinking.
        """
        beside = {name: getattr(grammar, name) for name in PARTS}
        grammar = replace(grammar, lead="", opening="", instead="")
        verdict = self._verdicts.get(grammar)
        if verdict is None:
            try:
                verdict = True, trial.run(grammar)
            except BadGrammar as refusal:
                verdict = False, str(refusal)
            self._verdicts.put(grammar, verdict)
        good, text = verdict
        if not good:
            raise BadGrammar(text, grammar.param)
        return with_parts(text, **beside)


Verdict = tuple[bool, str]
"""Whether a grammar is good, and its form or what is wrong with it."""


class _Verdicts:
    """Verdicts on the grammars asked for last, as many as fit into `max_bytes`."""

    def __init__(self, max_bytes: int) -> None:
        self._max_chars = max_bytes // 4  # what a character may take
        self._lock = threading.Lock()
        self._kept: OrderedDict[Grammar, Verdict] = OrderedDict()
        self._chars = 0

    def get(self, grammar: Grammar) -> Verdict | None:
        with self._lock:
            if grammar in self._kept:
                self._kept.move_to_end(grammar)
            return self._kept.get(grammar)

    def put(self, grammar: Grammar, verdict: Verdict) -> None:
        with self._lock:
            self._kept[grammar] = verdict
            self._chars += _chars(grammar, verdict)
            while self._chars > self._max_chars:
                self._chars -= _chars(*self._kept.popitem(last=False))


def _chars(grammar: Grammar, verdict: Verdict) -> int:
    return len(grammar.source) + len(verdict[1]) + 64  # and the objects around them
