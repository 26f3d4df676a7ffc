"""The router of a mixture of experts: scores, the mask over groups, the best k, their weights."""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from plait.errors import ShapeMismatch
from plait.kernels.cpu.codegen import vec
from plait.kernels.cpu.codegen.kernel import inline, kernel
from plait.kernels.cpu.codegen.kinds import Float, Floats, Int
from plait.kernels.cpu.codegen.maths import exp, sigmoid
from plait.kernels.cpu.runtime.executor import Executor
from plait.kernels.cpu.runtime.frame import rows_of, scratch_of, word
from plait.kernels.cpu.runtime.row_checks import TensorRows, dense, float32_rows
from plait.ops.moe import group_choice, look_up_experts, route, split_identities
from plait.spec.model import RouterSpec


@inline
def _or_nan(x: Floats, value: Floats) -> Floats:
    """value, or x where x is NaN, which exp forgets: neither below 0 nor above -1."""
    return vec.where_less(x, vec.zero_f32(), value, vec.where_less(vec.spread(np.float32(-1.0)), x, value, x))


SCORES = ("softmax", "sigmoid", "sqrtsoftplus")


@inline
def _softmax(logits: Int, n: Int, out: Int) -> None:
    low = vec.spread(np.float32(-np.inf))
    top = low
    for i in range(0, n, 16):
        left = np.int32(n - i)
        top = vec.largest(top, vec.where_below(left, vec.load_some(logits + 4 * i, left), low))
    highest, sums = vec.spread(vec.peak(top)), vec.zero_f32()
    for i in range(0, n, 16):
        left = np.int32(n - i)
        x = vec.sub(vec.load_some(logits + 4 * i, left), highest)
        e = vec.where_below(left, _or_nan(x, exp(x)), vec.zero_f32())
        vec.store_some(out + 4 * i, e, left)
        sums = vec.add(sums, e)
    whole = vec.spread(vec.total(sums))
    for i in range(0, n, 16):
        left = np.int32(n - i)
        vec.store_some(out + 4 * i, vec.div(vec.load_some(out + 4 * i, left), whole), left)


@inline
def _first_number(values: Int, n: Int) -> Int:
    """Where the first number is that is not NaN, or -1."""
    for i in range(n):
        value = vec.get_f32(values + 4 * i)
        if value == value:
            return np.int64(i)
    return np.int64(-1)


@inline
def _best(values: Int, n: Int) -> Int:
    """Where the largest is, the first among equals; it becomes NaN: taken. -1 if all are."""
    low, nan = vec.spread(np.float32(-np.inf)), vec.spread(np.float32(np.nan))
    top, where, at = low, vec.spread(np.float32(np.inf)), vec.to_f32(vec.lanes())
    for i in range(0, n, 16):
        left = np.int32(n - i)
        value = vec.where_below(left, vec.load_some(values + 4 * i, left), nan)
        where = vec.where_less(top, value, at, where)
        top = vec.where_less(top, value, value, top)
        at = vec.add(at, vec.spread(np.float32(16.0)))
    highest = vec.spread(vec.peak(top))
    first = vec.where_less(top, highest, vec.spread(np.float32(np.inf)), where)
    lowest = -vec.peak(vec.sub(vec.zero_f32(), first))  # the smallest place that holds the highest value
    best = np.int64(lowest) if lowest < np.float32(n) else _first_number(values, n)  # -inf is never `less`
    if best >= 0:
        vec.put_f32(values + 4 * best, np.float32(np.nan))
    return best


@inline
def _group_score(choice: Int, size: Int, by_two: Int) -> Float:
    """The largest choice of a group, or the sum of its two largest."""
    first: Float = np.float32(-np.inf)
    second: Float = first
    for i in range(size):
        value = vec.get_f32(choice + 4 * i)
        if value > first:
            first, second = value, first
        elif value > second:
            second = value
    return np.float32(first + second) if by_two != 0 else first


@inline
def _keep_groups(choice: Int, n: Int, groups: Int, top_groups: Int, by_two: Int, scores: Int) -> None:
    """Experts outside the best groups may not be chosen: their choice becomes -inf."""
    size = n // groups
    for g in range(groups):
        vec.put_f32(scores + 4 * g, _group_score(choice + 4 * g * size, size, by_two))
    for _ in range(top_groups):
        _best(scores, groups)
    for g in range(groups):
        score = vec.get_f32(scores + 4 * g)
        if score == score:  # not taken
            for i in range(g * size, (g + 1) * size):
                vec.put_f32(choice + 4 * i, np.float32(-np.inf))


@inline
def _mass_within(row: Int, choice: Int, n: Int, best: Int, margin: Float) -> Float:
    """The sum of exp(x - x of `best`) over what is not taken, x being within the margin of it."""
    top, zero, below = vec.spread(vec.get_f32(row + 4 * best)), vec.zero_f32(), vec.spread(np.float32(-1.0))
    sums = zero
    for i in range(0, n, 16):
        left = np.int32(n - i)
        x, free = vec.load_some(row + 4 * i, left), vec.load_some(choice + 4 * i, left)
        reach = vec.mul(vec.largest(vec.absolute(x), top), vec.spread(margin))
        e = vec.where_less(reach, vec.sub(top, x), zero, exp(vec.sub(x, top)))
        e = vec.where_less(free, zero, e, vec.where_less(below, free, e, zero))  # what is taken is NaN
        sums = vec.add(sums, vec.where_below(left, e, zero))
    return np.float32(vec.total(sums) + np.float32(1.0))  # `best` is taken, too


@inline
def _root_of_softplus(x: Float) -> Float:
    """√ln(1 + eˣ), which is √x for a large x."""
    wide = np.float64(x)
    return np.float32(math.sqrt(wide if wide > 20.0 else math.log1p(math.exp(wide))))


@inline
def score_row(row: Int, n: Int, kind: Int, scores: Int) -> None:
    """The scores of a row of n logits, of a kind of SCORES."""
    if kind == 2:
        for i in range(n):
            vec.put_f32(scores + 4 * i, _root_of_softplus(vec.get_f32(row + 4 * i)))
    elif kind == 1:
        for i in range(0, n, 16):
            left = np.int32(n - i)
            x = vec.load_some(row + 4 * i, left)
            vec.store_some(scores + 4 * i, _or_nan(x, sigmoid(x)), left)
    else:
        _softmax(row, n, scores)


@kernel
def route_rows(frame: int, args: int, thread: int, threads: int) -> None:
    """logits, bytes between rows, experts, bias or 0, k, which of SCORES, groups, top groups, 1 for top2,
    1 to renormalize, its eps, scale, weights (dense), indices (dense), factors or 0, 1 to choose by
    logits, the margin or 0."""
    logits, row_bytes, n, bias, k, score_kind, groups, top_groups, by_two = vec.words(args, 2, 11)
    renormalize, eps, scale = word(args, 11), vec.get_f32(args + 96), vec.get_f32(args + 104)
    weights, indices, rows, factors = word(args, 14), word(args, 15), rows_of(frame, args), word(args, 16)
    by_logits, margin = word(args, 17), vec.get_f32(args + 144)
    scores = scratch_of(frame, thread)
    choice = scores + 4 * n
    group_scores = choice + 4 * n
    for r in range(rows * thread // threads, rows * (thread + 1) // threads):
        row = logits + r * row_bytes
        score_row(row, n, score_kind, scores)
        for i in range(0, n, 16):
            left = np.int32(n - i)
            value = vec.load_some((row if by_logits != 0 else scores) + 4 * i, left)
            if bias != 0:
                value = vec.add(value, vec.load_some(bias + 4 * i, left))
            vec.store_some(choice + 4 * i, value, left)
        if groups > 1:
            _keep_groups(choice, n, groups, top_groups, by_two, group_scores)
        whole = np.float32(0.0)
        for j in range(k):
            e = _best(choice, n)
            if e < 0:  # all that is left is NaN: any expert, so that what follows stays inside its tensors
                e = np.int64(j)
            score: Float = vec.get_f32(scores + 4 * e)
            if margin > np.float32(0.0):
                score = np.float32(np.float32(1.0) / _mass_within(row, choice, n, e, margin))
            vec.put_i64(indices + 8 * (r * k + j), e)
            vec.put_f32(weights + 4 * (r * k + j), score)
            whole = np.float32(whole + score)
        for j in range(k):
            to = weights + 4 * (r * k + j)
            weight: Float = vec.get_f32(to)
            if renormalize != 0:
                weight = np.float32(weight / np.float32(whole + eps))
            weight = np.float32(weight * scale)
            if factors != 0:
                weight = np.float32(
                    weight * vec.get_f32(factors + 4 * vec.get_i64(indices + 8 * (r * k + j)))
                )
            vec.put_f32(to, weight)


@route.variant("native", on="cpu", when=float32_rows, native=True)
def _route(
    cpu: Executor,
    logits: Tensor,
    bias: Tensor | None,
    top_k: int,
    router: RouterSpec,
    factors: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    rows, n = TensorRows.of(logits), logits.shape[-1]
    for name, each in (("biases", bias), ("factors", factors)):
        if each is not None and (
            each.dtype != torch.float32 or each.shape != (n,) or not each.is_contiguous()
        ):
            raise ShapeMismatch(f"a router of {n} experts wants {n} float32 {name}, got {list(each.shape)}")
    smallest = 2 if router.group_by == "top2" and router.groups > 1 else 1
    if logits.dim() != 2 or not 0 < top_k <= n or n % router.groups or n // router.groups < smallest:
        raise ShapeMismatch(
            f"{top_k} of {list(logits.shape)} scores in {router.groups} groups (by {router.group_by})"
        )
    if not 0 < router.top_groups <= router.groups:
        raise ShapeMismatch(f"the best {router.top_groups} of {router.groups} groups of experts")
    weights = cpu.empty(rows.count, top_k)
    indices = cpu.empty(rows.count, top_k, dtype=torch.int64)
    cpu.launch(
        route_rows,
        *(logits, rows.row_bytes, n, bias, top_k, SCORES.index(router.score)),
        *(router.groups, router.top_groups, int(router.group_by == "top2")),
        *(int(router.renormalize), float(router.renorm_eps), float(router.scale), weights, indices, factors),
        int(router.by_logits or router.margin is not None),
        float(router.margin or 0.0),
        rows=rows.count,
        scratch=math.ceil((2 * n + router.groups) / 16) * 64,
    )
    return weights, indices


@kernel
def look_up_rows(frame: int, args: int, thread: int, threads: int) -> None:
    """logits, bytes between rows, experts, table (dense), token ids, k, which of SCORES, 1 to renormalize,
    its eps, scale, weights (dense), indices (dense)."""
    logits, row_bytes, n, table, ids, k, score_kind, renormalize = vec.words(args, 2, 10)
    eps, scale, weights, indices = (
        vec.get_f32(args + 80),
        vec.get_f32(args + 88),
        word(args, 12),
        word(args, 13),
    )
    scores, rows = scratch_of(frame, thread), rows_of(frame, args)
    for r in range(rows * thread // threads, rows * (thread + 1) // threads):
        row, whole = logits + r * row_bytes, np.float32(0.0)
        score_row(row, n, score_kind, scores)
        for j in range(k):
            e = vec.get_i64(table + 8 * (vec.get_i64(ids + 8 * r) * k + j))
            score = vec.get_f32(scores + 4 * e)
            vec.put_i64(indices + 8 * (r * k + j), e)
            vec.put_f32(weights + 4 * (r * k + j), score)
            whole = np.float32(whole + score)
        for j in range(k):
            weight: Float = vec.get_f32(weights + 4 * (r * k + j))
            if renormalize != 0:
                weight = np.float32(weight / np.float32(whole + eps))
            vec.put_f32(weights + 4 * (r * k + j), np.float32(weight * scale))


@look_up_experts.variant("native", on="cpu", when=float32_rows, native=True)
def _look_up_experts(
    cpu: Executor, logits: Tensor, table: Tensor, token_ids: Tensor, router: RouterSpec
) -> tuple[Tensor, Tensor]:
    rows, n, k = TensorRows.of(logits), logits.shape[-1], table.shape[-1]
    dense("a table of experts", table, table.shape[0], k, dtype=torch.int64)
    dense("token ids", token_ids, rows.count, dtype=torch.int64)
    weights, indices = cpu.empty(rows.count, k), cpu.empty(rows.count, k, dtype=torch.int64)
    cpu.launch(
        *(look_up_rows, logits, rows.row_bytes, n, table, token_ids, k, SCORES.index(router.score)),
        *(int(router.renormalize), float(router.renorm_eps), float(router.scale), weights, indices),
        rows=rows.count,
        scratch=math.ceil(n / 16) * 64,
    )
    return weights, indices


@kernel
def split_rows(frame: int, args: int, thread: int, threads: int) -> None:
    """weights, indices (dense), k, experts, weights, indices, weight of the others (dense)."""
    given, which, k, count = word(args, 2), word(args, 3), word(args, 4), word(args, 5)
    weights, indices, others, rows = word(args, 6), word(args, 7), word(args, 8), rows_of(frame, args)
    for r in range(rows * thread // threads, rows * (thread + 1) // threads):
        rest = np.float32(0.0)
        for i in range(r * k, (r + 1) * k):
            e, weight = vec.get_i64(which + 8 * i), vec.get_f32(given + 4 * i)
            is_own = e < count
            vec.put_i64(indices + 8 * i, e if is_own else np.int64(0))
            vec.put_f32(weights + 4 * i, weight if is_own else np.float32(0.0))
            rest = np.float32(rest + (np.float32(0.0) if is_own else weight))
        vec.put_f32(others + 4 * r, rest)


@split_identities.variant("native", on="cpu", when=float32_rows, native=True)
def _split_identities(
    cpu: Executor, weight: Tensor, index: Tensor, count: int
) -> tuple[Tensor, Tensor, Tensor]:
    rows, k = weight.shape
    dense("weights of experts", weight, rows, k)
    dense("indices of experts", index, rows, k, dtype=torch.int64)
    made = cpu.empty(rows, k), cpu.empty(rows, k, dtype=torch.int64), cpu.empty(rows, 1)
    cpu.launch(split_rows, weight, index, k, count, *made, rows=rows)
    return made


@kernel
def group_rows(frame: int, args: int, thread: int, threads: int) -> None:
    """weights, indices (dense), k, experts of a group, scale, weights, indices (dense)."""
    given, which, k, group = word(args, 2), word(args, 3), word(args, 4), word(args, 5)
    scale, weights, indices, rows = vec.get_f32(args + 48), word(args, 7), word(args, 8), rows_of(frame, args)
    for i in range(rows * thread // threads * k, rows * (thread + 1) // threads * k):
        vec.put_i64(indices + 8 * i, vec.get_i64(which + 8 * i) // group)
        vec.put_f32(weights + 4 * i, np.float32(vec.get_f32(given + 4 * i) * scale))


@group_choice.variant("native", on="cpu", when=float32_rows, native=True)
def _group_choice(
    cpu: Executor, weight: Tensor, index: Tensor, group: int, scale: float
) -> tuple[Tensor, Tensor]:
    rows, k = weight.shape
    dense("weights of experts", weight, rows, k)
    dense("indices of experts", index, rows, k, dtype=torch.int64)
    made = cpu.empty(rows, k), cpu.empty(rows, k, dtype=torch.int64)
    cpu.launch(group_rows, weight, index, k, group, float(scale), *made, rows=rows)
    return made
