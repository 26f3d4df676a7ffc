"""What a number was measured on: the share of others' CPU time."""

from __future__ import annotations

import os
import subprocess
import sys

from plait.bench.machine import _count_ticks

BURN = "import time\nwhile time.process_time() < 0.2: pass\nprint(flush=True)\ninput()"


def test_programs_that_a_side_runs_are_no_foreign_ones() -> None:
    before, each = _count_ticks([os.getpid()]), 0.15 * os.sysconf("SC_CLK_TCK")
    running = subprocess.Popen([sys.executable, "-c", BURN], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert running.stdout is not None
    running.stdout.readline()
    assert _count_ticks([os.getpid()]) - before > each, "it still runs"
    running.communicate(b"\n")
    assert _count_ticks([os.getpid()]) - before > each, "it has ended"
