"""The metrics of a cluster's engines, as a gateway shows them: each sample with the label `replica`."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from functools import partial

from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from plait.engine.metrics import Family

LABEL = "replica"
ANSWER_S = 2.0  # an engine answers between two steps, and its replica waits a second for that


class ReplicaMetrics(Collector):
    """The families of the replicas that are connected; one that has ended has no samples any more.

    `ask(number)` requests a report of each replica, and returns which; `arrive` gets what they report. A
    replica that does not answer within ANSWER_S has what it reported last. A scrape that comes while another
    one waits gets the same answers, so that many make no more work than one. Sums over replicas are
    Prometheus's to make: `sum without (replica) (plait_requests_waiting)`.
    """

    def __init__(self, ask: Callable[[int], Collection[str]]) -> None:
        self._ask, self._number = ask, 0
        self._reported: dict[str, tuple[int, Sequence[Family]]] = {}
        self._arrived = threading.Condition()
        self._asked: set[str] = set()
        self._asked_s = -ANSWER_S

    def arrive(self, replica: str, number: int, families: Sequence[Family]) -> None:
        """A replica reports: families as (name, help, type, samples)."""
        with self._arrived:
            self._reported[replica] = number, families
            self._arrived.notify_all()

    def forget(self, replica: str) -> None:
        """A replica has ended. One that is not known is no error."""
        with self._arrived:
            self._reported.pop(replica, None)
            self._asked.discard(replica)
            self._arrived.notify_all()

    def collect(self) -> Iterator[Metric]:
        """Every family, with the samples of all replicas."""
        with self._arrived:
            if self._is_answered(self._number) or time.monotonic() - self._asked_s >= ANSWER_S:
                self._number, self._asked_s = self._number + 1, time.monotonic()
                self._asked = {*self._ask(self._number)}
            self._arrived.wait_for(partial(self._is_answered, self._number), ANSWER_S)
            reported = [(name, families) for name, (_, families) in sorted(self._reported.items())]
        found: dict[str, Metric] = {}
        for replica, families in reported:
            for name, about, kind, samples in families:
                family = found.setdefault(name, Metric(name, about, kind))
                if family.type != kind:  # of another version: two types of one name would be no exposition
                    continue
                for sample, labels, value in samples:
                    family.add_sample(sample, {**labels, LABEL: replica}, value)
        yield from found.values()

    def _is_answered(self, number: int) -> bool:
        """Whether all that should report have done so for this number."""
        return all(self._reported.get(name, (0, ()))[0] >= number for name in self._asked)
