"""RWKV-6's scan in double precision, of one short sequence with a single decay."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from plait.ops.registry import TensorFn

TOKENS, HEADS, DIM = 7, 2, 20
SLOW = -16.0  # a state keeps all but 1e-7 of itself


class Given(NamedTuple):
    r: Tensor
    decay: Tensor
    k: Tensor
    v: Tensor
    bonus: Tensor | None


def given(decay: float, *, has_bonus: bool) -> Given:
    torch.manual_seed(3)
    r, k, v = torch.randn(3, TOKENS, HEADS, DIM)
    bonus = torch.randn(HEADS, DIM) if has_bonus else None
    return Given(r, torch.full_like(r, decay), k, v, bonus)


def largest_error(scan: TensorFn, x: Given) -> float:
    """Of `wkv6_scan`, as a share of the largest number that it should give. NaN, if it gives one."""
    state = torch.full((1, HEADS, DIM, DIM), torch.nan)
    where = (torch.zeros(1, dtype=torch.int64), torch.tensor([0, TOKENS]), torch.tensor([False]))
    got, want = scan(*x, state, *where, 0), exact(x)
    return float((got.double() - want).abs().max() / want.abs().max())


def exact(x: Given) -> Tensor:
    state, found = torch.zeros(HEADS, DIM, DIM, dtype=torch.float64), []
    bonus = None if x.bonus is None else x.bonus.double()[..., None]
    for r, decay, k, v in zip(*(t.double() for t in x[:4]), strict=True):
        speed, new, last = -decay.exp()[..., None], k[..., None] * v[:, None], state
        state = speed.exp() * last + (-speed.expm1() * new if bonus is None else new)
        read = state * DIM**-0.5 if bonus is None else last + bonus * new
        found.append((read * r[..., None]).sum(1))
    return torch.stack(found)
