"""Engines' metrics of several replicas are one exposition, with a label for each."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

import pytest
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from plait.cluster.replica_metrics import ReplicaMetrics
from plait.cluster.wire import EngineMetrics, MessageDecoder, ToGateway, encode_message
from plait.engine.metric_registry import RemoteMetrics, read_families
from plait.engine.metrics import Family
from plait.server.gateway.vllm_metrics import Aliases
from tests.patience import PATIENCE_S, until

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


def test_what_an_engine_reports_can_be_sent_whatever_numbers_it_has() -> None:
    engine = CollectorRegistry(auto_describe=False)
    engine.register(RemoteMetrics(lambda number: False, lambda: (2, True)))  # "up" is a bool there
    sent = EngineMetrics(1, read_families(engine))
    assert MessageDecoder(ToGateway).decode(encode_message(sent)) == sent
    values = {name: value for *_, samples in sent.families for name, _, value in samples}
    assert values == {"plait_engine_restarts_total": 2.0, "plait_engine_up": 1.0}


class Ask:
    """Stands for the connections: the numbers of scrapes, and the replicas that get them."""

    def __init__(self, replicas: Sequence[str] = ()) -> None:
        self.replicas, self.numbers = replicas, list[int]()
        self.answer: Callable[[int], None] = lambda number: None

    def __call__(self, number: int) -> Sequence[str]:
        self.numbers.append(number)
        self.answer(number)
        return self.replicas


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
    metrics = ReplicaMetrics(Ask())
    metrics.arrive("one", 1, (WAITING, ENDED))
    metrics.arrive("two", 1, (WAITING,))
    metrics.arrive(
        "two", 2, (("plait_requests_waiting", "", "gauge", (("plait_requests_waiting", {}, 5.0),)),)
    )
    assert read(metrics) == {
        ("plait_requests_waiting", "one", ""): 3.0,
        ("plait_requests_waiting", "two", ""): 5.0,
        ("plait_requests_total", "one", "stop"): 7.0,
    }
    metrics.forget("one")
    metrics.forget("never seen")
    assert read(metrics) == {("plait_requests_waiting", "two", ""): 5.0}


def test_one_name_of_two_types_is_shown_as_the_first() -> None:
    metrics = ReplicaMetrics(Ask())
    metrics.arrive("one", 1, (WAITING,))
    metrics.arrive("two", 1, ((WAITING[0], WAITING[1], "counter", WAITING[3]),))
    assert list(read(metrics)) == [("plait_requests_waiting", "one", "")]


def test_a_scrape_waits_for_the_replicas_that_it_asks_and_takes_the_last_report_of_a_slow_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ask = Ask(("one", "two"))
    metrics = ReplicaMetrics(ask)
    monkeypatch.setattr("plait.cluster.replica_metrics.ANSWER_S", 0.02)

    def answer(number: int) -> None:
        metrics.arrive("one", number, (WAITING,))
        if number == 1:
            metrics.arrive("two", number, (ENDED,))

    ask.answer = answer
    for _ in range(2):
        assert read(metrics) == {
            ("plait_requests_waiting", "one", ""): 3.0,
            ("plait_requests_total", "two", "stop"): 7.0,
        }
    assert ask.numbers == [1, 2]


def test_scrapes_at_once_ask_the_replicas_once_and_one_that_ends_keeps_none_waiting(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("plait.cluster.replica_metrics.ANSWER_S", PATIENCE_S)
    ask, found = Ask(("one", "gone")), []
    metrics = ReplicaMetrics(ask)
    scrapes = [threading.Thread(target=lambda: found.append(read(metrics)), daemon=True) for _ in range(4)]
    for scrape in scrapes:
        scrape.start()
    until(lambda: len(metrics._arrived._waiters) == 4)  # type: ignore[attr-defined]
    metrics.forget("gone")
    metrics.arrive("one", 1, (WAITING,))
    for scrape in scrapes:
        scrape.join(PATIENCE_S)
    assert found == [{("plait_requests_waiting", "one", ""): 3.0}] * 4
    assert ask.numbers == [1]


def test_replicas_stay_apart_under_vllms_names() -> None:
    metrics = ReplicaMetrics(Ask())
    sizes = {"block_size": "16", "num_blocks": "9", "num_slots": "2", "arithmetic": "fp_1"}
    cache: Family = ("plait_cache_config_info", "", "gauge", (("plait_cache_config_info", sizes, 1.0),))
    kinds = tuple(("plait_preemptions_total", {"kind": kind}, 2.0) for kind in ("swap", "recompute"))
    for replica in ("one", "two"):
        metrics.arrive(replica, 1, (WAITING, ENDED, cache, ("plait_preemptions", "", "counter", kinds)))
    ours = CollectorRegistry(auto_describe=False)
    ours.register(metrics)
    samples = [sample for family in Aliases(ours, "tiny").collect() for sample in family.samples]
    values = {(sample.name, sample.labels["replica"]): sample.value for sample in samples}
    assert len(values) == len(samples) == 8
    assert values["vllm:num_preemptions_total", "two"] == 4.0
    assert values["vllm:request_success_total", "one"] == 7.0
