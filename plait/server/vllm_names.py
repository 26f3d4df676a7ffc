"""The names that vLLM's metrics have, for the numbers we have: dashboards made for them work as they are.

Only what means the same is there. `docs/operations.md` lists them, and what is not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping

from prometheus_client import CollectorRegistry
from prometheus_client.core import Metric
from prometheus_client.metrics_core import Metric as Family
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample

# our family: theirs
RENAMED: Mapping[str, str] = {
    "plait_requests_running": "vllm:num_requests_running",
    "plait_requests_waiting": "vllm:num_requests_waiting",
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

    def _usage(self, family: Metric) -> Metric:
        """The part of all blocks that sequences hold."""
        blocks = {sample.labels["state"]: sample.value for sample in family.samples}
        found = Family("vllm:kv_cache_usage_perc", "Blocks held by sequences, of all: 0 to 1.", "gauge")
        total = sum(blocks.values())
        found.add_sample(found.name, self._labels, blocks.get("held", 0.0) / total if total else 0.0)
        return found

    def _finished(self, family: Metric) -> Metric:
        found = Family("vllm:request_success", family.documentation, "counter")
        for sample in family.samples:
            reason = FINISHED.get(sample.labels["finish_reason"], sample.labels["finish_reason"])
            labels = {"finished_reason": reason, **self._labels}
            found.add_sample(f"{found.name}_total", labels, sample.value)
        return found

    def _preempted(self, family: Metric) -> Metric:
        found = Family("vllm:num_preemptions", family.documentation, "counter")
        total = sum(sample.value for sample in family.samples)
        found.add_sample(f"{found.name}_total", self._labels, total)
        return found


_MADE: Mapping[str, Callable[[Aliases, Metric], Metric]] = {
    "plait_blocks": Aliases._usage,
    "plait_requests": Aliases._finished,
    "plait_preemptions": Aliases._preempted,
}


def aliases(ours: CollectorRegistry, model_name: str) -> CollectorRegistry:
    """A registry of `ours` under vLLM's names."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(Aliases(ours, model_name))
    return registry
