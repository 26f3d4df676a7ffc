"""Ops that compute every number from those at its place: cases and inputs are made from the reference."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from inspect import signature

import torch

from plait.ops.case import Case
from plait.ops.registry import TOLERANCE, Arguments, Op, op

SIZES = ((1, 64), (33, 300), (5, 7))  # rows and numbers of each: one row, many, and one with a short tail
Numbers = tuple[float | None, ...]


def elementwise_op(
    tolerance: Mapping[torch.dtype, float] = TOLERANCE, **numbers: Numbers
) -> Callable[[Callable[..., object]], Op]:
    """Make a plain torch function of tensors [T, n] the reference of an op; cases and inputs are made.

    Its parameters are tensors of one shape, then numbers: `numbers` has the values that each takes in the
    cases, in turn. Rows of the inputs lie apart in memory, as those of a fused projection do.
    """

    def register(fn: Callable[..., object]) -> Op:
        tensors = [name for name in signature(fn).parameters if name not in numbers]
        made = op(
            cases=[
                dict(tokens=tokens, size=size, **{name: v[i % len(v)] for name, v in numbers.items()})
                for i, (tokens, size) in enumerate(SIZES)
            ],
            tolerance=tolerance,
        )(fn)

        @made.inputs
        def _inputs(case: Case, dtype: torch.dtype, device: str) -> Arguments:
            n, count = case["size"], len(tensors)
            values: Mapping[str, object] = case
            wide = 2 * torch.randn(case["tokens"], 2 * n * count, dtype=dtype, device=device)
            return (*wide.split(n, -1)[::2], *(values[name] for name in numbers)), {}

        return made

    return register
