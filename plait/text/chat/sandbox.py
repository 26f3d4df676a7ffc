"""Reads and renders Jinja templates in child processes that may be killed.

A template is a program from the model's author: no other process so much as parses one. It gets no files, no
network, no imports, bounded memory, time and output (`{% set ns.s = ns.s ~ ns.s %}` forty times takes a
terabyte). A child that overruns is killed and replaced, and only its request fails. A client has one child at
a time, so that another's costly conversations leave one free.
"""

from __future__ import annotations

import json
import signal
import threading
from collections.abc import Mapping
from typing import Any

from msgspec import Struct

from plait.errors import BadTemplate, CapacityError
from plait.fair_queue import Turns
from plait.text.isolation.child_process import ChildProcess, is_foreign

_MIB = 1 << 20
_BUSY = "conversations of others are being rendered; try again later"


class TemplateEnded(BadTemplate):
    """A template took more time or memory than it may have, and its process was ended."""


class SandboxLimits(Struct, frozen=True):
    """What one rendering may take.

    `timeout_s`: of the processor; `clock_s`: by the clock, on a busy machine. `start_s` is for a child to
    start, which no template can help; `wait_s`: how long a rendering waits for its turn. `children`: how many
    there are at most.
    """

    timeout_s: float = 2.0
    clock_s: float = 10.0
    memory_bytes: int = 512 * _MIB
    max_chars: int = 16 * _MIB
    start_s: float = 60.0
    wait_s: float = 15.0
    children: int = 2


class Sandbox:
    """Rendering children, each started when first needed. Thread-safe: renderings take turns, see `turns`."""

    def __init__(self, limits: SandboxLimits | None = None) -> None:
        self._limits = limits or SandboxLimits()
        self._turns = Turns(self._limits.children, 1)
        self._children: dict[int, _Child] = {}
        self._locks = [threading.Lock() for _ in range(self._limits.children)]

    @property
    def wait_s(self) -> float:
        """The longest wait of a rendering for its turn."""
        return self._limits.wait_s

    def start(self) -> list[str]:
        """Starts a child now, so that the first rendering need not wait for it. Returns the walls it has."""
        with self._turns.take(self._limits.wait_s, _BUSY) as place, self._locks[place]:
            return self._ready(place).walls

    def read(self, template: str) -> frozenset[str]:
        """The names of the variables that a template reads, after compiling it. Raises as `render` does."""
        return frozenset(self._ask({"template": template}, "")["variables"])

    def render(self, template: str, values: Mapping[str, object]) -> str:
        """The rendered text. `values` must be JSON.

        Raises BadTemplate with the template's own message, TemplateEnded naming the limit, and CapacityError
        if its turn does not come in time, the machine is too busy, or its process is ended from outside.
        """
        request = {"template": template, "values": dict(values), "max_chars": self._limits.max_chars}
        text: str = self._ask(request, "the chat template refused: ")["text"]
        return text

    def close(self) -> None:
        """Ends the children and waits for them. A later rendering starts a new one."""
        for place, lock in enumerate(self._locks):
            while not lock.acquire(timeout=0.02):
                if child := self._children.get(place):
                    child.kill()  # the thread that waits for it fails at once, and then its pipes may go
            self._drop(place)
            lock.release()

    def _ask(self, request: Mapping[str, object], lead: str) -> dict[str, Any]:
        # The child's own watch on the clock is for when this process is gone.
        times = {"cpu_s": self._limits.timeout_s, "clock_s": self._limits.clock_s + 1}
        line = json.dumps({**request, **times}) + "\n"
        with self._turns.take(self._limits.wait_s, _BUSY) as place, self._locks[place]:
            answer = self._answer(place, line)
        if "error" in answer:
            raise BadTemplate(lead + answer["error"])
        return answer

    def _answer(self, place: int, line: str) -> dict[str, Any]:
        limits, child = self._limits, self._ready(place)
        try:
            answer: dict[str, object] = json.loads(child.ask(line, limits.clock_s))
        except TimeoutError as error:
            self._drop(place)
            raise CapacityError(
                f"the chat template did not finish within {limits.clock_s:g} s, as the machine is busy; "
                "try again later"
            ) from error
        except (OSError, ValueError, EOFError) as error:
            status = child.read_status()
            self._drop(place)
            if status is not None and is_foreign(status):
                raise CapacityError(
                    "the process that renders chat templates was ended by the system; try again"
                ) from error
            if status == -signal.SIGPROF:
                text = f"the chat template did not finish within {limits.timeout_s:g} s"
            else:
                limit = f"{limits.memory_bytes // _MIB} MiB"
                text = f"the chat template ended its process (it may use {limit} of memory)"
            raise TemplateEnded(text) from error
        return answer

    def _ready(self, place: int) -> _Child:
        child = self._children.get(place)
        if child is None or not child.alive():
            self._drop(place)
            child = self._children[place] = _Child(self._limits)
        return child

    def _drop(self, place: int) -> None:
        child = self._children.pop(place, None)
        if child is not None:
            child.stop()


class _Child(ChildProcess):
    """A rendering child; `walls`: what keeps it in. Raises CapacityError if it does not start."""

    def __init__(self, limits: SandboxLimits) -> None:
        try:
            super().__init__(
                "plait.text.chat.sandbox_child",
                str(limits.memory_bytes),
                max_bytes=12 * limits.max_chars + _MIB,
            )
        except OSError as error:
            raise CapacityError(
                f"no process can be started that renders chat templates: {error}; try again later"
            ) from error
        try:
            self.walls: list[str] = json.loads(self.read_line(limits.start_s))
        except (OSError, EOFError, ValueError) as error:
            why = self.explain_start(error, limits.start_s)
            self.stop()
            raise CapacityError(f"the process that renders chat templates {why}") from error
