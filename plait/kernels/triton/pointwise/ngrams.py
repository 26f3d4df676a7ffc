"""Features of n-grams on GPUs: the rows of hashed tables that tokens have, and values gated by a match.

    ids in front of a slot's next token [n-1]   o o         oldest first
    rows of the sequence                            x x x x x x x
    tiles of BT rows                                |-----||-----

A program takes every Z-th tile of one sequence's rows. A tile has at least n-1 rows, or Z is 1. So only the
first tile reads the ids in front, and the program that has it writes the last ones, when it has read all.
Nothing depends on data but addresses, so a decode step can be captured: ids in front stay on the device.

Slot 0 belongs to padding rows, of which several may write it at once; nothing reads what they get.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import product

import torch
import triton
import triton.language as tl
from torch import Tensor

from plait.kernels.triton.dependent_launch import await_previous
from plait.kernels.triton.forms import KernelForm, with_float16, with_float32
from plait.kernels.triton.maths import sigmoid
from plait.ops.launch import launch
from plait.ops.ngrams import LEAST, gate_by_match, hash_ngrams, sum_ngrams

NAME = "triton"
ROWS = 32  # of a tile in a step with prompts
MOST_PROGRAMS = 1024  # they share the tiles of all sequences
COLUMNS = 1024  # of a stream that a program has in registers


@triton.jit
def _read_ids(at, merged, there, MERGES: tl.constexpr):
    """Ids of tokens, or what the table `merged` has for them."""
    found = tl.load(at, mask=there, other=0)
    if MERGES:
        found = tl.load(merged + found, mask=there, other=0)
    return found


@triton.jit
def keep_last(
    ids, merged, home, first, count, oldest, end, PAST: tl.constexpr, PP: tl.constexpr, MERGES: tl.constexpr
):  # fmt: skip
    """The ids in front of the next step's token, for the program that read those in front of this one's."""
    n = tl.arange(0, PP)
    place = count - PAST + n
    fresh = _read_ids(ids + first + place, merged, (n < PAST) & (place >= 0), MERGES)
    is_kept = (n < PAST) & (place >= oldest) & (place < 0)
    kept = tl.load(home + PAST + place, mask=is_kept, other=0.0).to(tl.int64)
    last = tl.where(place >= oldest, tl.where(place >= 0, fresh, kept), end)
    tl.debug_barrier()  # the threads of this program have read what is written now
    tl.store(home + n, last.to(tl.float32), mask=n < PAST)


@triton.jit(do_not_specialize=["end"])
def hash_tokens(
    ids, before, slots, query_start, has_history, factors, sizes, starts, merged, out, end, slot_stride,
    PAST: tl.constexpr, PP: tl.constexpr, HEADS: tl.constexpr, HP: tl.constexpr, BT: tl.constexpr,
    MERGES: tl.constexpr,
):  # fmt: skip
    """ids: [T], before: [slots, PAST], factors: [PAST + 1], sizes, starts: [PAST HEADS] -> out [T, these].

    Grid: (S, Z), with BT ≥ PAST or Z = 1. A factor times an id, and so every number, is below 2^63. MERGES:
    ids are those that the table `merged` has for them, and no n-gram ends at `end`.
    """
    await_previous()
    s, part = tl.program_id(0), tl.program_id(1)
    first = tl.load(query_start + s).to(tl.int64)
    count = tl.load(query_start + s + 1).to(tl.int64) - first
    home = before + tl.load(slots + s).to(tl.int64) * slot_stride
    oldest = tl.where(tl.load(has_history + s).to(tl.int32) != 0, -PAST, 0)  # the first token that is known
    t, h = tl.arange(0, BT), tl.arange(0, HP)
    for start in range(part * BT, count, tl.num_programs(1) * BT):
        at = start + t + tl.zeros([BT], tl.int64)
        there = at < count
        token = _read_ids(ids + first + at, merged, there, MERGES)
        number = token * tl.load(factors)
        ended = at < 0
        for k in tl.static_range(1, PAST + 1):
            back = at - k
            near = _read_ids(ids + first + back, merged, there & (back >= 0), MERGES)
            known = there & (back >= oldest)
            far = tl.load(home + PAST + back, mask=known & (back < 0), other=0.0).to(tl.int64)
            token = tl.where(known, tl.where(back >= 0, near, far), end)
            if not MERGES:
                ended = ended | (token == end)
            number = number ^ (tl.where(ended, end, token) * tl.load(factors + k))
            head = (k - 1) * HEADS + h
            own = tl.load(sizes + head, mask=h < HEADS, other=1)
            row = number[:, None] % own[None, :] + tl.load(starts + head, mask=h < HEADS, other=0)[None, :]
            to = out + (first + at)[:, None] * (PAST * HEADS) + head[None, :]
            tl.store(to, row, mask=there[:, None] & (h < HEADS)[None, :])
    if part == 0:
        keep_last(ids, merged, home, first, count, oldest, end, PAST, PP, MERGES)


@triton.jit(do_not_specialize=["end"])
def sum_tokens(
    ids, before, slots, query_start, has_history, factors, sizes, starts, out, end, slot_stride,
    PAST: tl.constexpr, PP: tl.constexpr, HEADS: tl.constexpr, HP: tl.constexpr, BT: tl.constexpr,
):  # fmt: skip
    """ids: [T], before: [slots, PAST], factors: [PAST + 1, HEADS], sizes, starts: [HEADS] -> out [T, HEADS].

    Grid: (S, Z), as `hash_tokens`. Every sum is below 2^63.
    """
    await_previous()
    s, part = tl.program_id(0), tl.program_id(1)
    first = tl.load(query_start + s).to(tl.int64)
    count = tl.load(query_start + s + 1).to(tl.int64) - first
    home = before + tl.load(slots + s).to(tl.int64) * slot_stride
    oldest = tl.where(tl.load(has_history + s).to(tl.int32) != 0, -PAST, 0)  # the first token that is known
    t, h = tl.arange(0, BT), tl.arange(0, HP)
    own = tl.load(sizes + h, mask=h < HEADS, other=1)
    start_row = tl.load(starts + h, mask=h < HEADS, other=0)
    for start in range(part * BT, count, tl.num_programs(1) * BT):
        at = start + t + tl.zeros([BT], tl.int64)
        there = at < count
        token = tl.load(ids + first + at, mask=there, other=0)
        number = token[:, None] * tl.load(factors + h, mask=h < HEADS, other=0)[None, :]
        ended = at < 0
        for k in tl.static_range(1, PAST + 1):
            back = at - k
            near = tl.load(ids + first + back, mask=there & (back >= 0), other=0)
            known = there & (back >= oldest)
            far = tl.load(home + PAST + back, mask=known & (back < 0), other=0.0).to(tl.int64)
            token = tl.where(known, tl.where(back >= 0, near, far), end)
            ended = ended | (token == end)
            by = tl.load(factors + k * HEADS + h, mask=h < HEADS, other=0)
            number += tl.where(ended, 0, token)[:, None] * by[None, :]
        row = number % own[None, :] + start_row[None, :]
        to = out + (first + at)[:, None] * HEADS + h[None, :]
        tl.store(to, row, mask=there[:, None] & (h < HEADS)[None, :])
    if part == 0:
        keep_last(ids, ids, home, first, count, oldest, end, PAST, PP, False)


def hash_constants(past: int, heads: int, one_each: bool) -> dict[str, int]:
    """What `hash_tokens` is compiled for. one_each: the step has as many rows as sequences."""
    wide = triton.next_power_of_2(past)
    return {
        "PAST": past,
        "PP": wide,
        "HEADS": heads,
        "HP": triton.next_power_of_2(heads),
        "BT": 1 if one_each else max(ROWS, wide),
        "num_warps": 1,
    }


@hash_ngrams.variant(NAME, on="cuda")
def hash_ragged(
    ids: Tensor,
    before: Tensor,
    slots: Tensor,
    query_start: Tensor,
    has_history: Tensor,
    factors: Tensor,
    sizes: Tensor,
    starts: Tensor,
    end: int,
    merged: Tensor | None = None,
) -> Tensor:
    """`hash_ngrams`: the same arguments and result."""
    past, out = len(factors) - 1, ids.new_empty(len(ids), len(sizes))
    if len(ids):
        constants = hash_constants(past, len(sizes) // past, len(ids) == len(slots))
        launch(
            hash_tokens, _grid(ids, slots, constants), ids, before, slots, query_start, has_history, factors,
            sizes, starts, ids if merged is None else merged, out, end, before.stride(0),
            MERGES=merged is not None, **constants,
        )  # fmt: skip
    return out


def _grid(ids: Tensor, slots: Tensor, constants: dict[str, int]) -> tuple[int, int]:
    tokens, seqs = len(ids), len(slots)
    tiles = triton.cdiv(tokens - seqs + 1, constants["BT"]) if tokens > seqs else 1  # of the longest, at most
    return seqs, min(tiles, triton.cdiv(MOST_PROGRAMS, seqs))


@sum_ngrams.variant(NAME, on="cuda")
def sum_ragged(
    ids: Tensor,
    before: Tensor,
    slots: Tensor,
    query_start: Tensor,
    has_history: Tensor,
    factors: Tensor,
    sizes: Tensor,
    starts: Tensor,
    end: int,
) -> Tensor:
    """`sum_ngrams`: the same arguments and result."""
    out = ids.new_empty(len(ids), len(sizes))
    if len(ids):
        constants = hash_constants(len(factors) - 1, len(sizes), len(ids) == len(slots))
        launch(
            sum_tokens, _grid(ids, slots, constants), ids, before, slots, query_start, has_history, factors,
            sizes, starts, out, end, before.stride(0), **constants,
        )  # fmt: skip
    return out


@triton.jit
def gate_streams(
    query, key, value, out, q_row, q_stream, k_row, k_stream, v_row, root,
    K: tl.constexpr, N: tl.constexpr, BN: tl.constexpr, LEAST: tl.constexpr,
):  # fmt: skip
    """query, key: [T, K, N], value: [T, N] -> out [T, K, N]; root: √N. Grid: (T K)."""
    await_previous()
    item = tl.program_id(0).to(tl.int64)
    row, stream, c = item // K, item % K, tl.arange(0, BN)
    total = tl.zeros([BN], tl.float32)
    for at in tl.static_range(0, N, BN):
        seen = at + c < N
        q = tl.load(query + row * q_row + stream * q_stream + at + c, mask=seen, other=0.0).to(tl.float32)
        k = tl.load(key + row * k_row + stream * k_stream + at + c, mask=seen, other=0.0).to(tl.float32)
        total += q * k
    match = tl.sum(total, 0) / root
    size = tl.abs(match)
    size = tl.sqrt(tl.where(size < LEAST, LEAST, size))  # of what is no number as well
    by = sigmoid(tl.where(match == 0, 0.0, tl.where(match < 0, -size, size)))
    for at in tl.static_range(0, N, BN):
        seen = at + c < N
        numbers = tl.load(value + row * v_row + at + c, mask=seen, other=0.0).to(tl.float32)
        tl.store(out + item * N + at + c, (by * numbers).to(out.dtype.element_ty), mask=seen)


def gate_constants(streams: int, size: int) -> dict[str, float]:
    columns = min(triton.next_power_of_2(size), COLUMNS)
    return {"K": streams, "N": size, "BN": columns, "LEAST": LEAST, "num_warps": 4 if columns > 256 else 1}


@gate_by_match.variant(NAME, on="cuda")
def gate_rows(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """`gate_by_match`: the same arguments and result."""
    tokens, streams, size = query.shape
    query, key, value = (t if t.stride(-1) == 1 else t.contiguous() for t in (query, key, value))
    out = torch.empty(query.shape, dtype=value.dtype, device=query.device)
    launch(
        gate_streams, (tokens * streams,), query, key, value, out, *query.stride()[:2], *key.stride()[:2],
        value.stride(0), math.sqrt(size), **gate_constants(streams, size),
    )  # fmt: skip
    return out


TYPES = {
    **dict.fromkeys(("ids", "slots", "query_start", "factors", "sizes", "starts", "merged"), "i64*"),
    "before": "fp32*", "has_history": "i1*",
    **dict.fromkeys(("query", "key", "value"), "bf16*"),
    **dict.fromkeys(("q_row", "q_stream", "k_row", "k_stream", "v_row"), "i32!"), "root": "fp32",
}  # fmt: skip


@with_float16
@with_float32
def forms() -> Iterator[KernelForm]:
    """What Qwen4-Exp and DeepSeek-V4.1 launch: three or four tokens at most, eight hashes of each; four
    streams. N-grams of LongCat-Flash-Lite have up to four tokens and those of LongCat-2.0 up to five, with
    four hashes each."""
    for (model, past), step in product((("qwen4-exp", 2), ("deepseek-v4.1", 3)), ("decodes", "prompts")):
        constants = hash_constants(past, 8, step == "decodes") | {"MERGES": past == 3}
        warps = constants.pop("num_warps")
        name = f"hash_tokens, {model}, {step}"
        yield KernelForm(name, hash_tokens, {**TYPES, "out": "i64*"}, constants, warps)
    sums = (("longcat-flash-lite", 3), ("longcat-2.0", 4))
    for (model, past), step in product(sums, ("decodes", "prompts")):
        constants = hash_constants(past, 4 * past, step == "decodes")
        warps = constants.pop("num_warps")
        name = f"sum_tokens, {model}, {step}"
        yield KernelForm(name, sum_tokens, {**TYPES, "out": "i64*"}, constants, warps)
    gates = gate_constants(4, 2048)
    warps = int(gates.pop("num_warps"))
    types = {**TYPES, "out": "bf16*"}
    yield KernelForm(
        "gate_streams, qwen4-exp", gate_streams, types, gates, warps, demands=(("LDG.128", "LDG.64"),)
    )
