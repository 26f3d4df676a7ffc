"""Two threads that load models at once generate the same kernels."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

from plait.kernels.cpu.codegen.kernel import load_generated
from tests.patience import PATIENCE_S

SOURCE = f"from {__name__} import hold\nhold()\nmade = 1\n"
is_inside, may_go = threading.Event(), threading.Event()


def hold() -> None:
    """Called in the middle of the generated module."""
    is_inside.set()
    assert may_go.wait(PATIENCE_S)


def test_no_thread_gets_a_generated_module_that_is_not_complete() -> None:
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(load_generated, "test_race", SOURCE)
        assert is_inside.wait(PATIENCE_S)
        second = pool.submit(lambda: hasattr(load_generated("test_race", SOURCE), "made"))
        with suppress(TimeoutError):  # it waits for the first one, however long
            second.result(0.2)
        may_go.set()
        assert second.result(PATIENCE_S)
        assert first.result(PATIENCE_S).made == 1
