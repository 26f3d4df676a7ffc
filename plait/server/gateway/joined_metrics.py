"""Several registries of metrics as one."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from prometheus_client import CollectorRegistry
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

# Prometheus's client adds when a counter was made: a second family, which this text format has no use for.
CREATED = "_created"


class JoinedMetrics(Collector):
    """Several registries as one: a family that several have is one, with the samples of all.

    `registries`: each with labels that are added to its samples, so that no two samples are the same.
    """

    def __init__(self, registries: Iterable[tuple[CollectorRegistry, Mapping[str, str]]]) -> None:
        self._registries = [*registries]

    def collect(self) -> Iterator[Metric]:
        """Every family, as it is now."""
        families: dict[str, Metric] = {}
        for registry, labels in self._registries:
            for family in registry.collect():
                joined = families.get(family.name)
                if joined is None:
                    joined = Metric(family.name, family.documentation, family.type)
                    families[family.name] = joined
                for sample in family.samples:
                    if sample.name.endswith(CREATED):
                        continue
                    joined.add_sample(sample.name, {**labels, **sample.labels}, sample.value)
        yield from families.values()


def join_metrics(registries: Iterable[tuple[CollectorRegistry, Mapping[str, str]]]) -> CollectorRegistry:
    """A registry of all that these have."""
    joined = CollectorRegistry(auto_describe=False)
    joined.register(JoinedMetrics(registries))
    return joined
