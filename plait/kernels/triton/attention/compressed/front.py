"""Attention over keys in front of each text, and over its own in pages (Hymba): two launches.

    place_pairs    a token                  its keys and values to the cache
    attend_front   token × kv head × part   a part of the keys it sees: those in front, then its own

A tile has the query heads of one token that read the same keys. Parts are as in `entries`. What lies in front
is the same for all sequences and outside of every window.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
import triton
import triton.language as tl
from torch import Tensor

from plait.kernels.triton.attention.attention import LOG2E, _join_softmaxes, join_splits
from plait.kernels.triton.attention.compressed.rows import (
    PART,
    add_keys,
    count_apart,
    find_counters,
    find_row,
    row_size,
)
from plait.kernels.triton.attention.compressed.turn import TILE, store_tile, turn_tile
from plait.kernels.triton.attention.place import _as_entry
from plait.kernels.triton.dependent_launch import await_previous
from plait.kernels.triton.forms import KernelForm, as_float32, split_options, with_float16
from plait.kernels.triton.row_views import pack_rows
from plait.ops.entry import CODED
from plait.ops.front import begin_slots, front_attention
from plait.ops.launch import launch
from plait.ops.place import HeadNorms, Rotation, place_heads
from plait.ops.registry import OpFacts

NAME, FRONT = "triton", "triton front"  # what stores keys has the name of what reads them
HEADS = 16  # query heads of a tile: matrix units multiply no fewer
NUMBERS = 1024  # of a state that a program writes


@triton.jit
def place_pairs(
    k, v, k_cache, v_cache, slot_mapping, k_row, v_row,
    K: tl.constexpr, V: tl.constexpr, KP: tl.constexpr, VP: tl.constexpr,
):  # fmt: skip
    """Store K numbers of keys and V of values of a token. Grid: (T,)."""
    await_previous()
    row, i, j = tl.program_id(0).to(tl.int64), tl.arange(0, KP), tl.arange(0, VP)
    slot = tl.load(slot_mapping + row).to(tl.int64)
    key = tl.load(k + row * k_row + i, mask=i < K, other=0.0)
    tl.store(k_cache + slot * K + i, _as_entry(key, k_cache), mask=i < K)
    value = tl.load(v + row * v_row + j, mask=j < V, other=0.0)
    tl.store(v_cache + slot * V + j, _as_entry(value, v_cache), mask=j < V)


@triton.jit
def place_turned_pairs(
    q, k, v, inv_freq, positions, slot_mapping, out, k_cache, v_cache, q_row, k_row, v_row, q_head, k_head,
    mscale,
    H: tl.constexpr, KVH: tl.constexpr, D: tl.constexpr, V: tl.constexpr, VP: tl.constexpr,
    PAIRS: tl.constexpr, PAIRSP: tl.constexpr, RESTP: tl.constexpr, HB: tl.constexpr,
    INTERLEAVED: tl.constexpr,
):  # fmt: skip
    """Rotate queries and keys, and store keys and V numbers of values. Grid: (T, 1 + blocks of HB heads, of
    keys, then of queries)."""
    await_previous()
    row, p = tl.program_id(0).to(tl.int64), tl.program_id(1)
    j, r = tl.arange(0, PAIRSP)[None, :], tl.arange(0, max(RESTP, 1))[None, :]
    position, slot = tl.load(positions + row), tl.load(slot_mapping + row).to(tl.int64)
    keys: tl.constexpr = (KVH + HB - 1) // HB
    head = (p - 1) * HB + tl.arange(0, HB)[:, None]
    if p == 0:
        i = tl.arange(0, VP)
        value = tl.load(v + row * v_row + i, mask=i < V, other=0.0)
        tl.store(v_cache + slot * V + i, _as_entry(value, v_cache), mask=i < V)
    elif p <= keys:
        a, b, rest = turn_tile(
            # 32 bits hold the heads of a row
            k + row * k_row + head * k_head, inv_freq, inv_freq, position, inv_freq, head < KVH, j, r, 0.0,
            mscale, D, PAIRS, RESTP, False, False, False, False, INTERLEAVED,
        )  # fmt: skip
        place = k_cache + (slot * KVH + head) * D
        store_tile(place, k, a, b, rest, head < KVH, j, r, D, PAIRS, RESTP, False, INTERLEAVED)
    else:
        own = head - keys * HB
        a, b, rest = turn_tile(
            # 32 bits hold the heads of a row
            q + row * q_row + own * q_head, inv_freq, inv_freq, position, inv_freq, own < H, j, r, 0.0,
            mscale, D, PAIRS, RESTP, False, False, False, False, INTERLEAVED,
        )  # fmt: skip
        to = out + (row * H + own) * D
        store_tile(to, out, a, b, rest, own < H, j, r, D, PAIRS, RESTP, False, INTERLEAVED)


@triton.jit
def _load_rows(at, rows, seen, d, D: tl.constexpr):
    """D columns of rows behind a pointer, [keys, columns]."""
    return tl.load(at + rows[:, None] + d[None, :], mask=seen[:, None] & (d < D)[None, :], other=0.0)


@triton.jit(do_not_specialize=["num_seqs", "front"])
def attend_front(
    q, k_cache, v_cache, front_k, front_v, table, query_start, seq_lens, out, part, part_sums, counters,
    table_row, q_row, q_head, num_seqs, front, scale,
    S: tl.constexpr, G: tl.constexpr, KVH: tl.constexpr, D: tl.constexpr, E: tl.constexpr,
    DP: tl.constexpr, EP: tl.constexpr, WINDOW: tl.constexpr, PAGE: tl.constexpr, PART: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """q: [T, KVH G, D] -> out [T, KVH G, E]. Grid: (T, KVH × blocks of BM heads, parts or 1).

    front_k: [front, KVH, D], front_v: [front, KVH, E] float32. WINDOW 0: there is none. part: [programs, BM,
    EP] float32.
    """
    await_previous()
    token, block, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    seq, position = find_row(query_start, seq_lens, token, num_seqs, S)
    oldest = tl.maximum(position - WINDOW + 1, 0) if WINDOW else position * 0
    ahead = (front + PART - 1) // PART
    splits = ahead + (position + PART - oldest) // PART
    first, last, slot = split * 0, splits, split * 0 - 1
    if tl.num_programs(2) > 1:
        first, last = split, tl.minimum(split + 1, splits)
        slot = (token * tl.num_programs(1) + block) * tl.num_programs(2)  # 32 bits hold MOST_SLOTS
    if first < last:
        kv = block // ((G + BM - 1) // BM)
        own = block % ((G + BM - 1) // BM) * BM + tl.arange(0, BM)
        d, e, row = tl.arange(0, DP), tl.arange(0, EP), token.to(tl.int64)
        there, head, line = own < G, kv * G + own, table + seq.to(tl.int64) * table_row
        # 32 bits hold the heads of a row
        at = row * q_row + head * q_head
        own_q = tl.load(q + at[:, None] + d[None, :], mask=there[:, None] & (d < D)[None, :], other=0.0)
        largest, sums = tl.full([BM], -float("inf"), tl.float32), tl.zeros([BM], tl.float32)
        acc = tl.zeros([BM, EP], tl.float32)
        for s in range(first, last):
            p = s + tl.zeros([], tl.int32)
            top, mass = tl.full([BM], -float("inf"), tl.float32), tl.zeros([BM], tl.float32)
            values = tl.zeros([BM, EP], tl.float32)
            start = p * PART
            for n in range(start, tl.minimum(start + PART, front), BN):
                i = n + tl.arange(0, BN)
                seen = i < tl.minimum(start + PART, front)
                k = _load_rows(front_k, (i * KVH + kv) * D, seen, d, D).to(own_q.dtype)
                v = _load_rows(front_v, (i * KVH + kv) * E, seen, e, E).to(own_q.dtype)
                top, mass, values = add_keys(own_q, k, v, seen, scale, top, mass, values)
            start = oldest + (p - ahead) * PART
            stop = tl.where(p < ahead, start, tl.minimum(start + PART, position + 1))
            for n in range(start, stop, BN):
                t = n + tl.arange(0, BN)
                seen = t < stop
                place = tl.load(line + t // PAGE, mask=seen, other=0).to(tl.int64)
                entry = (place * PAGE + t % PAGE) * KVH + kv
                k = _load_rows(k_cache, entry * D, seen, d, D).to(own_q.dtype)
                v = _load_rows(v_cache, entry * E, seen, e, E).to(own_q.dtype)
                top, mass, values = add_keys(own_q, k, v, seen, scale, top, mass, values)
            largest, before, now = _join_softmaxes(largest, top)
            sums = sums * before + mass * now
            acc = acc * before[:, None] + values * now[:, None]
        tile = token * tl.num_programs(1) + block  # 32 bits hold MOST_SLOTS
        is_whole, sums, acc = join_splits(
            largest, sums, acc, part, part_sums, counters, slot, split, 0, 1, splits, tile, 0, there, e,
            1, 1, BM, EP, MIXED=False,
        )  # fmt: skip
        if is_whole:
            sums = tl.where(there, sums, 1.0)
            result = (acc / sums[:, None]).to(out.dtype.element_ty)
            at_out = (row * (KVH * G) + head) * E
            tl.store(out + at_out[:, None] + e[None, :], result, mask=there[:, None] & (e < E)[None, :])


def _constants(
    heads: int, kv_heads: int, sizes: tuple[int, int], window: int | None, dtype: torch.dtype
) -> dict[str, int]:
    """What `attend_front` is compiled for; sizes: of a head's key and of its value."""
    wide, broad = (max(16, triton.next_power_of_2(size)) for size in sizes)
    is_heavy = dtype == torch.float32 or max(wide, broad) > 128
    return {
        "G": heads // kv_heads,
        "KVH": kv_heads,
        "D": sizes[0],
        "E": sizes[1],
        "DP": wide,
        "EP": broad,
        "WINDOW": window or 0,
        "PART": PART,
        "BM": HEADS,
        "BN": 16 if max(wide, broad) > 256 else 32,
        "num_warps": 8 if is_heavy else 4,
        "num_stages": 1 if dtype == torch.float32 else 2,
    }


def _place_sizes(keys: int, values: int) -> dict[str, int]:
    wide, broad = (triton.next_power_of_2(n) for n in (keys, values))
    return {"K": keys, "V": values, "KP": wide, "VP": broad}


def why_not(facts: OpFacts) -> str | None:
    """The `when` of attention over keys in front."""
    if (kept := facts.sizes.get("kv_dtype")) in CODED:
        return f"it keeps float32 or bfloat16, not {kept}"
    most = max(facts.sizes.get(name, 0) for name in ("dim", "v_dim"))
    return f"its tiles have up to 512 columns, not {most}" if most > 512 else None


@front_attention.variant(FRONT, on="cuda", when=why_not)
def attend(
    q: Tensor,
    k: Tensor | None,
    v: Tensor | None,
    k_cache: Tensor,
    v_cache: Tensor,
    front: tuple[Tensor, Tensor],
    block_table: Tensor,
    slot_mapping: Tensor,
    query_start: Tensor,
    seq_lens: Tensor,
    scale: float,
    window: int | None = None,
    step: dict[object, object] | None = None,
) -> Tensor:
    """`front_attention`: the same arguments and result."""
    (tokens, heads, dim), (page, kv_heads, size), num_seqs = q.shape, v_cache.shape[1:], len(seq_lens)
    out = torch.empty(tokens, heads, size, dtype=q.dtype, device=q.device)
    if not tokens:
        return out
    q = pack_rows(q)
    constants = _constants(heads, kv_heads, (dim, size), window, q.dtype)
    tiles = kv_heads * -(-constants["G"] // HEADS)
    most = min(block_table.shape[1] * page, window or block_table.shape[1] * page)
    parts = count_apart(tokens * tiles, -(-len(front[0]) // PART) + -(-most // PART))
    slots = tokens * tiles * parts if parts > 1 else 1
    part = torch.empty(slots, HEADS, constants["EP"], dtype=torch.float32, device=q.device)
    sums = torch.empty(slots, HEADS, 2, dtype=torch.float32, device=q.device)
    counters = find_counters(step, tokens * tiles, parts, q.device)
    if k is not None and v is not None:
        _place_new(k, v, (k_cache, v_cache), slot_mapping)
    launch(
        attend_front, (tokens, tiles, parts), q, k_cache, v_cache, *front, block_table, query_start, seq_lens,
        out, part, sums, counters, block_table.stride(0), q.stride(0), q.stride(1), num_seqs, len(front[0]),
        scale * LOG2E, S=row_size(tokens, num_seqs), PAGE=page, **constants,
    )  # fmt: skip
    return out


def _place_new(k: Tensor, v: Tensor, caches: tuple[Tensor, Tensor], slot_mapping: Tensor) -> None:
    """Store keys and values as they are."""
    new = k.flatten(1), v.flatten(1)
    sizes = _place_sizes(new[0].shape[1], new[1].shape[1])
    rows = (t.stride(0) for t in new)
    launch(place_pairs, (len(k),), *new, *caches, slot_mapping, *rows, **sizes, num_warps=4)


def _turn_sizes(heads: int, kv_heads: int, dim: int, size: int, rotation: Rotation) -> dict[str, int]:
    """What `place_turned_pairs` is compiled for; size: of a value."""
    pairs, wide = len(rotation.inv_freq), triton.next_power_of_2(dim)
    rest = dim - 2 * pairs
    return {
        "H": heads,
        "KVH": kv_heads,
        "D": dim,
        "V": kv_heads * size,
        "VP": triton.next_power_of_2(kv_heads * size),
        "PAIRS": pairs,
        "PAIRSP": triton.next_power_of_2(pairs),
        "RESTP": triton.next_power_of_2(rest) if rest else 0,
        "HB": min(max(TILE // wide, 1), triton.next_power_of_2(heads)),
        "INTERLEAVED": rotation.interleaved,
    }


def why_not_apart(facts: OpFacts) -> str | None:
    """The `when` of the store of values that are wider than keys."""
    if "v_dim" not in facts.sizes or facts.sizes["v_dim"] == facts.sizes.get("dim"):
        return "values are of another width than keys"
    if facts.sizes.get("over"):
        return "it has no norms of heads"
    return why_not(facts)


@place_heads.variant(FRONT, on="cuda", when=why_not_apart)
def place(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slot_mapping: Tensor,
    positions: Tensor,
    norms: HeadNorms | None,
    rotation: Rotation | None,
) -> Tensor:
    """`place_heads`: the same arguments and result, without norms."""
    if rotation is None:
        _place_new(k, v, (k_cache, v_cache), slot_mapping)
        return q
    q, k, v = pack_rows(q), pack_rows(k), v.flatten(1)
    (tokens, heads, dim), kv_heads = q.shape, k.shape[1]
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    sizes = _turn_sizes(heads, kv_heads, dim, v_cache.shape[-1], rotation)
    grid = tokens, 1 + sum(-(-count // sizes["HB"]) for count in (heads, kv_heads))
    launch(
        place_turned_pairs, grid, q, k, v, rotation.inv_freq, positions, slot_mapping, out, k_cache, v_cache,
        q.stride(0), k.stride(0), v.stride(0), q.stride(1), k.stride(1), rotation.mscale, **sizes,
    )  # fmt: skip
    return out


@triton.jit
def begin_rows(initial, state, slots, has_history, history, state_row, count, BLOCK: tl.constexpr):
    """initial: [count] to the slots of sequences without history; history [S]: true. Grid: (S, blocks)."""
    await_previous()
    s, i = tl.program_id(0), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_new = tl.load(has_history + s) == 0
    slot = tl.load(slots + s).to(tl.int64)
    number = tl.load(initial + i, mask=(i < count) & is_new, other=0.0)
    tl.store(state + slot * state_row + i, number.to(state.dtype.element_ty), mask=(i < count) & is_new)
    if tl.program_id(1) == 0:
        tl.store(history + s, tl.full([], True, tl.int1))


@begin_slots.variant(NAME, on="cuda")
def begin(initial: Tensor, state: Tensor, slots: Tensor, has_history: Tensor, positions: Tensor) -> Tensor:
    """`begin_slots`: the same arguments and result."""
    history, count = torch.empty_like(has_history), initial.numel()
    grid = len(slots), -(-count // NUMBERS)
    initial, row = initial.contiguous(), state.stride(0)
    launch(begin_rows, grid, initial, state, slots, has_history, history, row, count, BLOCK=NUMBERS)
    return history


POINTERS = {
    **dict.fromkeys(("q", "k", "v", "k_cache", "v_cache", "out", "initial", "state"), "bf16*"),
    **dict.fromkeys(("front_k", "front_v", "part", "part_sums"), "fp32*"),
    **dict.fromkeys(("table", "slot_mapping", "positions", "query_start", "seq_lens", "slots"), "i64*"),
    **dict.fromkeys(("has_history", "history"), "i1*"),
    **dict.fromkeys(("k_row", "v_row", "table_row", "q_row", "q_head", "k_head", "state_row"), "i32!"),
    "counters": "i32*",
    "inv_freq": "fp32*",
    "scale": "fp32",
    "mscale": "fp32",
}
KEPT = {"k_cache": "bf16*", "v_cache": "bf16*"}
SHAPES = {"window": 1024, "whole": None}  # of Hymba


@with_float16
def forms() -> Iterator[KernelForm]:
    """Hymba's layers: decodes, and in bfloat16 prompts, too."""
    for name, window in SHAPES.items():
        for step, size in (("decodes", 1), ("prompts", 64)):
            form = _attend_form(f"attend_front, {name}, {step}", window, size, torch.bfloat16)
            yield form
        wide = as_float32(_attend_form(f"attend_front, {name}", window, 1, torch.float32))
        yield from (wide, replace(wide, name=f"{wide.name} over bfloat16", types={**wide.types, **KEPT}))
    turned = _turn_sizes(25, 5, 64, 128, Rotation(torch.empty(32, device="meta"), 1.0, False))
    for kernel, sizes in ((place_pairs, _place_sizes(320, 640)), (place_turned_pairs, turned)):
        form = KernelForm(kernel.fn.__name__, kernel, POINTERS, sizes)
        wide = as_float32(form)
        over = replace(wide, name=f"{wide.name} over bfloat16", types={**wide.types, **KEPT})
        yield from (form, wide, over)
    begin = KernelForm("begin_rows", begin_rows, POINTERS, {"BLOCK": NUMBERS})
    yield from (begin, as_float32(begin))


def _attend_form(name: str, window: int | None, size: int, dtype: torch.dtype) -> KernelForm:
    constants, more = split_options(_constants(25, 5, (64, 128), window, dtype))
    demands = (("HMMA", "HGMMA"), ("LDG.128", "LDGSTS.128"))
    sizes = constants | {"S": size, "PAGE": 64}
    return KernelForm(name, attend_front, POINTERS, sizes, demands=demands, shares_rows=True, **more)
