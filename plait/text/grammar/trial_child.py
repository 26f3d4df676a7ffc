"""The process that tries grammars out: limited in time, memory and stack, and nothing worth stealing.

The library that compiles them ends its process on a chain of a few thousand `$ref`s. It allocates gigabytes
for a thousand regular expressions at once, and compares a thousand `patternProperties` for minutes. Here that
harms no other request. Requests and answers are one JSON object a line on standard input and output:
`{"size", "special", "ends", "limits"}` comes first; then the fields of a `Grammar` that describe the reply
→ `{"form"}`, which is what the library compiles, or `{"error"}`.
"""

from __future__ import annotations

import json
import random
import signal
import sys
import threading
from collections.abc import Mapping, Sequence
from typing import Any

from plait.request import JsonStyle
from plait.text.grammar.library import PARTS, GrammarLimits, compile_grammar, token_table, with_parts
from plait.text.grammar.source import library_form
from plait.text.isolation.confine import confine

_NOTHING = "it allows no reply at all"


class Trials:
    """Tries grammars over a small vocabulary: the 256 bytes, and the model's control tokens at their ids."""

    def __init__(self, vocabulary: Mapping[str, Any], limits: GrammarLimits) -> None:
        special = {int(i): text.encode() for i, text in vocabulary["special"].items()}
        self._ends = frozenset(int(i) for i in vocabulary["ends"])
        size = max(vocabulary["size"], 256 + len(special))
        free = (i for i in range(size) if i not in special)
        self._bytes = [next(free) for _ in range(256)]
        tokens = [special.get(i, b"") for i in range(size)]
        for byte, i in enumerate(self._bytes):
            tokens[i] = bytes([byte])
        self._table = token_table(tokens, sorted(special), sorted(self._ends))
        self._rest = sorted(special.keys() - self._ends)
        self._limits = limits

    def answer(self, request: Mapping[str, Any]) -> dict[str, str]:
        """The answer to the parent about one grammar.

        A reply is tried without the server's own parts: no trial would get through its thinking.
        """
        try:
            kind, source, style = request["kind"], request["source"], style_of(request)
            form = library_form(kind, source, style, self._limits.max_bytes)
        except ValueError as error:
            return {"error": str(error)}
        matcher = compile_grammar(self._table, form, self._limits)
        failed = matcher.get_error() if matcher.is_error() else self._walk(matcher)
        if failed:
            return {"error": failed}
        whole = with_parts(form, **{name: request.get(name, "") for name in PARTS})
        if whole != form:
            matcher = compile_grammar(self._table, whole, self._limits)
        return {"error": matcher.get_error()} if whole != form and matcher.is_error() else {"form": whole}

    def _walk(self, matcher: Any) -> str:
        """Writes the beginning of some reply, always the same; returns the library's error, or ""."""
        choose = random.Random(0)
        for step in range(self._limits.trial_steps):
            mask = matcher.compute_bitmask()
            if matcher.is_error():
                return (
                    str(matcher.get_error()) if step or "NoExtension" not in matcher.get_error() else _NOTHING
                )
            allowed = _set_bits(mask, self._bytes) or _set_bits(mask, self._rest)
            if not allowed:
                return "" if matcher.is_accepting() else _NOTHING
            if not matcher.consume_token(choose.choice(allowed)):
                return str(matcher.get_error())
        return ""


def style_of(request: Mapping[str, Any]) -> JsonStyle:
    """How the JSON of a grammar is written; the default where it does not say."""
    return JsonStyle(bool(request.get("open_objects")), request.get("space") or "line")


def _set_bits(mask: bytes, ids: Sequence[int]) -> list[int]:
    return [i for i in ids if mask[i >> 3] >> (i & 7) & 1]


def main() -> None:
    """Answers requests until standard input ends."""
    vocabulary = json.loads(sys.stdin.readline())
    limits = GrammarLimits(**vocabulary["limits"])
    trials = Trials(vocabulary, limits)
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    confine(limits.memory_bytes, threads=True)
    # The default action of SIGPROF ends the process: no grammar may have more of the processor than this.
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    # Less than a thread of the server has, so that what fits here fits there.
    threading.stack_size(limits.stack_bytes)
    for line in sys.stdin:
        answers: list[dict[str, str]] = []
        signal.setitimer(signal.ITIMER_PROF, limits.cpu_s)
        thread = threading.Thread(target=_try, args=(trials, line, answers))
        thread.start()
        thread.join()
        signal.setitimer(signal.ITIMER_PROF, 0)
        if not answers:
            sys.exit(1)
        sys.stdout.write(json.dumps(answers[0]) + "\n")
        sys.stdout.flush()


def _try(trials: Trials, line: str, answers: list[dict[str, str]]) -> None:
    try:
        answers.append(trials.answer(json.loads(line)))
    except MemoryError:
        answers.append({"error": "it needs more memory than a grammar may have"})
