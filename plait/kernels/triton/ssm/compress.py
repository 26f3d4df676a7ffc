"""Compressed entries of DeepSeek-V4 in one launch: decodes and chunks of prompts alike.

Of each channel a program holds the softmax so far of the window in the making: the largest logit, the sum,
the weighted sum. With two parts it holds three of these: the first and the second part of this window, and
the first part of the window before. It has BC channels of one sequence and walks the sequence's tokens in
order; nothing is shared between programs. So a row's bits depend on its history only, and a prompt may be cut
anywhere. Of several tokens the loads come first, because only they take long.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import triton
import triton.language as tl
from torch import Tensor

from plait.kernels.triton.dependent_launch import await_previous
from plait.kernels.triton.forms import KernelForm, with_float16, with_float32
from plait.ops.compressed import compress_tokens
from plait.ops.launch import launch

NAME = "triton"
CHANNELS = 64  # of a program of one warp
UNROLLED = 4  # tokens of which the loads come first, in steps with prompts


@triton.jit
def fold_softmax(top, total, mixed, other_top, other_total, other_mixed):
    """Two softmaxes so far as one; the first may be empty, which is a sum of 0."""
    has = total > 0
    best = tl.where(has, tl.maximum(top, other_top), other_top)
    left, right = tl.exp(top - best), tl.exp(other_top - best)
    total = other_total * right + tl.where(has, total * left, 0.0)
    return best, total, other_mixed * right + tl.where(has, mixed * left, 0.0)


@triton.jit
def _load_softmax(at, D: tl.constexpr, there):
    """(largest, sum, weighted sum) of each channel; zeros without history."""
    top = tl.load(at, mask=there, other=0.0)
    return top, tl.load(at + D, mask=there, other=0.0), tl.load(at + 2 * D, mask=there, other=0.0)


@triton.jit
def _store_softmax(at, D: tl.constexpr, ok, top, total, mixed):
    tl.store(at, top, mask=ok)
    tl.store(at + D, total, mask=ok)
    tl.store(at + 2 * D, mixed, mask=ok)


@triton.jit
def compress_windows(
    kv, gate, bias, state, slots, query_start, has_history, positions, entries, firsts, kv_row, gate_row,
    RATE: tl.constexpr, D: tl.constexpr, PARTS: tl.constexpr, BC: tl.constexpr, U: tl.constexpr,
):  # fmt: skip
    """kv, gate: [T, PARTS D], bias: [RATE, PARTS D], state: [slots, 2 PARTS - 1, 3, D] -> entries [T, D].

    firsts: [T], the first position of each token's window. Grid: (D / BC, S). With one part the second and
    the one before stay empty.
    """
    await_previous()
    block, s = tl.program_id(0), tl.program_id(1)
    c = block * BC + tl.arange(0, BC)
    ok = c < D
    first, end = tl.load(query_start + s).to(tl.int64), tl.load(query_start + s + 1).to(tl.int64)
    slot, past = tl.load(slots + s).to(tl.int64), tl.load(has_history + s).to(tl.int32)
    at, there = state + slot * ((2 * PARTS - 1) * 3 * D) + c, c < D * past
    top, total, mixed = _load_softmax(at, D, there)
    second_top, second_total, second_mixed = top, total, mixed
    old_top, old_total, old_mixed = top, total, mixed
    if PARTS == 2:
        second_top, second_total, second_mixed = _load_softmax(at + 3 * D, D, there)
        old_top, old_total, old_mixed = _load_softmax(at + 6 * D, D, there)
    for start in range(first, end, U):
        places, logits, numbers, second_logits, second_numbers = (), (), (), (), ()
        for k in tl.static_range(U):
            row = start + k + tl.zeros([], tl.int64)
            wide = c < tl.where(row < end, D, 0)
            place = tl.load(positions + tl.minimum(row, end - 1)).to(tl.int64)
            own = bias + place % RATE * (PARTS * D) + c
            logit = tl.load(gate + row * gate_row + c, mask=wide, other=0.0).to(tl.float32)
            logit += tl.load(own, mask=wide, other=0.0)
            number = tl.load(kv + row * kv_row + c, mask=wide, other=0.0).to(tl.float32)
            places += (place,)  # type: ignore[assignment]
            logits += (logit,)  # type: ignore[assignment]
            numbers += (number,)  # type: ignore[assignment]
            if PARTS == 2:
                logit = tl.load(gate + row * gate_row + D + c, mask=wide, other=0.0).to(tl.float32)
                logit += tl.load(own + D, mask=wide, other=0.0)
                number = tl.load(kv + row * kv_row + D + c, mask=wide, other=0.0).to(tl.float32)
                second_logits += (logit,)  # type: ignore[assignment]
                second_numbers += (number,)  # type: ignore[assignment]
        for k in tl.static_range(U):
            row = start + k + tl.zeros([], tl.int64)
            is_there = row < end
            wide, within = c < tl.where(is_there, D, 0), places[k] % RATE
            begins = is_there & (within == 0)
            if PARTS == 2:
                old_top = tl.where(begins, top, old_top)
                old_total, old_mixed = tl.where(begins, total, old_total), tl.where(begins, mixed, old_mixed)
                second_total = tl.where(begins, 0.0, second_total)
                new_top, new_total, new_mixed = fold_softmax(
                    second_top, second_total, second_mixed, second_logits[k], 1.0, second_numbers[k]
                )
                second_top = tl.where(is_there, new_top, second_top)
                second_total = tl.where(is_there, new_total, second_total)
                second_mixed = tl.where(is_there, new_mixed, second_mixed)
            total = tl.where(begins, 0.0, total)
            new_top, new_total, new_mixed = fold_softmax(top, total, mixed, logits[k], 1.0, numbers[k])
            top, total = tl.where(is_there, new_top, top), tl.where(is_there, new_total, total)
            mixed = tl.where(is_there, new_mixed, mixed)
            whole, weighed = total, mixed
            if PARTS == 2:
                _, whole, weighed = fold_softmax(
                    old_top, old_total, old_mixed, second_top, second_total, second_mixed
                )
            entry = tl.where(within == RATE - 1, weighed / whole, 0.0)
            tl.store(entries + row * D + c, entry.to(entries.dtype.element_ty), mask=wide)
            tl.store(firsts + row, places[k] - within, mask=is_there & (block == 0))
    _store_softmax(at, D, ok, top, total, mixed)
    if PARTS == 2:
        _store_softmax(at + 3 * D, D, ok, second_top, second_total, second_mixed)
        _store_softmax(at + 6 * D, D, ok, old_top, old_total, old_mixed)


def _constants(rate: int, size: int, parts: int, is_decode: bool) -> dict[str, int]:
    """What the kernel is compiled for. is_decode: every sequence has one token."""
    return {"RATE": rate, "D": size, "PARTS": parts, "BC": CHANNELS, "U": 1 if is_decode else UNROLLED}


@compress_tokens.variant(NAME, on="cuda")
def compress(
    kv: Tensor,
    gate: Tensor,
    bias: Tensor,
    state: Tensor,
    slots: Tensor,
    query_start: Tensor,
    has_history: Tensor,
    positions: Tensor,
    rate: int,
) -> tuple[Tensor, Tensor]:
    """`compress_tokens`: the same arguments and results."""
    (tokens, wide), size, seqs = kv.shape, state.shape[-1], len(slots)
    entries = torch.empty(tokens, size, dtype=kv.dtype, device=kv.device)
    firsts = torch.empty_like(positions)
    if not tokens:
        return entries, firsts
    kv, gate = (m if m.stride(-1) == 1 else m.contiguous() for m in (kv, gate))
    constants = _constants(rate, size, wide // size, tokens == seqs)
    launch(
        compress_windows, (triton.cdiv(size, CHANNELS), seqs),
        kv, gate, bias, state, slots, query_start, has_history, positions, entries, firsts,
        kv.stride(0), gate.stride(0), **constants, num_warps=1,
    )  # fmt: skip
    return entries, firsts


POINTERS = {
    **dict.fromkeys(("kv", "gate", "entries"), "bf16*"),
    **dict.fromkeys(("bias", "state"), "fp32*"),
    **dict.fromkeys(("slots", "query_start", "positions", "firsts"), "i64*"),
    "has_history": "i1*",
    "kv_row": "i32!",
    "gate_row": "i32!",
}
SHAPES = {  # rate, size, parts
    "DeepSeek-V4, every 4th": (4, 512, 2),
    "DeepSeek-V4, every 128th": (128, 512, 1),
    "DeepSeek-V4, index": (4, 128, 2),
}


@with_float16
@with_float32
def forms() -> Iterator[KernelForm]:
    """What models of published sizes launch, for decodes and for steps with prompts."""
    for name, (rate, size, parts) in SHAPES.items():
        for step in ("decodes", "prompts"):
            yield KernelForm(
                f"compress, {name}, {step}", compress_windows, POINTERS,
                _constants(rate, size, parts, step == "decodes"), num_warps=1,
            )  # fmt: skip
