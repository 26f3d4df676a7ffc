"""Child processes at their end."""

from __future__ import annotations

import io
import subprocess

import pytest

from plait.text.isolation import child_process


class StuckProcess:
    """A process in a driver that does not let it go: a SIGKILL waits as long as that does."""

    def __init__(self) -> None:
        self.stdin, self.stdout = io.BytesIO(), io.BytesIO()
        self.is_killed = False

    def kill(self) -> None:
        self.is_killed = True

    def wait(self, timeout: float | None = None) -> int:
        if timeout is None:
            pytest.fail("it is waited for without a limit, so for ever")
        raise subprocess.TimeoutExpired("child", timeout)


def test_a_child_that_the_system_cannot_end_is_left_to_it() -> None:
    """A trial of a GPU kernel that hangs in the driver must not hold up the startup for ever."""
    process = StuckProcess()
    child_process._reap(process)  # type: ignore[arg-type]
    assert process.is_killed
    assert process.stdin.closed
    assert process.stdout.closed
