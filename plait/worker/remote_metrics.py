"""The metrics of an engine in another process, and of those that ran before it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from plait.worker.protocol import MetricsReport

ANSWER_S = 1.0  # an engine answers between two steps; without an answer, the last one stands
SUMMED = frozenset({"counter", "histogram"})
Sample = tuple[str, tuple[tuple[str, str], ...]]


class Collected(Collector):
    """Families as the engine last reported them. Totals go on when the engine is replaced.

    `ask(number)` requests a report from the engine; False: there is no engine. `of_front`: how often the
    engine was replaced, and whether it is up.
    """

    def __init__(self, ask: Callable[[int], bool], of_front: Callable[[], Mapping[str, float]]) -> None:
        self._ask, self._of_front = ask, of_front
        self._arrived = threading.Condition()
        self._last: MetricsReport | None = None
        self._past: dict[Sample, float] = {}  # totals of engines that have ended
        self._is_past = False  # the engine of the last report has ended, and is in `_past`
        self._number = 0
        self.registry = CollectorRegistry(auto_describe=False)
        self.registry.register(self)

    def arrive(self, counted: MetricsReport) -> None:
        """The engine has answered: keep its report."""
        with self._arrived:
            self._last, self._is_past = counted, False
            self._arrived.notify_all()

    def keep(self) -> None:
        """The engine has ended: add its totals to those of earlier engines."""
        with self._arrived:
            if self._last is None or self._is_past:
                return
            for _, _, kind, samples in self._last.families:
                for name, labels, value in samples if kind in SUMMED else ():
                    sample = (name, tuple(labels.items()))
                    self._past[sample] = self._past.get(sample, 0.0) + value
            self._is_past = True

    def collect(self) -> Iterator[Metric]:
        """Every family, as things are now or were a moment ago."""
        with self._arrived:
            self._number = number = self._number + 1
        if self._ask(number):
            with self._arrived:
                self._arrived.wait_for(lambda: self._last and self._last.number >= number, ANSWER_S)
        with self._arrived:
            families = [*self._families()]
        yield from families
        found = self._of_front()
        about = "Engine processes that ended unasked and were replaced."
        yield CounterMetricFamily("plait_engine_restarts", about, value=found["restarts"])
        yield GaugeMetricFamily("plait_engine_up", "Whether there is an engine.", value=found["up"])

    def _families(self) -> Iterator[Metric]:
        for name, about, kind, samples in self._last.families if self._last else ():
            family = Metric(name, about, kind)
            for sample, labels, value in samples:
                now = 0.0 if self._is_past else value
                if kind in SUMMED:
                    now += self._past.get((sample, tuple(labels.items())), 0.0)
                family.add_sample(sample, labels, now)
            yield family
