"""Renders Jinja templates in a child process that may be killed.

A template is a program from the model's author. It gets no files, no imports, bounded memory, bounded time
and bounded output (`{% set ns.s = ns.s ~ ns.s %}` forty times wants a terabyte); a child that overruns is
killed and replaced, and only its request fails.
"""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from plait.errors import BadTemplate, CapacityError

_MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class Limits:
    """What one rendering may take. `start_s` is for the child to come up, which is nobody's fault.

    `wait_s`: how long a rendering waits for its turn.
    """

    timeout_s: float = 2.0
    memory_bytes: int = 512 * _MIB
    max_chars: int = 16 * _MIB
    start_s: float = 60.0
    wait_s: float = 2.0


class Sandbox:
    """One rendering child, started when first needed. Thread-safe: renderings take turns."""

    def __init__(self, limits: Limits | None = None) -> None:
        self._limits = limits or Limits()
        self._lock = threading.Lock()
        self._child: _Child | None = None

    def start(self) -> None:
        """Starts the child now, so that the first rendering need not wait for it."""
        with self._lock:
            self._ready()

    def render(self, template: str, values: Mapping[str, Any]) -> tuple[str, frozenset[str]]:
        """(the rendered text, the names of the variables that the template reads).

        `values` must be JSON. Raises BadTemplate with the template's own message, or naming the limit, and
        CapacityError if its turn does not come in time.
        """
        request = {
            "template": template,
            "values": dict(values),
            "max_chars": self._limits.max_chars,
            "timeout_s": self._limits.timeout_s + 1,  # the child's own watch, should this process be gone
        }
        line = json.dumps(request).encode() + b"\n"
        # Whoever waits holds a thread: a queue of costly renderings must not take them all.
        if not self._lock.acquire(timeout=self._limits.wait_s):
            raise CapacityError("conversations of others are being rendered; try again later")
        try:
            answer = self._answer(line)
        finally:
            self._lock.release()
        if "error" in answer:
            raise BadTemplate(f"the chat template refused: {answer['error']}")
        return answer["text"], frozenset(answer["variables"])

    def _answer(self, line: bytes) -> dict[str, Any]:
        child = self._ready()
        try:
            most = 12 * self._limits.max_chars + _MIB
            answer: dict[str, Any] = json.loads(child.ask(line, self._limits.timeout_s, most))
        except TimeoutError as error:
            self._drop()
            raise BadTemplate(
                f"the chat template did not finish within {self._limits.timeout_s:g} s; "
                "give another one with --chat-template"
            ) from error
        except (OSError, ValueError, EOFError) as error:
            self._drop()
            limit = f"{self._limits.memory_bytes // _MIB} MiB"
            raise BadTemplate(
                f"the chat template ended its process (it may use {limit} of memory); "
                "give another one with --chat-template"
            ) from error
        return answer

    def close(self) -> None:
        """Ends the child and waits for it. A later rendering starts a new one."""
        with self._lock:
            self._drop()

    def _ready(self) -> _Child:
        if self._child is None or not self._child.alive():
            self._drop()
            self._child = _Child(self._limits)
        return self._child

    def _drop(self) -> None:
        if self._child is not None:
            self._child.stop()
        self._child = None


class _Child:
    """The process and its two pipes."""

    def __init__(self, limits: Limits) -> None:
        script = Path(__file__).with_name("sandbox_child.py")
        command = [sys.executable, "-I", str(script), str(limits.memory_bytes)]
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            bufsize=0,
            env={},
        )
        self.stop = weakref.finalize(self, _reap, self._process)
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._in, self._out = self._process.stdin.fileno(), self._process.stdout.fileno()
        os.set_blocking(self._in, False)
        try:
            self._read_line(time.monotonic() + limits.start_s, 64)
        except (TimeoutError, EOFError, ValueError) as error:
            self.stop()
            raise BadTemplate(
                f"the process that renders chat templates did not start within {limits.start_s:g} s"
            ) from error

    def alive(self) -> bool:
        return self._process.poll() is None

    def ask(self, line: bytes, timeout_s: float, max_bytes: int) -> bytes:
        """The answer to one request. Raises TimeoutError, EOFError, ValueError (too long) or OSError."""
        deadline = time.monotonic() + timeout_s
        rest = memoryview(line)
        while rest:
            _wait(self._in, select.POLLOUT, deadline)
            rest = rest[os.write(self._in, rest[: 1 << 16]) :]
        return self._read_line(deadline, max_bytes)

    def _read_line(self, deadline: float, max_bytes: int) -> bytes:
        pieces: list[bytes] = []
        size = 0
        while not (pieces and pieces[-1].endswith(b"\n")):
            _wait(self._out, select.POLLIN, deadline)
            piece = os.read(self._out, 1 << 16)
            if not piece:
                raise EOFError("the child closed its pipe")
            size += len(piece)
            if size > max_bytes:
                raise ValueError(f"an answer of more than {max_bytes} bytes")
            pieces.append(piece)
        return b"".join(pieces)


def _wait(pipe: int, event: int, deadline: float) -> None:
    poll = select.poll()  # select() itself cannot watch descriptors above 1023, which a busy server has
    poll.register(pipe, event)
    left = deadline - time.monotonic()
    if left <= 0 or not poll.poll(left * 1000):
        raise TimeoutError


def _reap(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            pipe.close()
