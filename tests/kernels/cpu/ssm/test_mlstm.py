"""xLSTM's scan over several steps: no cut of a prompt and no number of threads changes a bit."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from plait.kernels.load import executor
from plait.ops.mlstm import mlstm_scan
from plait.ops.registry import OpFacts

HEADS, KEY, VALUE, LENGTHS = 2, 10, 83, (30, 1, 9, 17, 3)  # values: 64 that move together, and 19


def run(cpu: Any, given: list[list[Tensor]], cuts: list[list[int]]) -> list[Tensor]:
    """Sequences in steps of these sizes, in one batch, over slots full of NaN -> the output of each."""
    scan, row = mlstm_scan.bind(OpFacts("cpu", torch.float32, {}, cpu))
    assert row.variant == "native"
    shapes = ((HEADS, KEY, VALUE), (HEADS, KEY), (HEADS,))
    states = [torch.full((len(given) + 1, *shape), float("nan")) for shape in shapes]
    done, out = [0] * len(given), [list[Tensor]() for _ in given]
    for sizes in zip(*cuts, strict=True):
        which = [s for s, n in enumerate(sizes) if n]
        parts = [[x[done[s] : done[s] + sizes[s]] for x in given[s]] for s in which]
        starts = torch.tensor([0, *(sizes[s] for s in which)]).cumsum(0)
        history = torch.tensor([done[s] > 0 for s in which])
        where = (torch.tensor([s + 1 for s in which]), starts, history, 0)
        y = scan(*(torch.cat(list(x)) for x in zip(*parts, strict=True)), *states, *where, 1e-6)
        for s, piece in zip(which, y.split([sizes[s] for s in which]), strict=True):
            out[s].append(piece)
            done[s] += sizes[s]
    return [torch.cat(pieces) for pieces in out]


def test_cuts_batches_and_threads_change_no_bit(cpu: Any) -> None:
    shapes = ((HEADS, KEY), (HEADS, KEY), (HEADS, VALUE), (HEADS,), (HEADS,))
    given = [[torch.randn(n, *shape) for shape in shapes] for n in LENGTHS]
    alone = executor(1)
    assert alone is not None
    whole = [run(alone, [g], [[n]])[0] for g, n in zip(given, LENGTHS, strict=True)]
    alone.close()
    cuts = [[min(7, max(0, n - 7 * i)) for i in range(5)] for n in LENGTHS]
    for want, got in zip(whole, run(cpu, given, cuts), strict=True):
        assert bool(want.isfinite().all())
        assert torch.equal(want, got)
