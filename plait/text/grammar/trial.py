"""Grammars are tried out in a process that may be killed, before the server's own compiles them."""

from __future__ import annotations

import contextlib
import json
import signal
import subprocess
import sys
import threading
import weakref
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from plait.errors import BadGrammar, CapacityError
from plait.text.grammar.grammar import Grammar, GrammarLimits
from plait.text.grammar.library import readable

_MIB = 1 << 20
_ROOT = Path(__file__).resolve().parents[3]
_RUN = "import sys; sys.path.insert(0, sys.argv[1]); from plait.text.grammar.trial_child import main; main()"


class Trial:
    """One trying process, started when first needed. Thread-safe: grammars take turns.

    `vocabulary`: `size`, `special` (text by id) and `ends` (ids), of plain JSON.
    """

    def __init__(self, vocabulary: Mapping[str, Any], limits: GrammarLimits) -> None:
        self._setup = json.dumps({**vocabulary, "limits": asdict(limits)}) + "\n"
        self._limits = limits
        self._lock = threading.Lock()
        self._child: _Child | None = None

    def start(self) -> None:
        """Starts the process now, so that the first grammar need not wait for it."""
        with self._lock:
            self._ready()

    def run(self, grammar: Grammar) -> str:
        """The form of a grammar that the library compiles. Raises BadGrammar with the reason.

        CapacityError when that is no fault of the grammar: the machine is too busy to try it, or others' are
        being tried out.
        """
        line = json.dumps({"kind": grammar.kind, "source": grammar.source}) + "\n"
        # Whoever waits holds a thread: a queue of costly grammars must not take them all.
        if not self._lock.acquire(timeout=self._limits.wait_s):
            raise CapacityError("grammars of others are being tried out; try again later")
        try:
            answer = self._answer(line, grammar)
        finally:
            self._lock.release()
        if "error" in answer:
            raise BadGrammar(f"the grammar cannot be honoured: {readable(answer['error'])}", grammar.param)
        form: str = answer["form"]
        return form

    def _answer(self, line: str, grammar: Grammar) -> dict[str, Any]:
        child = self._ready()
        try:
            answer: dict[str, Any] = json.loads(child.ask(line, self._limits.timeout_s))
        except (OSError, ValueError) as error:
            self._child = None
            status = child.ended()
            if status == -signal.SIGKILL:
                raise CapacityError(
                    f"the grammar could not be tried out within {self._limits.timeout_s:g} s, as the "
                    "machine is busy; try again later, or make it simpler"
                ) from error
            raise BadGrammar(_refusal(status, self._limits), grammar.param) from error
        return answer

    def close(self) -> None:
        """Ends the process and waits for it. A later grammar starts a new one."""
        with self._lock:
            self._drop()

    def _ready(self) -> _Child:
        if self._child is None or not self._child.alive():
            self._drop()
            child = _Child()
            try:
                child.ask(self._setup, self._limits.start_s)
            except OSError as error:
                child.stop()
                raise CapacityError(
                    "the process that tries grammars out did not start within "
                    f"{self._limits.start_s:g} s; try again"
                ) from error
            self._child = child
        return self._child

    def _drop(self) -> None:
        if self._child is not None:
            self._child.stop()
        self._child = None


class _Child:
    """The process and its two pipes."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-c", _RUN, str(_ROOT)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            encoding="utf-8",
            env={},
        )
        self.stop = weakref.finalize(self, _reap, self._process)

    def alive(self) -> bool:
        return self._process.poll() is None

    def ask(self, line: str, timeout_s: float) -> str:
        """The line it answers to `line`. Raises OSError if it ends, or its time does, before that."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        watch = threading.Timer(timeout_s, self._process.kill)
        watch.start()
        try:
            self._process.stdin.write(line)
            self._process.stdin.flush()
            answer = self._process.stdout.readline()
        finally:
            watch.cancel()
        if not answer.endswith("\n"):
            raise BrokenPipeError("the process ended")
        return answer

    def ended(self) -> int:
        """The exit status of a process that closed its pipe; negative for the signal that ended it."""
        try:
            status = self._process.wait(1)  # its pipe closes a moment before it is gone
        except subprocess.TimeoutExpired:
            status = -signal.SIGKILL
        self.stop()
        return status


def _refusal(status: int, limits: GrammarLimits) -> str:
    if status == -signal.SIGPROF:
        return f"the grammar takes more than {limits.cpu_s:g} s to compile; make it simpler"
    return (
        "the grammar is too large or its references too deep to compile in "
        f"{limits.memory_bytes // _MIB} MiB of memory and {limits.stack_bytes / _MIB:g} MiB of stack; "
        "make it simpler"
    )


def _reap(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.wait()
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            with contextlib.suppress(OSError):  # what was never read is written once more on closing
                pipe.close()
