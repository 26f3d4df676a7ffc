"""Engines' metrics of several replicas are one exposition, with a label for each."""

from __future__ import annotations

from prometheus_client import CollectorRegistry
from prometheus_client.exposition import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from plait.cluster.replica_metrics import ReplicaMetrics
from plait.engine.metrics import Family

WAITING: Family = (
    "plait_requests_waiting",
    "Choices that wait.",
    "gauge",
    (("plait_requests_waiting", {}, 3.0),),
)
ENDED: Family = (
    "plait_requests",
    "Choices that ended.",
    "counter",
    (("plait_requests_total", {"finish_reason": "stop"}, 7.0),),
)


def read(metrics: ReplicaMetrics) -> dict[tuple[str, str, str], float]:
    registry = CollectorRegistry(auto_describe=False)
    registry.register(metrics)
    families = text_string_to_metric_families(generate_latest(registry).decode())
    return {
        (sample.name, sample.labels["replica"], sample.labels.get("finish_reason", "")): sample.value
        for family in families
        for sample in family.samples
    }


def test_samples_have_their_replica_and_go_with_it() -> None:
    metrics = ReplicaMetrics()
    metrics.arrive("one", (WAITING, ENDED))
    metrics.arrive("two", (WAITING,))
    metrics.arrive("two", (("plait_requests_waiting", "", "gauge", (("plait_requests_waiting", {}, 5.0),)),))
    assert read(metrics) == {
        ("plait_requests_waiting", "one", ""): 3.0,
        ("plait_requests_waiting", "two", ""): 5.0,
        ("plait_requests_total", "one", "stop"): 7.0,
    }
    metrics.forget("one")
    metrics.forget("never seen")
    assert read(metrics) == {("plait_requests_waiting", "two", ""): 5.0}


def test_one_name_of_two_types_is_shown_as_the_first() -> None:
    metrics = ReplicaMetrics()
    metrics.arrive("one", (WAITING,))
    metrics.arrive("two", ((WAITING[0], WAITING[1], "counter", WAITING[3]),))
    assert list(read(metrics)) == [("plait_requests_waiting", "one", "")]
