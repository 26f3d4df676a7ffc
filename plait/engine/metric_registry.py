"""An engine's metrics as those of Prometheus' client, of an engine in this process or in another."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from plait.engine.metrics import Family

ANSWER_S = 1.0  # an engine answers between two steps; without an answer, the last one counts
SampleKey = tuple[str, tuple[tuple[str, str], ...]]  # name, labels
SUMMED = frozenset({"counter", "histogram"})
LOAD = {"plait_requests_running": "num_running", "plait_requests_waiting": "num_waiting"}


class _Families(Collector):
    """Families that are plain values, read anew by each scrape."""

    def __init__(self, read: Callable[[], Iterable[Family]]) -> None:
        self._read = read

    def collect(self) -> Iterator[Metric]:
        return map(make_metric, self._read())


def make_metric(family: Family) -> Metric:
    """A family as Prometheus' client has it."""
    name, about, kind, samples = family
    made = Metric(name, about, kind)
    for sample, labels, value in samples:
        made.add_sample(sample, labels, value)
    return made


def make_registry(read: Callable[[], Iterable[Family]]) -> CollectorRegistry:
    """A registry of which each scrape gives what `read` does then."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Families(read))
    return registry


class RemoteMetrics(Collector):
    """The families that an engine in another process last reported. Totals go on when it is replaced.

    `ask(number)` requests a report; False: there is no engine. `of_front`: restarts, and whether it is up.
    `ended`: choices that ended by their reason, if the front counts them. An engine that is killed cannot
    report the last of them. `stats`: what runs and waits, if the front knows it. An engine that starts, or is
    busy with a long step, cannot report that.
    """

    def __init__(
        self,
        ask: Callable[[int], bool],
        of_front: Callable[[], tuple[int, bool]],
        ended: Callable[[], Mapping[str, int]] | None = None,
        stats: Callable[[], Mapping[str, int]] = dict,
    ) -> None:
        self._ask, self._of_front, self._ended, self._stats = ask, of_front, ended, stats
        self._arrived = threading.Condition()
        self._families: Sequence[Family] = ()  # of the last report
        self._past: dict[SampleKey, float] = {}  # totals of ended engines
        self._is_past = False  # the engine of the last report has ended, and is in `_past`
        self._number = self._answered = 0

    def arrive(self, number: int, families: Sequence[Family]) -> None:
        """The engine has answered: keep its report."""
        with self._arrived:
            self._families, self._answered, self._is_past = families, number, False
            self._arrived.notify_all()

    def keep(self, last: Mapping[str, int]) -> None:
        """The engine has ended: add its totals to earlier ones. `last`: some of them as of its end."""
        with self._arrived:
            totals: dict[SampleKey, float] = {}
            for _, _, kind, samples in () if self._is_past else self._families:
                for name, labels, value in samples if kind in SUMMED else ():
                    totals[name, tuple(labels.items())] = value
            for name, count in last.items():
                sample = f"plait_{name.removeprefix('num_')}_total", ()
                totals[sample] = max(totals.get(sample, 0.0), count)
            for key, value in totals.items():
                self._past[key] = self._past.get(key, 0.0) + value
            self._is_past = True

    def collect(self) -> Iterator[Metric]:
        """Every family, as things are now or were a moment ago."""
        with self._arrived:
            self._number = number = self._number + 1
        if self._ask(number):
            with self._arrived:
                self._arrived.wait_for(lambda: self._answered >= number, ANSWER_S)
        stats = self._stats()
        with self._arrived:
            families = [*self._current(stats)]
        yield from families
        num_restarts, is_up = self._of_front()
        about = "Engine processes that ended and were replaced."
        yield CounterMetricFamily("plait_engine_restarts", about, value=num_restarts)
        yield GaugeMetricFamily("plait_engine_up", "Whether there is an engine.", value=is_up)

    def _current(self, stats: Mapping[str, int]) -> Iterator[Metric]:
        for name, about, kind, samples in self._families:
            family = Metric(name, about, kind)
            ended = self._ended() if self._ended and name == "plait_requests" else None
            for sample, labels, value in samples:
                now = 0.0 if self._is_past else value
                if ended is not None:
                    now = float(ended.get(labels["finish_reason"], 0))
                elif name in LOAD:
                    now = float(stats.get(LOAD[name], now))
                elif kind in SUMMED:
                    now += self._past.get((sample, tuple(labels.items())), 0.0)
                family.add_sample(sample, labels, now)
            yield family


def read_families(collector: Collector) -> tuple[Family, ...]:
    """What a scrape gives, as plain values for another process."""

    def read(family: Metric) -> Family:
        rows = tuple(
            (s.name, dict(s.labels), float(s.value)) for s in family.samples
        )  # a value may be a bool
        return family.name, family.documentation, family.type, rows

    return tuple(map(read, collector.collect()))
