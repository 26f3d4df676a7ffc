"""Attention to keys that an indexer chose: `sparse_latent_attention` and `block_sparse_attention`.

    attend_chosen   a program has some heads of one row, and a split of the row's chosen keys or all of them
    fold_chosen     where splits were apart: their sums, in the order of positions

Chosen keys are counted in the order of their positions, SIZE for each number of `chosen`: 1 of latents, and
of blocks all keys, of which those behind the row are not seen. A tile of them is gathered from its pages, and
scores and sums are products of matrices. Each split of `SPLIT` chosen keys has a softmax of its own, and
splits are added in their order: by the program that walks them, or by `fold_chosen`. Both are the same sums,
so a row's bits depend on no other row, and the number of rows may decide which it is: few rows in splits keep
a device busy.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import triton
import triton.language as tl
from torch import Tensor

from plait.kernels.triton.attention.attention import (
    LOG2E,
    PROGRAMS,
    _as_words,
    _join_softmaxes,
    _load_entries,
    _load_rest,
    count_programs,
)
from plait.kernels.triton.attention.choose import count_sequences, find_sequence
from plait.kernels.triton.attention.index_scores import why_coded
from plait.kernels.triton.attention.layout import PagedLayout, why_too_large
from plait.kernels.triton.attention.place import entry_places, place_all_heads, why_no_codes
from plait.kernels.triton.dependent_launch import await_previous
from plait.kernels.triton.forms import FLOAT16, FLOAT32, KernelForm, as_half
from plait.kernels.triton.row_views import pack_rows
from plait.kernels.triton.shared_memory import LEAST_SHARED, shared_limit
from plait.ops.attention import write_paged
from plait.ops.block_sparse import block_sparse_attention
from plait.ops.entry import CODED, latent_codes
from plait.ops.indexer import sparse_latent_attention
from plait.ops.launch import launch
from plait.ops.registry import OpFacts

NAME = "triton"
SPLIT = 256  # chosen keys that share a softmax
PART: tl.constexpr = tl.constexpr(32)  # columns of float32 at a time
FOLDED = 2  # heads of a program that adds splits


@triton.jit
def _score_parts(
    q, at, there, cache, at_k, seen,
    WIDTH: tl.constexpr, PART: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """q · k of float32 queries, [BM, BN], by some columns at a time: without matrix units a product has all
    columns of its rows in registers."""
    scores = tl.zeros([BM, BN], tl.float32)
    for start in range(0, WIDTH, PART):
        c = start + tl.arange(0, PART)[None, :]
        own = tl.load(q + at[:, None] + c, mask=there[:, None] & (c < WIDTH), other=0.0)
        k = tl.load(cache + at_k[:, None] + c, mask=seen[:, None] & (c < WIDTH), other=0.0)
        scores = tl.dot(own, tl.trans(k.to(tl.float32)), scores, input_precision="ieee")
    return scores


@triton.jit(do_not_specialize=["num_seqs", "top_k"])
def attend_chosen(
    q, k_cache, v_cache, k_words, v_words, chosen, table, query_start, seq_lens, out, part, part_sums, sinks,
    num_seqs, top_k, table_row, q_row, q_head, scale,
    S: tl.constexpr, G: tl.constexpr, KVH: tl.constexpr, D: tl.constexpr, DP: tl.constexpr,
    REST: tl.constexpr, RESTP: tl.constexpr, LATENT: tl.constexpr, KW: tl.constexpr, VW: tl.constexpr,
    GROUP: tl.constexpr, REST_AT: tl.constexpr, PAGE: tl.constexpr, SIZE: tl.constexpr,
    SPLIT: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, SINKS: tl.constexpr, APART: tl.constexpr,
):  # fmt: skip
    """q: [T, KVH * G, D + REST], chosen: [T, KVH, top_k] -> out [T, KVH * G, D], or of APART splits
    part [T, splits, KVH * G, DP] and part_sums [T, splits, KVH * G, 2] (largest score, sum), float32.

    Grid: (T, KVH * tiles of BM heads, splits or 1).
    """
    await_previous()
    row, tiles = tl.program_id(0).to(tl.int64), (G + BM - 1) // BM
    kv, tile = tl.program_id(1) // tiles, tl.program_id(1) % tiles
    seq = find_sequence(query_start, row, num_seqs, S)
    stop_row = tl.load(query_start + seq + 1)
    position = (tl.load(seq_lens + seq) - (stop_row - row)).to(tl.int32)
    g, d, b = tile * BM + tl.arange(0, BM), tl.arange(0, DP), tl.arange(0, BN)
    there, head = g < G, kv * G + g
    # 32 bits hold the heads of a row
    at = row * q_row + head * q_head
    kind: tl.constexpr = q.dtype.element_ty
    if kind != tl.float32:
        own_q = tl.load(q + at[:, None] + d[None, :], mask=there[:, None] & (d < D)[None, :], other=0.0)
        if REST:
            r = tl.arange(0, RESTP)
            rest_q = tl.load(
                q + at[:, None] + D + r[None, :], mask=there[:, None] & (r < REST)[None, :], other=0.0
            )
    first = tl.program_id(2)
    largest = tl.full([BM], -float("inf"), tl.float32)
    sums = tl.zeros([BM], tl.float32)
    if SINKS:
        if first == 0:
            largest = tl.load(sinks + head, mask=there, other=0.0) * 1.4426950408889634
            sums = tl.full([BM], 1.0, tl.float32)
    acc = tl.zeros([BM, DP], tl.float32)
    line, own = table + seq.to(tl.int64) * table_row, chosen + (row * KVH + kv) * top_k
    for s in range(first, (top_k * SIZE + SPLIT - 1) // SPLIT, tl.num_programs(2)):  # all, or one
        start = (s + tl.zeros([], tl.int32)) * SPLIT
        each = start + tl.arange(0, SPLIT)
        some = tl.load(own + each // SIZE, mask=each < top_k * SIZE, other=-1)
        stop = start + tl.sum((some >= 0).to(tl.int32), 0)
        top = tl.full([BM], -float("inf"), tl.float32)
        mass = tl.zeros([BM], tl.float32)
        values = tl.zeros([BM, DP], tl.float32)
        for n in range(start, stop, BN):
            i = n + b
            t = tl.load(own + i // SIZE, mask=i < stop, other=0) * SIZE + i % SIZE
            seen = (i < stop) & (t <= position)
            block = tl.load(line + t // PAGE, mask=seen, other=0).to(tl.int64)
            inside = t % PAGE * KVH + kv
            at_k, scales = entry_places(block, inside, D, REST, KW, PAGE * KVH, GROUP)
            if kind == tl.float32:
                scores = _score_parts(q, at, there, k_cache, at_k, seen, D + REST, PART, BM, BN)
            else:
                k = _load_entries(k_cache, k_words, at_k, scales, seen, d, D, DP, GROUP).to(kind)
                scores = tl.dot(own_q, tl.trans(k), input_precision="ieee")
                if REST:
                    if GROUP:
                        more = _load_rest(k_words, scales + (REST_AT - D) // 2, seen, r, REST)
                    else:
                        more = _load_entries(k_cache, k_words, at_k + D, scales, seen, r, REST, RESTP, 0)
                    scores = tl.dot(rest_q, tl.trans(more.to(kind)), scores, input_precision="ieee")
            scores = tl.where(seen[None, :], scores * scale, -float("inf"))  # of base 2
            new = tl.maximum(top, tl.max(scores, 1))
            base = tl.where(new == -float("inf"), 0.0, new)
            p = tl.exp2(scores - base[:, None])
            old = tl.exp2(top - base)
            mass = mass * old + tl.sum(p, 1)
            if LATENT and kind != tl.float32:
                v = k
            else:
                at_v, _ = entry_places(block, inside, D, REST, VW, PAGE * KVH, 0)
                v = _load_entries(v_cache, v_words, at_v, scales, seen, d, D, DP, 0).to(kind)
            values = tl.dot(p.to(kind), v, values * old[:, None], input_precision="ieee")
            top = new
        largest, before, now = _join_softmaxes(largest, top)
        sums = sums * before + mass * now
        acc = acc * before[:, None] + values * now[:, None]
    if APART:
        place = (row * tl.num_programs(2) + first) * (KVH * G) + head
        tl.store(part + place[:, None] * DP + d[None, :], acc, mask=there[:, None] & (sums > 0)[:, None])
        tl.store(part_sums + place * 2, largest, mask=there)
        tl.store(part_sums + place * 2 + 1, sums, mask=there)
    else:
        _store_rows(out + (row * (KVH * G) + head) * D, acc, sums, there, d, D)


@triton.jit
def _store_rows(to, acc, sums, there, d, D: tl.constexpr):
    """Sums as means; of a row that sees no key, zeros."""
    result = acc / tl.where(sums > 0, sums, 1.0)[:, None]
    result = result.to(to.dtype.element_ty)
    tl.store(to[:, None] + d[None, :], result, mask=there[:, None] & (d < D)[None, :])


@triton.jit
def fold_chosen(
    part, part_sums, out, splits, H: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, BM: tl.constexpr
):  # fmt: skip
    """See `attend_chosen`. Grid: (T, tiles of BM heads)."""
    await_previous()
    row, head, d = tl.program_id(0).to(tl.int64), tl.program_id(1) * BM + tl.arange(0, BM), tl.arange(0, DP)
    there = head < H
    largest = tl.full([BM], -float("inf"), tl.float32)
    sums = tl.zeros([BM], tl.float32)
    acc = tl.zeros([BM, DP], tl.float32)
    for s in range(splits):
        place = (row * splits + s) * H + head
        top = tl.load(part_sums + place * 2, mask=there, other=-float("inf"))
        mass = tl.load(part_sums + place * 2 + 1, mask=there, other=0.0)
        # Nothing was stored of a split without keys.
        values = tl.load(part + place[:, None] * DP + d[None, :], mask=(mass > 0)[:, None], other=0.0)
        largest, before, now = _join_softmaxes(largest, top)
        sums = sums * before + mass * now
        acc = acc * before[:, None] + values * now[:, None]
    _store_rows(out + (row * H + head) * D, acc, sums, there, d, D)


def _list_constants(
    layout: PagedLayout, caches: tuple[Tensor, Tensor], size: int, sinks: bool, limit: int
) -> dict[str, int]:
    """The constants of `attend_chosen` that follow from sizes, and its warps and stages."""
    kept = caches[0].dtype
    found = layout.constants(1, layout.rows(has_prompts=False, kept=kept))
    found |= layout.attention(*caches, sinks, limit=limit)
    for name in ("S", "STEPS", "WINDOW", "SOFTCAP", "ALIBI", "STAGES"):
        del found[name]
    return {**found, "LATENT": caches[0] is caches[1], "SIZE": size, "SPLIT": SPLIT}


def _attend_to(
    q: Tensor,
    caches: tuple[Tensor, Tensor],
    chosen: Tensor,
    where: tuple[Tensor, Tensor, Tensor],
    layout: PagedLayout,
    scale: float,
    size: int,
    sinks: Tensor | None,
) -> Tensor:
    """q: [T, heads, dim + rest], caches of keys and values, chosen: [T, kv_heads, top_k] -> [T, heads, dim].

    where: (block_table, query_start, seq_lens), size: keys for each number of `chosen`.
    """
    table, query_start, seq_lens = where
    k_cache, v_cache = caches
    (total, heads), num_seqs = q.shape[:2], len(seq_lens)
    out = torch.empty(total, heads, layout.dim, dtype=q.dtype, device=q.device)
    q = pack_rows(q)
    sizes = _list_constants(layout, caches, size, sinks is not None, shared_limit(q.device))
    tiles, top_k = -(-sizes["G"] // sizes["BM"]), chosen.shape[-1]
    splits = -(-top_k * size // SPLIT)
    is_apart = splits > 1 and total * layout.kv_heads * tiles < count_programs(q.device) // PROGRAMS
    part = sums = torch.empty(0, device=q.device)
    if is_apart:
        part = torch.empty(total, splits, heads, sizes["DP"], device=q.device)
        sums = torch.empty(total, splits, heads, 2, device=q.device)
    launch(
        attend_chosen, (total, layout.kv_heads * tiles, splits if is_apart else 1),
        q, k_cache, v_cache, *map(_as_words, caches), chosen, table, query_start, seq_lens, out, part, sums,
        sums if sinks is None else sinks, num_seqs, top_k, table.stride(0), q.stride(0), q.stride(1),
        scale * LOG2E, S=count_sequences(num_seqs), APART=is_apart, **sizes,
        **_options(layout, k_cache.dtype),
    )  # fmt: skip
    if is_apart:
        launch(fold_chosen, (total, -(-heads // FOLDED)), part, sums, out, splits, **_fold_sizes(layout))
    return out


def _options(layout: PagedLayout, kept: torch.dtype) -> dict[str, int]:
    """Registers of a thread: left to itself, ptxas spills to have one block more on a processor."""
    return {"maxnreg": 255} if layout.dtype == torch.float32 else layout.options(kept)


def _fold_sizes(layout: PagedLayout) -> dict[str, int]:
    wide = max(16, triton.next_power_of_2(layout.dim))
    return {"H": layout.heads, "D": layout.dim, "DP": wide, "BM": FOLDED}


def _why_no_latents(facts: OpFacts) -> str | None:
    if not facts.sizes.get("rope_dim") and facts.sizes.get("kv_dtype") == "int8":
        return "it reads int8 latents with a rotated part alone"
    return why_no_codes(facts) or _why_mixed(facts) or why_too_large(facts)


def _why_no_heads(facts: OpFacts) -> str | None:
    return why_coded(facts) or _why_mixed(facts) or why_too_large(facts)


def _why_mixed(facts: OpFacts) -> str | None:
    """Without matrix units keys are read in parts of their columns, and those of codes are not."""
    if facts.dtype != torch.float32 or facts.sizes.get("kv_dtype") not in CODED:
        return None
    return "it reads codes in bfloat16 and float16"


@sparse_latent_attention.variant(NAME, on="cuda", when=_why_no_latents)
def attend_latents(
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
    rest = q.shape[-1] - kv_rank
    codes = latent_codes(kv_rank, rest) if cache.dtype is torch.int8 else None
    if latent is not None:
        write_paged(cache, latent, slot_mapping, codes)
    layout = PagedLayout(q.shape[1], 1, kv_rank, rest, codes, None, None, q.dtype)
    where = block_table, query_start, seq_lens
    return _attend_to(q, (cache, cache), chosen[:, None], where, layout, scale, 1, sinks)


@block_sparse_attention.variant(NAME, on="cuda", when=_why_no_heads)
def attend_blocks(
    q: Tensor,
    k: Tensor | None,
    v: Tensor | None,
    k_cache: Tensor,
    v_cache: Tensor,
    chosen: Tensor,
    block_table: Tensor,
    slot_mapping: Tensor,
    query_start: Tensor,
    seq_lens: Tensor,
    scale: float,
    size: int,
) -> Tensor:
    """`block_sparse_attention`: the same arguments and result."""
    if k is not None and v is not None:
        place_all_heads(q, k, v, k_cache, v_cache, slot_mapping, slot_mapping, None, None)
    layout = PagedLayout(q.shape[1], k_cache.shape[2], q.shape[2], 0, None, None, None, q.dtype)
    where = block_table, query_start, seq_lens
    return _attend_to(q, (k_cache, v_cache), chosen, where, layout, scale, size, None)


POINTERS = {
    **dict.fromkeys(("q", "k_cache", "v_cache", "k_words", "v_words", "out"), "bf16*"),
    **dict.fromkeys(("table", "query_start", "seq_lens"), "i64*"),
    **dict.fromkeys(("part", "part_sums", "sinks"), "fp32*"),
    **dict.fromkeys(("table_row", "q_row", "q_head"), "i32!"),
    "chosen": "i32*",
    "scale": "fp32",
}  # fmt: skip
CODES = {"k_cache": "i8*", "v_cache": "i8*", "k_words": "i16*", "v_words": "i16*"}
WIDE, KEPT = dict.fromkeys(("q", "out"), "fp32*"), ("k_cache", "v_cache", "k_words", "v_words")
SHAPES = {  # heads, kv_heads, dim, rest, keys of a block, sinks, codes
    "latents, 128 heads": (128, 1, 512, 64, 1, False, False),
    "latents, 64 heads, sinks": (64, 1, 512, 64, 1, True, False),
    "latents, 128 heads int8": (128, 1, 512, 64, 1, False, True),
    "latents, 64 heads, sinks int8": (64, 1, 512, 64, 1, True, True),
    "latents, 64 heads, none rotated": (64, 1, 512, 0, 1, False, False),
    "blocks, 64/4 d128": (64, 4, 128, 0, 128, False, False),
}
DTYPES = {  # of queries, and the types of what differs
    "": (torch.bfloat16, {}),
    " over float32": (torch.bfloat16, dict.fromkeys(KEPT, "fp32*")),
    FLOAT32: (torch.float32, WIDE | dict.fromkeys(KEPT, "fp32*")),
    FLOAT16: (torch.float16, as_half(POINTERS)),
    ", float32 over bfloat16": (torch.float32, WIDE),
    ", float16 over bfloat16": (torch.float16, dict.fromkeys(("q", "out"), "fp16*")),
    ", float16 over float32": (torch.float16, as_half(POINTERS) | dict.fromkeys(KEPT, "fp32*")),
}
CACHES = {"bf16*": torch.bfloat16, "fp16*": torch.float16, "fp32*": torch.float32, "i8*": torch.int8}


def forms() -> Iterator[KernelForm]:
    """What models of published sizes launch, in splits and walking, over caches of each dtype."""
    for name, shape in SHAPES.items():
        *_, sinks, coded = shape
        for suffix, (dtype, types) in DTYPES.items():
            is_usual = not coded or (" over " not in suffix and suffix != FLOAT32)
            if is_usual and (not (sinks or "none" in name) or suffix in ("", FLOAT32)):
                yield from _attend_forms(f"attend_chosen, {name}", shape, suffix, dtype, types)


def _attend_forms(
    name: str, shape: tuple[int, ...], suffix: str, dtype: torch.dtype, types: dict[str, str]
) -> Iterator[KernelForm]:
    heads, kv_heads, dim, rest, size, sinks, coded = shape
    given = POINTERS | types | (CODES if coded else {})
    codes = latent_codes(dim, rest) if coded else None
    width = codes.width if codes else dim + rest
    cache = torch.empty(1, 64, kv_heads, width, dtype=CACHES[given["k_cache"]], device="meta")
    layout = PagedLayout(heads, kv_heads, dim, rest, codes, None, None, dtype)
    caches = cache, cache if size == 1 else cache.clone()
    sizes = _list_constants(layout, caches, size, bool(sinks), LEAST_SHARED)
    warps, stages = sizes.pop("num_warps"), sizes.pop("num_stages")
    demands = () if dtype == torch.float32 else (("HMMA", "HGMMA"),)
    words = {"splits": True} | ({} if dtype == torch.float16 else {"all": False})
    for word, is_apart in words.items():
        yield KernelForm(
            f"{name}, {word}{suffix}", attend_chosen, given, {**sizes, "S": 64, "APART": is_apart}, warps,
            stages, demands=demands, options=_options(layout, cache.dtype), shares_rows=True,
        )  # fmt: skip
    if not coded and not sinks and " over " not in suffix:
        yield KernelForm(name.replace("attend", "fold") + suffix, fold_chosen, given, _fold_sizes(layout))
