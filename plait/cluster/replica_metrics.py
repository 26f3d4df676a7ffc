"""The metrics of a cluster's engines, as a gateway shows them: each sample with the label `replica`."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence

from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from plait.engine.metrics import Family

LABEL = "replica"


class ReplicaMetrics(Collector):
    """What replicas last reported of their engines. A replica that has ended has no samples any more.

    Sums over replicas are Prometheus's to make: `sum without (replica) (plait_requests_waiting)`.
    """

    def __init__(self) -> None:
        self._reported: dict[str, Sequence[Family]] = {}
        self._lock = threading.Lock()

    def arrive(self, replica: str, families: Sequence[Family]) -> None:
        """A replica reports: families as (name, help, type, samples), as `MetricsReport` has them."""
        with self._lock:
            self._reported[replica] = families

    def forget(self, replica: str) -> None:
        """A replica has ended. One that is not known is no error."""
        with self._lock:
            self._reported.pop(replica, None)

    def collect(self) -> Iterator[Metric]:
        """Every family, with the samples of all replicas."""
        with self._lock:
            reported = sorted(self._reported.items())
        found: dict[str, Metric] = {}
        for replica, families in reported:
            for name, about, kind, samples in families:
                family = found.setdefault(name, Metric(name, about, kind))
                if family.type != kind:  # of another version: two types of one name would be no exposition
                    continue
                for sample, labels, value in samples:
                    family.add_sample(sample, {**labels, LABEL: replica}, value)
        yield from found.values()
