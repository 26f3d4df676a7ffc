"""How many threads a step gets: all, unless other processes use the cores. Measured, not assumed."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import NamedTuple


def levels(most: int) -> list[int]:
    """The numbers of threads that are tried, from all down to one."""
    return sorted({most, most - 1, most * 3 // 4, most // 2, most // 4, 1} - {0}, reverse=True)


class Took(NamedTuple):
    """What one call took. `kind`: only costs of one kind are compared; `work`: how much of it there was."""

    kind: int
    work: int
    seconds: float
    waited: float
    at: float


class ThreadTuner:
    """The number of threads for steps of one sort, small ones or large ones.

    A thread that has lost its core keeps all others waiting at the next barrier, for a scheduler's slice each
    time. So when much of the time of several steps goes into long waits, fewer threads are tried, for some
    steps. They stay if the same kind of step costs less so. More threads are then tried again from time to
    time, less and less often while that fails, so that the trials cost a few per cent at most. The number of
    threads never changes a result.

    Within one step, thread 0 goes on alone when waits have taken as long as it would need more for that
    (`patience`): a lost core costs at most twice what it must. Short waits are common: a server sends what
    streams got while the next step runs, and needs a core for some milliseconds.

    Times are seconds of any clock that only goes forward: the caller says what time it is.
    """

    SIGNS = 4  # calls, of which three must have waited, before fewer threads are tried
    LONG_S = 0.1  # of time, which says as much as several calls do
    DOWN_S, UP_S = 0.02, 0.06  # what a trial of fewer and of more threads takes at least
    GAIN = 0.95  # of the cost before: a trial that takes less wins
    TRUST_S = 2.0  # in which waits are ignored after fewer threads were no faster
    FIRST_S, MOST_S = 0.5, 4.0  # until more threads are tried again: at first, and at most
    FORGET_S = 60.0  # what was longer ago says nothing
    LOSS, SHARE = 0.01, 0.03  # a trial that has lost so many seconds ends; what trials may lose of all time

    def __init__(self, most: int, patience: float) -> None:
        self.patience = self.least = patience  # seconds of waits until the rest of a step is played alone
        self._clear: dict[int, float] = {}  # seconds for a unit of work without waits, by kind
        self._levels = levels(most)
        self._at, self._trial = 0, 0  # indices; they differ while another number is tried
        self._recent: deque[Took] = deque(maxlen=64)  # on the number that has been settled
        self._tried: list[Took] = []
        self._last = 0.0  # when the last call ended
        self._failed = 0  # trials of fewer threads, since one was better
        self._pause, self._due, self._trusted, self._rose = self.FIRST_S, 0.0, 0.0, -self.MOST_S

    @property
    def threads(self) -> int:
        """How many the next step gets."""
        return self._levels[self._trial]

    def begin(self, kind: int, work: int, now: float) -> int:
        """The same, for a step that begins now: after a long pause all, since others may have gone."""
        if self._trial > 0 and now - self._last > self.FORGET_S:
            self._at = self._trial = self._failed = 0
            self._recent.clear()
            self._tried = []
        alone = self._clear.get(kind, 0.0) * work * (self.threads - 1)  # by how much longer it would take
        self.patience = max(self.least, alone)
        return self.threads

    def observe(self, kind: int, work: int, seconds: float, waited: float, now: float) -> None:
        """What a call took on that many threads, and for how long they waited for one without a core."""
        if waited > self.patience:  # its rest was played alone, and would have been waited for
            waited = seconds
        else:
            self._clear[kind] = max(seconds - waited, 0.0) / work
        took, self._last = Took(kind, work, seconds, waited, now), now
        if self._trial != self._at:
            self._tried.append(took)
            self._judge(now)
            return
        recent = self._recent
        recent.append(took)
        while recent[0].at < now - self.FORGET_S:
            recent.popleft()
        if waited > 0 and now >= self._trusted and self._at + 1 < len(self._levels) and self._is_late():
            # One fewer may wait as much for another that has no core: one alone is tried in turn with it.
            self._trial = len(self._levels) - 1 if self._failed % 2 else self._at + 1
        elif self._at > 0 and now >= self._due:
            same = [t.seconds for t in recent if t.kind == kind]
            if len(same) >= self.SIGNS or (len(same) > 1 and sum(same) >= self.LONG_S):
                self._trial = self._at - 1

    def _is_late(self) -> bool:
        """Whether so much time goes into waits that fewer threads may be faster."""
        recent = [t for t in self._recent if t.at > self._last - 1.0]
        seconds, waiting = sum(t.seconds for t in recent), sum(t.waited > 0 for t in recent)
        if (len(recent) < self.SIGNS or waiting < 3) and seconds < self.LONG_S:
            return False
        fewer = self._levels[self._at + 1] / self._levels[self._at]
        return sum(t.waited for t in recent) > max((1 - fewer) / 2, 0.1) * seconds

    def _judge(self, now: float) -> None:
        costs = _costs(self._recent)
        known = [t for t in self._tried if t.kind in costs]
        took, expected = sum(t.seconds for t in known), sum(costs[t.kind] * t.work for t in known)
        lost, is_up = took - expected, self._trial < self._at
        strange = sum(t.seconds for t in self._tried) - took >= self.LONG_S  # steps of other kinds came
        is_long = took >= (self.UP_S if is_up else self.DOWN_S) and (
            len(known) >= self.SIGNS or took >= self.LONG_S
        )
        if not (is_long or strange or lost > self.LOSS):
            return
        if is_long and took < self.GAIN * expected:
            self._settle(is_up, now)
        elif strange:
            self._due = now + self._pause
        elif is_up:
            self._pause = min(2 * self._pause, self.MOST_S)
            self._due = now + max(self._pause, lost / self.SHARE)
        else:
            self._trusted, self._failed = now + self.TRUST_S, self._failed + 1
            self._recent.clear()
        self._tried, self._trial = [], self._at

    def _settle(self, is_up: bool, now: float) -> None:
        self._at, self._failed = self._trial, 0
        self._recent.clear()
        self._recent.extend(self._tried)
        if is_up:
            self._rose = now
        else:  # a number that did not last is tried less often
            lasted = now - self._rose > self.MOST_S
            self._pause = self.FIRST_S if lasted else min(2 * self._pause, self.MOST_S)
        self._due = now + self._pause


def _costs(calls: Iterable[Took]) -> dict[int, float]:
    """Seconds for a unit of work, by kind."""
    sums: dict[int, tuple[float, int]] = {}
    for t in calls:
        seconds, work = sums.get(t.kind, (0.0, 0))
        sums[t.kind] = (seconds + t.seconds, work + t.work)
    return {kind: seconds / work for kind, (seconds, work) in sums.items()}
