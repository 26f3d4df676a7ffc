"""The dashboard of deploy/grafana, evaluated over scrapes: its metrics exist, and no engine counts twice."""

from __future__ import annotations

import json
import math
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import pytest
from prometheus_client import CollectorRegistry

from plait.cluster.loop import ClusterLoop
from plait.config import ServerConfig
from plait.engine.metric_registry import RemoteMetrics, make_registry
from plait.engine.metrics import Metrics
from plait.request import RequestTrace
from plait.server.gateway.joined_metrics import join_metrics
from plait.server.gateway.middleware import Traffic
from tests.cluster.replicas import Cluster, cluster
from tests.promql import NAME, Scrape, evaluate, names_of
from tests.test_deploy import DEPLOY, Counts, metric_labels

Samples = list[tuple[dict[str, str], float]]
CLUSTER_LABELS = {"gateway", "replica"}
PLACES = {"$__rate_interval": "5m", "$__range": "30m", "$instance": ".+"}
IS_OF_CLUSTERS = "plait_cluster_"


def expressions() -> list[str]:
    """Of every panel, with the values that Grafana would put in."""
    dashboard = json.loads((DEPLOY / "grafana/plait.json").read_text("utf-8"))
    found = [target["expr"] for panel in dashboard["panels"] for target in panel.get("targets", ())]
    for place, value in PLACES.items():
        found = [text.replace(place, value) for text in found]
    return found


class Busy(Counts):
    """A scheduler of which every number is the same."""

    def __init__(self, number: int) -> None:
        self._number = number
        self.cache_counts = {"hit": number, "new": 1, "asked_tokens": 10 * number, "hit_tokens": 5}

    def stats(self) -> Mapping[str, int]:
        return defaultdict(lambda: self._number)


def make_trace(seconds: float) -> RequestTrace:
    return RequestTrace(
        request_id="r",
        index=0,
        arrival_s=0.0,
        first_scheduled_s=0.1,
        first_token_s=0.2,
        finish_s=seconds,
        finish_reason="stop",
        num_prompt_tokens=10,
        num_output_tokens=9,
    )


def make_engine(number: int) -> CollectorRegistry:
    """The metrics of an engine that has done something: more with a higher number."""
    metrics = Metrics(Busy(number))
    for i in range(number):
        metrics.count_request(10 << i)
        metrics.count_start(0.01 * number, 3)
        metrics.count_first(1, 0.03 * (i + 1))
        metrics.count_next(2, 0.05 * number)
        metrics.count_steps(2, 8 * number, 0.02 * number)
        metrics.count_draft(4, 1 + i % 2)
        metrics.count_end(make_trace(1.0 + i))
    found = make_registry(metrics.families)
    found.register(RemoteMetrics(lambda asked: False, lambda: (number, True)))
    return found


def make_traffic(number: int, labels: Mapping[str, str]) -> CollectorRegistry:
    """What a server counts of HTTP, after some requests."""
    traffic = Traffic(ServerConfig(), labels=labels)
    traffic._requests.labels("/v1/completions", "POST", "200").inc(number)
    traffic._requests.labels("/v1/completions", "POST", "503").inc(2)
    traffic._requests.labels("/health", "GET", "503").inc(number)
    traffic._seconds.labels("/v1/completions").observe(0.3 * number)
    traffic._in_flight.set(number)
    return join_metrics([(traffic.registry, traffic.labels)])


def scrape(instance: str, *registries: CollectorRegistry) -> Samples:
    """What Prometheus has of one target."""
    samples = [s for r in registries for family in r.collect() for s in family.samples]
    return [({NAME: s.name, "instance": instance, **s.labels}, s.value) for s in samples]


@dataclass
class World:
    """The same two engines as Prometheus sees them; gateways behind one address take turns."""

    pods: Scrape
    gateways: Scrape
    behind_one_address: Scrape


@contextmanager
def gateways_of(made: Cluster) -> Iterator[tuple[ClusterLoop, ClusterLoop]]:
    """Two gateways that are connected with all replicas."""
    other = ClusterLoop(name="other")
    try:
        other.set_members({name: r.server.address for name, r in made.replicas.items()})
        other.first_card()
        made.received.wait(lambda: other.count_states()["ready"] == 2)
        yield made.loop, other
    finally:
        other.close(drain=False)


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    with cluster(2) as made:
        engines = [make_engine(2), make_engine(5)]
        for replica, engine in zip(made.replicas.values(), engines, strict=True):
            replica.engine.registry = engine
        with gateways_of(made) as loops:
            for loop in loops:
                assert loop._table is not None
                loop._table.moved["replica", "yes"] += 1
                loop._table.routed["load"] += 1
            pods = [scrape(f"pod{i}", engines[i], make_traffic(i + 3, {})) for i in (0, 1)]
            each = [
                scrape(f"gateway{i}", loop.registry, make_traffic(i + 3, loop.metric_labels))
                for i, loop in enumerate(loops)
            ]
            yield World([*pods[0], *pods[1]], [*each[0], *each[1]], as_one_target([*each[0], *each[1]]))


def as_one_target(samples: Samples) -> Samples:
    """Of several scrapes of one address the last sample of each series."""
    latest = {tuple(sorted({**labels, "instance": "proxy"}.items())): value for labels, value in samples}
    return [(dict(labels), value) for labels, value in latest.items()]


def rounded(found: Mapping[frozenset[tuple[str, str]], float]) -> dict[frozenset[tuple[str, str]], float]:
    return {labels: round(value, 9) for labels, value in found.items()}


@pytest.mark.slow
def test_numbers_of_a_cluster_are_those_of_its_engines_whichever_gateways_are_scraped(world: World) -> None:
    panels = [text for text in expressions() if IS_OF_CLUSTERS not in text]
    assert len(panels) > 40
    for text in panels:
        expected = evaluate(text, world.pods)
        assert expected, text
        assert not any(math.isnan(value) for value in expected.values()), text
        assert rounded(evaluate(text, world.gateways)) == rounded(expected), text
        assert rounded(evaluate(text, world.behind_one_address)) == rounded(expected), text


@pytest.mark.slow
def test_gateways_count_their_own_streams_and_show_the_same_replicas(world: World) -> None:
    states = evaluate("max by (state) (plait_cluster_replicas)", world.gateways)
    assert states[frozenset({("state", "ready")})] == 2
    rows: Samples = [
        (
            {NAME: "plait_cluster_moved_total", "gateway": name, "why": "replica", "same_arithmetic": "yes"},
            value,
        )
        for name, value in (("a", 2.0), ("b", 3.0))
    ]
    twice = [({**labels, "instance": instance}, value) for labels, value in rows for instance in ("p", "q")]
    (moved,) = [text for text in expressions() if "moved" in text]
    assert [*evaluate(moved, twice).values()] == [5.0]


@pytest.mark.slow
def test_no_sample_of_two_gateways_is_the_same(world: World) -> None:
    for samples in (world.gateways, world.behind_one_address):
        keys = [frozenset(labels.items()) for labels, _ in samples]
        assert len(keys) == len({*keys})


@pytest.mark.slow
def test_the_dashboard_names_metrics_and_labels_that_servers_have(world: World) -> None:
    known = metric_labels()
    for labels, _ in world.gateways:
        known.setdefault(labels[NAME], set()).update(labels.keys() - {NAME})
    shown: set[str] = set()
    for text in expressions():
        names = names_of(text)
        assert names <= known.keys(), text
        shown |= {re.sub(r"_(bucket|count|sum)$", "", name) for name in names}
        labels = CLUSTER_LABELS.union({"instance"}, *(known[name] for name in names))
        inside = {
            label for part in re.findall(r"\{([^}]*)\}", text) for label in re.findall(r"(\w+)[=!]", part)
        }
        grouped = {label for part in re.findall(r"by \(([^)]*)\)", text) for label in part.split(", ")}
        assert inside | grouped <= labels, text
    families = {re.sub(r"_(bucket|count|sum)$", "", name) for name in known}
    assert families - shown == set(), "the dashboard shows every metric"


def test_panels_have_numbers_of_their_own_and_one_source() -> None:
    dashboard = json.loads((DEPLOY / "grafana/plait.json").read_text("utf-8"))
    ids = [panel["id"] for panel in dashboard["panels"]]
    assert len(ids) == len({*ids})
    places = [tuple(panel["gridPos"][key] for key in "xy") for panel in dashboard["panels"]]
    assert len(places) == len({*places})


@pytest.mark.parametrize("text", ["sum(a", "a)", "a{b=}", "rate(a)", "a + b", "sum by (x (a)", "rate(a[5])"])
def test_what_is_no_expression_is_refused(text: str) -> None:
    with pytest.raises((ValueError, KeyError)):
        evaluate(text, ())
