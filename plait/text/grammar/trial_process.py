"""One process that tries grammars out, and its two pipes. It may be killed at any time."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import threading
import weakref

from plait.errors import CapacityError
from plait.text.grammar.grammar import GrammarLimits
from plait.text.isolation.child_process import command

_MIB = 1 << 20


class TrialChild:
    """Starts the process at construction. One thread at a time may ask it; `stop` may be called by any."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            command("plait.text.grammar.trial_child"),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            encoding="utf-8",
            env={},
        )
        self.stop = weakref.finalize(self, _reap, self._process)

    def set_up(self, setup: str, limits: GrammarLimits) -> None:
        """Say which vocabulary it is for. Raises CapacityError if it does not come up."""
        try:
            self.ask(setup, limits.start_s)
        except (OSError, ValueError) as error:
            self.stop()
            raise CapacityError(
                f"the process that tries grammars out did not start within {limits.start_s:g} s, or found no "
                "memory; try again"
            ) from error

    def alive(self) -> bool:
        return self._process.poll() is None

    def ask(self, line: str, timeout_s: float) -> str:
        """The line it answers to `line`.

        Raises OSError if it ends, or its time does, before that, or if nothing can watch its time.
        """
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        watch = threading.Timer(timeout_s, self._process.kill)
        watch.daemon = True
        try:
            watch.start()
        except RuntimeError as error:  # the system gives no thread
            raise OSError(f"no thread can watch its time: {error}") from error
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


def refusal(status: int, limits: GrammarLimits) -> str:
    """What is wrong with a grammar for which the process ended with that status."""
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
