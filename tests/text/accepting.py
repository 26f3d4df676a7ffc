"""Whether grammars take whole replies, by the masks that they give on the way."""

from __future__ import annotations

from collections.abc import Sequence

from plait.request import Grammar
from plait.text.grammar.compiler import GrammarCompiler
from plait.text.grammar.state import GrammarState


def count_allowed(state: GrammarState, draft: Sequence[int]) -> int:
    """How many of the tokens may come next, one after the other. The state stays where it is."""
    return len(state.masks(draft)) - 1


def accepts(compiler: GrammarCompiler, grammar: Grammar | None, text: str) -> bool:
    """Whether a whole reply may be this text, with control tokens where the text has their names."""
    assert grammar is not None
    ids = compiler.vocabulary.tokenizer.encode(text, add_special=False, allow_special=True)
    return accepts_ids(compiler.compile(grammar).state(), ids)


def accepts_ids(state: GrammarState, ids: Sequence[int]) -> bool:
    """Whether these tokens may come next, and the reply may end behind them. If so, they are accepted."""
    if count_allowed(state, ids) < len(ids):
        return False
    for token_id in ids:
        state.accept(token_id)
    return state.may_stop
