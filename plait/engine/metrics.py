"""Prometheus metrics of an engine: what it has done and how long it took, counted as it runs.

The engine's thread counts into plain numbers, which costs next to nothing per token. A scrape of
`Metrics.registry`, on any thread, turns them into metric families, together with the scheduler's numbers of
that moment.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from typing import Protocol, get_args

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from plait.request import FinishReason, RequestTrace

CAUSES = ("hit", "new", "evicted", "no_snapshot", "window", "short", "off")
WAITS_S = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 60.0, 120.0, 300.0, 600.0)
GAPS_S = (0.001, 0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1.0, 2.0, 5.0, 20.0)
LENGTHS = tuple(float(1 << i) for i in range(18))  # 1 to 131,072 tokens
STEP_TOKENS = tuple(float(1 << i) for i in range(14))  # 1 to 8,192


class SchedulerCounts(Protocol):
    """The scheduler as it is read here; both methods are safe from any thread."""

    @property
    def cache_counts(self) -> Mapping[str, int]: ...

    def stats(self) -> Mapping[str, int]: ...


class Histogram:
    """A histogram of observed values. One thread observes, any thread reads."""

    def __init__(self, name: str, about: str, bounds: Sequence[float]) -> None:
        self.name, self.about, self.bounds = name, about, tuple(bounds)
        self.total = 0.0
        self._counts = [0] * (len(self.bounds) + 1)
        self._labels = [*(str(float(bound)) for bound in self.bounds), "+Inf"]

    def observe(self, value: float, times: int = 1) -> None:
        """Record that `value` came `times` times."""
        self._counts[bisect_left(self.bounds, value)] += times
        self.total += value * times

    def family(self) -> HistogramMetricFamily:
        """As Prometheus has it: each bucket counts the values up to its bound."""
        counts, total, below, buckets = [*self._counts], self.total, 0, []
        for label, count in zip(self._labels, counts, strict=True):
            below += count
            buckets.append((label, below))
        return HistogramMetricFamily(self.name, self.about, buckets=buckets, sum_value=total)


class Metrics(Collector):
    """The numbers of one engine, in a registry of their own. Written by the engine's thread alone.

    Totals start at zero with the engine and only grow.
    """

    def __init__(self, scheduler: SchedulerCounts) -> None:
        self._scheduler = scheduler
        self.num_steps = self.num_steps_ahead = self.num_failed_steps = self.num_repairs = 0
        self.num_prompt_tokens = self.num_cached_tokens = self.num_output_tokens = 0
        self.num_drafted_tokens = self.num_accepted_tokens = 0
        self._ended: dict[str, int] = dict.fromkeys(get_args(FinishReason), 0)
        self._first_token = Histogram(
            "plait_time_to_first_token_seconds", "From the arrival of a request to its first token.", WAITS_S
        )
        self._gap = Histogram(
            "plait_inter_token_latency_seconds",
            "From one output token to the next; tokens of one step share the time evenly.",
            GAPS_S,
        )
        self._whole = Histogram(
            "plait_request_latency_seconds", "From the arrival of a request to its end.", WAITS_S
        )
        self._queue = Histogram(
            "plait_queue_time_seconds",
            "From the arrival of a request to the first step that ran it.",
            WAITS_S,
        )
        self._step = Histogram("plait_step_seconds", "What a step took to compute.", GAPS_S)
        self._step_tokens = Histogram("plait_step_tokens", "Tokens computed in a step.", STEP_TOKENS)
        self._prompt = Histogram("plait_request_prompt_tokens", "Tokens in a prompt.", LENGTHS)
        self._output = Histogram("plait_request_output_tokens", "Tokens in a reply.", LENGTHS)
        self.registry = CollectorRegistry(auto_describe=False)
        self.registry.register(self)

    def count_request(self, num_prompt_tokens: int) -> None:
        """Count a request that was taken."""
        self.num_prompt_tokens += num_prompt_tokens
        self._prompt.observe(num_prompt_tokens)

    def count_start(self, queue_s: float, num_cached_tokens: int) -> None:
        """Count a choice that ran for the first time, `queue_s` after its arrival."""
        self.num_cached_tokens += num_cached_tokens
        self._queue.observe(queue_s)

    def count_steps(self, num_steps: int, num_tokens: int, seconds: float) -> None:
        """Count steps of `num_tokens` tokens each that were computed and committed in `seconds`."""
        self.num_steps += num_steps
        self.num_steps_ahead += num_steps - 1
        self._step.observe(seconds / num_steps, num_steps)
        self._step_tokens.observe(num_tokens, num_steps)

    def count_first(self, num_tokens: int, seconds: float) -> None:
        """Count the first tokens of a choice, `seconds` after its arrival; accepted drafts come with them."""
        self.num_output_tokens += num_tokens
        self._first_token.observe(seconds)
        if num_tokens > 1:
            self._gap.observe(0.0, num_tokens - 1)

    def count_next(self, num_tokens: int, seconds: float) -> None:
        """Count more tokens of a choice, `seconds` after those before them."""
        self.num_output_tokens += num_tokens
        self._gap.observe(seconds / num_tokens, num_tokens)

    def count_draft(self, drafted: int, accepted: int) -> None:
        """Count a draft that was verified."""
        self.num_drafted_tokens += drafted
        self.num_accepted_tokens += accepted

    def count_end(self, trace: RequestTrace) -> None:
        """Count a choice that ended. One that broke off counts in no histogram of replies."""
        self._ended[trace.finish_reason] += 1
        if trace.finish_reason in {"stop", "length"}:
            self._whole.observe(trace.finish_s - trace.arrival_s)
            self._output.observe(trace.num_output_tokens)

    def collect(self) -> Iterator[Metric]:
        """Every metric family with its current values."""
        stats = self._scheduler.stats()
        yield from self._gauges(stats)
        yield from self._counters(stats)
        yield from self._cache_counters(self._scheduler.cache_counts)
        for histogram in (self._first_token, self._gap, self._whole, self._queue, self._step):
            yield histogram.family()
        for histogram in (self._step_tokens, self._prompt, self._output):
            yield histogram.family()

    def _gauges(self, stats: Mapping[str, int]) -> Iterator[Metric]:
        yield _gauge("plait_requests_running", "Choices of requests that run.", stats["num_running"])
        yield _gauge("plait_requests_waiting", "Choices of requests that wait.", stats["num_waiting"])
        for what, about, cached in (
            ("blocks", "Blocks of keys, values and latents, in all groups", stats["num_cached_blocks"]),
            ("slots", "Places for the fixed-size state of a sequence", stats["num_snapshots"]),
        ):
            total, free = stats[f"num_{what}"], stats[f"num_free_{what}"]
            states = {"free": free, "held": total - free - cached, "cached": cached}
            yield _add_labels(GaugeMetricFamily(f"plait_{what}", f"{about}.", labels=["state"]), states)
        yield _gauge("plait_snapshots", "Saved slots that a prompt can start from.", stats["num_snapshots"])
        yield _gauge(
            "plait_host_saved_bytes",
            "Memory of the host that holds the state of sequences swapped out.",
            stats["host_nbytes"],
        )

    def _counters(self, stats: Mapping[str, int]) -> Iterator[Metric]:
        for name, about, value in (
            ("prompt_tokens", "Tokens of prompts taken.", self.num_prompt_tokens),
            ("cached_tokens", "Tokens of prompts that were not computed again.", self.num_cached_tokens),
            ("output_tokens", "Tokens generated.", self.num_output_tokens),
            ("drafted_tokens", "Tokens guessed ahead.", self.num_drafted_tokens),
            ("accepted_tokens", "Tokens guessed ahead that were right.", self.num_accepted_tokens),
            ("steps", "Steps computed.", self.num_steps),
            ("failed_steps", "Steps that failed and were tried again.", self.num_failed_steps),
            ("repairs", "Times that the scheduler's books were found wrong and mended.", self.num_repairs),
        ):
            yield CounterMetricFamily(f"plait_{name}", about, value=value)
        ended = CounterMetricFamily(
            "plait_requests", "Choices of requests that ended.", labels=["finish_reason"]
        )
        yield _add_labels(ended, {**self._ended})
        kinds = {"swap": stats["num_swaps"], "recompute": stats["num_preemptions"] - stats["num_swaps"]}
        about = "Running sequences whose memory was taken."
        yield _add_labels(CounterMetricFamily("plait_preemptions", about, labels=["kind"]), kinds)

    def _cache_counters(self, counts: Mapping[str, int]) -> Iterator[Metric]:
        about = "Prompts looked up in the prefix cache: hit, or why nothing was found."
        family = CounterMetricFamily("plait_prefix_cache_lookups", about, labels=["cause"])
        yield _add_labels(family, {cause: counts.get(cause, 0) for cause in CAUSES})
        for name, about in (("asked", "Tokens looked up in"), ("hit", "Tokens found in")):
            value = counts.get(f"{name}_tokens", 0)
            yield CounterMetricFamily(
                f"plait_prefix_cache_{name}_tokens", f"{about} the prefix cache.", value=value
            )


def _gauge(name: str, about: str, value: float) -> GaugeMetricFamily:
    return GaugeMetricFamily(name, about, value=value)


def _add_labels(
    family: GaugeMetricFamily | CounterMetricFamily, values: Mapping[str, float]
) -> GaugeMetricFamily | CounterMetricFamily:
    """One sample for each value of the family's only label."""
    for label, value in values.items():
        family.add_metric([label], value)
    return family
