"""Attention with a bias that each query makes for each distance (Inkling): decodes and chunks of prompts.

    profile_biases   grid (rows × heads / BH, distances / BE)   biases [T, heads, distances], by products
    attend_relative  work items as in `attention`               scores, each plus the bias of its distance

Biases are of float32 and in memory, since the keys of a tile have another distance from each of its rows. So
a step with many rows is attended in parts of rows, of `MOST_BIASES` numbers each: their shapes follow from
sizes, and what a part sees of each sequence is computed on the device.

A bias is one sum over the profiles in one order, and splits are fixed and added as in `attention`. So a row's
bits depend on no other sequence, on no grid and on no chunk of a prompt. `attention.attend` has no registers
left for one more tile of loads.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

import torch
import triton
import triton.language as tl
from torch import Tensor

from plait.kernels.triton.attention.attention import (
    LOG2E,
    _find_sequence,
    _join_softmaxes,
    count_programs,
    join_splits,
    list_work,
    most_slots,
)
from plait.kernels.triton.attention.attention_forms import POINTERS
from plait.kernels.triton.attention.layout import ROWS, SPLIT, PagedLayout, why_too_large
from plait.kernels.triton.attention.place import place_all_heads
from plait.kernels.triton.dependent_launch import await_previous
from plait.kernels.triton.forms import KernelForm, as_float32, with_float16
from plait.kernels.triton.shared_memory import LEAST_SHARED, shared_limit
from plait.ops.entry import CODED
from plait.ops.launch import launch
from plait.ops.registry import OpFacts
from plait.ops.relative import relative_attention

NAME = "triton"
MOST_BIASES = 1 << 26  # numbers of biases in memory at a time
BH, BE = 16, 64  # rows and distances of a tile of biases


@triton.jit
def profile_biases(
    mixed, profiles, biases, total, row, head, M: tl.constexpr, MP: tl.constexpr, H: tl.constexpr,
    EXTENT: tl.constexpr, BH: tl.constexpr, BE: tl.constexpr,
):  # fmt: skip
    """mixed: [T, H, M], profiles: [EXTENT, M] -> biases [T, H, EXTENT] float32. total: T H."""
    await_previous()
    r = tl.program_id(0).to(tl.int64) * BH + tl.arange(0, BH)
    e, m = tl.program_id(1) * BE + tl.arange(0, BE), tl.arange(0, MP)
    there, near, wide = r < total, e < EXTENT, m < M
    at = r // H * row + r % H * head
    a = tl.load(mixed + at[:, None] + m[None, :], mask=there[:, None] & wide[None, :], other=0.0)
    b = tl.load(profiles + e[:, None] * M + m[None, :], mask=near[:, None] & wide[None, :], other=0.0)
    found = tl.dot(a.to(tl.float32), tl.trans(b), input_precision="ieee")
    tl.store(biases + r[:, None] * EXTENT + e[None, :], found, mask=there[:, None] & near[None, :])


@triton.jit
def attend_relative(
    q, k_cache, v_cache, biases, table, seq_lens, items, slots, starts, counters, out, part, part_sums, sinks,
    table_row, q_row, q_head, sink_row, bias_row, scale,
    S: tl.constexpr, STEPS: tl.constexpr, G: tl.constexpr, KVH: tl.constexpr, D: tl.constexpr,
    DP: tl.constexpr, PAGE: tl.constexpr, SPLIT: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    WINDOW: tl.constexpr, EXTENT: tl.constexpr, SINKS: tl.constexpr,
):  # fmt: skip
    """q: [T, KVH G, D], caches: [blocks, PAGE, KVH, D], biases: [T, KVH G, EXTENT], or one such row for all
    where bias_row is 0, sinks: [T, KVH G] -> out [T, KVH G, D].

    The rest as in `attention.attend`.
    """
    await_previous()
    total = tl.load(items + S) * KVH
    for i in range(tl.program_id(0), total, tl.num_programs(0)):
        which = i + tl.zeros([], tl.int32)  # the interpreter counts in Python's numbers
        kv, item = which % KVH, which // KVH
        seq = _find_sequence(items, item, S, STEPS)
        own, slot = item - tl.load(items + seq), tl.load(slots + seq)
        first_row, length = tl.load(starts + seq), tl.load(seq_lens + seq).to(tl.int32)
        count = tl.load(starts + seq + 1) - first_row
        tiles = (count * G + BM - 1) // BM
        tile, split = own % tiles, own // tiles
        begins = tl.zeros([], tl.int32)
        if WINDOW:
            begins = tl.maximum(length - count - WINDOW + 1, 0) // SPLIT
        first, last = begins, (length + SPLIT - 1) // SPLIT
        splits = last - begins
        if slot >= 0:
            first = begins + split
            last = first + 1
        rows = tile * BM + tl.arange(0, BM)
        there, token, head = rows < count * G, rows // G, kv * G + rows % G
        place = (first_row + token).to(tl.int64)
        d = tl.arange(0, DP)
        at = place * q_row + head * q_head
        own_q = tl.load(q + at[:, None] + d[None, :], mask=there[:, None] & (d < D)[None, :], other=0.0)
        own_biases = biases + place * bias_row + head * EXTENT
        position = length - count + token
        if SINKS and first == begins:
            sink = tl.load(sinks + place * sink_row + head, mask=there, other=0.0)
            largest = sink.to(tl.float32) * 1.4426950408889634
            sums = tl.full([BM], 1.0, tl.float32)
        else:
            largest = tl.full([BM], -float("inf"), tl.float32)
            sums = tl.zeros([BM], tl.float32)
        acc = tl.zeros([BM, DP], tl.float32)
        line = table + seq.to(tl.int64) * table_row
        # The keys of a tile are those that its first and last row see, and what is between.
        end = tl.minimum(length, length - count + (tl.minimum(tile * BM + BM, count * G) - 1) // G + 1)
        oldest = length - count + tile * BM // G - WINDOW + 1
        for s in range(first, last):
            start = (s + tl.zeros([], tl.int32)) * SPLIT
            stop = tl.minimum(start + SPLIT, end)
            top = tl.full([BM], -float("inf"), tl.float32)
            mass = tl.zeros([BM], tl.float32)
            values = tl.zeros([BM, DP], tl.float32)
            for n in range(start, stop, BN):
                t = n + tl.arange(0, BN)
                seen = t < stop
                if WINDOW:
                    seen &= t >= oldest
                block = tl.load(line + t // PAGE, mask=seen, other=0).to(tl.int64)
                entry = ((block * PAGE + t % PAGE) * KVH + kv) * D
                wide = seen[:, None] & (d < D)[None, :]
                k = tl.load(k_cache + entry[:, None] + d[None, :], mask=wide, other=0).to(own_q.dtype)
                scores = tl.dot(own_q, tl.trans(k), input_precision="ieee") * scale  # of base 2
                behind = position[:, None] - t[None, :]
                ok = seen[None, :] & there[:, None] & (behind >= 0)
                if WINDOW:
                    ok &= behind < WINDOW
                bias = tl.load(own_biases[:, None] + behind, mask=ok & (behind < EXTENT), other=0.0)
                scores = tl.where(ok, scores + bias * 1.4426950408889634, -float("inf"))
                new = tl.maximum(top, tl.max(scores, 1))
                base = tl.where(new == -float("inf"), 0.0, new)
                p = tl.exp2(scores - base[:, None])
                old = tl.exp2(top - base)
                mass = mass * old + tl.sum(p, 1)
                v = tl.load(v_cache + entry[:, None] + d[None, :], mask=wide, other=0).to(own_q.dtype)
                values = tl.dot(p.to(own_q.dtype), v, values * old[:, None], input_precision="ieee")
                top = new
            largest, before, now = _join_softmaxes(largest, top)
            sums = sums * before + mass * now
            acc = acc * before[:, None] + values * now[:, None]
        is_whole, sums, acc = join_splits(
            largest, sums, acc, part, part_sums, counters, slot, own, tile, tiles, splits, seq, kv, there, d,
            S, KVH, BM, DP, MIXED=False,
        )  # fmt: skip
        if is_whole:
            sums = tl.where(there, sums, 1.0)  # a row that is not there sees no key
            result = (acc / sums[:, None]).to(out.dtype.element_ty)
            at_out = (place * (KVH * G) + head) * D
            tl.store(out + at_out[:, None] + d[None, :], result, mask=there[:, None] & (d < D)[None, :])


def make_biases(mixed: Tensor, profiles: Tensor) -> Tensor:
    """mixed: [T, heads, m], profiles: [distances, m] float32 -> [T, heads, distances] float32."""
    tokens, heads = mixed.shape[:2]
    biases = torch.empty(tokens, heads, len(profiles), dtype=torch.float32, device=mixed.device)
    mixed = mixed if mixed.stride(-1) == 1 else mixed.contiguous()
    constants = _bias_constants(heads, len(profiles), profiles.shape[1])
    total = tokens * heads
    grid = (triton.cdiv(total, BH), triton.cdiv(len(profiles), BE))
    launch(profile_biases, grid, mixed, profiles, biases, total, *mixed.stride()[:2], **constants)
    return biases


def _bias_constants(heads: int, extent: int, rank: int) -> dict[str, int]:
    wide = max(16, triton.next_power_of_2(rank))
    return {"M": rank, "MP": wide, "H": heads, "EXTENT": extent, "BH": BH, "BE": BE}


def _constants(
    layout: PagedLayout, num_seqs: int, page: int, extent: int, kept: torch.dtype, limit: int = LEAST_SHARED
) -> dict[str, int]:
    """What `attend_relative` is compiled for, over a cache of `kept`; limit: as `PagedLayout.keys` has it.

    Decodes and prompts have one form: with more rows it spills. So does float32 by four warps, or by stages.
    """
    shared, is_wide = layout.constants(num_seqs, ROWS), layout.dtype == torch.float32
    return shared | {
        "PAGE": page,
        "SPLIT": SPLIT,
        "BN": min(64 if layout.dim <= 128 else 32, layout.keys(kept, limit)),
        "WINDOW": layout.window or 0,
        "EXTENT": extent,
        "num_warps": 8 if layout.dim > 128 or is_wide else 4,
        "num_stages": 1 if is_wide else 2,
    }


def _attend_part(
    q: Tensor,
    mixed: Tensor,
    profiles: Tensor,
    caches: tuple[Tensor, Tensor],
    where: tuple[Tensor, Tensor, Tensor],
    layout: PagedLayout,
    scale: float,
    sinks: Tensor | None,
    out: Tensor,
) -> None:
    """Attend some rows of a step. where: (block_table, query_start, seq_lens)."""
    table, query_start, seq_lens = where
    k_cache, v_cache = caches
    num_seqs, biases = len(seq_lens), make_biases(mixed, profiles)
    sizes = num_seqs, k_cache.shape[1], len(profiles), k_cache.dtype, shared_limit(q.device)
    constants = _constants(layout, *sizes)
    capacity = most_slots(table, k_cache.shape[1], constants)
    work = list_work(query_start, seq_lens, constants, layout.window or 0, capacity)
    launch(
        attend_relative, (count_programs(q.device),),
        q, k_cache, v_cache, biases, table, seq_lens, work.items, work.slots, work.starts, work.counters,
        out, work.part, work.sums, work.sums if sinks is None else sinks, table.stride(0), *q.stride()[:2],
        0 if sinks is None else sinks.stride(0), biases.stride(0) if len(biases) > 1 else 0, scale * LOG2E,
        SINKS=sinks is not None, **constants,
    )  # fmt: skip


def why_coded(facts: OpFacts) -> str | None:
    """The `when` of a kernel that reads caches of numbers alone, in tiles like those of `attention`."""
    kept = facts.sizes.get("kv_dtype")
    return f"it keeps float32 or bfloat16, not {kept}" if kept in CODED else why_too_large(facts)


@relative_attention.variant(NAME, on="cuda", when=why_coded)
def attend_by_distance(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mixed: Tensor,
    profiles: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_table: Tensor,
    slot_mapping: Tensor,
    query_start: Tensor,
    seq_lens: Tensor,
    scale: float,
    window: int | None,
    sinks: Tensor | None,
) -> Tensor:
    """`relative_attention`: the same arguments and result."""
    tokens, heads, dim = q.shape
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    if not tokens:
        return out
    place_all_heads(q, k, v, k_cache, v_cache, slot_mapping, slot_mapping, None, None)
    q = q if q.stride(-1) == 1 else q.contiguous()
    sinks = None if sinks is None else sinks if sinks.stride(-1) == 1 else sinks.contiguous()
    layout = PagedLayout(heads, k_cache.shape[2], dim, 0, None, window, None, q.dtype)
    if mixed.stride(0) == 0:  # what is mixed is the same for all rows, and so are biases
        where = (block_table, query_start, seq_lens)
        _attend_part(q, mixed[:1], profiles, (k_cache, v_cache), where, layout, scale, sinks, out)
        return out
    most = max(1, MOST_BIASES // (heads * len(profiles)))
    for first in range(0, tokens, most):
        some, seqs = slice(first, first + most), (query_start, seq_lens)
        if tokens > most:  # of each sequence the rows of this part, and the keys up to its last one
            starts = query_start.clamp(first, first + most) - first
            seqs = starts, seq_lens - (query_start[1:] - (first + most)).clamp(min=0)
        given = (q[some], mixed[some], profiles, (k_cache, v_cache), (block_table, *seqs))
        _attend_part(*given, layout, scale, None if sinks is None else sinks[some], out[some])
    return out


SHAPES = {  # heads, kv_heads, dim, profiles, distances, window, sinks
    "inkling": (64, 8, 128, 16, 1024, None, False),
    "inkling window": (64, 16, 128, 16, 512, 512, False),
    "inkling 2": (48, 8, 128, 16, 1024, None, True),
    "inkling 2 window": (48, 8, 128, 16, 1024, 1024, True),
    "step 1": (48, 4, 128, 1, 32768, None, False),
}


@with_float16
def forms() -> Iterator[KernelForm]:
    """What models of published sizes launch, in every step, in bfloat16 and in float32."""
    shared = POINTERS | {
        "biases": "fp32*",
        "profiles": "fp32*",
        "row": "i32!",
        "head": "i32!",
        "sinks": "bf16*",
        "sink_row": "i32!",
        "bias_row": "i32!",
    }
    for (name, shape), dtype in product(SHAPES.items(), (torch.bfloat16, torch.float32)):
        heads, kv_heads, dim, rank, extent, window, sinks = shape
        types = shared | {"mixed": "fp32*" if rank == 1 else "bf16*"}  # slopes are numbers of the spec
        layout = PagedLayout(heads, kv_heads, dim, 0, None, window, None, dtype)
        constants = _constants(layout, 64, 64, extent, dtype) | {"SINKS": sinks}
        warps, stages = constants.pop("num_warps"), constants.pop("num_stages")
        own = KernelForm(
            f"attend_relative, {name}", attend_relative, types, constants, warps, stages,
            demands=(("HMMA", "HGMMA"), ("LDG.128", "LDGSTS.128")),
        )  # fmt: skip
        biases = KernelForm(
            f"profile_biases, {name}", profile_biases, types, _bias_constants(heads, extent, rank)
        )
        yield from (own, biases) if dtype == torch.bfloat16 else map(as_float32, (own, biases))
