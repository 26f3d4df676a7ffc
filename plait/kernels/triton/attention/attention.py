"""Attention over paged memory, for every ragged batch: one kernel for GQA and for MLA's latents.

A captured step has one grid for all batches, but sequences have any length. So the grid is as large as the
device, and its programs take work items in turn. An item is a split of `SPLIT` tokens of one sequence, for a
tile of its query rows and one kv head. `count_items` says how many items each sequence has, once in a step
for all layers that see the same keys; a program finds the sequence of an item by binary search.

Each split has a softmax of its own at fixed positions, and splits are added in the order of positions: where
each is an item, by the program that finishes the last of a tile, or by the item itself where one item walks
all splits of its rows. Both orders are the same, so the bits of a row depend on no other sequence, on no grid
and on no chunk of a prompt.

    items  | seq 0, split 0 | seq 0, split 1 | seq 0, split 2 | seq 1 (walks) | ...
    part   |    slot 0      |    slot 1      |    slot 2      |               | ...

Entries of a cache are one behind the other, [block_size, kv_heads, width], as `ops.entry` describes them.
Only codes of keys and values lie otherwise, so that they are read 16 bytes at a time: in each block, codes
of all its entries, [block_size, kv_heads, d], then their scales. `place` writes them. Keys and values are
mixed before they become codes (`mix`): queries with keys, and sums of values are turned back.

Which program is the last of a tile is counted in `counters`, one for a tile and kv head, that are 0 between
launches: `count_items` writes zeros, and the last program writes one again. Its addition is a release of what
its program stored, all threads of which a barrier orders before it, and an acquire of what the others did.
Partial results are read past the first cache level, which is of one processor.
Flash attention: Dao et al. 2022; split keys: Dao et al. 2023 (flash decoding).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from plait.errors import ShapeMismatch
from plait.kernels.triton.attention.layout import SPLIT, PagedLayout, why_too_large
from plait.kernels.triton.attention.mix import mix_columns, turn_back
from plait.kernels.triton.attention.place import entry_places, place_all_heads, why_no_codes
from plait.kernels.triton.dependent_launch import await_previous
from plait.kernels.triton.maths import tanh
from plait.kernels.triton.shared_memory import shared_limit
from plait.ops.attention import paged_attention, paged_latent_attention, write_paged
from plait.ops.entry import key_codes, latent_codes
from plait.ops.launch import launch
from plait.ops.registry import OpFacts

NAME = "triton"
MOST_TILES = 2  # of a sequence up to which its splits are items; with more, tiles keep a device busy
MOST_SLOTS = 4096  # partial results: splits of all sequences together; those that do not fit are walked
PART_NBYTES = 256 << 20  # and their memory; it has 32,000 items of heads of 128 columns, whatever the model
PROGRAMS = 4  # for each processor of the device
LOG2E = 1.4426950408889634


@triton.jit
def _load_entries(
    cache, words, at, scales, seen, d, D: tl.constexpr, DP: tl.constexpr, GROUP: tl.constexpr
):  # fmt: skip
    """D columns behind the addresses `at` of a cache; of codes (GROUP > 0) what they stand for, their scales
    being words behind `scales`. [tokens, columns]."""
    there = seen[:, None] & (d < D)[None, :]
    found = tl.load(cache + at[:, None] + d[None, :], mask=there, other=0)
    if GROUP:
        if GROUP >= D:
            bits = tl.load(words + scales, mask=seen, other=0).to(tl.int32) << 16  # bfloat16
            numbers = found.to(tl.float32) * bits.to(tl.float32, bitcast=True)[:, None]
        else:
            g = tl.arange(0, DP // GROUP)
            given = seen[:, None] & (g * GROUP < D)[None, :]
            bits = tl.load(words + scales[:, None] + g[None, :], mask=given, other=0).to(tl.int32) << 16
            apart = tl.reshape(found.to(tl.float32), [at.shape[0], DP // GROUP, GROUP])
            apart = apart * bits.to(tl.float32, bitcast=True)[:, :, None]
            numbers = tl.reshape(apart, [at.shape[0], DP])
    else:
        numbers = found
    return numbers


@triton.jit
def _load_rest(words, at, seen, d, D: tl.constexpr):
    """The bfloat16 numbers behind the codes of entries, as float32; at: of their words."""
    there = seen[:, None] & (d < D)[None, :]
    bits = tl.load(words + at[:, None] + d[None, :], mask=there, other=0)
    return (bits.to(tl.int32) << 16).to(tl.float32, bitcast=True)


@triton.jit
def _join_softmaxes(largest, top):
    """(largest score of both, factor of the first sum, factor of the second): softmaxes over other keys."""
    new = tl.maximum(largest, top)
    base = tl.where(new == -float("inf"), 0.0, new)
    return new, tl.exp2(largest - base), tl.exp2(top - base)


@triton.jit
def join_splits(
    largest, sums, acc, part, part_sums, counters, slot, own, tile, tiles, splits, seq, kv, there, d,
    S: tl.constexpr, KVH: tl.constexpr, BM: tl.constexpr, DP: tl.constexpr, MIXED: tl.constexpr,
):  # fmt: skip
    """(whether these are the rows' results, sums, values): of an item that is a split, leave its softmax as a
    partial result; the last of a tile joins all of them in the order of positions.

    largest, sums: [BM], acc: [BM, DP]. slot: of the sequence's first partial result, -1 if items walk splits;
    own: the item's number in its sequence. MIXED: columns of the values are mixed afterwards.
    """
    is_whole = slot < 0
    if slot >= 0:
        # 32 bits hold partial results: each takes kilobytes
        line = ((slot + own).to(tl.int64) * KVH + kv) * BM + tl.arange(0, BM)
        tl.store(part + line[:, None] * DP + d[None, :], acc, mask=there[:, None])
        tl.store(part_sums + line * 2, largest, mask=there)
        tl.store(part_sums + line * 2 + 1, sums, mask=there)
        tl.debug_barrier()
        counter = counters + (tile * KVH + kv) * S + seq
        is_whole = tl.atomic_add(counter, 1, sem="acq_rel", scope="gpu") == splits - 1
        if is_whole:
            tl.store(counter, 0)
            if not MIXED:
                sums, acc = _join_parts(part, part_sums, slot, tile, tiles, splits, kv, there, d, KVH, BM, DP)
    # Triton 3.9 does not compile a mixture of what one branch inside another returns.
    if MIXED:
        if is_whole & (slot >= 0):
            sums, acc = _join_parts(part, part_sums, slot, tile, tiles, splits, kv, there, d, KVH, BM, DP)
    return is_whole, sums, acc


@triton.jit
def _join_parts(
    part, part_sums, slot, tile, tiles, splits, kv, there, d,
    KVH: tl.constexpr, BM: tl.constexpr, DP: tl.constexpr,
):  # fmt: skip
    """(sums [BM], values [BM, DP]) of all partial results of a tile."""
    largest = tl.full([BM], -float("inf"), tl.float32)
    sums = tl.zeros([BM], tl.float32)
    acc = tl.zeros([BM, DP], tl.float32)
    for s in range(splits):
        # 32 bits hold partial results: each takes kilobytes
        at = slot + (s + tl.zeros([], tl.int32)) * tiles + tile
        line = (at.to(tl.int64) * KVH + kv) * BM + tl.arange(0, BM)
        top = tl.load(part_sums + line * 2, mask=there, other=0.0, cache_modifier=".cg")
        mass = tl.load(part_sums + line * 2 + 1, mask=there, other=1.0, cache_modifier=".cg")
        values = tl.load(
            part + line[:, None] * DP + d[None, :], mask=there[:, None], other=0.0, cache_modifier=".cg"
        )
        largest, before, now = _join_softmaxes(largest, top)
        sums = sums * before + mass * now
        acc = acc * before[:, None] + values * now[:, None]
    return sums, acc


@triton.jit
def _first_seen(position, opened, WINDOW: tl.constexpr, CHUNK: tl.constexpr, OPEN: tl.constexpr):
    """The first position in the window of a query, perhaps below 0; it ends with the query, its chunk, or
    the position `opened` from which on all is seen."""
    last = position // CHUNK * CHUNK + CHUNK - 1 if CHUNK else position
    return (tl.minimum(last, opened) if OPEN else last) - WINDOW + 1


@triton.jit
def _last_seen(position, opened, length, CANVAS: tl.constexpr, OPEN: tl.constexpr):
    """The last position that a query sees: its own, the last of its canvas, or from `opened` on of all."""
    if CANVAS:
        return tl.minimum(position // CANVAS * CANVAS + CANVAS, length) - 1
    return tl.where(position >= opened, length - 1, position) if OPEN else position


@triton.jit(do_not_specialize=["num_seqs", "capacity"])
def count_items(
    query_start, seq_lens, canvas_start, items, slots, starts, counters, num_seqs, capacity,
    S: tl.constexpr, G: tl.constexpr, KVH: tl.constexpr, BM: tl.constexpr, WINDOW: tl.constexpr,
    CHUNK: tl.constexpr, OPEN: tl.constexpr, SPLIT: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    """items [S + 1]: items in front of each sequence, for each kv head; slots [S]: partial results, or -1;
    starts [S + 1]: the first row of each sequence, and of those that are not there the end of all; counters
    [TILES, KVH, S]: zeros.

    A sequence with more than TILES tiles, or with partial results that do not fit into `capacity`, has none:
    its items walk all their splits.
    """
    await_previous()
    s = tl.arange(0, S)
    start = tl.load(query_start + tl.minimum(s, num_seqs)).to(tl.int32)
    after = tl.load(query_start + tl.minimum(s + 1, num_seqs)).to(tl.int32)
    count = after - start
    length = tl.load(seq_lens + s, mask=s < num_seqs, other=0).to(tl.int32)
    tiles = (count * G + BM - 1) // BM
    opened = tl.load(canvas_start + s, mask=s < num_seqs, other=0).to(tl.int32) if OPEN else length
    first = tl.maximum(_first_seen(length - count, opened, WINDOW, CHUNK, OPEN), 0) // SPLIT if WINDOW else 0
    splits = (length + SPLIT - 1) // SPLIT - first
    wanted = tl.where((splits > 1) & (tiles <= TILES), tiles * splits, 0)
    before = tl.cumsum(wanted, 0) - wanted
    apart = (wanted > 0) & (before + wanted <= capacity)
    own = tl.where(apart, wanted, tiles)
    tl.store(items + s, tl.cumsum(own, 0) - own)
    tl.store(items + S + s * 0, tl.sum(own, 0), mask=s == 0)
    tl.store(slots + s, tl.where(apart, before, -1))
    tl.store(starts + s, start)
    tl.store(starts + s + 1, after)
    for i in range(TILES * KVH):
        tl.store(counters + i * S + s, tl.zeros_like(s))


@triton.jit
def _find_sequence(items, item, S: tl.constexpr, STEPS: tl.constexpr):
    """The sequence an item belongs to: the last one with at most so many items in front of it."""
    low, high = item * 0, item * 0 + S
    for _ in tl.static_range(STEPS):
        middle = (low + high) // 2
        behind = tl.load(items + middle) > item
        low, high = tl.where(behind, low, middle), tl.where(behind, middle, high)
    return low


@triton.jit
def attend(
    q, k_cache, v_cache, k_words, v_words, table, seq_lens, canvas_start, items, slots, starts, counters,
    out, part, part_sums, sinks, slopes, table_row, q_row, q_head, scale,
    S: tl.constexpr, STEPS: tl.constexpr, G: tl.constexpr, KVH: tl.constexpr,
    D: tl.constexpr, DP: tl.constexpr, REST: tl.constexpr, RESTP: tl.constexpr, LATENT: tl.constexpr,
    KW: tl.constexpr, VW: tl.constexpr, GROUP: tl.constexpr, REST_AT: tl.constexpr,
    PAGE: tl.constexpr, SPLIT: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, WINDOW: tl.constexpr,
    CHUNK: tl.constexpr, CANVAS: tl.constexpr, OPEN: tl.constexpr, SOFTCAP: tl.constexpr,
    SINKS: tl.constexpr, TOKEN_SINKS: tl.constexpr, ALIBI: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """q: [T, KVH * G, D + REST] -> out [T, KVH * G, D], or partial results of splits: see the module.

    part: [slots, KVH, BM, DP] float32, part_sums: [slots, KVH, BM, 2] (largest score, sum). sinks: [KVH * G],
    or by TOKEN_SINKS [T, KVH * G].
    """
    await_previous()
    total = tl.load(items + S) * KVH
    for i in range(tl.program_id(0), total, tl.num_programs(0)):
        which = i + tl.zeros([], tl.int32)  # the interpreter counts in Python's numbers
        kv, item = which % KVH, which // KVH
        seq = _find_sequence(items, item, S, STEPS)
        own, slot = item - tl.load(items + seq), tl.load(slots + seq)
        first_row, length = tl.load(starts + seq), tl.load(seq_lens + seq).to(tl.int32)
        opened = tl.load(canvas_start + seq).to(tl.int32) if OPEN else length
        count = tl.load(starts + seq + 1) - first_row
        tiles = (count * G + BM - 1) // BM
        tile, split = own % tiles, own // tiles
        begins = tl.zeros([], tl.int32)
        if WINDOW:
            begins = tl.maximum(_first_seen(length - count, opened, WINDOW, CHUNK, OPEN), 0) // SPLIT
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
        if STAGES:
            own_q = mix_columns(own_q.to(tl.float32), BM, DP, STAGES).to(own_q.dtype)
        if REST and GROUP:
            again = item - tl.load(items + seq, volatile=True)
        if REST:
            r = tl.arange(0, RESTP)
            rest_q = tl.load(
                q + at[:, None] + D + r[None, :], mask=there[:, None] & (r < REST)[None, :], other=0.0
            )
        position = length - count + token
        if ALIBI:
            lean = tl.load(slopes + head, mask=there, other=0.0) * 1.4426950408889634
        if SINKS and first == begins:
            at_sink = place * (KVH * G) + head if TOKEN_SINKS else head
            sink = tl.load(sinks + at_sink, mask=there, other=0.0)
            largest = sink.to(tl.float32) * 1.4426950408889634
            sums = tl.full([BM], 1.0, tl.float32)
        else:
            largest = tl.full([BM], -float("inf"), tl.float32)
            sums = tl.zeros([BM], tl.float32)
        acc = tl.zeros([BM, DP], tl.float32)
        line = table + seq.to(tl.int64) * table_row
        # The keys of a tile end with those its last row sees. They begin with those its first row sees: what
        # lies in front of a window may be no number, and a weight of 0 would not take it away.
        latest = length - count + (tl.minimum(tile * BM + BM, count * G) - 1) // G
        end = tl.minimum(length, _last_seen(latest, opened, length, CANVAS, OPEN) + 1)
        oldest = _first_seen(length - count + tile * BM // G, opened, WINDOW, CHUNK, OPEN)
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
                inside = t % PAGE * KVH + kv
                at_k, scales = entry_places(block, inside, D, REST, KW, PAGE * KVH, GROUP)
                k = _load_entries(k_cache, k_words, at_k, scales, seen, d, D, DP, GROUP).to(own_q.dtype)
                scores = tl.dot(own_q, tl.trans(k), input_precision="ieee")
                if REST:
                    if GROUP:
                        more = _load_rest(k_words, scales + (REST_AT - D) // 2, seen, r, REST)
                    else:
                        more = _load_entries(k_cache, k_words, at_k + D, scales, seen, r, REST, RESTP, 0)
                    scores = tl.dot(rest_q, tl.trans(more.to(own_q.dtype)), scores, input_precision="ieee")
                scores = scores * scale  # of base 2
                if ALIBI:
                    scores += lean[:, None] * (t[None, :] - position[:, None]).to(tl.float32)
                if SOFTCAP > 0:
                    cap: tl.constexpr = SOFTCAP * 1.4426950408889634
                    scores = cap * tanh(scores / cap)
                ok = seen[None, :] & (
                    t[None, :] <= _last_seen(position, opened, length, CANVAS, OPEN)[:, None]
                )
                if WINDOW:
                    ok &= t[None, :] >= _first_seen(position, opened, WINDOW, CHUNK, OPEN)[:, None]
                scores = tl.where(ok, scores, -float("inf"))
                new = tl.maximum(top, tl.max(scores, 1))
                base = tl.where(new == -float("inf"), 0.0, new)
                p = tl.exp2(scores - base[:, None])
                old = tl.exp2(top - base)
                mass = mass * old + tl.sum(p, 1)
                if LATENT:
                    v = k
                else:
                    whole: tl.constexpr = D if GROUP else 0  # one scale for a value
                    at_v, scales = entry_places(block, inside, D, REST, VW, PAGE * KVH, whole)
                    v = _load_entries(v_cache, v_words, at_v, scales, seen, d, D, DP, whole).to(own_q.dtype)
                values = tl.dot(p.to(own_q.dtype), v, values * old[:, None], input_precision="ieee")
                top = new
            largest, before, now = _join_softmaxes(largest, top)
            sums = sums * before + mass * now
            acc = acc * before[:, None] + values * now[:, None]
        if REST and GROUP:
            # The compiler does not know that it is `tile`: addresses of results take no registers until here.
            tile = again % tiles
            rows = tile * BM + tl.arange(0, BM)
            there, token, head = rows < count * G, rows // G, kv * G + rows % G
            place = (first_row + token).to(tl.int64)
        is_whole, sums, acc = join_splits(
            largest, sums, acc, part, part_sums, counters, slot, own, tile, tiles, splits, seq, kv, there, d,
            S, KVH, BM, DP, MIXED=STAGES > 0,
        )  # fmt: skip
        if is_whole:
            sums = tl.where(there, sums, 1.0)  # a row that is not there may see no key
            result = acc / sums[:, None]
            if STAGES:
                result = mix_columns(result, BM, DP, STAGES) * (1.0 / (1 << STAGES))
            result = result.to(out.dtype.element_ty)
            at_out = (place * (KVH * G) + head) * D
            tl.store(out + at_out[:, None] + d[None, :], result, mask=there[:, None] & (d < D)[None, :])


@dataclass(frozen=True, slots=True, eq=False)
class AttentionWork:
    """What `count_items` made for the layers of a step, and their memory for partial results."""

    items: Tensor
    slots: Tensor
    starts: Tensor
    counters: Tensor
    part: Tensor  # [slots, kv_heads, rows of a tile, columns] float32
    sums: Tensor  # [slots, kv_heads, rows of a tile, 2]


def _most_tiles(constants: Mapping[str, int]) -> int:
    """Tiles of a sequence up to which its splits are items: those of one token at least."""
    return max(MOST_TILES, -(-constants["G"] // constants["BM"]))


def most_slots(table: Tensor, page: int, constants: Mapping[str, int]) -> int:
    """Partial results that a step may have: of all splits of its block tables, [sequences, blocks of `page`].

    It follows from shapes of the step alone, so a step over garbage takes as much memory as a real one: that
    is measured before the memory of blocks is sized.
    """
    seqs, blocks = table.shape
    nbytes = constants["KVH"] * constants["BM"] * (constants["DP"] + 2) * 4
    splits = seqs * -(-blocks * page // SPLIT) * -(-constants["G"] // constants["BM"])
    return max(1, min(MOST_SLOTS, PART_NBYTES // nbytes, splits))


def list_work(
    query_start: Tensor,
    seq_lens: Tensor,
    constants: Mapping[str, int],
    window: int,
    capacity: int,
    chunk: int = 0,
    canvas_start: Tensor | None = None,
) -> AttentionWork:
    """Launch `count_items`. Nothing waits for the device."""
    size, heads, rows = (constants[name] for name in ("S", "KVH", "BM"))
    most_tiles = _most_tiles(constants)
    ints = partial(torch.empty, dtype=torch.int32, device=seq_lens.device)
    floats = partial(torch.empty, dtype=torch.float32, device=seq_lens.device)
    work = AttentionWork(
        ints(size + 1), ints(size), ints(size + 1), ints(most_tiles * heads * size),
        floats(capacity, heads, rows, constants["DP"]), floats(capacity, heads, rows, 2),
    )  # fmt: skip
    few = {name: constants[name] for name in ("S", "G", "KVH", "BM")}
    launch(
        count_items, (1,), query_start, seq_lens, seq_lens if canvas_start is None else canvas_start,
        work.items, work.slots, work.starts, work.counters, len(seq_lens), capacity, WINDOW=window,
        CHUNK=chunk, OPEN=canvas_start is not None, SPLIT=SPLIT, TILES=most_tiles, **few,
    )  # fmt: skip
    return work


def _attend_over(
    q: Tensor,
    caches: tuple[Tensor, Tensor],
    where: tuple[Tensor, Tensor, Tensor],
    layout: PagedLayout,
    scale: float,
    step: dict[object, Any] | None,
    sinks: Tensor | None = None,
    slopes: Tensor | None = None,
    chunk: int | None = None,
    canvas: int | None = None,
    canvas_start: Tensor | None = None,
) -> Tensor:
    """q: [T, heads, dim + rest], caches of keys and values, where: (block_table, query_start, seq_lens)
    -> [T, heads, dim]. `step`: where the work list of the step is, or is left."""
    table, query_start, seq_lens = where
    k_cache, v_cache = caches
    _check_sinks(sinks, q)
    out = torch.empty(*q.shape[:2], layout.dim, dtype=q.dtype, device=q.device)
    if not len(q):
        return out
    num_seqs = len(seq_lens)
    shared = layout.constants(num_seqs, layout.rows(len(q) != num_seqs, k_cache.dtype))
    capacity, window = most_slots(table, k_cache.shape[1], shared), layout.window
    key = (NAME, window, chunk, capacity, *(shared[n] for n in ("G", "KVH", "DP")))
    step = {} if step is None else step
    work = step.get(key)
    if work is None:
        more = (chunk or 0, canvas_start)
        work = step[key] = list_work(query_start, seq_lens, shared, window or 0, capacity, *more)
    launch(
        attend, (count_programs(q.device),),
        q, k_cache, v_cache, *map(_as_words, caches), table, seq_lens,
        seq_lens if canvas_start is None else canvas_start, work.items, work.slots, work.starts,
        work.counters, out, work.part, work.sums, work.sums if sinks is None else sinks,
        work.sums if slopes is None else slopes, table.stride(0), q.stride(0), q.stride(1), scale * LOG2E,
        **shared,
        CHUNK=chunk or 0, CANVAS=canvas or 0, OPEN=canvas_start is not None,
        TOKEN_SINKS=sinks is not None and sinks.dim() == 2,
        **layout.attention(*caches, sinks is not None, slopes is not None, shared_limit(q.device)),
        **layout.options(k_cache.dtype, slopes is not None),
    )  # fmt: skip
    mixed = layout.codes.mixed if layout.codes and not layout.mixes_inside else 1
    return out if mixed == 1 else turn_back(out, mixed)


def _check_sinks(sinks: Tensor | None, q: Tensor) -> None:
    """Raises ShapeMismatch unless they lie one behind the other: of heads, or of each token's."""
    if sinks is None:
        return
    wanted = q.shape[:2] if sinks.dim() == 2 else q.shape[1:2]
    if sinks.shape != wanted or not sinks.is_contiguous():
        raise ShapeMismatch(
            f"sinks must be dense, {list(wanted)}, got {list(sinks.shape)} with strides {sinks.stride()}"
        )


@cache
def count_programs(device: torch.device) -> int:
    """The size of the grid; the interpreter has one processor."""
    if device.type != "cuda":
        return PROGRAMS
    return PROGRAMS * int(torch.cuda.get_device_properties(device).multi_processor_count)


def _as_words(cache: Tensor) -> Tensor:
    """The same memory as int16, where scales of codes are read."""
    return cache.view(torch.int16) if cache.dtype is torch.int8 else cache


def why_not(facts: OpFacts) -> str | None:
    """The `when` of both ops."""
    return why_no_codes(facts) or why_too_large(facts)


@paged_attention.variant(NAME, on="cuda", when=why_not)
def attend_paged(
    q: Tensor,
    k: Tensor | None,
    v: Tensor | None,
    k_cache: Tensor,
    v_cache: Tensor,
    block_table: Tensor,
    slot_mapping: Tensor,
    query_start: Tensor,
    seq_lens: Tensor,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    step: dict[object, Any] | None = None,
    slopes: Tensor | None = None,
    chunk: int | None = None,
    canvas: int | None = None,
    canvas_start: Tensor | None = None,
) -> Tensor:
    """`paged_attention`: the same arguments and result."""
    dim = q.shape[-1]
    if k is not None and v is not None:
        place_all_heads(q, k, v, k_cache, v_cache, slot_mapping, slot_mapping, None, None)
    codes = key_codes(dim) if k_cache.dtype is torch.int8 else None
    layout = PagedLayout(q.shape[1], k_cache.shape[2], dim, 0, codes, window, softcap, q.dtype)
    if codes and layout.mixes_inside:
        scale /= codes.mixed  # mixing has no factor
    elif codes:
        q = turn_back(q.contiguous(), codes.mixed)  # which divides by it
    where = block_table, query_start, seq_lens
    more = (sinks, slopes, chunk, canvas, canvas_start)
    return _attend_over(q, (k_cache, v_cache), where, layout, scale, step, *more)


def why_no_latents(facts: OpFacts) -> str | None:
    """The `when` of attention over latents."""
    if facts.sizes.get("rope_dim") == 0 and facts.sizes.get("kv_dtype") == "int8":
        return "codes of latents lie next to their scales only where a rotated part is behind them"
    return why_not(facts)


@paged_latent_attention.variant(NAME, on="cuda", when=why_no_latents)
def attend_latent(
    q: Tensor,
    latent: Tensor | None,
    cache: Tensor,
    block_table: Tensor,
    slot_mapping: Tensor,
    query_start: Tensor,
    seq_lens: Tensor,
    scale: float,
    kv_rank: int,
    step: dict[object, Any] | None = None,
    window: int | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """`paged_latent_attention`: the same arguments and result."""
    rest = q.shape[-1] - kv_rank
    codes = latent_codes(kv_rank, rest) if cache.dtype is torch.int8 else None
    if latent is not None:
        write_paged(cache, latent, slot_mapping, codes)
    layout = PagedLayout(q.shape[1], 1, kv_rank, rest, codes, window, None, q.dtype)
    where = block_table, query_start, seq_lens
    return _attend_over(q, (cache, cache), where, layout, scale, step, sinks)
