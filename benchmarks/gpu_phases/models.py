"""Phases 4, 5 and 8: models with random weights in published shapes, through the real engine."""

from __future__ import annotations

import gc
import math
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Any

import torch

from gpu_phases.machine import read_gb_s, tflop_s
from gpu_phases.results import Bench, Item
from gpu_phases.shapes import RandomModel, make_model
from gpu_phases.timing import settle
from plait.config import EngineConfig
from plait.engine.core import Engine
from plait.engine.device import CudaMemory, free_memory
from plait.engine.memory_plan import size_state
from plait.kernels.load import wide_tiles
from plait.loading.build import describe_for_sizing, engine_over
from plait.loading.make_runner import make_sampler
from plait.loading.measure_memory import size_gpu
from plait.memory import SlotState, block_groups
from plait.ops.launch import permit_dependent
from plait.request import Event, Request, SamplingParams
from plait.runner.device.capture import capture_step, decode_batch
from plait.runner.runner import ModelRunner

ALONE = (  # (model, storage, whether the short form has it)
    ("Llama-8B", "model", True),
    ("Llama-8B", "Q4_K_M", True),
    ("Llama-8B", "fp8_b128", False),
    ("Llama-8B", "int4_g128", False),
    ("Llama-8B", "Q8_0", False),
    ("Qwen3-0.6B", "model", False),
    ("Qwen3-30B-A3B", "model", True),
    ("Granite-4-H-Tiny", "model", True),
    ("Granite-4-H-Small", "model", False),
    ("Falcon-Mamba-7B", "model", False),
)
MANY = (  # (model, sequences, prompt, new tokens, whether the short form has it)
    ("Llama-8B", 64, 128, 256, True),
    ("Llama-8B", 1, 2048, 1, True),
    ("Llama-8B", 16, 128, 1024, False),
    ("Llama-8B", 256, 128, 1024, False),
    ("Granite-4-H-Small", 64, 128, 512, False),
)
DRY_ALONE = (("little Llama", "model", True), ("little Falcon-Mamba", "model", True))
DRY_MANY = (("little Llama", 3, 5, 4, True),)
FOLDED = ("add_linear", "norm_linear", "norm_glu", "add_experts", "norm_route")  # norms between branches
BUILD_S = 30.0  # seconds that a model takes to be made


@dataclass(slots=True)
class Measured:
    """What a run of the engine took: seconds of each step, tokens in it, and when the first tokens came."""

    steps: list[tuple[float, int]]
    first_s: float
    seconds: float
    tokens: int

    @property
    def decode_step_s(self) -> float:
        """The median of steps that brought a token, without those that the first tokens came in."""
        took = [seconds / max(tokens, 1) for seconds, tokens in self.steps if tokens]
        return median(took[len(took) // 4 :])


def run_requests(
    engine: Engine, vocab_size: int, seqs: int, prompt: int, tokens: int, *, profile: Any = None
) -> Measured:
    """`seqs` greedy requests of random tokens, to their end. `profile`: entered once all have a token."""
    events: list[Event] = []
    params = SamplingParams(temperature=0.0, top_p=1.0, top_k=0, seed=0, max_tokens=tokens, ignore_eos=True)
    ids = torch.randint(1, vocab_size, (seqs, prompt)).tolist()
    for n, some in enumerate(ids):
        engine.submit(Request(f"{n}", tuple(some), params), events.append)
    steps, seen, begun, first = list[tuple[float, int]](), 0, time.perf_counter(), 0.0
    going = True
    while going:
        at = time.perf_counter()
        going = engine.step()
        took = time.perf_counter() - at
        count = sum(len(event.token_ids) for event in events)
        if not first and count >= seqs:
            first = time.perf_counter() - begun
            if profile:
                profile.__enter__()
        steps.append((took, (count - seen) // seqs if first else 0))
        seen = count
    if profile:
        profile.__exit__(None, None, None)
    failed = [event.error for event in events if event.error]
    if failed:
        raise failed[0]
    return Measured(steps, first, time.perf_counter() - begun, seen)


class OpenModel:
    """A model with an engine, as a server has it."""

    def __init__(
        self, bench: Bench, model: RandomModel, seqs: int, length: int, *, records: bool = True
    ) -> None:
        config = EngineConfig(
            max_num_seqs=seqs, max_model_len=length, block_size=model.target.block_size, prefix_cache=False
        )
        target, decoder = model.target, model.decoder
        facts = describe_for_sizing(decoder, target)
        if target.device.type == "cuda":
            sizing = size_gpu(facts, decoder, target, config, CudaMemory(target.device))
        else:
            sizing = size_state(facts, config, free_memory=free_memory(target.device))
        sampler = make_sampler(target, decoder.spec.vocab_size, ())
        self.model, self.bench, self.vocab_size = model, bench, decoder.spec.vocab_size
        made: tuple[ModelRunner, Engine] = engine_over(
            decoder, sampler, target, config, sizing, records=records
        )
        self.runner, self.engine = made
        sampler.prepare()
        if records and not self.runner.is_recorded:
            raise RuntimeError(f"no step is captured: {self.runner.step_kind}")

    def close(self) -> None:
        """Give all memory back, also what this object still holds."""
        self.runner.close()
        del self.model, self.runner, self.engine

    def run(self, seqs: int, prompt: int, tokens: int, *, profile: Any = None) -> Measured:
        """See `run_requests`."""
        return run_requests(self.engine, self.vocab_size, seqs, prompt, tokens, profile=profile)

    def launches(self) -> Counter[str]:
        """The launches of a decode step of two sequences, by kernel; raises if it cannot be captured."""
        decoder, store = self.model.decoder, self.runner.store
        groups = block_groups(decoder.states)
        capture, _ = capture_step(decoder, store, decode_batch(groups, 2, 4, store), is_dry=True)
        return Counter(capture.launches)


@contextmanager
def opened(
    bench: Bench,
    name: str,
    storage: str,
    seqs: int,
    length: int,
    *,
    records: bool = True,
    is_early: bool = True,
    no_fuse: tuple[str, ...] = (),
) -> Iterator[OpenModel]:
    """A model as long as it is measured; its memory is free afterwards.

    no_fuse: fused ops that are left out; is_early: kernels may begin before those before them have ended, if
    this GPU is right in that.
    """
    dtype = torch.float32 if bench.is_dry else torch.bfloat16
    with ExitStack() as stack:
        if bench.is_dry:
            stack.enter_context(wide_tiles())
        if not is_early:
            stack.callback(permit_dependent, bench.device, permit_dependent(bench.device, False))
        make = partial(make_model, name, storage, bench.device, bench.chip, length, dtype, no_fuse)
        yield from _opened(bench, make, seqs, length, records=records)


def _opened(
    bench: Bench, make: Callable[[], RandomModel], seqs: int, length: int, *, records: bool
) -> Iterator[OpenModel]:
    with torch.inference_mode():
        model = make()
    made = OpenModel(bench, model, seqs, length, records=records)  # an engine is made outside of that mode
    del model
    try:
        yield made
    finally:
        made.close()
        gc.collect()
        settle(bench)


def list_single(bench: Bench) -> Iterator[Item]:
    """One sequence: tokens a second, share of the roof, launches, and what the host takes."""
    for name, storage, is_short in DRY_ALONE if bench.is_dry else ALONE:
        if is_short or bench.is_full:
            what = (name, storage)
            yield Item("decode", "bound", name, storage, lambda w=what: _single(bench, *w), needs_s=BUILD_S)
            if bench.is_full:
                run = lambda w=what: _single(bench, *w, records=False)  # noqa: E731
                yield Item("decode", "op by op", name, storage, run, needs_s=BUILD_S)
                run = lambda w=what: _single(bench, *w, is_early=False)  # noqa: E731
                yield Item("decode", "kernels in turns (no PDL)", name, storage, run, needs_s=BUILD_S)
                run = lambda w=what: _single(bench, *w, no_fuse=FOLDED)  # noqa: E731
                yield Item("decode", "norms apart", name, storage, run, needs_s=BUILD_S)


def _single(bench: Bench, name: str, storage: str, **how: Any) -> dict[str, Any]:
    """how: options of `opened`."""
    prompt, tokens = (3, 5) if bench.is_dry else (128, 256)
    with opened(bench, name, storage, 2, prompt + tokens + 64, **how) as it:
        it.run(1, prompt, min(tokens, 16))  # warms up
        made = it.run(1, prompt, tokens)
        state = sum(
            t[0].numel() * t.element_size()
            for own in it.model.decoder.states
            if isinstance(it.model.decoder.states[own], SlotState)
            for t in it.runner.store[own].values()
        )
        found: dict[str, Any] = {"us": 1e6 * made.decode_step_s, "tokens_s": 1 / made.decode_step_s}
        found["bytes"] = it.model.nbytes_per_token + 2 * state
        found["first_s"] = made.first_s
        if bench.is_dry:
            counted = it.launches()
            return {**found, "launches": sum(counted.values()), "note": it.runner.step_kind}
        found["share_of_roof"] = found["bytes"] / read_gb_s(bench) / 1e9 / made.decode_step_s
        device = _profile_steps(it, prompt, 24)
        launches = sum(count for _, count in device.kernels.values()) / device.steps
        host = max(0.0, found["us"] - device.busy_us / device.steps)
        return {**found, "launches": launches, "host_us": host, "note": it.runner.step_kind}


@dataclass(frozen=True)
class DeviceTimes:
    """What a GPU did in some decode steps. `kernels`: (microseconds, launches) of each.

    busy_us: in which anything ran; kernels that begin early are counted once where they overlap.
    """

    kernels: dict[str, tuple[float, int]]
    busy_us: float
    steps: int


def _profile_steps(it: OpenModel, prompt: int, tokens: int) -> DeviceTimes:
    from torch.autograd import DeviceType
    from torch.profiler import ProfilerActivity, profile

    profiler = profile(activities=[ProfilerActivity.CUDA])
    it.run(1, prompt, tokens, profile=profiler)
    found: dict[str, tuple[float, int]] = {}
    for event in profiler.key_averages():
        us = float(getattr(event, "self_device_time_total", 0.0))
        if us and not event.key.startswith("cuda"):
            found[event.key] = (us, event.count)
    ran = [event.time_range for event in profiler.events() or () if event.device_type == DeviceType.CUDA]
    return DeviceTimes(found, join_ranges((one.start, one.end) for one in ran), max(tokens - 1, 1))


def join_ranges(ranges: Iterable[tuple[float, float]]) -> float:
    """How long it is that at least one of these ranges of time lasts."""
    total, until = 0.0, -math.inf
    for start, end in sorted(ranges):
        total += max(0.0, end - max(start, until))
        until = max(until, end)
    return total


def list_many(bench: Bench) -> Iterator[Item]:
    """Many sequences at once, and long prompts."""
    for name, seqs, prompt, tokens, is_short in DRY_MANY if bench.is_dry else MANY:
        if is_short or bench.is_full:
            shape = f"{name} {seqs} × ({prompt} + {tokens})"
            what = (name, seqs, prompt, tokens)
            yield Item("batch", "bound", shape, "model", lambda w=what: _many(bench, *w), needs_s=BUILD_S)


def _many(bench: Bench, name: str, seqs: int, prompt: int, tokens: int) -> dict[str, Any]:
    with opened(bench, name, "model", seqs, prompt + tokens + 16) as it:
        it.run(seqs, prompt, min(tokens, 4))
        made = it.run(seqs, prompt, tokens)
        count = made.tokens if tokens > 1 else seqs * prompt
        found: dict[str, Any] = {"us": 1e6 * made.seconds, "tokens_s": count / made.seconds}
        if not bench.is_dry and tokens == 1:  # a prompt: two operations for each weight and token
            size = it.model.target.dtype.itemsize
            found["flops"] = 2 * count * it.model.nbytes_per_token // size
            found["share_of_roof"] = found["flops"] / made.seconds / tflop_s(bench) / 1e12
        return found


def list_profiles(bench: Bench) -> Iterator[Item]:
    """The kernels of a step of the two models that are farthest from the roof."""
    rows = [r for r in bench.rows if r["phase"] == 4 and r["share_of_roof"] and r["chip"] == bench.chip.name]
    if bench.is_dry:
        yield Item("profile", "launches", DRY_ALONE[0][0], "model", lambda: _dry_profile(bench))
    for row in sorted(rows, key=lambda r: r["share_of_roof"])[:2]:
        what = (row["shape"], row["dtype"])
        yield Item("profile", "kernels", *what, lambda w=what: _profile(bench, *w), needs_s=BUILD_S)


def _profile(bench: Bench, name: str, storage: str) -> dict[str, Any]:
    # Launched one after the other: else a kernel's time has that in which it waits for the one before it.
    with opened(bench, name, storage, 2, 256, is_early=False) as it:
        it.run(1, 64, 8)
        device = _profile_steps(it, 64, 24)
    steps, slowest = device.steps, sorted(device.kernels.items(), key=lambda pair: -pair[1][0])[:12]
    shown = [
        f"{key[:60]}: {us / steps:.1f} us in {count / steps:.0f} launches" for key, (us, count) in slowest
    ]
    return {"us": device.busy_us / steps, "note": "; ".join(shown)}


def _dry_profile(bench: Bench) -> dict[str, Any]:
    with opened(bench, DRY_ALONE[0][0], "model", 2, 64) as it:
        counted = it.launches()
    shown = ", ".join(f"{count} {name}" for name, count in counted.most_common(12))
    return {"launches": sum(counted.values()), "note": shown}
