"""What a gateway counts of its cluster, as metric families."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Protocol

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from plait.engine.metric_registry import make_metric
from plait.engine.metrics import Histogram


class ClusterCounts(Protocol):
    """A cluster loop as it is read here; safe from any thread."""

    lease_seconds: Histogram

    def count_states(self) -> Mapping[str, int]: ...
    def counts(self) -> tuple[Mapping[tuple[str, str], int], Mapping[str, int]]: ...


class ClusterMetrics(Collector):
    """What a gateway counts of its cluster."""

    def __init__(self, loop: ClusterCounts) -> None:
        self._loop = loop

    def collect(self) -> Iterator[Metric]:
        """The families, at this moment."""
        moved, routed = self._loop.counts()
        text = "Streams that went on in another replica."
        family = CounterMetricFamily("plait_cluster_moved", text, labels=("why", "same_arithmetic"))
        for labels, count in moved.items():
            family.add_metric(labels, count)
        yield family
        family = CounterMetricFamily(
            "plait_cluster_routed", "Leases, by what decided their route.", labels=("why",)
        )
        for why, count in routed.items():
            family.add_metric((why,), count)
        yield family
        states = GaugeMetricFamily("plait_cluster_replicas", "Replicas that are known.", labels=("state",))
        for state, count in self._loop.count_states().items():
            states.add_metric((state,), count)
        yield states
        yield make_metric(self._loop.lease_seconds.family())
