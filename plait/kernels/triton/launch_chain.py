"""The chain of launches that `ops.launch_chain` describes, launched early, one by one and in a graph."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch
import triton
import triton.language as tl
from torch import Tensor

from plait.kernels.triton.dependent_launch import await_previous, is_dependent, prefetch_rows
from plait.kernels.triton.forms import KernelForm
from plait.ops.launch import launch, permit_dependent
from plait.ops.launch_chain import FIRST, RUNS, chain_launches
from plait.ops.registry import OpFacts

NAME = "triton"
BLOCK = 1024  # numbers of a program


@triton.jit
def write_reversed(x, out, n, BLOCK: tl.constexpr):
    """x + 1 in reverse order -> out, [n] each: the first program reads what the last one before wrote."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    if is_dependent():
        prefetch_rows(x, tl.arange(0, 1), tl.program_id(0) * BLOCK, n, 0, BLOCK)
    await_previous()
    tl.store(out + n - 1 - at, tl.load(x + at, at < n, other=0.0) + 1.0, at < n)


def why_not(facts: OpFacts) -> str | None:
    if facts.chip is None or facts.chip.capability >= FIRST:
        return None
    return f"programmatic dependent launch begins with sm_{FIRST}"


@chain_launches.variant(NAME, on="cuda", when=why_not)
def _chain_launches(x: Tensor, links: int) -> Tensor:
    found = x.new_full((RUNS, links + 1, *x.shape), -1.0)
    was_permitted = permit_dependent(x.device, True)
    try:
        rows = x.new_empty(links + 1, *x.shape)
        for run, step in enumerate(_list_runs(partial(_run_links, x, rows), x.device)):
            step()
            found[run].copy_(rows)
            rows.fill_(-1.0)
    finally:
        permit_dependent(x.device, was_permitted)
    return found


def _list_runs(step: Callable[[], None], device: torch.device) -> Iterator[Callable[[], None]]:
    """The step itself, then what replays a graph of it, which has other edges between its kernels."""
    yield step
    replay = step
    if device.type == "cuda":
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize(device)
        with torch.cuda.graph(graph, stream=torch.cuda.Stream(device)):
            step()
        replay = graph.replay
    yield from [replay] * (RUNS - 1)


def _run_links(x: Tensor, rows: Tensor) -> None:
    """The chain. Before some links the memory of their result is written by what knows nothing of early
    launches: a copy comes before the first, then torch's own kernels, and what the driver has for zeros."""
    n, here = x.shape[0], torch.empty_like(x)
    here.copy_(x)
    for link, row in enumerate(rows[:-1]):
        if link % 4 == 1:
            row.fill_(7.0)
        elif link % 4 == 3:
            row.zero_()
        launch(write_reversed, (triton.cdiv(n, BLOCK),), here, row, n, BLOCK=BLOCK)
        here = row
    rows[-1].copy_(rows[:-1].sum(0))


def forms() -> Iterator[KernelForm]:
    types = {"x": "fp32*", "out": "fp32*"}
    yield KernelForm("write_reversed", write_reversed, types, {"BLOCK": BLOCK})
