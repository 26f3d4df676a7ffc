"""Attention over the depth in two launches: every source is scored by itself, then all are mixed.

    score_sources   a source of a token for each program, in one tile: its scale, and a product for each query
    share_sources   a piece of a token's row for each program: the softmax anew, then each source once

Sources are tensors of their own, which a kernel has a pointer for each of. A row's bits depend on its own
sources alone: sums over a row have the order of its width, and of sources the last comes last.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import triton
import triton.language as tl
from torch import Tensor

from plait.kernels.triton.dependent_launch import await_previous
from plait.kernels.triton.forms import KernelForm, with_float16, with_float32
from plait.kernels.triton.pointwise.norm import why_too_wide
from plait.kernels.triton.pointwise.streams import row_constants
from plait.kernels.triton.row_views import pack_rows
from plait.ops.launch import launch
from plait.ops.registry import OpFacts
from plait.ops.streams import mix_sources

NAME = "triton"
MOST = 16  # sources: pointers of a kernel
MOST_READS = 4
PIECE = 512  # numbers of each source that a program reads


@triton.jit
def score_sources(
    s0, s1, s2, s3, s4, s5, s6, s7, s8, s9, s10, s11, s12, s13, s14, s15,
    r0, r1, r2, r3, r4, r5, r6, r7, r8, r9, r10, r11, r12, r13, r14, r15,
    queries, scores, scales, eps,
    N: tl.constexpr, BLOCK: tl.constexpr, COUNT: tl.constexpr, READS: tl.constexpr,
):  # fmt: skip
    """scales [T, COUNT] = 1 / rms of a source, scores [T, READS, COUNT] = query · source / rms, both float32.

    s0 and on: the sources [T, N], r0 and on: their rows' strides. queries: [READS, N]. Grid: (T, COUNT).
    """
    await_previous()
    sources = (s0, s1, s2, s3, s4, s5, s6, s7, s8, s9, s10, s11, s12, s13, s14, s15)
    strides = (r0, r1, r2, r3, r4, r5, r6, r7, r8, r9, r10, r11, r12, r13, r14, r15)
    row, which = tl.program_id(0).to(tl.int64), tl.program_id(1)
    c = tl.arange(0, BLOCK)
    there = c < N
    h = tl.zeros([BLOCK], tl.float32)
    for k in tl.static_range(COUNT):
        if which == k:
            h = tl.load(sources[k] + row * strides[k] + c, mask=there, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(h * h, 0) / N + eps)
    tl.store(scales + row * COUNT + which, scale)
    for r in tl.static_range(READS):
        query = tl.load(queries + r * N + c, mask=there, other=0.0)
        tl.store(scores + (row * READS + r) * COUNT + which, tl.sum(h * query, 0) * scale)


@triton.jit
def share_sources(
    s0, s1, s2, s3, s4, s5, s6, s7, s8, s9, s10, s11, s12, s13, s14, s15,
    r0, r1, r2, r3, r4, r5, r6, r7, r8, r9, r10, r11, r12, r13, r14, r15,
    scores, scales, out,
    N: tl.constexpr, BLOCK: tl.constexpr, COUNT: tl.constexpr, READS: tl.constexpr, NORMED: tl.constexpr,
):  # fmt: skip
    """out [T, READS, N] = Σ_k softmax_k(scores) source_k, with NORMED times its scale. Grid: (T, pieces)."""
    await_previous()
    sources = (s0, s1, s2, s3, s4, s5, s6, s7, s8, s9, s10, s11, s12, s13, s14, s15)
    strides = (r0, r1, r2, r3, r4, r5, r6, r7, r8, r9, r10, r11, r12, r13, r14, r15)
    row = tl.program_id(0).to(tl.int64)
    c = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    there = c < N
    shares, mixed = (), ()
    for r in tl.static_range(READS):
        masses, at = (), scores + (row * READS + r) * COUNT
        top = tl.load(at)
        for k in tl.static_range(1, COUNT):
            top = tl.maximum(top, tl.load(at + k))
        whole = tl.zeros([], tl.float32)
        for k in tl.static_range(COUNT):
            mass = tl.exp(tl.load(at + k) - top)
            whole += mass
            masses += (mass,)  # type: ignore[assignment]
        for k in tl.static_range(COUNT):
            share = masses[k] / whole
            if NORMED:
                share = share * tl.load(scales + row * COUNT + k)
            shares += (share,)  # type: ignore[assignment]
        mixed += (tl.zeros([BLOCK], tl.float32),)  # type: ignore[assignment]
    for k in tl.static_range(COUNT):
        value = tl.load(sources[k] + row * strides[k] + c, mask=there, other=0.0).to(tl.float32)
        more = ()
        for r in tl.static_range(READS):
            more += (mixed[r] + shares[r * COUNT + k] * value,)  # type: ignore[assignment]
        mixed = more
    for r in tl.static_range(READS):
        tl.store(out + (row * READS + r) * N + c, mixed[r].to(out.dtype.element_ty), mask=there)


def _why_not(facts: OpFacts) -> str | None:
    count, reads = facts.sizes.get("sources", 0), facts.sizes.get("reads", 1)
    if count > MOST or reads > MOST_READS:
        return f"{count} sources and {reads} queries; a kernel has {MOST} pointers, and {MOST_READS} sums"
    return why_too_wide(facts)


@mix_sources.variant(NAME, on="cuda", when=_why_not)
def mix_in_two_launches(queries: Tensor, eps: float, of_normed: bool, *sources: Tensor) -> Tensor:
    """`mix_sources`: the same arguments and result."""
    found = [pack_rows(x) for x in sources]
    count, reads, (tokens, width) = len(found), len(queries), sources[0].shape
    filled = [*found, *found[:1] * (MOST - count)]
    where = (*filled, *(x.stride(0) for x in filled))
    scores = torch.empty(tokens, reads, count, dtype=torch.float32, device=queries.device)
    scales = torch.empty(tokens, count, dtype=torch.float32, device=queries.device)
    out = torch.empty(tokens, reads * width, dtype=found[0].dtype, device=queries.device)
    constants = {"COUNT": count, "READS": reads}
    launch(
        score_sources, (tokens, count), *where, queries, scores, scales, eps,
        **row_constants(width), **constants,
    )  # fmt: skip
    sizes = _piece_constants(width)
    launch(
        share_sources, (tokens, triton.cdiv(width, sizes["BLOCK"])), *where, scores, scales, out,
        **sizes, **constants, NORMED=of_normed,
    )  # fmt: skip
    return out


def _piece_constants(width: int) -> dict[str, int]:
    block = min(PIECE, triton.next_power_of_2(width))
    return {"N": width, "BLOCK": block, "num_warps": max(block // 256, 1)}


TYPES = {
    **{f"s{k}": "bf16*" for k in range(MOST)}, **{f"r{k}": "i32!" for k in range(MOST)},
    "queries": "fp32*", "scores": "fp32*", "scales": "fp32*", "eps": "fp32", "out": "bf16*",
}  # fmt: skip
SIZES = {  # width, sources, queries, whether normed
    "kimi-k3": (7168, 9, 1, False),
    "inkling-2": (6144, 9, 1, True),
    "inkling-2, three queries": (6144, 9, 3, True),
}


@with_float16
@with_float32
def forms() -> Iterator[KernelForm]:
    """What models launch; the first launch does not know what the second mixes."""
    for name, (width, count, reads, normed) in SIZES.items():
        shared = {"COUNT": count, "READS": reads}
        whole, piece = row_constants(width), _piece_constants(width)
        warps = whole.pop("num_warps"), piece.pop("num_warps")
        constants = whole | shared
        yield KernelForm(
            f"score_sources, {name}", score_sources, TYPES, constants, warps[0], demands=(("LDG.128",),)
        )
        constants = piece | shared | {"NORMED": normed}
        wide = (("LDG.128",), ("STG.128",))
        yield KernelForm(f"share_sources, {name}", share_sources, TYPES, constants, warps[1], demands=wide)
