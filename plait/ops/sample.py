"""Choosing a token: temperature, top-k, top-p (Holtzman et al. 2020), min-p, then inverse transform sampling.

The random number comes from outside, so a row's token depends on nothing but that row. Equal logits: the
lower id comes first, everywhere.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from plait.ops.case import Case
from plait.ops.registry import Arguments, op
from plait.ops.seed import GOLDEN, MIX_1, MIX_2

Floats = npt.NDArray[np.float64]
Ids = npt.NDArray[np.int64]
GROUP = 32
SIZES = ((1, 7), (5, 300), (16, 5000))
CASES: list[Case] = [dict(rows=rows, vocab_size=size) for rows, size in SIZES]


@op(cases=CASES, tolerance={torch.float32: 0.0})
def largest(logits: Tensor) -> tuple[Tensor, Tensor]:
    """The largest of each row: logits [L, vocab] float32 -> its id [L] int64 and its value [L].

    The lowest id among equals. A NaN is larger than any number, so that it is found.
    """
    ids = logits.argmax(-1)
    return ids, logits.gather(-1, ids[:, None])[:, 0]


@largest.inputs
def _largest_inputs(case: Case, dtype: torch.dtype, device: str) -> Arguments:
    logits = torch.randn(case["rows"], case["vocab_size"], dtype=dtype).round(decimals=1)  # with ties
    return (logits.to(device),), {}


@op(cases=CASES, tolerance={torch.float32: 0.0})
def sample(
    logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor, uniform: Tensor
) -> Tensor:
    """logits: [L, vocab] float32; the rest: [L], float64, top_k int64 (< 1: no limit) -> ids [L] int64.

    Weights are softmax(logits / temperature). In the order of falling weight: the first `top_k`; of these
    the fewest that hold `top_p` of their mass; of these the ones with at least `min_p` of the largest weight.
    `uniform` in [0, 1) picks one of what is left, in proportion to the weights. temperature > 0.
    """
    values, ids = logits.double().sort(dim=-1, descending=True, stable=True)
    weight = ((values - values[:, :1]) / temperature[:, None]).exp()
    rank = torch.arange(logits.shape[1], device=logits.device)
    limit = torch.where(top_k < 1, logits.shape[1], top_k)[:, None]
    weight = weight.masked_fill(rank >= limit, 0.0)
    before = weight.cumsum(-1).roll(1, -1)
    before[:, 0].zero_()
    unlimited = top_p[:, None] >= 1.0
    kept = unlimited | (before < top_p[:, None] * weight.sum(-1, keepdim=True)) | (rank == 0)
    kept &= weight >= min_p[:, None] * weight[:, :1]
    mass = (weight * kept).cumsum(-1)
    index = (mass <= uniform[:, None] * mass[:, -1:]).sum(-1)
    last = ((weight * kept) > 0).sum(-1) - 1
    chosen: Tensor = ids.gather(-1, torch.minimum(index, last)[:, None])[:, 0]
    return chosen


@sample.inputs
def _inputs(case: Case, dtype: torch.dtype, device: str) -> Arguments:
    rows = case["rows"]
    grid = torch.arange(rows)
    logits = (torch.randn(rows, case["vocab_size"], dtype=dtype) * 3).round(decimals=1)  # with ties
    temperature = torch.tensor([0.7, 1.0, 0.1, 2.0], dtype=torch.float64)[grid % 4]
    top_k = torch.tensor([40, 0, 1, 3, -1])[grid % 5]
    top_p = torch.tensor([0.9, 1.0, 0.0, 0.5], dtype=torch.float64)[grid // 2 % 4]
    min_p = torch.tensor([0.0, 0.1, 0.0], dtype=torch.float64)[grid % 3]
    uniform = torch.rand(rows, dtype=torch.float64)
    settings = (temperature, top_k, top_p, min_p, uniform)
    return (logits.to(device), *(t.to(device) for t in settings)), {}


@op(cases=CASES, tolerance={torch.float32: 0.0})
def sample_at(
    logits: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    seed: Tensor,
    position: Tensor,
) -> tuple[Tensor, Tensor]:
    """`sample` with the random number of (seed, position), or the largest where the temperature is 0.

    seed, position: [L] int64, a seed modulo 2^64; the rest as `sample` has it -> ids [L] int64, and the
    largest logit of each row [L]. One sequence of launches serves every row of a batch.
    """
    ids, values = largest.reference(logits)
    warm: Tensor = temperature.masked_fill(temperature <= 0, 1.0)
    drawn = sample.reference(logits, warm, top_k, top_p, min_p, uniforms(seed, position))
    return torch.where(temperature > 0, drawn, ids), values


@sample_at.inputs
def _at_inputs(case: Case, dtype: torch.dtype, device: str) -> Arguments:
    (logits, temperature, top_k, top_p, min_p, _), options = _inputs(case, dtype, device)
    rows = case["rows"]
    temperature[3::4] = 0.0
    seed = torch.randint(-(2**63), 2**63 - 1, (rows,), dtype=torch.int64)
    position = torch.randint(0, 2**20, (rows,), dtype=torch.int64)
    return (logits, temperature, top_k, top_p, min_p, seed.to(device), position.to(device)), options


def uniforms(seed: Tensor, position: Tensor) -> Tensor:
    """`seed.uniform` of tensors: [L] int64 -> [L] float64, the same numbers."""
    stream = _mix(seed + _wrap(GOLDEN))
    found: Tensor = _shift(_mix(stream + (position + 1) * _wrap(GOLDEN)), 11).double() * 2.0**-53
    return found


def _mix(x: Tensor) -> Tensor:
    x = (x ^ _shift(x, 30)) * _wrap(MIX_1)
    x = (x ^ _shift(x, 27)) * _wrap(MIX_2)
    return x ^ _shift(x, 31)


def _shift(x: Tensor, by: int) -> Tensor:
    """To the right, of 64 bits without a sign."""
    return torch.bitwise_and(x >> by, (1 << (64 - by)) - 1)


def _wrap(number: int) -> int:
    """An integer of 64 bits as int64 has it."""
    number &= 2**64 - 1
    return number - 2**64 if number >= 2**63 else number


@sample.variant("candidates", on="cpu")
def _candidates(
    logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor, uniform: Tensor
) -> Tensor:
    """Sorts only the tokens that can be chosen, which few logits decide: no row is sorted whole.

    Every row is computed by itself, so its bits cannot depend on the other rows.
    """
    rows = logits.numpy()
    columns = (x.tolist() for x in (temperature, top_k, top_p, min_p, uniform))
    chosen = [
        _pick_of_top(row, _top(row, k), t, p, m, u)
        if 0 < k < rows.shape[1]
        else _pick_of_all(row, t, p, m, u)
        for row, t, k, p, m, u in zip(rows, *columns, strict=True)
    ]
    return torch.tensor(chosen, dtype=torch.int64)


def _top(row: npt.NDArray[np.float32], k: int) -> Ids:
    """Ids of the k largest, largest first, the lower id first among equals."""
    # The k-th largest of the maxima of disjoint groups is not above the k-th largest of all, and lets few by.
    groups = row.size // GROUP
    pool = row[: groups * GROUP].reshape(GROUP, groups).max(0) if groups >= k else row
    bound = np.partition(pool, pool.size - k)[pool.size - k]
    return _sort_falling(row, np.flatnonzero(row >= bound))[:k]


def _sort_falling(row: npt.NDArray[np.float32], ids: Ids) -> Ids:
    return ids[np.argsort(-row[ids], kind="stable")]


def _pick_of_top(
    row: npt.NDArray[np.float32], ids: Ids, temperature: float, top_p: float, min_p: float, uniform: float
) -> int:
    values = row[ids].astype(np.float64)
    weight = np.exp((values - values[0]) / temperature)
    return _pick(ids, weight, weight.sum(), (top_p, min_p), uniform)


def _pick_of_all(
    row: npt.NDArray[np.float32], temperature: float, top_p: float, min_p: float, uniform: float
) -> int:
    """Without top-k. What lies under `floor` weighs less together than the part that cannot be chosen."""
    values = row.astype(np.float64)
    weight = np.exp((values - values.max()) / temperature)
    if top_p >= 1.0 and min_p > 0.0:
        weight[weight < min_p] = 0.0
    total = float(weight.sum())
    reached = top_p if top_p < 1.0 else uniform
    least = 0.5 * total * (1.0 - reached) / row.size
    floor = max(least, min_p) if top_p < 1.0 or min_p == 0.0 else min_p  # min_p alone: all of them count
    ids = _sort_falling(row, np.flatnonzero(weight >= floor))
    return _pick(ids, weight[ids], total, (top_p, min_p), uniform)


def _pick(ids: Ids, weight: Floats, total: float, nucleus: tuple[float, float], uniform: float) -> int:
    """One of `ids`, sorted by falling weight; `total` is the mass of everything that was not cut by top-k."""
    top_p, min_p = nucleus
    mass, count, kept_mass = np.cumsum(weight), ids.size, total
    if top_p < 1.0:
        count = 1 + int(np.count_nonzero(mass[:-1] < top_p * total))
    if min_p > 0.0:
        count = min(count, int(np.count_nonzero(weight >= min_p)))
    if top_p < 1.0 or min_p > 0.0:
        kept_mass = float(mass[count - 1])
    index = int(np.searchsorted(mass[:count], uniform * kept_mass, side="right"))
    last = min(count, int(np.count_nonzero(weight))) - 1
    return int(ids[min(index, last)])
