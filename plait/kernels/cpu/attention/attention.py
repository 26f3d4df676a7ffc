"""Attention over paged keys and values, float32, bfloat16 or codes, with windows, softcaps and shared heads.

The caches keep their shape. Inside, keys lie as [block][kv head][sixteen tokens][column][token] (bfloat16:
[column pair][token][2]) and values as [block][kv head][token][column]. So lanes are tokens for the scores and
columns for the outputs, and nothing but the softmax is summed across lanes.

Int8 lies by groups of sixteen tokens with their scales behind them, rounded as `ops.entry` does: [block]
[kv head][sixteen tokens][codes (keys: [column][token], values: [token][column]), scales (keys: [group of
columns][token], values: [token])]. Int4 keys lie so, too: [codes [column pair][token], the even column in the
lower half; then of each group of columns steps [token] and offsets [token]]. A token's int4 values, and a
latent, lie as `ops.entry` says. Keys, and values of int8, are mixed before they become codes (`mix`): queries
with keys, and what is a sum of values is turned back.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from plait.errors import ShapeMismatch
from plait.kernels.cpu.attention.mix import mix_heads, turn_back
from plait.kernels.cpu.attention.source import Form, module, record_bytes
from plait.kernels.cpu.codegen.kernel import Kernel, inline, kernel
from plait.kernels.cpu.codegen.kinds import Int
from plait.kernels.cpu.codegen.vec import (
    absolute,
    div,
    fma,
    get_bf16,
    get_f32,
    get_i32,
    get_i64,
    get_u8,
    largest,
    load_f32,
    load_some,
    mul,
    nearest,
    peak,
    put_bf16,
    put_f32,
    put_i32,
    put_u8,
    smallest,
    spread,
    store_bf16,
    store_i8,
    sub,
    to_i32,
    total,
    words,
    zero_f32,
)
from plait.kernels.cpu.runtime.executor import Executor
from plait.kernels.cpu.runtime.frame import rows_of, scratch_of
from plait.kernels.cpu.runtime.row_checks import TensorRows, dense, float32_rows
from plait.ops.attention import paged_attention
from plait.ops.entry import CODED, KEY_GROUP, NIBBLE_GROUP, SCALE_NBYTES, count_mixed, head_widths
from plait.ops.registry import OpFacts

SPAN = 256  # tokens of a split: their scores are in L1 together; threads share out a long sequence by splits
APART = 8 << 20  # bytes for parts of rows: beyond, one thread computes all splits of a row
LOCATE = "locate(args, s, kv_head, at, first, end, {k_bytes}, {v_bytes}, to, {groups})"
SCRATCH = 64  # bytes of each thread that writes codes
LEAN = "lean(args, scores + r * {line}, head, tail, at, position, kv_head, base + i + r, {unit})"
UNIT = "np.float32(1.0) / get_f32(args + 8 * SCALE)"
WEIGH = "weigh(args, scores + r * {line}, head, tail, values)"
CODES = {torch.int8: "int8", torch.uint8: "int4"}
KEPT = (torch.float32, torch.bfloat16, *CODES)


@kernel
def store_rows(frame: int, args: int, thread: int, threads: int) -> None:
    """k, its strides, v, its strides, k_cache, v_cache, slots, kv_heads, d, block_size, bytes of a number."""
    k, k_row, k_head, v, v_row, v_head, keys, values, slots, heads, d, block, size = words(args, 2, 15)
    items, pairs = rows_of(frame, args) * heads, scratch_of(frame, thread)
    for item in range(items * thread // threads, items * (thread + 1) // threads):
        token, head = item // heads, item % heads
        slot = get_i64(slots + 8 * token)
        place, offset = slot // block * heads + head, slot % block
        x, y = k + token * k_row + head * k_head, v + token * v_row + head * v_head
        group = keys + (place * block + offset // 16 * 16) * d * size
        row = values + (place * block + offset) * d * size
        if size == 4:
            at = group + 4 * (offset % 16)
            for i in range(d):
                put_f32(at + 64 * i, get_f32(x + 4 * i))
                put_f32(row + 4 * i, get_f32(y + 4 * i))
        else:
            at, whole = group + 4 * (offset % 16), d // 16 * 16
            for i in range(0, whole, 16):
                store_bf16(pairs + 2 * i, load_f32(x + 4 * i))
                store_bf16(row + 2 * i, load_f32(y + 4 * i))
            for i in range(whole, d):
                put_bf16(pairs + 2 * i, get_f32(x + 4 * i))
                put_bf16(row + 2 * i, get_f32(y + 4 * i))
            for i in range(d // 2):
                put_i32(at + 64 * i, get_i32(pairs + 4 * i))


@inline
def code(x: Int, n: Int, to: Int, stride: Int, scale: Int, scratch: Int) -> None:
    """n floats become codes, `stride` bytes apart, under a scale that goes to the address `scale`.

    A number that is infinite or none makes the scale none: what reads it is not a number either.
    """
    top, odd = zero_f32(), zero_f32()
    for i in range(0, n, 16):
        v = load_some(x + 4 * i, np.int32(n - i))
        top, odd = largest(top, absolute(v)), fma(v, zero_f32(), odd)
    put_bf16(scale, peak(top) / np.float32(127.0) + total(odd))
    step = get_bf16(scale)
    unit = spread(step if step > np.float32(0.0) else np.float32(1.0))
    low, high = spread(np.float32(-127.0)), spread(np.float32(127.0))
    for i in range(0, n, 16):
        v = smallest(largest(div(load_some(x + 4 * i, np.int32(n - i)), unit), low), high)
        store_i8(scratch, to_i32(nearest(v)))
        for j in range(min(n - i, 16)):
            put_u8(to + stride * (i + j), get_u8(scratch + j))


@kernel
def store_codes(frame: int, args: int, thread: int, threads: int) -> None:
    """k, its strides, v, its strides, k_cache, v_cache, slots, kv_heads, d, block_size, columns of a key's
    scale."""
    k, k_row, k_head, v, v_row, v_head, keys, values, slots, heads, d, block, part = words(args, 2, 15)
    scratch, items = scratch_of(frame, thread), rows_of(frame, args) * heads
    for item in range(items * thread // threads, items * (thread + 1) // threads):
        token, head = item // heads, item % heads
        slot = get_i64(slots + 8 * token)
        lane = slot % 16
        group = (slot // block * heads + head) * block + slot % block - lane
        x, y = k + token * k_row + head * k_head, v + token * v_row + head * v_head
        key, value = keys + group * (d + (d + part - 1) // part * 2), values + group * (d + 2)
        for i in range(0, d, part):
            scale = key + 16 * d + 32 * (i // part) + 2 * lane
            code(x + 4 * i, min(d - i, part), key + 16 * i + lane, 16, scale, scratch)
        code(y, d, value + d * lane, 1, value + 16 * d + 2 * lane, scratch)


@kernel
def store_latent_codes(frame: int, args: int, thread: int, threads: int) -> None:
    """latent, its row stride, cache, slots, columns in codes, of a scale; where the rest begins, how many
    numbers it has, bytes of an entry."""
    latent, row_bytes, cached, slots, n, group, rest_at, rest, width = words(args, 2, 11)
    scratch, rows = scratch_of(frame, thread), rows_of(frame, args)
    for r in range(rows * thread // threads, rows * (thread + 1) // threads):
        x, to = latent + r * row_bytes, cached + get_i64(slots + 8 * r) * width
        for i in range(0, n, group):
            code(x + 4 * i, min(n - i, group), to + i, 1, to + n + i // group * 2, scratch)
        for i in range(rest):
            put_bf16(to + rest_at + 2 * i, get_f32(x + 4 * (n + i)))


@inline
def code_nibbles(x: Int, scratch: Int, step_at: Int, offset_at: Int) -> None:
    """32 floats become codes, a byte each at `scratch`, under a step and an offset, which are stored.

    A number that is infinite or none makes the step none: what reads it is not a number either.
    """
    a, b, zero = load_f32(x), load_f32(x + 64), zero_f32()
    high, low = peak(largest(a, b)), -peak(sub(zero, smallest(a, b)))
    odd = total(fma(a, zero, mul(b, zero)))
    put_bf16(step_at, (high - low) / np.float32(15.0) + odd)
    put_bf16(offset_at, low)
    step = get_bf16(step_at)
    unit, offset = spread(step if step > np.float32(0.0) else np.float32(1.0)), spread(get_bf16(offset_at))
    most = spread(np.float32(15.0))
    for i in range(2):
        v = smallest(largest(div(sub(load_f32(x + 64 * i), offset), unit), zero), most)
        store_i8(scratch + 16 * i, to_i32(nearest(v)))


@kernel
def store_nibbles(frame: int, args: int, thread: int, threads: int) -> None:
    """k, its strides, v, its strides, k_cache, v_cache, slots, kv_heads, d, block_size."""
    k, k_row, k_head, v, v_row, v_head, keys, values, slots, heads, d, block = words(args, 2, 14)
    codes, items, width = scratch_of(frame, thread), rows_of(frame, args) * heads, d // 8 * 5
    for item in range(items * thread // threads, items * (thread + 1) // threads):
        token, head = item // heads, item % heads
        slot = get_i64(slots + 8 * token)
        lane = slot % 16
        group = (slot // block * heads + head) * block + slot % block - lane
        x, y = k + token * k_row + head * k_head, v + token * v_row + head * v_head
        key, value = keys + group * width, values + (group + lane) * width
        for i in range(0, d, 32):
            scale = key + 8 * d + 2 * i + 2 * lane
            code_nibbles(x + 4 * i, codes, scale, scale + 32)
            for p in range(16):
                both = get_u8(codes + 2 * p) | get_u8(codes + 2 * p + 1) << np.int32(4)
                put_u8(key + 8 * i + 16 * p + lane, both)
            scale = value + d // 2 + i // 8
            code_nibbles(y + 4 * i, codes, scale, scale + 2)
            for p in range(16):
                put_u8(value + i // 2 + p, get_u8(codes + p) | get_u8(codes + 16 + p) << np.int32(4))


@kernel
def store_latent_nibbles(frame: int, args: int, thread: int, threads: int) -> None:
    """latent, its row stride, cache, slots, columns in codes, numbers of the rest, bytes of an entry."""
    latent, row_bytes, cached, slots, n, rest, width = words(args, 2, 9)
    codes, rows = scratch_of(frame, thread), rows_of(frame, args)
    for r in range(rows * thread // threads, rows * (thread + 1) // threads):
        x, to = latent + r * row_bytes, cached + get_i64(slots + 8 * r) * width
        for i in range(0, n, 32):
            scale = to + n // 2 + i // 8
            code_nibbles(x + 4 * i, codes, scale, scale + 2)
            for p in range(16):
                put_u8(to + i // 2 + p, get_u8(codes + p) | get_u8(codes + 16 + p) << np.int32(4))
        for i in range(rest):
            put_bf16(to + n // 8 * 5 + 2 * i, get_f32(x + 4 * (n + i)))


def _nibble_form() -> Form:
    k_bytes, v_bytes = (f"word(args, {dim}) // 8 * 5" for dim in ("K_DIM", "V_DIM"))
    made = Form(
        name="int4",
        span=SPAN,
        key_size=0,
        value_size=0,
        stride=v_bytes,
        locate=LOCATE.format(k_bytes=k_bytes, v_bytes=v_bytes, groups=SPAN // 16),
        next_keys=f"word(args, BLOCK) * ({k_bytes})",
    )
    return replace(made, lean=LEAN.format(line=made.line, unit=UNIT))


def form_of(dtype: torch.dtype) -> Form:
    if dtype == torch.uint8:
        return _nibble_form()
    size = dtype.itemsize
    k_bytes, v_bytes = (f"word(args, {dim}) * {size}" for dim in ("K_DIM", "V_DIM"))
    coded = dtype == torch.int8
    if coded:
        scales = f"(word(args, K_DIM) + {KEY_GROUP - 1}) // {KEY_GROUP} * {SCALE_NBYTES}"
        k_bytes, v_bytes = f"word(args, K_DIM) + {scales}", f"word(args, V_DIM) + {SCALE_NBYTES}"
    made = Form(
        name=str(dtype).removeprefix("torch."),
        span=SPAN,
        key_size=size,
        value_size=size,
        stride=f"word(args, V_DIM) * {size}",
        locate=LOCATE.format(k_bytes=k_bytes, v_bytes=v_bytes, groups=SPAN // 16),
        next_keys=f"word(args, BLOCK) * ({k_bytes})",
    )
    lean = LEAN.format(line=made.line, unit=UNIT)
    return replace(made, lean=lean, weigh=WEIGH.format(line=made.line) if coded else made.weigh)


@cache
def attend_of(dtype: torch.dtype) -> Kernel:
    """The kernel for caches of this dtype."""
    made: Kernel = module(form_of(dtype)).attend
    return made


def why_unstorable(facts: OpFacts) -> str | None:
    """Why caches like these cannot be kept here, if so."""
    if reason := float32_rows(facts):
        return reason
    if (kept := facts.sizes.get("kv_dtype", "model")) not in ("model", "float32", "bfloat16", *CODED):
        return f"it keeps float32, bfloat16, int8 or int4, not {kept}"
    if facts.sizes.get("block_size", 16) % 16:
        return f"it wants blocks of 16, 32, ... tokens, not of {facts['block_size']}"
    return None


def why_unserved(facts: OpFacts) -> str | None:
    """Why the native kernels cannot serve these facts, if so."""
    if facts.sizes.get("dim", 2) % 2:
        return f"it wants heads of even size, not of {facts['dim']}"
    if facts.sizes.get("kv_dtype") == "int8" and facts.sizes.get("dim", 4) % 4:
        return f"it keeps int8 for heads of a multiple of 4, not of {facts['dim']}"
    if facts.sizes.get("kv_dtype") == "int4" and facts.sizes.get("dim", 32) % NIBBLE_GROUP:
        return f"it keeps int4 for heads of a multiple of {NIBBLE_GROUP}, not of {facts['dim']}"
    return why_unstorable(facts)


@dataclass(frozen=True, slots=True)
class Chosen:
    """What computes attention: a kernel, its form, and the one that it calls for few tokens, if it does."""

    kernel: Kernel
    form: Form
    few: Chosen | None = None

    def scratch(self, k_dim: int, v_dim: int) -> int:
        """Bytes per thread: for whichever kernel computes a step."""
        own = self.form.scratch(k_dim, v_dim)
        return max(own, self.few.scratch(k_dim, v_dim)) if self.few else own


def attend(
    cpu: Executor,
    chosen: Chosen | None,
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
    slopes: Tensor | None = None,
) -> Tensor:
    """See `ops.attention.paged_attention`. `chosen`: another kernel than the usual one of these caches.

    Without k and v, another layer of the step has stored them.
    """
    rows = TensorRows.of(q)
    size, kv_heads = k_cache.shape[1:3]
    kept, d = CODES.get(k_cache.dtype, "model"), rows.width
    widths = head_widths(d, kept)
    for name, cached, width in zip(("k_cache", "v_cache"), (k_cache, v_cache), widths, strict=True):
        check_cache(name, cached, (size, kv_heads, width), k_cache.dtype)
    check_index(block_table, slot_mapping, query_start, seq_lens)
    _check_heads(q, k, v, (kv_heads, d), {"int8": 4, "int4": NIBBLE_GROUP}.get(kept, 2))
    for name, each in (("sinks", sinks), ("slopes", slopes)):
        if each is not None:
            dense(name, each, rows.heads)
    if kept in CODED:
        q, k, mixed_v = mix_heads(cpu, q, k, v if kept == "int8" else None)
        v = v if mixed_v is None else mixed_v
        rows, scale = TensorRows.of(q), scale / count_mixed(d)
    if k is not None and v is not None:
        _store(cpu, k, v, k_cache, v_cache, slot_mapping)
    out = cpu.empty(*q.shape)
    spans = -(-block_table.shape[1] * size // SPAN)
    apart = min(APART, rows.count * rows.heads * spans * record_bytes(d))
    chosen = chosen or Chosen(attend_of(k_cache.dtype), form_of(k_cache.dtype))
    cpu.launch(
        chosen.kernel, q, *rows.strides, out, k_cache, v_cache, block_table,
        block_table.stride(0) * 8, query_start, seq_lens, rows.heads, kv_heads, d, d, size, window or 0,
        float(scale), float(softcap or 0), apart, sinks, chosen.few.kernel.address if chosen.few else 0,
        slopes,
        rows=rows.count, seqs=seq_lens.shape[0], scratch=chosen.scratch(d, d), shared=apart,
    )  # fmt: skip
    if kept == "int8":
        turn_back(cpu, out)
    return out


def _store(cpu: Executor, k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slots: Tensor) -> None:
    k_rows, v_rows = TensorRows.of(k), TensorRows.of(v)
    size, kv_heads = k_cache.shape[1:3]
    new = (k, *k_rows.strides, v, *v_rows.strides, k_cache, v_cache, slots, kv_heads, k_rows.width, size)
    if k_cache.dtype == torch.int8:
        cpu.launch(store_codes, *new, KEY_GROUP, rows=k_rows.count, scratch=SCRATCH)
    elif k_cache.dtype == torch.uint8:
        cpu.launch(store_nibbles, *new, rows=k_rows.count, scratch=SCRATCH)
    else:
        scratch = 2 * k_rows.width
        cpu.launch(store_rows, *new, k_cache.element_size(), rows=k_rows.count, scratch=scratch)


@paged_attention.variant("native", on="cpu", when=why_unserved, native=True)
def _paged_attention(cpu: Executor, *args: Any, **more: Any) -> Tensor:
    return attend(cpu, None, *args, **more)


def check_cache(name: str, cached: Tensor, entry: tuple[int, ...], dtype: torch.dtype) -> None:
    """Raises ShapeMismatch unless the cache is dense [blocks, *entry] of whole groups of sixteen tokens."""
    known = cached.dtype == dtype and dtype in KEPT and cached.is_contiguous()
    if not known or tuple(cached.shape[1:]) != entry or entry[0] % 16:
        raise ShapeMismatch(
            f"{name}: native attention wants contiguous float32, bfloat16 or codes [blocks, {entry}], the "
            "same for keys and values, blocks being of 16, 32, ... tokens, got "
            f"{cached.dtype} {list(cached.shape)} strides {cached.stride()}"
        )


def check_index(table: Tensor, slots: Tensor, starts: Tensor, lens: Tensor) -> None:
    """Raises ShapeMismatch unless these are the int64 tensors of a batch."""
    names = ("block_table", "slot_mapping", "query_start", "seq_lens")
    for name, x in zip(names, (table, slots, starts, lens), strict=True):
        if x.dtype != torch.int64 or (x.shape[-1] > 1 and x.stride(-1) != 1):
            raise ShapeMismatch(
                f"{name}: int64 with a dense last dimension is wanted, got {x.dtype} {x.stride()}"
            )
    if starts.shape[0] < lens.shape[0] + 1 or table.shape[0] < lens.shape[0]:
        raise ShapeMismatch(
            f"{lens.shape[0]} sequences want as many rows of block_table and one more query_start, got "
            f"{table.shape[0]} and {starts.shape[0]}"
        )


def _check_heads(q: Tensor, k: Tensor | None, v: Tensor | None, kept: tuple[int, int], step: int) -> None:
    kv_heads, d = kept
    shapes = [None if x is None else list(x.shape) for x in (k, v)]
    new_ones = shapes in ([[q.shape[0], kv_heads, d]] * 2, [None, None])
    if not new_ones or q.dim() != 3 or q.shape[2] != d or q.shape[1] % kv_heads or d % step:
        raise ShapeMismatch(
            f"q {list(q.shape)}, k {shapes[0]}, v {shapes[1]} do not fit caches of {kv_heads} kv "
            f"heads of {d}: heads must be a multiple of kv heads, all of one size, a multiple of {step}"
        )
