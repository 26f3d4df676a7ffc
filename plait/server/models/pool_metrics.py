"""Metrics of a server of several models: those of each engine under its name, and what the pool did."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from plait.server.gateway.joined_metrics import join_metrics
from plait.server.models.hosted import HostedModel

if TYPE_CHECKING:
    from plait.frontend.frontend import Front

LOAD_S = (0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 60.0, 120.0, 300.0, 600.0)


class ModelGauges(Collector):
    """How each model is now."""

    def __init__(self, list_models: Callable[[], Sequence[HostedModel]]) -> None:
        self._list_models = list_models

    def collect(self) -> Iterator[Metric]:
        """A sample for each model, by its name."""
        loaded = GaugeMetricFamily("plait_model_loaded", "1: the model is loaded.", labels=["model"])
        memory = GaugeMetricFamily(
            "plait_model_memory_bytes", "Memory of a model's engine; 0: it has none.", labels=["model"]
        )
        waiting = GaugeMetricFamily(
            "plait_model_waiting_requests", "Requests that wait until it is loaded.", labels=["model"]
        )
        for model in self._list_models():
            is_loaded = model.front is not None
            loaded.add_metric([model.name], float(is_loaded))
            memory.add_metric([model.name], float(model.need if is_loaded else 0))
            waiting.add_metric([model.name], float(len(model.waiters)))
        yield from (loaded, memory, waiting)


class PoolMetrics:
    """Counts loads and unloads."""

    def __init__(self, list_models: Callable[[], Sequence[HostedModel]]) -> None:
        self.registry = CollectorRegistry()
        self.registry.register(ModelGauges(list_models))
        self._loads = Counter(
            "plait_model_loads", "Attempts to load a model.", ["model", "outcome"], registry=self.registry
        )
        self._unloads = Counter(
            "plait_model_unloads", "Models that were unloaded.", ["model", "reason"], registry=self.registry
        )
        self._seconds = Histogram(
            "plait_model_load_seconds",
            "Time from the start of its load until a model is ready.",
            ["model"],
            buckets=LOAD_S,
            registry=self.registry,
        )

    def join(self, fronts: Mapping[str, Front]) -> CollectorRegistry:
        """The metrics of all engines, each sample with the label `model`."""
        return join_metrics((front.loop.registry, {"model": name}) for name, front in fronts.items())

    def record_load(self, name: str, seconds: float | None) -> None:
        """Record an attempt to load a model. `seconds`: how long it took, None if it failed."""
        self._loads.labels(name, "failed" if seconds is None else "loaded").inc()
        if seconds is not None:
            self._seconds.labels(name).observe(seconds)

    def record_unload(self, name: str, reason: str) -> None:
        """Record that a model was unloaded: idle, memory, requested, files or lost."""
        self._unloads.labels(name, reason).inc()
