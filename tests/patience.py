"""How long tests wait for what must come: a bound against hanging for ever, never an expectation."""

from __future__ import annotations

import time
from collections.abc import Callable

PATIENCE_S = 60.0
MAX_PAUSE_S = 0.01


def wait_until(condition: Callable[[], object], timeout_s: float = PATIENCE_S) -> bool:
    """Whether it became true in time."""
    deadline, pause_s = time.monotonic() + timeout_s, 0.001
    while time.monotonic() < deadline:
        if condition():
            return True
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, MAX_PAUSE_S)
    return bool(condition())


def until(condition: Callable[[], object], timeout_s: float = PATIENCE_S) -> None:
    """Wait for it; the test fails if it does not become true."""
    assert wait_until(condition, timeout_s), "it did not come true in time"
