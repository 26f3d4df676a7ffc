from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Any

import pytest
from prometheus_client.exposition import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from plait.engine.metric_registry import RemoteMetrics, make_registry
from plait.engine.metrics import Histogram, Metrics
from plait.memory import BlockGroup
from plait.request import FinishReason, RequestTrace
from plait.schedule.allocation import Allocation
from plait.schedule.costs import SchedulerLimits

STATS = dict(
    num_running=3,
    num_waiting=2,
    num_waiting_tokens=900,
    prompt_tokens_per_s=300,
    num_blocks=100,
    num_free_blocks=60,
    num_cached_blocks=30,
    num_slots=8,
    num_free_slots=1,
    num_snapshots=4,
    host_nbytes=4096,
    num_preemptions=5,
    num_swaps=2,
)


class Books:
    """Stands for the scheduler."""

    def __init__(self) -> None:
        self.limits = SchedulerLimits(
            max_num_seqs=4, max_num_batched_tokens=8, max_waiting=1, max_model_len=64
        )
        groups = (BlockGroup("full", None, ("a",)), BlockGroup("window", 32, ("b",)))
        self.memory = Allocation(groups, [71, 31], 16, num_slots=9, max_step_len=8)
        self.cache_counts: Mapping[str, int] = {"hit": 7, "new": 2, "asked_tokens": 90, "hit_tokens": 64}

    def stats(self) -> Mapping[str, int]:
        return STATS


def read(metrics: Metrics) -> dict[str, float]:
    """Every sample that a scrape gives, as `name{label}`."""
    text = generate_latest(make_registry(metrics.families)).decode()
    return {
        sample.name + "".join(f"{{{value}}}" for value in sample.labels.values()): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def trace(reason: FinishReason, **times: Any) -> RequestTrace:
    known = dict(arrival_s=10.0, first_scheduled_s=10.1, first_token_s=10.2, finish_s=13.0) | times
    return RequestTrace(
        request_id="r", index=0, finish_reason=reason, num_prompt_tokens=4, num_output_tokens=6, **known
    )


def test_what_the_scheduler_says_is_read_at_the_scrape() -> None:
    books = Books()
    metrics = Metrics(books)
    metrics.arithmetic = "fp_own"
    found = read(metrics)
    assert found["plait_requests_running"] == 3
    assert found["plait_requests_waiting"] == 2
    assert found["plait_waiting_seconds"] == 3.0  # of prompts; how long a reply runs is not known yet
    assert found["plait_places_used_ratio"] == 3 / 4
    assert [found[f"plait_blocks{{{state}}}"] for state in ("free", "held", "cached")] == [60, 10, 30]
    assert [found[f"plait_slots{{{state}}}"] for state in ("free", "held", "cached")] == [1, 3, 4]
    assert found["plait_memory_usage_ratio"] == 3 / 4  # slots: more than the tenth of the blocks
    assert found["plait_cache_config_info{fp_own}{16}{70}{8}"] == 1
    assert found["plait_snapshots"] == 4
    assert found["plait_host_saved_bytes"] == 4096
    assert found["plait_preemptions_total{swap}"] == 2
    assert found["plait_preemptions_total{recompute}"] == 3
    assert found["plait_prefix_cache_asked_tokens_total"] == 90
    assert found["plait_prefix_cache_hit_tokens_total"] == 64
    books.cache_counts = {"hit": 8, "evicted": 1}
    assert read(metrics)["plait_prefix_cache_lookups_total{hit}"] == 8


def test_before_the_first_reply_has_ended_those_that_wait_wait_as_long_as_one_has_run() -> None:
    now = [100.0]
    metrics = Metrics(Books(), lambda: now[0])
    metrics.count_first(1, 0.4)
    now[0] += 8.0
    prompts, places = 3.0, 4
    assert read(metrics)["plait_waiting_seconds"] == prompts + 1 * 8.0 / places
    metrics.count_end(trace("cancelled"))
    assert read(metrics)["plait_waiting_seconds"] == prompts
    metrics.count_end(trace("stop"))  # it ran for 2.8 s
    assert read(metrics)["plait_waiting_seconds"] == pytest.approx(prompts + 2.8 / places)


def test_every_label_is_there_from_the_start_so_that_rates_have_a_beginning() -> None:
    found = read(Metrics(Books()))
    causes = ("hit", "new", "evicted", "no_snapshot", "window", "short", "off")
    assert {f"plait_prefix_cache_lookups_total{{{cause}}}" for cause in causes} <= set(found)
    reasons = ("stop", "length", "cancelled", "error")
    assert [found[f"plait_requests_total{{{reason}}}"] for reason in reasons] == [0] * 4


def test_counters_add_up() -> None:
    metrics = Metrics(Books())
    metrics.count_request(7)
    metrics.count_request(5)
    metrics.count_start(0.3, 4)
    metrics.count_steps(3, 12, 0.06)
    metrics.count_first(1, 0.4)
    metrics.count_next(3, 0.06)
    metrics.count_draft(8, 2)
    metrics.num_failed_steps += 1
    metrics.num_repairs += 2
    found = read(metrics)
    for name, value in dict(
        prompt_tokens=12,
        cached_tokens=4,
        output_tokens=4,
        drafted_tokens=8,
        accepted_tokens=2,
        steps=3,
        failed_steps=1,
        repairs=2,
    ).items():
        assert found[f"plait_{name}_total"] == value
    assert found["plait_request_prompt_tokens_sum"] == 12
    assert found["plait_queue_time_seconds_sum"] == pytest.approx(0.3)
    assert found["plait_step_tokens_sum"] == 36
    assert found["plait_step_seconds_sum"] == pytest.approx(0.06)
    assert found["plait_time_to_first_token_seconds_sum"] == pytest.approx(0.4)


def test_tokens_of_one_step_share_its_time() -> None:
    metrics = Metrics(Books())
    metrics.count_next(3, 0.06)
    found = read(metrics)
    name = "plait_inter_token_latency_seconds"
    assert found[f"{name}_sum"] == pytest.approx(0.06)
    assert found[f"{name}_count"] == 3
    assert found[f"{name}_bucket{{0.01}}"] == 0
    assert found[f"{name}_bucket{{0.03}}"] == 3


def test_only_replies_that_came_to_their_end_count_for_latency_and_length() -> None:
    metrics = Metrics(Books())
    for reason in ("stop", "length", "cancelled", "error"):
        metrics.count_end(trace(reason))
    found = read(metrics)
    assert [found[f"plait_requests_total{{{r}}}"] for r in ("stop", "length", "cancelled", "error")] == [
        1
    ] * 4
    assert found["plait_request_latency_seconds_count"] == 2
    assert found["plait_request_latency_seconds_sum"] == pytest.approx(6.0)
    assert found["plait_request_output_tokens_sum"] == 12


def test_a_value_on_a_bound_is_under_it_and_one_beyond_all_is_in_the_last_bucket() -> None:
    histogram = Histogram("lengths", "Lengths.", (1.0, 2.0))
    for value, times in ((1.0, 1), (1.5, 2), (2.0, 1), (9.0, 3)):
        histogram.observe(value, times)
    samples = {labels.get("le", name): value for name, labels, value in histogram.family()[3]}
    assert samples == {"1.0": 1, "2.0": 4, "+Inf": 7, "lengths_count": 7, "lengths_sum": 33.0}


def test_every_family_is_ours_with_help_and_base_units() -> None:
    text = generate_latest(make_registry(Metrics(Books()).families)).decode()
    families = list(text_string_to_metric_families(text))
    assert len(families) > 20
    for family in families:
        assert family.name.startswith("plait_")
        assert family.documentation.endswith(".")
        assert not family.name.endswith(("_ms", "_mib", "_percent"))
        if family.type == "counter":
            assert all(sample.name.endswith("_total") for sample in family.samples)


class Graphs:
    """Two captured steps, and one that found no memory."""

    def count_graphs(self) -> Mapping[tuple[str, str], int]:
        return {("decode", "8"): 2, ("check", "8"): 1}

    def count_refusals(self) -> Mapping[tuple[str, str, str], int]:
        return {("decode", "64", "memory"): 1}


def test_how_steps_run_is_shown_and_graphs_where_there_are_any() -> None:
    metrics = Metrics(Books())
    assert not {name for name in read(metrics) if "graphs" in name or "step_info" in name}
    assert "num_graphs" not in metrics.count_totals()
    metrics.step_kind, metrics.graphs = "9 launches, one call; compiled 2 of them: 12.1 s", Graphs()
    shown = read(metrics)
    assert shown["plait_step_info{9 launches, one call}"] == 1
    assert shown["plait_graphs{8}{decode}"] == 2
    assert shown["plait_graphs{8}{check}"] == shown["plait_refused_graphs{memory}{64}{decode}"] == 1
    assert {"num_graphs": 3, "num_refused_graphs": 1}.items() <= metrics.count_totals().items()
    metrics.draft_graphs = Graphs()
    shown = read(metrics)
    assert (shown["plait_graphs{8}{draft}"], shown["plait_graphs{8}{decode}"]) == (3, 2)
    assert {"num_graphs": 6, "num_refused_graphs": 1}.items() <= metrics.count_totals().items()


def test_two_engines_count_apart() -> None:
    one, other = Metrics(Books()), Metrics(Books())
    one.count_steps(1, 5, 0.1)
    assert read(one)["plait_steps_total"] == 1
    assert read(other)["plait_steps_total"] == 0


def test_scrape_of_a_running_engine_is_consistent() -> None:
    """A histogram's buckets never fall and its count is the last of them, whatever is observed meanwhile."""
    metrics, stop = Metrics(Books()), threading.Event()

    def work() -> None:
        while not stop.is_set():
            for i in range(200):
                metrics.count_next(1, i / 100)

    thread = threading.Thread(target=work)
    thread.start()
    try:
        last = 0.0
        for _ in range(20):
            found = read(metrics)
            name = "plait_inter_token_latency_seconds"
            counts = [value for key, value in found.items() if key.startswith(f"{name}_bucket")]
            assert counts == sorted(counts)
            assert counts[-1] == found[f"{name}_count"] >= last
            last = found[f"{name}_count"]
    finally:
        stop.set()
        thread.join()
    assert last > 0


def test_what_runs_and_waits_is_shown_as_the_front_knows_it_whatever_an_engine_last_reported() -> None:
    load = {"num_running": 0, "num_waiting": 3}
    remote = RemoteMetrics(lambda number: False, lambda: (1, False), None, lambda: load)
    remote.arrive(1, list(Metrics(Books()).families()))
    remote.keep({})  # that engine has ended, and its requests wait for the next one
    families = {family.name: family.samples[0].value for family in remote.collect()}
    assert (families["plait_requests_running"], families["plait_requests_waiting"]) == (0, 3)
