"""The time of a call on a GPU: the median of replays of a graph, over inputs that are not in its cache."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from statistics import median
from typing import Any

import torch
from torch import Tensor

from gpu_phases.results import Bench

L2_FACTOR = 3  # the copies of inputs are so many times as large as the cache
MOST_COPIES = 24
REPLAYS = 15
Call = Callable[[], Any]


def copies_for(bench: Bench, nbytes: int) -> int:
    """How many copies of inputs push each other out of the cache."""
    if bench.is_dry:
        return 1
    cache = int(getattr(torch.cuda.get_device_properties(bench.device), "L2_cache_size", 64 << 20))
    return max(1, min(MOST_COPIES, L2_FACTOR * cache // max(nbytes, 1) + 1))


def copied(value: Any) -> Any:
    """A copy of an argument, with memory of its own."""
    if isinstance(value, Tensor):
        return value.clone()
    if isinstance(value, tuple) and any(isinstance(v, Tensor) for v in value):
        return tuple(copied(v) for v in value)
    tensors = {
        n: v for n in getattr(value, "__slots__", ()) if isinstance(v := getattr(value, n, None), Tensor)
    }
    return replace(value, **{n: v.clone() for n, v in tensors.items()}) if tensors else value


def time_us(bench: Bench, calls: Sequence[Call]) -> float:
    """Microseconds of one call. All calls are captured one after the other; dry, one is timed once."""
    if bench.is_dry:
        began = time.perf_counter()
        calls[0]()
        return (time.perf_counter() - began) * 1e6
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for call in (*calls, *calls[:2]):
            call()
    torch.cuda.current_stream().wait_stream(stream)
    graph, rounds = torch.cuda.CUDAGraph(), max(1, 16 // len(calls))
    with torch.cuda.graph(graph):
        for _ in range(rounds):
            for call in calls:
                call()
    times = [_time_replay(graph) for _ in range(3 + REPLAYS)][3:]
    return 1000 * median(times) / (rounds * len(calls))


def _time_replay(graph: Any) -> float:
    """Milliseconds."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    graph.replay()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end))


def settle(bench: Bench) -> None:
    """Wait for the device, and give back what is not in use."""
    if not bench.is_dry:
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
