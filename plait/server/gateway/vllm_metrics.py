"""Our metrics under vLLM's names, so that dashboards made for vLLM work as they are.

Only what means the same is there. `docs/operations.md` lists them, and what is not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping

from prometheus_client import CollectorRegistry, Gauge, Histogram
from prometheus_client.core import Metric
from prometheus_client.metrics_core import Metric as Family
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample

from plait.request import RequestTrace
from plait.server.gateway.exchange import Exchange

# our family: theirs
RENAMED: Mapping[str, str] = {
    "plait_requests_running": "vllm:num_requests_running",
    "plait_requests_waiting": "vllm:num_requests_waiting",
    "plait_memory_usage_ratio": "vllm:kv_cache_usage_perc",
    "plait_prompt_tokens": "vllm:prompt_tokens",
    "plait_output_tokens": "vllm:generation_tokens",
    "plait_prefix_cache_asked_tokens": "vllm:prefix_cache_queries",
    "plait_prefix_cache_hit_tokens": "vllm:prefix_cache_hits",
    "plait_drafted_tokens": "vllm:spec_decode_num_draft_tokens",
    "plait_accepted_tokens": "vllm:spec_decode_num_accepted_tokens",
    "plait_time_to_first_token_seconds": "vllm:time_to_first_token_seconds",
    "plait_inter_token_latency_seconds": "vllm:inter_token_latency_seconds",
    "plait_request_latency_seconds": "vllm:e2e_request_latency_seconds",
    "plait_queue_time_seconds": "vllm:request_queue_time_seconds",
    "plait_request_prompt_tokens": "vllm:request_prompt_tokens",
    "plait_request_output_tokens": "vllm:request_generation_tokens",
    "plait_step_tokens": "vllm:iteration_tokens_total",
}
SECONDS = (0.01, 0.05, 0.1, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 20.0, 40.0, 60.0, 120.0, 600.0)
EACH_S = (0.001, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1.0, 2.0, 5.0)
COUNTS = (1.0, 2.0, 5.0, 10.0, 20.0)
TOKENS = (1.0, 10.0, 100.0, 500.0, 1000.0, 5000.0, 10_000.0, 50_000.0, 100_000.0)
PER_REQUEST: Mapping[str, tuple[str, tuple[float, ...]]] = {
    "request_prefill_time_seconds": ("From the first step of a choice to its first token.", SECONDS),
    "request_decode_time_seconds": ("From the first token of a choice to its end.", SECONDS),
    "request_inference_time_seconds": ("From the first step of a choice to its end.", SECONDS),
    "request_time_per_output_token_seconds": ("Decode time by tokens after the first.", EACH_S),
    "request_params_n": ("Choices of a request, its n.", COUNTS),
    "request_params_max_tokens": ("Tokens that a choice may have.", TOKENS),
}
CACHE_LABELS = {"block_size": "block_size", "num_blocks": "num_gpu_blocks"}
FINISHED = {"stop": "stop", "length": "length", "cancelled": "abort", "error": "error"}


class Aliases(Collector):
    """The families of a registry under vLLM's names, with its labels."""

    def __init__(self, ours: CollectorRegistry, model_name: str) -> None:
        self._ours, self._labels = ours, {"model_name": model_name, "engine": "0"}

    def collect(self) -> Iterator[Metric]:
        """Every family that has a name there, as it is now."""
        for family in self._ours.collect():
            if name := RENAMED.get(family.name):
                yield self._family(name, family, (s for s in family.samples))
            elif made := _MADE.get(family.name):
                yield made(self, family)

    def _family(self, name: str, family: Metric, samples: Iterable[Sample]) -> Metric:
        found = Family(name, family.documentation, family.type)
        for sample in samples:
            suffix = sample.name.removeprefix(family.name)
            found.add_sample(name + suffix, {**sample.labels, **self._labels}, sample.value)
        return found

    def _describe_cache(self, family: Metric) -> Metric:
        found = Family("vllm:cache_config_info", family.documentation, "gauge")
        for sample in family.samples:
            labels = {theirs: sample.labels[ours] for ours, theirs in CACHE_LABELS.items()}
            found.add_sample(found.name, {**labels, **_engine_of(sample), **self._labels}, sample.value)
        return found

    def _describe_ends(self, family: Metric) -> Metric:
        found = Family("vllm:request_success", family.documentation, "counter")
        for sample in family.samples:
            reason = FINISHED.get(sample.labels["finish_reason"], sample.labels["finish_reason"])
            labels = {"finished_reason": reason, **_engine_of(sample), **self._labels}
            found.add_sample(f"{found.name}_total", labels, sample.value)
        return found

    def _sum_preemptions(self, family: Metric) -> Metric:
        found = Family("vllm:num_preemptions", family.documentation, "counter")
        totals: dict[tuple[tuple[str, str], ...], float] = {}
        for sample in family.samples:
            engine = tuple(_engine_of(sample).items())
            totals[engine] = totals.get(engine, 0.0) + sample.value
        for engine, total in totals.items():
            found.add_sample(f"{found.name}_total", {**dict(engine), **self._labels}, total)
        return found


def _engine_of(sample: Sample) -> dict[str, str]:
    """The label of the engine, where a gateway shows several."""
    return {name: value for name, value in sample.labels.items() if name == "replica"}


_MADE: Mapping[str, Callable[[Aliases, Metric], Metric]] = {
    "plait_cache_config_info": Aliases._describe_cache,
    "plait_requests": Aliases._describe_ends,
    "plait_preemptions": Aliases._sum_preemptions,
}


class PerRequest:
    """vLLM's histograms of whole requests, from the trace that the engine reports at each choice's end."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._histograms = {
            name: Histogram(
                f"vllm:{name}", about, ["model_name", "engine"], buckets=bounds, registry=self.registry
            )
            for name, (about, bounds) in PER_REQUEST.items()
        }

    def record(self, exchange: Exchange, ended_ns: int) -> None:
        """Record a request that has ended. The times of cancelled choices are left out: they mean nothing."""
        for stream in exchange.streams:
            params = stream.request.params
            self._observe(exchange.model, "request_params_n", params.n)
            self._observe(exchange.model, "request_params_max_tokens", params.max_tokens or 0)
        for trace in exchange.traces():
            if trace.finish_reason in {"stop", "length"}:
                self._times(exchange.model, trace)

    def _times(self, model: str, trace: RequestTrace) -> None:
        start, first, end = trace.first_scheduled_s, trace.first_token_s, trace.finish_s
        if start is None or first is None:
            return
        self._observe(model, "request_prefill_time_seconds", first - start)
        self._observe(model, "request_decode_time_seconds", end - first)
        self._observe(model, "request_inference_time_seconds", end - start)
        if trace.num_output_tokens > 1:
            each = (end - first) / (trace.num_output_tokens - 1)
            self._observe(model, "request_time_per_output_token_seconds", each)

    def _observe(self, model: str, name: str, value: float) -> None:
        self._histograms[name].labels(model, "0").observe(value)


def aliases(ours: CollectorRegistry, model_name: str, healthy: bool) -> CollectorRegistry:
    """A registry of `ours` under vLLM's names."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(Aliases(ours, model_name))
    gauge = Gauge("vllm:engine_healthy", "1: the engine works.", ["model_name", "engine"], registry=registry)
    gauge.labels(model_name, "0").set(healthy)
    return registry
