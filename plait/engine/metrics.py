"""Prometheus metrics of an engine: what it has done and how long it took, counted as it runs.

The engine's thread counts into plain numbers, which costs next to nothing per token. A scrape, on any thread,
turns them into metric families, together with the scheduler's numbers of that moment. Families are plain
values here: Prometheus' client takes a twentieth of a startup, and many engines are never scraped.
`metric_registry` has them as that client's.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Protocol, get_args

from plait.engine.waiting_work import ReplyDuration, estimate_waiting_s
from plait.request import FinishReason, RequestTrace
from plait.schedule.costs import SchedulerLimits

if TYPE_CHECKING:  # the front of a server reads metrics, and loads neither torch nor kernels
    from plait.schedule.allocation import Allocation

CAUSES = ("hit", "new", "evicted", "no_snapshot", "window", "short", "off", "disk")
WAITS_S = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 60.0, 120.0, 300.0, 600.0)
GAPS_S = (0.001, 0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1.0, 2.0, 5.0, 20.0)
LENGTHS = tuple(float(1 << i) for i in range(18))  # 1 to 131,072 tokens
STEP_TOKENS = tuple(float(1 << i) for i in range(14))  # 1 to 8,192
ABOUT_GAP = "From one output token to the next; tokens of one step share the time evenly."
HISTOGRAMS = (  # name, help, bounds
    ("time_to_first_token_seconds", "From the arrival of a request to its first token.", WAITS_S),
    ("inter_token_latency_seconds", ABOUT_GAP, GAPS_S),
    ("request_latency_seconds", "From the arrival of a request to its end.", WAITS_S),
    ("queue_time_seconds", "From the arrival of a request to the first step that ran it.", WAITS_S),
    ("step_seconds", "What a step took to compute.", GAPS_S),
    ("step_tokens", "Tokens computed in a step.", STEP_TOKENS),
    ("request_prompt_tokens", "Tokens in a prompt.", LENGTHS),
    ("request_output_tokens", "Tokens generated for a reply.", LENGTHS),
)
COUNTERS = {  # name -> help; the value is the attribute `num_` + name of `Metrics`
    "prompt_tokens": "Tokens of prompts taken.",
    "cached_tokens": "Tokens of prompts that were not computed again.",
    "output_tokens": "Tokens generated.",
    "drafted_tokens": "Draft tokens that were checked.",
    "accepted_tokens": "Draft tokens that were accepted.",
    "steps": "Steps computed.",
    "failed_steps": "Steps that failed and were tried again.",
    "repairs": "Times that block tables were found wrong and were repaired.",
}
Sample = tuple[str, dict[str, str], float]  # name, labels, value
Family = tuple[str, str, str, tuple[Sample, ...]]  # name, help, type, samples


class SchedulerCounts(Protocol):
    """The scheduler as it is read here, safe from any thread."""

    @property
    def cache_counts(self) -> Mapping[str, int]: ...
    @property
    def limits(self) -> SchedulerLimits: ...
    @property
    def memory(self) -> Allocation: ...
    def stats(self) -> Mapping[str, int]: ...


class StepGraphs(Protocol):
    """The captured steps of a device, by kind (decode, check) and number of sequences. From any thread."""

    def count_graphs(self) -> Mapping[tuple[str, str], int]: ...
    def count_refusals(self) -> Mapping[tuple[str, str, str], int]:
        """Steps that are not captured and run op by op; the last part is the cause."""


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

    def family(self) -> Family:
        """As Prometheus has it: each bucket counts the values up to its bound."""
        counts, total, below = [*self._counts], self.total, 0
        samples: list[Sample] = []
        for label, count in zip(self._labels, counts, strict=True):
            below += count
            samples.append((f"{self.name}_bucket", {"le": label}, float(below)))
        ends: tuple[Sample, ...] = ((f"{self.name}_count", {}, float(below)), (f"{self.name}_sum", {}, total))
        return self.name, self.about, "histogram", (*samples, *ends)


class Metrics:
    """The numbers of one engine. Written by the engine's thread alone.

    Totals start at zero with the engine and only grow. `step_kind`: how steps run, as found at startup;
    `graphs`: the captured steps of a device.
    """

    def __init__(self, scheduler: SchedulerCounts, clock: Callable[[], float] = time.monotonic) -> None:
        self._scheduler = scheduler
        self.num_steps = self.num_steps_ahead = self.num_failed_steps = self.num_repairs = 0
        self.num_prompt_tokens = self.num_cached_tokens = self.num_output_tokens = 0
        self.num_drafted_tokens = self.num_accepted_tokens = 0
        self.reply_duration = ReplyDuration(clock)
        self._ended: dict[str, int] = dict.fromkeys(get_args(FinishReason), 0)
        made = [Histogram(f"plait_{name}", about, bounds) for name, about, bounds in HISTOGRAMS]
        self._histograms, (self._first_token, self._gap, self._whole, self._queue) = made, made[:4]
        self._step, self._step_tokens, self._prompt, self._output = made[4:]
        self.arithmetic = ""  # see `engine.fingerprint`; an engine's process sets it
        self.step_kind = ""
        self.graphs: StepGraphs | None = None
        self.draft_graphs: StepGraphs | None = None  # of a draft model; refusals are counted with the model's

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
        self.reply_duration.begin()
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
        self.reply_duration.observe(trace)
        if trace.finish_reason in {"stop", "length"}:
            self._whole.observe(trace.finish_s - trace.arrival_s)
            self._output.observe(trace.num_output_tokens)

    def count_refused(self, num_choices: int) -> None:
        """Count the choices of a request that could not be opened."""
        self._ended["error"] += num_choices

    def families(self) -> Iterator[Family]:
        """Every metric family with its current values."""
        stats, lookups = self._scheduler.stats(), self._scheduler.cache_counts
        yield _gauge("requests_running", "Choices of requests that run.", stats["num_running"])
        yield _gauge("requests_waiting", "Choices of requests that wait.", stats["num_waiting"])
        yield from self._describe_work(stats)
        about = "Blocks of keys, values and latents, in all groups."
        yield _states(stats, "blocks", about, stats["num_cached_blocks"])
        yield _states(stats, "slots", "Slots for the recurrent state of a sequence.", stats["num_snapshots"])
        yield _gauge("memory_usage_ratio", "Memory that sequences hold, of all: 0 to 1.", self._usage(stats))
        yield self._describe_cache(stats)
        yield _gauge("snapshots", "Saved slots that a prompt can start from.", stats["num_snapshots"])
        about = "Memory of the host that holds the state of sequences swapped out."
        yield _gauge("host_saved_bytes", about, stats["host_nbytes"])
        yield from _describe_disk(stats)
        yield from self._describe_steps()
        for name, about in COUNTERS.items():
            yield _counter(name, about, getattr(self, f"num_{name}"))
        yield _counters("requests", "Choices of requests that ended.", "finish_reason", {**self._ended})
        kinds = {"swap": stats["num_swaps"], "recompute": stats["num_preemptions"] - stats["num_swaps"]}
        yield _counters("preemptions", "Running sequences from which memory was taken.", "kind", kinds)
        about = "Prompts looked up in the prefix cache: hit, or why nothing was found."
        causes = {cause: lookups.get(cause, 0) for cause in CAUSES}
        yield _counters("prefix_cache_lookups", about, "cause", causes)
        for name, about in (("asked", "Tokens looked up in"), ("hit", "Tokens found in")):
            value = lookups.get(f"{name}_tokens", 0)
            yield _counter(f"prefix_cache_{name}_tokens", f"{about} the prefix cache.", value)
        yield from (histogram.family() for histogram in self._histograms)

    def _describe_work(self, stats: Mapping[str, int]) -> Iterator[Family]:
        """What decides how many replicas of a server there should be."""
        places = self._scheduler.limits.max_num_seqs
        waiting_s = estimate_waiting_s(
            num_tokens=stats["num_waiting_tokens"],
            tokens_per_s=stats["prompt_tokens_per_s"],
            num_waiting=stats["num_waiting"],
            num_running=stats["num_running"],
            places=places,
            reply_s=self.reply_duration.average_s,
        )
        yield _gauge("waiting_seconds", "Seconds until what waits now would run, as estimated.", waiting_s)
        about = "Choices that run, of those that may run at once: 0 to 1."
        yield _gauge("places_used_ratio", about, stats["num_running"] / places)

    def count_totals(self) -> Mapping[str, int]:
        """Steps and tokens since startup, and graphs where there are any; safe from any thread."""
        found = {
            "reply_ms": round(self.reply_duration.average_s * 1e3),
            "num_steps": self.num_steps,
            "num_prompt_tokens": self.num_prompt_tokens,
            "num_output_tokens": self.num_output_tokens,
        }
        if self.graphs is not None:
            found["num_graphs"] = sum(self._count_graphs().values())
            found["num_refused_graphs"] = sum(self.graphs.count_refusals().values())
        return found

    def _count_graphs(self) -> Mapping[tuple[str, str], int]:
        """Captured steps by kind and number of sequences; "draft": decodes of a draft model."""
        found = Counter(self.graphs.count_graphs() if self.graphs else {})
        for (_, sequences), count in self.draft_graphs.count_graphs().items() if self.draft_graphs else ():
            found["draft", sequences] += count
        return found

    def _describe_steps(self) -> Iterator[Family]:
        """How steps run, and which are graphs, where there are any."""
        if self.step_kind:
            labels = {"kind": self.step_kind.partition(";")[0]}
            about = "How steps run, as found at startup: recorded, as graphs, or op by op and why."
            yield "plait_step_info", about, "gauge", (("plait_step_info", labels, 1.0),)
        if self.graphs is not None:
            about = "Captured steps, by kind and number of sequences."
            yield _gauges("graphs", about, ("step", "sequences"), self._count_graphs().items())
            about = "Captures that were refused: such steps run op by op, and slower."
            refused = self.graphs.count_refusals()
            yield _gauges("refused_graphs", about, ("step", "sequences", "cause"), refused.items())

    def _usage(self, stats: Mapping[str, int]) -> float:
        """Of blocks, or of the slots that running sequences can have: the larger share that is held."""
        most = min(stats["num_slots"], self._scheduler.limits.max_num_seqs)
        slots = stats["num_slots"] - stats["num_free_slots"] - stats["num_snapshots"]
        blocks = stats["num_blocks"] - stats["num_free_blocks"] - stats["num_cached_blocks"]
        return max(blocks / max(stats["num_blocks"], 1), min(slots / max(most, 1), 1.0))

    def _describe_cache(self, stats: Mapping[str, int]) -> Family:
        """What does not change while the engine runs, as labels."""
        memory = self._scheduler.memory
        sizes = [pool.num_blocks - 1 for pool in memory.pools.blocks]
        labels = {
            "block_size": str(memory.block_size),
            "num_blocks": str(max(sizes, default=0)),
            "num_slots": str(stats["num_slots"]),
            "arithmetic": self.arithmetic,
        }
        about = "Tokens in a block, blocks of the largest group, slots, fingerprint of the arithmetic."
        return "plait_cache_config_info", about, "gauge", (("plait_cache_config_info", labels, 1.0),)


def _gauge(name: str, about: str, value: float) -> Family:
    return f"plait_{name}", about, "gauge", ((f"plait_{name}", {}, float(value)),)


def _counter(name: str, about: str, value: float) -> Family:
    return f"plait_{name}", about, "counter", ((f"plait_{name}_total", {}, float(value)),)


def _counters(name: str, about: str, label: str, values: Mapping[str, float]) -> Family:
    """One sample for each value of the family's only label."""
    samples = ((f"plait_{name}_total", {label: value}, float(count)) for value, count in values.items())
    return f"plait_{name}", about, "counter", tuple(samples)


def _gauges(
    name: str, about: str, labels: Sequence[str], rows: Iterable[tuple[Sequence[str], int]]
) -> Family:
    """A gauge with one sample for each row of values of its labels."""
    name = f"plait_{name}"
    samples = ((name, dict(zip(labels, row, strict=True)), float(n)) for row, n in sorted(rows))
    return name, about, "gauge", tuple(samples)


def _describe_disk(stats: Mapping[str, int]) -> Iterator[Family]:
    """The families of the disk cache, if there is one."""
    if "disk_nbytes" not in stats:
        return
    yield _gauge("disk_cache_bytes", "Bytes of the files of the disk cache.", stats["disk_nbytes"])
    yield _gauge("disk_cache_files", "Files of the disk cache.", stats["disk_files"])
    start = "num_disk_"
    events = {name.removeprefix(start): n for name, n in stats.items() if name.startswith(start)}
    yield _counters("disk_cache_events", "What happened to files of the disk cache.", "event", events)


def _states(stats: Mapping[str, int], what: str, about: str, cached: int) -> Family:
    """Memory by its state: free, held by sequences, or cached."""
    free, name = stats[f"num_free_{what}"], f"plait_{what}"
    held = stats[f"num_{what}"] - free - cached
    counts = {"free": free, "held": held, "cached": cached}
    samples = ((name, {"state": state}, float(count)) for state, count in counts.items())
    return name, about, "gauge", tuple(samples)
