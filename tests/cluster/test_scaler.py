"""What Ray Serve's controller asks for: replicas by the work that waits in those that report."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field

from plait.cluster.ray_serve.scaler import WaitingWorkScaler
from plait.cluster.scaling import ReplicaLoad

BUSY = ReplicaLoad(waiting_tokens=9000, waiting_replies=8, running_replies=4, places=4, tokens_per_s=1000.0)
IDLE = ReplicaLoad(waiting_tokens=0, places=4)


@dataclass
class Point:
    value: float


Reported = Mapping[str, Mapping[Hashable, Sequence[Point]]]


@dataclass
class Context:
    """What Serve hands to a policy."""

    target_num_replicas: int
    running_replicas: Sequence[str]
    raw_metrics: Reported | None
    policy_state: Mapping[str, object] = field(default_factory=lambda: {"__decision_counters": 1})


def report(loads: Mapping[str, ReplicaLoad], before: ReplicaLoad = IDLE) -> Reported:
    """Two reports of each replica, the older one first."""
    return {
        number: {
            replica: [Point(one.to_numbers()[number]) for one in (before, load)]
            for replica, load in loads.items()
        }
        for number in ReplicaLoad.number_names()
    }


def make_scaler(down_after_s: float = 300.0) -> WaitingWorkScaler:
    return WaitingWorkScaler(least=1, most=4, max_queue_s=2.0, down_after_s=down_after_s)


def test_the_latest_reports_of_running_replicas_decide() -> None:
    scaler = make_scaler()
    assert scaler(Context(1, ["a"], report({"a": BUSY})))[0] == 2
    assert scaler(Context(1, ["a"], report({"a": IDLE}, before=BUSY)))[0] == 1
    assert scaler(Context(2, ["a", "b"], report({"a": IDLE, "b": IDLE, "gone": BUSY})))[0] == 2
    assert scaler(Context(2, ["a"], report({"a": BUSY})))[0] == 2  # the second one starts already


def test_the_number_stays_while_nothing_is_reported_or_only_a_part() -> None:
    scaler, whole = make_scaler(), report({"a": BUSY})
    partial = {name: points for name, points in whole.items() if name != "places"}
    cases: list[Reported | None] = [None, {}, partial, {**whole, "places": {"a": []}}]
    for reported in cases:
        assert scaler(Context(3, ["a"], reported))[0] == 3


def test_idle_replicas_go_one_by_one_and_the_state_of_serve_is_kept() -> None:
    scaler, target, found = make_scaler(down_after_s=0.0), 3, []
    for _ in range(3):
        target, state = scaler(Context(target, ["a", "b", "c"], report(dict.fromkeys("abc", IDLE))))
        found.append(target)
        assert state == {"__decision_counters": 1}
    assert found == [2, 1, 1]
