"""Decides how long drafts are, or that there are none, by what tokens cost with each length.

Nothing is modelled: for some tokens there are drafts of one length, then of another, then none, and what the
engine spent on a token is compared. The costs are of windows next to each other, so a load that comes or goes
changes both. What wins stays until the next check; checks become rarer while they change nothing.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence

WINDOW = 16  # tokens of each sequence in a window
SKIPPED = 4  # tokens behind a change of length that do not count: caches are cold, and a head begins anew
NUM_WINDOWS, NUM_REMEMBERED = 3, 5  # windows in which a length is tried; of which the median counts
START, STAY = 0.96, 0.99  # share of the plain cost below which drafts begin to pay, and go on to
BETTER = 0.98  # share of a length's cost that another one must stay below to take its place
CLEAR = 1.25  # times the cost of the rival: a length that costs more is not tried further
FIRST_PAUSE, LONGEST_PAUSE = 256, 16_384  # tokens of each sequence until the next check
REST = 4  # times the first pause: the first one without drafts, because a check costs more there


class DraftGovernor:
    """The draft length for each number of sequences, as a power of two. `lengths`: those to choose from."""

    def __init__(self, lengths: Sequence[int]) -> None:
        self._lengths = tuple(lengths)
        self._loads: dict[int, _Load] = {}

    def choose(self, num_sequences: int) -> int:
        """The length of the drafts of the next step; 0: none."""
        return self._load(num_sequences).length

    def is_measuring(self, num_sequences: int) -> bool:
        """Whether the next plan's cost is needed. In most of the time without drafts it is not."""
        return self._load(num_sequences).is_measuring

    def is_comparing(self, num_sequences: int) -> bool:
        """Whether the next plan belongs to a window of a check, and had better bring few tokens."""
        return self._load(num_sequences).is_comparing

    def charge(self, num_sequences: int, num_tokens: int, seconds: float | None) -> None:
        """Record what the engine spent on a plan in which so many sequences could have had drafts.

        seconds: None where they were not measured.
        """
        if num_tokens < 1 or (seconds is not None and not 0 < seconds < math.inf):
            return
        load, tokens = self._load(num_sequences), num_tokens / num_sequences
        if seconds is not None:
            load.charge(tokens, seconds / num_tokens)
        elif not load.is_measuring:
            load.pass_by(tokens)

    def _load(self, num_sequences: int) -> _Load:
        bits = num_sequences.bit_length()
        if bits not in self._loads:
            self._loads[bits] = _Load(self._lengths)
        return self._loads[bits]


class _Load:
    """Lengths under one load. `_best`: the one between checks; `_agenda`: those of the windows of a check."""

    def __init__(self, lengths: Sequence[int]) -> None:
        self._lengths = tuple(lengths)
        self._costs: dict[int, deque[float]] = {n: deque(maxlen=NUM_REMEMBERED) for n in (0, *lengths)}
        self._best = self._tried = lengths[0]
        self._agenda = deque([self._best] * NUM_WINDOWS + [0] * NUM_WINDOWS)
        self._is_first = True
        self._pause = self._left = float(FIRST_PAUSE)
        self._skip, self._tokens, self._seconds = float(SKIPPED), 0.0, 0.0

    @property
    def length(self) -> int:
        """The length of the current window."""
        return self._agenda[0] if self._agenda else self._best

    @property
    def is_comparing(self) -> bool:
        return bool(self._agenda)

    @property
    def is_measuring(self) -> bool:
        """Whether a plan's cost is needed: not without drafts, until shortly before the next check."""
        return bool(self._agenda or self._best) or self._left <= WINDOW * (NUM_REMEMBERED + 1)

    def pass_by(self, tokens: float) -> None:
        """Count tokens of which the cost was not measured."""
        self._left -= tokens
        self._skip, self._tokens, self._seconds = float(SKIPPED), 0.0, 0.0

    def charge(self, tokens: float, token_s: float) -> None:
        """tokens: of each sequence; token_s: seconds for one."""
        if self._skip > 0:
            self._skip -= tokens
            return
        self._tokens, self._seconds = self._tokens + tokens, self._seconds + tokens * token_s
        if self._tokens < WINDOW:
            return
        length = self.length
        self._costs[length].append(self._seconds / self._tokens)
        self._left -= self._tokens
        self._tokens = self._seconds = 0.0
        if self._agenda:
            self._agenda.popleft()
            if self._is_clear(length):
                self._agenda = deque(n for n in self._agenda if n != length)
            if not self._agenda:
                self._decide()
        elif self._left <= 0:
            self._check()
        if self.length != length:
            self._skip = float(SKIPPED)

    def _cost(self, length: int) -> float:
        costs = sorted(self._costs[length])
        return costs[(len(costs) - 1) // 2] if costs else math.inf  # the lower median

    def _is_clear(self, length: int) -> bool:
        """Whether a length costs so much more than its rival that further windows would show nothing new."""
        rival = min(map(self._cost, self._lengths)) if length == 0 else self._cost(0)
        return rival < math.inf and self._costs[length][-1] > CLEAR * rival

    def _decide(self) -> None:
        """The windows of a check are over: try a longer draft, or choose until the next check."""
        plain, tried = self._cost(0), self._tried
        longer = next((n for n in self._lengths if n > tried), None)
        bound = CLEAR if self._is_first else START
        is_better = all(self._cost(tried) < self._cost(n) for n in self._lengths if n < tried)
        if longer and not self._costs[longer] and is_better and self._cost(tried) < bound * plain:
            self._tried = longer
            self._agenda.extend([longer] * NUM_WINDOWS)
            return
        best = min(self._lengths, key=self._cost)
        if self._best and self._cost(best) > BETTER * self._cost(self._best):
            best = self._best
        if self._cost(best) >= (STAY if self._best else START) * plain:
            best = 0
        first = FIRST_PAUSE * (1 if best else REST)
        self._pause = min(2 * self._pause, LONGEST_PAUSE) if best == self._best else first
        self._best, self._left, self._is_first = best, self._pause, False

    def _check(self) -> None:
        """Compare again. Without drafts: with the length that cost least; else with none, and neighbours."""
        if self._best == 0:
            self._tried = min(self._lengths, key=self._cost)
            again = [self._tried]
        else:
            at = self._lengths.index(self._best)
            self._tried = self._lengths[: at + 2][-1]
            again = [0, *self._lengths[max(at - 1, 0) : at + 2]]
        for length, costs in self._costs.items():
            if length or self._best:  # the best, too: plans are short only while lengths are compared
                costs.clear()
        self._agenda.extend(n for n in again for _ in range(NUM_WINDOWS))
