"""A chain of launches: does a GPU order kernels that begin before the one before them has ended?

No model has it. Its trial decides whether a GPU's kernels are launched that way (`ops.launch`).
"""

from __future__ import annotations

import torch
from torch import Tensor

from plait.ops.case import Case
from plait.ops.registry import Arguments, op

FIRST = 90  # the first compute capability with programmatic dependent launch
RUNS = 4  # the first one by one, the others of a graph
CASES: list[Case] = [dict(size=1, rounds=3), dict(size=300, rounds=8), dict(size=70_001, rounds=40)]


@op(cases=CASES, tolerance={torch.float32: 0.0})
def chain_launches(x: Tensor, links: int) -> Tensor:
    """What is left of x [n] float32 after each of `links` launches, in `RUNS` runs -> [RUNS, links + 1, n].

    A launch adds one to what the one before it has written, and writes it in reverse order. The last of each
    run is the sum of all. Whole numbers up to 2^24, so results are exact.
    """
    found = [x]
    for _ in range(links):
        found.append(found[-1].flip(0) + 1)
    found = [*found[1:], torch.stack(found[1:]).sum(0)]
    return torch.stack(found).expand(RUNS, -1, -1)


@chain_launches.inputs
def _inputs(case: Case, dtype: torch.dtype, device: str) -> Arguments:
    return (torch.randint(0, 1000, (case["size"],), device=device).to(dtype), case["rounds"]), {}
