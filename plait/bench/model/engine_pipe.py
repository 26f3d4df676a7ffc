"""An engine in a child process that loads once and measures on command."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any

from plait.errors import EngineError

CHILD = Path(__file__).resolve().parents[1] / "engines" / "child.py"


class Cannot(EngineError):
    """What a side says it cannot measure or read, and why."""


class Side:
    """One side of a comparison, running. Use as a context manager, or call `close()`."""

    def __init__(self, name: str, script: Path, python: str = "", root: Path | None = None) -> None:
        self.name = name
        command = [python or sys.executable, str(CHILD), str(script), *([str(root)] if root else [])]
        self._started = time.time()
        try:
            self._process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, encoding="utf-8"
            )
        except OSError as error:
            raise EngineError(f"{name}: {command[0]} cannot be run: {error.strerror or error}") from error

    @property
    def pid(self) -> int:
        return self._process.pid

    def load(self, **given: Any) -> dict[str, Any]:
        """Load its model; what it says about itself, with `startup_s` since the process began."""
        facts: dict[str, Any] = self.ask("load", started=self._started, **given)
        return facts

    def ask(self, do: str, **given: Any) -> Any:
        """Run one command and wait for its answer. Raises Cannot, or EngineError if it fails or dies."""
        try:
            self._pipe(self._process.stdin).write(json.dumps({"do": do, **given}) + "\n")
            self._pipe(self._process.stdin).flush()
            line = self._pipe(self._process.stdout).readline()
        except BrokenPipeError:
            line = ""
        if not line:
            code = self._process.wait()
            raise EngineError(f"{self.name}: its process ended with code {code} during {do!r}; see above")
        answer = json.loads(line)
        if "cannot" in answer:
            raise Cannot(f"{self.name}: {answer['cannot']}")
        if "error" in answer:
            raise EngineError(f"{self.name}: {answer['type']} during {do!r}: {answer['error']}")
        return answer["value"]

    def greedy(self, prompts: Sequence[Sequence[int]], tokens: int) -> list[list[int]]:
        found: list[list[int]] = self.ask("greedy", prompts=[list(p) for p in prompts], tokens=tokens)
        return found

    def close(self) -> None:
        """End the process; kill it if it does not go by itself."""
        if self._process.poll() is None:
            try:
                self._pipe(self._process.stdin).write('{"do": "quit"}\n')
                self._pipe(self._process.stdin).close()
                self._process.wait(timeout=20)
            except (BrokenPipeError, subprocess.TimeoutExpired):
                self._process.kill()
                self._process.wait()
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None and not stream.closed:
                stream.close()

    def __enter__(self) -> Side:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @staticmethod
    def _pipe(stream: IO[str] | None) -> IO[str]:
        if stream is None:
            raise EngineError("a side of a comparison has no pipe")
        return stream
