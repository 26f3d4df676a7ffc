"""Attention over a window of latents and over compressed entries (DeepSeek-V4): two launches.

    store_entries   a token               its latent, and its entry if a window ends with it
    attend_entries  token × heads × part  a part of the keys that the token sees: latents, then entries

A tile has BM heads of one token, which see the same keys; an indexer's choice is another one for each token.
Keys are taken in parts of `PART` from the first that the token sees, each with a softmax of its own, and
parts are added in their order: where each has a program, by the one that ends last, or by the one that walks
them all. So the bits of a row depend on its sequence alone.

    parts of a token   | latents of its window | entries 0.. | entries PART.. | ...

Latents that are codes lie as `ops.entry` has them, entry by entry; entries are numbers.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
import triton
import triton.language as tl
from torch import Tensor

from plait.kernels.triton.attention.attention import LOG2E, _join_softmaxes, _load_entries, join_splits
from plait.kernels.triton.attention.compressed.rows import (
    PART,
    add_keys,
    count_apart,
    find_counters,
    find_row,
    row_size,
)
from plait.kernels.triton.attention.place import _as_entry, _code, _group_scales, why_no_codes
from plait.kernels.triton.dependent_launch import await_previous
from plait.kernels.triton.forms import FLOAT16, KernelForm, as_half, split_options
from plait.kernels.triton.row_views import pack_rows
from plait.ops.attention import paged_latent_attention
from plait.ops.compressed import entry_attention
from plait.ops.entry import Codes, latent_codes
from plait.ops.indexer import sparse_latent_attention
from plait.ops.launch import launch
from plait.ops.registry import OpFacts

NAME, WINDOW = "triton", "triton window"
HEADS = 16  # of a tile: matrix units multiply no fewer
MOST_COLUMNS = 512  # of a tile


@triton.jit(do_not_specialize=["num_seqs"])
def store_entries(
    latent, entries, cache, words, packed, near_slots, far_slots, query_start, seq_lens,
    latent_row, entry_row, num_seqs,
    S: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, RATE: tl.constexpr, STEP: tl.constexpr,
    WIDTH: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """Store latents, and entries of tokens that end a window. Grid: (T,)."""
    await_previous()
    token = tl.program_id(0)
    _, position = find_row(query_start, seq_lens, token, num_seqs, S)
    d, row = tl.arange(0, DP)[None, :], token.to(tl.int64)
    slot = tl.load(near_slots + token).to(tl.int64)
    number = tl.load(latent + row * latent_row + d, mask=d < D, other=0.0)
    if GROUP:
        bits, step = _group_scales(number.to(tl.float32), d < D, 1, D, DP, GROUP)
        g = tl.arange(0, bits.shape[1])[None, :]
        tl.store(words + slot * (WIDTH // 2) + D // 2 + g, bits.to(tl.int16), mask=g * GROUP < D)
        tl.store(cache + slot * WIDTH + d, _code(number.to(tl.float32), step), mask=d < D)
    else:
        tl.store(cache + slot * WIDTH + d, _as_entry(number, cache), mask=d < D)
    if RATE:
        ends = (position + 1) % RATE == 0
        to = tl.load(far_slots + token).to(tl.int64) // STEP * D
        entry = tl.load(entries + row * entry_row + d, mask=(d < D) & ends, other=0.0)
        tl.store(packed + to + d, _as_entry(entry, packed), mask=(d < D) & ends)


@triton.jit(do_not_specialize=["num_seqs"])
def attend_entries(
    q, cache, words, packed, chosen, near, far, query_start, seq_lens, sinks, out, part, part_sums, counters,
    near_row, far_row, q_row, q_head, num_seqs, scale,
    S: tl.constexpr, H: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, WINDOW: tl.constexpr,
    RATE: tl.constexpr, STEP: tl.constexpr, TOP_K: tl.constexpr, PAGE: tl.constexpr, WIDTH: tl.constexpr,
    GROUP: tl.constexpr, SINKS: tl.constexpr, PART: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """q: [T, H, D] -> out [T, H, D]. Grid: (T, blocks of BM heads, parts or 1).

    near, far: block tables of latents and of entries, of which a block has PAGE / STEP; chosen: [T, TOP_K],
    or all of RATE tokens that have ended; RATE 0: there are no entries. With a WINDOW of 0 and a RATE of 1
    they are latents.
    part: [programs, BM, DP] float32.
    """
    await_previous()
    token, block, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    seq, position = find_row(query_start, seq_lens, token, num_seqs, S)
    near_line, far_line = near + seq.to(tl.int64) * near_row, far + seq.to(tl.int64) * far_row
    known = (position + 1) // RATE if RATE else position * 0
    if TOP_K:
        known = tl.minimum(known, TOP_K)
    raw: tl.constexpr = (WINDOW + PART - 1) // PART
    width: tl.constexpr = WIDTH if RATE == 1 and WINDOW == 0 else D
    group: tl.constexpr = GROUP if RATE == 1 and WINDOW == 0 else 0
    splits = raw + (known + PART - 1) // PART
    first, last, slot = split * 0, splits, split * 0 - 1
    if tl.num_programs(2) > 1:
        first, last = split, tl.minimum(split + 1, splits)
        slot = (token * tl.num_programs(1) + block) * tl.num_programs(2)  # 32 bits hold MOST_SLOTS
    if first < last:
        head, d = block * BM + tl.arange(0, BM), tl.arange(0, DP)
        there, row = head < H, token.to(tl.int64)
        # 32 bits hold the heads of a row
        at = row * q_row + head * q_head
        own_q = tl.load(q + at[:, None] + d[None, :], mask=there[:, None] & (d < D)[None, :], other=0.0)
        largest, sums = tl.full([BM], -float("inf"), tl.float32), tl.zeros([BM], tl.float32)
        acc = tl.zeros([BM, DP], tl.float32)
        if SINKS:
            sink = tl.load(sinks + head, mask=there & (first == 0), other=-float("inf"))
            largest = sink * 1.4426950408889634
            sums = tl.where(first == 0, 1.0, 0.0) + tl.zeros([BM], tl.float32)
        oldest = tl.maximum(position - WINDOW + 1, 0)
        for s in range(first, last):
            p = s + tl.zeros([], tl.int32)
            top, mass = tl.full([BM], -float("inf"), tl.float32), tl.zeros([BM], tl.float32)
            values = tl.zeros([BM, DP], tl.float32)
            if WINDOW:
                start = oldest + p * PART
                stop = tl.where(p < raw, tl.minimum(start + PART, position + 1), start)
                for n in range(start, stop, BN):
                    t = n + tl.arange(0, BN)
                    seen = t < stop
                    place = tl.load(near_line + t // PAGE, mask=seen, other=0).to(tl.int64)
                    at_k = (place * PAGE + t % PAGE) * WIDTH
                    k = _load_entries(cache, words, at_k, at_k // 2 + D // 2, seen, d, D, DP, GROUP)
                    k = k.to(own_q.dtype)
                    top, mass, values = add_keys(own_q, k, k, seen, scale, top, mass, values)
            if RATE:
                start = (p - raw) * PART
                stop = tl.where(p < raw, start, tl.minimum(start + PART, known))
                for n in range(start, stop, BN):
                    e = n + tl.arange(0, BN)
                    seen = e < stop
                    if TOP_K:
                        e = tl.load(chosen + row * TOP_K + e, mask=seen, other=0)
                        seen &= e >= 0
                    r = ((e + 1) * RATE - 1) // STEP
                    place = tl.load(far_line + r // (PAGE // STEP), mask=seen, other=0).to(tl.int64)
                    at_k = (place * (PAGE // STEP) + r % (PAGE // STEP)) * width
                    k = _load_entries(packed, words, at_k, at_k // 2 + D // 2, seen, d, D, DP, group)
                    k = k.to(own_q.dtype)
                    top, mass, values = add_keys(own_q, k, k, seen, scale, top, mass, values)
            largest, before, now = _join_softmaxes(largest, top)
            sums = sums * before + mass * now
            acc = acc * before[:, None] + values * now[:, None]
        tile = token * tl.num_programs(1) + block  # 32 bits hold MOST_SLOTS
        is_whole, sums, acc = join_splits(
            largest, sums, acc, part, part_sums, counters, slot, split, 0, 1, splits, tile, 0, there, d,
            1, 1, BM, DP, MIXED=False,
        )  # fmt: skip
        if is_whole:
            sums = tl.where(sums > 0.0, sums, 1.0)  # a row of padding may see no key
            result = (acc / sums[:, None]).to(out.dtype.element_ty)
            at_out = (row * H + head) * D
            tl.store(out + at_out[:, None] + d[None, :], result, mask=there[:, None] & (d < D)[None, :])


def _constants(
    heads: int, dim: int, window: int, kept: torch.dtype, dtype: torch.dtype, codes: Codes | None
) -> dict[str, int]:
    """What both kernels of a step are compiled for; tiles follow from sizes and dtypes alone."""
    wide = max(16, triton.next_power_of_2(dim))
    is_heavy = dtype == torch.float32 or kept.itemsize > dtype.itemsize
    return {
        "H": heads,
        "D": dim,
        "DP": wide,
        "WINDOW": window,
        "WIDTH": codes.width if codes else dim,
        "GROUP": codes.group if codes else 0,
        "PART": PART,
        "BM": HEADS,
        "BN": 16 if is_heavy or codes else 32,
        "num_warps": 8 if wide > 128 else 4,
        "num_stages": 1 if dtype == torch.float32 else 2,
    } | ({"maxnreg": 255} if dtype == torch.float32 else {})  # left to itself, ptxas spills


def _store_sizes(constants: Mapping[str, int]) -> dict[str, int]:
    return {name: constants[name] for name in ("D", "DP", "WIDTH", "GROUP")}


def _attend(
    q: Tensor,
    latent: Tensor | None,
    entries: Tensor | None,
    caches: tuple[Tensor, Tensor],
    chosen: Tensor | None,
    near: tuple[Tensor, Tensor],
    far: tuple[Tensor, Tensor],
    seqs: tuple[Tensor, Tensor],
    scale: float,
    window: int,
    sinks: Tensor | None,
    rate: int,
    step: int,
    work: dict[object, object] | None,
) -> Tensor:
    """Both launches. caches: of latents and of entries; seqs: (query_start, seq_lens); rate 0: no entries."""
    (tokens, heads, dim), (cache, packed), num_seqs = q.shape, caches, len(seqs[1])
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    if not tokens:
        return out
    q = pack_rows(q)
    codes = latent_codes(dim, 0) if cache.dtype is torch.int8 else None
    constants = _constants(heads, dim, window, cache.dtype, q.dtype, codes)
    words = cache.view(torch.int16) if codes else cache
    blocks, page, top_k = -(-heads // HEADS), cache.shape[1], 0 if chosen is None else chosen.shape[1]
    most = top_k or (far[0].shape[1] * page // rate if rate else 0)
    parts = count_apart(tokens * blocks, -(-window // PART) + -(-most // PART))
    slots = tokens * blocks * parts if parts > 1 else 1
    part = torch.empty(slots, HEADS, constants["DP"], dtype=torch.float32, device=q.device)
    sums = torch.empty(slots, HEADS, 2, dtype=torch.float32, device=q.device)
    counters = find_counters(work, tokens * blocks, parts, q.device)
    few = {"S": row_size(tokens, num_seqs), "RATE": rate, "STEP": step}
    if latent is not None:
        latent, stored = pack_rows(latent), few if entries is not None else few | {"RATE": 0}
        entries = latent if entries is None else pack_rows(entries)
        launch(
            store_entries, (tokens,), latent, entries, cache, words, packed, near[1], far[1], *seqs,
            latent.stride(0), entries.stride(0), num_seqs, **stored, **_store_sizes(constants), num_warps=4,
        )  # fmt: skip
    launch(
        attend_entries, (tokens, blocks, parts), q, cache, words, packed,
        near[0] if chosen is None else chosen, near[0], far[0], *seqs, sums if sinks is None else sinks, out,
        part, sums, counters, near[0].stride(0), far[0].stride(0), q.stride(0), q.stride(1), num_seqs,
        scale * LOG2E, TOP_K=top_k, PAGE=page, SINKS=sinks is not None, **few, **constants,
    )  # fmt: skip
    return out


def why_not(facts: OpFacts) -> str | None:
    """The `when` of attention over entries."""
    if (dim := facts.sizes.get("kv_rank", 0)) > MOST_COLUMNS:
        return f"its tiles have up to {MOST_COLUMNS} columns, not {dim}"
    return why_no_codes(facts)


@entry_attention.variant(NAME, on="cuda", when=why_not)
def attend(
    q: Tensor,
    latent: Tensor | None,
    entries: Tensor | None,
    cache: Tensor,
    packed: Tensor,
    chosen: Tensor | None,
    near: tuple[Tensor, Tensor],
    far: tuple[Tensor, Tensor],
    query_start: Tensor,
    seq_lens: Tensor,
    scale: float,
    window: int,
    sinks: Tensor,
    rate: int,
    step: int,
    work: dict[object, object] | None = None,
) -> Tensor:
    """`entry_attention`: the same arguments and result."""
    caches, seqs = (cache, packed), (query_start, seq_lens)
    return _attend(
        q, latent, entries, caches, chosen, near, far, seqs, scale, window, sinks, rate, step, work
    )


def why_not_window(facts: OpFacts) -> str | None:
    """The `when` of attention over a window of latents alone."""
    if facts.sizes.get("rope_dim") != 0 or facts.sizes.get("kv_dtype") != "int8":
        return "it reads latents of int8 of which nothing is rotated apart"
    if not facts.sizes.get("window"):
        return "it reads latents of a window"
    return why_not(facts)


@paged_latent_attention.variant(WINDOW, on="cuda", when=why_not_window)
def attend_window(
    q: Tensor,
    latent: Tensor | None,
    cache: Tensor,
    block_table: Tensor,
    slot_mapping: Tensor,
    query_start: Tensor,
    seq_lens: Tensor,
    scale: float,
    kv_rank: int,
    step: dict[object, object] | None = None,
    window: int = 0,
    sinks: Tensor | None = None,
) -> Tensor:
    """`paged_latent_attention`: the same arguments and result."""
    where, seqs = (block_table, slot_mapping), (query_start, seq_lens)
    return _attend(
        q,
        latent,
        None,
        (cache, cache),
        None,
        where,
        where,
        seqs,
        scale,
        window,
        sinks,
        rate=0,
        step=1,
        work=step,
    )


def why_not_codes(facts: OpFacts) -> str | None:
    """The `when` of attention over latents of int8 that an indexer chooses."""
    if facts.sizes.get("rope_dim") != 0 or facts.sizes.get("kv_dtype") != "int8":
        return "it reads latents of int8 of which nothing is rotated apart"
    return why_not(facts)


@sparse_latent_attention.variant("triton codes", on="cuda", when=why_not_codes)
def attend_codes(
    q: Tensor,
    latent: Tensor | None,
    cache: Tensor,
    chosen: Tensor,
    block_table: Tensor,
    slot_mapping: Tensor,
    query_start: Tensor,
    seq_lens: Tensor,
    scale: float,
    kv_rank: int,
    sinks: Tensor | None = None,
) -> Tensor:
    """`sparse_latent_attention`: the same arguments and result."""
    where, seqs = (block_table, slot_mapping), (query_start, seq_lens)
    return _attend(
        q, latent, None, (cache, cache), chosen, where, where, seqs, scale, 0, sinks, rate=1, step=1,
        work=None,
    )  # fmt: skip


POINTERS = {
    **dict.fromkeys(("q", "latent", "entries", "cache", "words", "packed", "out"), "bf16*"),
    **dict.fromkeys(("part", "part_sums", "sinks"), "fp32*"),
    **dict.fromkeys(("near", "far", "near_slots", "far_slots", "query_start", "seq_lens"), "i64*"),
    **dict.fromkeys(("chosen", "counters"), "i32*"),
    **dict.fromkeys(("latent_row", "entry_row", "near_row", "far_row", "q_row", "q_head"), "i32!"),
    "scale": "fp32",
}
CODES = {"cache": "i8*", "packed": "i8*", "words": "i16*"}
# Tokens of an entry, entries that are chosen, the window: of DeepSeek-V4, of V4.1, and of GLM-5.3 the last.
NUMBERS = {
    "chosen": (4, 512, 128),
    "all": (128, 0, 128),
    "chosen tokens": (1, 2048, 128),
    "chosen pairs": (2, 2048, 128),
}
CODED = {"window of codes": (0, 0, 128), "chosen codes": (1, 2051, 0)}
KINDS = {"bf16*": torch.bfloat16, "fp16*": torch.float16, "fp32*": torch.float32, "i8*": torch.int8}


def forms() -> Iterator[KernelForm]:
    """Layers over numbers and codes: decodes, and in bfloat16 prompts, too."""
    narrow = dict.fromkeys(("cache", "words", "packed"), "bf16*")
    wide = {name: "fp32*" if kind == "bf16*" else kind for name, kind in POINTERS.items()}
    half = as_half(POINTERS)
    for suffix, types in (
        ("", POINTERS),
        (FLOAT16, half),
        (f"{FLOAT16} over bfloat16", half | narrow),
        (", float32", wide),
        (", float32 over bfloat16", wide | narrow),
    ):
        for name, layer in NUMBERS.items():
            yield from _forms_of(f"{name}{suffix}", layer, 1, types)
        for name, layer in CODED.items() if "over" not in suffix else ():
            yield from _forms_of(f"{name}{suffix}", layer, 1, types | CODES)
    for name, layer in NUMBERS.items():
        yield from _forms_of(f"{name}, prompts", layer, 64, POINTERS)
    for name, layer in CODED.items():
        yield from _forms_of(f"{name}, prompts", layer, 64, POINTERS | CODES)


def _forms_of(
    name: str, layer: tuple[int, int, int], size: int, types: dict[str, str]
) -> Iterator[KernelForm]:
    """layer: as in NUMBERS; size: `S` of `find_row`."""
    (rate, top_k, window), dtype, kept = layer, KINDS[types["q"]], KINDS[types["cache"]]
    codes = latent_codes(512, 0) if kept == torch.int8 else None
    few = {"S": size, "RATE": rate, "STEP": min(max(rate, 1), 4)}
    constants, more = split_options(_constants(64, 512, window, kept, dtype, codes))
    stored = few if rate and window else few | {"RATE": 0}
    yield KernelForm(f"store_entries, {name}", store_entries, types, stored | _store_sizes(constants))
    demands = (() if dtype == torch.float32 else ("HMMA", "HGMMA"), ("LDG.128", "LDGSTS.128"))
    sizes = constants | few | {"TOP_K": top_k, "PAGE": 64, "SINKS": window > 0}
    yield KernelForm(
        f"attend_entries, {name}", attend_entries, types, sizes, demands=demands, shares_rows=True, **more
    )
