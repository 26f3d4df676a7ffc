"""How many replicas a cluster should have: by the seconds of work that wait for each of them.

    seconds of a replica = waiting tokens / prompt speed + replies that wait / replies that end in a second

Up at once, because starting one takes a while and requests wait meanwhile. Down only after minutes, one
replica at a time, because a replica takes its cache with it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from math import ceil, inf

from plait.engine.waiting_work import estimate_waiting_s
from plait.errors import ConfigError

MOST_GROWTH = 2.0  # the target is at most this many times what there is, so that one bad report costs little


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaLoad:
    """What a replica has to do. `tokens_per_s`: of prompts; 0: not measured. `places`: replies at once.

    `reply_s`: seconds that a reply takes once it runs, on average; 0: not known.
    """

    waiting_tokens: int
    waiting_replies: int = 0
    running_replies: int = 0
    places: int = 1
    tokens_per_s: float = 0.0
    reply_s: float = 0.0

    @classmethod
    def from_stats(cls, stats: Mapping[str, int]) -> ReplicaLoad:
        """Of an engine's `stats()`."""
        return cls(
            waiting_tokens=stats.get("num_waiting_tokens", 0),
            waiting_replies=stats.get("num_waiting", 0),
            running_replies=stats.get("num_running", 0),
            places=max(stats.get("num_places", 1), 1),
            tokens_per_s=float(stats.get("prompt_tokens_per_s", 0)),
            reply_s=stats.get("reply_ms", 0) / 1e3,
        )

    @classmethod
    def from_numbers(cls, numbers: Mapping[str, float]) -> ReplicaLoad:
        """Of what `to_numbers` made. Raises KeyError for a number that is missing."""
        return cls(
            waiting_tokens=int(numbers["waiting_tokens"]),
            waiting_replies=int(numbers["waiting_replies"]),
            running_replies=int(numbers["running_replies"]),
            places=max(int(numbers["places"]), 1),
            tokens_per_s=numbers["tokens_per_s"],
            reply_s=numbers["reply_s"],
        )

    @classmethod
    def number_names(cls) -> list[str]:
        """The names of what `to_numbers` has."""
        return [field.name for field in fields(cls)]

    def to_numbers(self) -> dict[str, float]:
        """As an autoscaler's statistics have it: numbers by name."""
        return asdict(self)

    @property
    def waiting_s(self) -> float:
        """Seconds until what waits now would run: its prompts computed, and a place free for its reply."""
        return estimate_waiting_s(
            num_tokens=self.waiting_tokens,
            tokens_per_s=self.tokens_per_s,
            num_waiting=self.waiting_replies,
            num_running=self.running_replies,
            places=self.places,
            reply_s=self.reply_s,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ScalingLimits:
    """`least` and `most`: replicas. `max_queue_s`: seconds that may wait for a replica, on average.

    `down_after_s`: seconds under a third of that before one is taken away. Raises ConfigError.
    """

    least: int = 1
    most: int = 1
    max_queue_s: float = 2.0
    down_after_s: float = 300.0

    def __post_init__(self) -> None:
        if not 0 <= self.least <= self.most or not self.most:
            raise ConfigError(
                f"replicas: {self.least}..{self.most} is no range; the first is at most the second"
            )
        if not 0 < self.max_queue_s < inf or not 0 <= self.down_after_s < inf:
            raise ConfigError("max_queue_s and down_after_s: they are positive numbers of seconds")


class ScalingPolicy:
    """Decides the number of replicas. It remembers since when there is little to do, and nothing else."""

    def __init__(self, limits: ScalingLimits) -> None:
        self.limits = limits
        self._calm_since: float | None = None

    def decide(self, loads: Sequence[ReplicaLoad], current: int, now: float, pending: int = 0) -> int:
        """Replicas that there should be, of `current` that run or start.

        `loads`: of those that report; `pending`: requests that no replica has, as a gateway holds them while
        there is none. `now`: seconds of any steady clock.
        """
        limits, total = self.limits, sum(load.waiting_s for load in loads)
        if not loads:  # nothing is known: as it is, but one for those that wait
            self._calm_since = None
            return self._clamp(max(current, 1 if pending else 0))
        mean = total / len(loads)
        if mean > limits.max_queue_s:
            self._calm_since = None
            needed = ceil(min(total / limits.max_queue_s, MOST_GROWTH * len(loads)))
            return self._clamp(max(current, needed))
        if self._is_busy(loads, mean, current):
            self._calm_since = None
            return self._clamp(current)
        if self._calm_since is None:
            self._calm_since = now
        if now - self._calm_since < limits.down_after_s:
            return self._clamp(current)
        self._calm_since = now  # the next one goes as late again
        return self._clamp(current - 1)

    def _is_busy(self, loads: Sequence[ReplicaLoad], mean: float, current: int) -> bool:
        """Whether one replica less would have too much to do: waiting work, or replies for its places."""
        if mean > self.limits.max_queue_s / 3:
            return True
        is_idle = not any(load.running_replies or load.waiting_replies for load in loads)
        if current <= 1:
            return not is_idle
        running = sum(load.running_replies for load in loads)
        places = sum(load.places for load in loads) * (current - 1) / current
        return running > 0.8 * places

    def _clamp(self, wanted: int) -> int:
        return min(max(wanted, self.limits.least), self.limits.most)
