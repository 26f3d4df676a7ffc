"""llguidance, as Plait uses it: its limits, a table of tokens, a compiled grammar, readable errors."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from plait.errors import clip_text

CONTROL_MARKER = b"\xff"
"""The library's mark at the head of control tokens; no valid UTF-8 holds that byte."""
_LINE, _SHOWN = 120, 260
_MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class GrammarLimits:
    """What one grammar may cost.

    `max_bytes`: of its source. `cpu_s`, `memory_bytes`, `stack_bytes`: of the process that tries it out;
    `timeout_s`: how long that may take by the clock, on a busy machine; `start_s`: for that process to come
    up. `children`: how many such processes there are. `wait_s`: how long a request waits for its grammar's
    verdict, if it has no shorter time of its own; `max_waiting`: grammars of one key that may wait.
    `trial_steps`: how many bytes of a reply are tried. `max_row_items` and `max_step_items` (in the parser),
    `step_fuel` and `max_lexer_states` (in the lexer; 1 to 2 kB each) bound each token of a reply in memory;
    its masks may take `reply_s` of the processor in all, and `token_s` more for each. `remembered_bytes`: of
    verdicts on recent grammars. `headroom_bytes`: of memory that must be free, where the process has a limit,
    before the library works: it ends its process where it gets none.
    """

    max_bytes: int = 256 << 10
    cpu_s: float = 2.0
    memory_bytes: int = 512 * _MIB
    stack_bytes: int = _MIB
    timeout_s: float = 10.0
    start_s: float = 60.0
    children: int = 2
    wait_s: float = 300.0
    max_waiting: int = 256
    trial_steps: int = 128
    max_row_items: int = 1_000
    max_step_items: int = 50_000
    step_fuel: int = 200_000
    max_lexer_states: int = 50_000
    reply_s: float = 1.0
    token_s: float = 0.02
    remembered_bytes: int = 16 * _MIB
    headroom_bytes: int = 64 * _MIB


class _Words:
    """The interface of a tokenizer that the library needs."""

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(self, tokens: list[bytes], special: list[int], eos: int) -> None:
        self.tokens = tokens
        self.special_token_ids = special
        self.eos_token_id = eos

    def __call__(self, text: str) -> list[int]:
        """Never called: the grammars that we compile force nothing."""
        raise NotImplementedError("no grammar may depend on how a text is cut into tokens")


def token_table(tokens: Sequence[bytes], special: Sequence[int], ends: Sequence[int]) -> object:
    """The library's index of a vocabulary. `special`: control tokens, which no text matches; `ends` is not
    empty. An id without bytes is never allowed."""
    import llguidance

    # A token that begins with the marker would pass for a control token.
    hidden = set(special)
    kept = [
        b"" if t[:1] == CONTROL_MARKER and len(t) > 1 and i not in hidden else t for i, t in enumerate(tokens)
    ]
    words: Any = _Words(kept, list(special), ends[0])
    table = llguidance.LLTokenizer(words, eos_token=list(ends))
    words.tokens = []  # it has its own copy
    return table


def compile_grammar(table: Any, form: str, limits: GrammarLimits) -> Any:
    """A matcher at the beginning of a reply; one that `is_error()` if the grammar could not be compiled."""
    import llguidance

    bounds = llguidance.LLParserLimits(
        max_items_in_row=limits.max_row_items,
        step_max_items=limits.max_step_items,
        step_lexer_fuel=limits.step_fuel,
        max_lexer_states=limits.max_lexer_states,
        precompute_large_lexemes=False,
        verbose_errors=False,
    )
    return llguidance.LLMatcher(table, form, log_level=0, limits=bounds)


PARTS = ("lead", "opening", "instead")
"""What may come with a described reply: fields of a `Grammar`, rules of the library's grammar."""


def with_parts(form: str, **parts_by_name: str) -> str:
    """A serialized grammar of two, the outer of which refers to `@reply`, with Lark sources for its parts.

    `parts_by_name`: of `PARTS`, "" for none. `lead` and `opening` come before the reply, and `instead` may
    replace the reply with its opening.
    """
    parts = [{"name": name, "lark_grammar": parts_by_name[name]} for name in PARTS if parts_by_name.get(name)]
    if not parts:
        return form
    outer, reply = json.loads(form)["grammars"]
    start = "@opening @reply" if parts_by_name.get("opening") else "@reply"
    start = f"( {start} | @instead )" if parts_by_name.get("instead") else start
    start = f"@lead {start}" if parts_by_name.get("lead") else start
    outer["lark_grammar"] = outer["lark_grammar"].replace("@reply", start)
    return json.dumps({"grammars": [outer, reply, *parts]}, ensure_ascii=False)


# Advice for the library's callers does not help a server's clients: (what it writes, what is true here).
_ADVICE = (
    "oneOf constraints are not supported. Enable 'coerce_one_of' option to approximate oneOf with anyOf",
    "oneOf is not supported where two of its schemas may both hold; send anyOf, or schemas that do not",
)


def readable(complaint: str) -> str:
    """A complaint of the library in one line of bounded length: it quotes the grammar, and draws arrows."""
    complaint = complaint.replace(*_ADVICE)
    lines = complaint.split("\n<backtrace>")[0].replace("<non-verbose/>", "").split("\n")
    kept = [clip_text(" ".join(line.split()), _LINE) for line in lines if line.strip(" ^")]
    kept[1:] = sorted(kept[1:], key=lambda line: not line.startswith("error"))  # the cause before quotes
    text = "; ".join(kept).replace(":;", ":")
    return (text if len(text) <= _SHOWN else text[: _SHOWN - 1] + "…") or "no reason given"
