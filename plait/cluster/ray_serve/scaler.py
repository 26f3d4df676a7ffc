"""The number of replicas as Ray Serve's controller asks for it: by the seconds of work that wait in them.

Serve makes one `WaitingWorkScaler` in its controller, from `policy_kwargs`, and calls it several times a
second. What replicas report, `EngineReplica.record_autoscaling_stats`, is about a second old. Serve pickles
the class by value, so what it needs at run time it imports; Ray itself is not needed.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Hashable, Mapping, Sequence
from typing import Protocol

from plait.cluster.scaling import ReplicaLoad, ScalingLimits, ScalingPolicy


class TimedNumber(Protocol):
    """A number that a replica reported."""

    @property
    def value(self) -> float: ...


class ScalingContext(Protocol):
    """The part of Serve's `AutoscalingContext` that is read. `raw_metrics`: by name, replica and time."""

    @property
    def raw_metrics(self) -> Mapping[str, Mapping[Hashable, Sequence[TimedNumber]]] | None: ...
    @property
    def running_replicas(self) -> Collection[Hashable]: ...
    @property
    def target_num_replicas(self) -> int: ...
    @property
    def policy_state(self) -> Mapping[str, object]: ...


class WaitingWorkScaler:
    """Serve's policy object; see `ScalingPolicy`. It keeps what it remembers itself."""

    def __init__(self, least: int, most: int, max_queue_s: float, down_after_s: float) -> None:
        limits = ScalingLimits(least=least, most=most, max_queue_s=max_queue_s, down_after_s=down_after_s)
        self._policy = ScalingPolicy(limits)

    def __call__(self, context: ScalingContext) -> tuple[int, dict[str, object]]:
        """The replicas that there should be, and Serve's own state of a policy, unchanged.

        A replica that has not reported yet, or reports other numbers (another version), does not count.
        """
        latest: dict[Hashable, dict[str, float]] = {name: {} for name in context.running_replicas}
        for number, of_replicas in (context.raw_metrics or {}).items():
            for replica, points in of_replicas.items():
                if replica in latest and points:
                    latest[replica][number] = points[-1].value
        wanted = set(ReplicaLoad.number_names())
        loads = [ReplicaLoad.from_numbers(numbers) for numbers in latest.values() if wanted <= numbers.keys()]
        target = self._policy.decide(loads, context.target_num_replicas, time.monotonic())
        return target, dict(context.policy_state)
