"""Ends what waits for a rank that has ended, in a process that must go on: that of a program with an `LLM`.

The engine's process of a server ends itself then (`worker/child`), since NCCL waits for minutes, and a sum
over symmetric memory for ever. Here the other ranks are killed and sums of NCCL broken off, so what waits for
them fails by itself. A sum over symmetric memory holds its thread as long as this process runs: `on_stuck`
gets the loss then.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

from plait.errors import RankLost
from plait.runner.ranks.group import RankGroup
from plait.runner.ranks.processes import ENDED_S, RankWatch

LOOK_S = 0.25  # between two looks at the ranks
GRACE_S = 2.0  # for what waits, to fail and to close the group
log = logging.getLogger("plait")


class RankGuard:
    """Watches the ranks of a group, on a thread of its own, until the group is closed."""

    def __init__(self, group: RankGroup) -> None:
        self._group = group
        self.on_stuck: Callable[[RankLost], object] = _report
        threading.Thread(target=self._watch, name="plait-ranks", daemon=True).start()

    def _watch(self) -> None:
        watch = RankWatch(self._group.started)
        while self._group.is_open:
            if (lost := watch.find_lost(ENDED_S)) is not None:
                self._end(RankLost(f"a rank (process {lost[0]}) {lost[1]}"))
                return
            time.sleep(LOOK_S)

    def _end(self, error: RankLost) -> None:
        self._group.kill(error)
        deadline = time.monotonic() + GRACE_S
        while self._group.is_open:
            if time.monotonic() > deadline:
                self.on_stuck(error)
                return
            time.sleep(LOOK_S / 10)


def _report(error: RankLost) -> None:
    """Log what no request can report: the model is still being loaded."""
    log.error("%s, and this process waits for it: end it", error)
