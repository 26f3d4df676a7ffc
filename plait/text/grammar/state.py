"""How far a reply has come in its grammar, and which tokens may follow."""

from __future__ import annotations

import time
from collections.abc import Sequence
from copy import copy
from typing import Any

import numpy as np
from msgspec import Struct

from plait.errors import BadGrammar, EngineError, OutOfMemory
from plait.resource_limits import is_free
from plait.text.grammar.library import CONTROL_MARKER, GrammarLimits, readable
from plait.text.grammar.vocabulary import Mask, Vocabulary


class CompiledGrammar(Struct, frozen=True):
    """A grammar at the beginning of a reply. It never changes; every reply gets a state of its own."""

    matcher: Any
    vocabulary: Vocabulary
    limits: GrammarLimits
    param: str | None = None

    def state(self) -> GrammarState:
        """A reply without a token yet."""
        return GrammarState(self)


class GrammarState:
    """One reply. Not for two threads at once; different states, of the same grammar too, do not meet.

    A method raises BadGrammar once the grammar has become too complex or too slow to follow. The reply must
    then fail, and never go on without its grammar.
    """

    def __init__(self, grammar: CompiledGrammar) -> None:
        self._matcher = grammar.matcher.deep_copy()
        self._vocabulary, self._limits, self._param = grammar.vocabulary, grammar.limits, grammar.param
        self._ended, self._left_s = False, grammar.limits.reply_s

    @property
    def may_stop(self) -> bool:
        """Whether the reply is complete as it is: exactly then an end of generation is allowed."""
        return self._ended or bool(self._matcher.is_accepting())

    @property
    def is_finished(self) -> bool:
        """Whether the reply is complete and nothing but an end of generation may follow."""
        return self._ended or bool(self._matcher.is_stopped() and not self._matcher.is_error())

    def fill(self, row: Mask) -> None:
        """Writes which tokens may come next: [num_words] uint32, contiguous. Releases the interpreter."""
        vocabulary = self._vocabulary
        if row.shape != vocabulary.usable.shape or row.dtype != np.uint32 or not row.flags.c_contiguous:
            raise EngineError(
                f"a mask is {vocabulary.num_words} contiguous uint32, not {list(row.shape)} of {row.dtype}"
            )
        if self._ended:
            row[:] = vocabulary.usable & ~vocabulary.usable_inside
            return
        if not is_free(self._limits.headroom_bytes // 2):
            raise OutOfMemory(
                "the limit on this process's memory (ulimit -v) ends a reply with a grammar; raise it"
            )
        began = time.thread_time()
        self._matcher.unsafe_compute_mask_ptr(row.ctypes.data, row.nbytes)
        self._left_s += self._limits.token_s - (time.thread_time() - began)
        self._check()
        # The library lets a grammar name any id: an end in the middle, or one that stands for nothing.
        within = vocabulary.usable if self._matcher.is_accepting() else vocabulary.usable_inside
        np.bitwise_and(row, within, out=row)
        if not row.any():
            raise BadGrammar("the grammar allows no token here that the model could write", self._param)

    def masks(self, draft: Sequence[int] = ()) -> tuple[bytes, ...]:
        """Masks of the next token and of those after each token of `draft`, as far as they are allowed.

        So a draft of which k tokens may stand gives k + 1 masks; the rest of it must be cut off. A mask is
        the bytes of `fill`'s row. The state stays where it is.
        """
        row = np.empty(self._vocabulary.num_words, np.uint32)
        found, taken = [], 0
        try:
            for token_id in (*draft, None):
                self.fill(row)
                found.append(row.tobytes())
                if token_id is None or token_id in self._vocabulary.ends or not allows(row, token_id):
                    break
                self._step(token_id)
                taken += 1
        finally:
            if taken and not self._matcher.rollback(taken):
                self._check()
        return tuple(found)

    def accept(self, token_id: int) -> None:
        """The reply has this token now. Raises EngineError for one that was not allowed."""
        if token_id in self._vocabulary.ends:
            self._check()
            if not self.may_stop:
                raise EngineError(f"token {token_id} ends a reply that its grammar does not let end here")
            self._ended = True
        elif self._ended:
            raise EngineError(f"token {token_id} follows the end of its reply")
        else:
            self._step(token_id)

    def _step(self, token_id: int) -> None:
        if not self._matcher.validate_tokens([token_id]):
            self._check()
            raise EngineError(f"token {token_id} was chosen where its grammar does not allow it")
        self._matcher.consume_token(token_id)
        self._check()

    def find_forced(self) -> tuple[int, ...]:
        """Tokens of the text that must come next, where there is no choice: a draft that is never wrong.

        It need not be how the model itself would cut that text.
        """
        if self._ended or self._matcher.is_stopped():
            return ()
        # A copy is used: the library takes the forced text for written, and then masks no control token.
        forced = self._matcher.deep_copy().compute_ff_bytes()
        try:
            text = forced.partition(CONTROL_MARKER)[0].decode()
        except UnicodeDecodeError:  # it begins or ends within a character
            return ()
        return self._vocabulary.ids(text) if text else ()

    def copy(self) -> GrammarState:
        """Another reply with the same beginning."""
        twin = copy(self)
        twin._matcher = self._matcher.deep_copy()
        return twin

    def _check(self) -> None:
        if self._matcher.is_error():
            reason = readable(self._matcher.get_error())
            raise BadGrammar(f"the grammar cannot be followed any further: {reason}", self._param)
        if self._left_s < 0:  # an ambiguous grammar costs more with every token, and the batch waits for it
            raise BadGrammar(
                f"the grammar takes more than {self._limits.token_s * 1e3:g} ms for a token, and "
                f"{self._limits.reply_s:g} s in all; make it less ambiguous",
                self._param,
            )


def allows(row: Mask, token_id: int) -> bool:
    """Whether a mask has this token's bit."""
    return 0 <= token_id < row.size * 32 and bool(row[token_id >> 5] >> np.uint32(token_id & 31) & 1)
