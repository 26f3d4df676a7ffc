"""Int8 KV cache: writes keys, values and latents as codes under scales, as `ops.entry` rounds them.

Heads lie as in `attention.py`, but by groups of sixteen tokens with their scales behind them: [block]
[kv head][sixteen tokens][codes (keys: [column][token], values: [token][column]), scales (keys: [group of
columns][token], values: [token])]. A latent lies as `ops.entry` says.
"""

from __future__ import annotations

import numpy as np

from plait.kernels.cpu.codegen.kernel import inline, kernel
from plait.kernels.cpu.codegen.kinds import Int
from plait.kernels.cpu.codegen.vec import (
    absolute,
    div,
    fma,
    get_bf16,
    get_f32,
    get_i64,
    get_u8,
    largest,
    load_some,
    nearest,
    peak,
    put_bf16,
    put_u8,
    smallest,
    spread,
    store_i8,
    to_i32,
    total,
    zero_f32,
)
from plait.kernels.cpu.runtime.frame import rows_of, scratch_of, word

SCRATCH = 64  # bytes of each thread


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
    k, k_row, k_head = word(args, 2), word(args, 3), word(args, 4)
    v, v_row, v_head = word(args, 5), word(args, 6), word(args, 7)
    keys, values, slots = word(args, 8), word(args, 9), word(args, 10)
    heads, d, block, part = word(args, 11), word(args, 12), word(args, 13), word(args, 14)
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
    latent, row_bytes, cached, slots = word(args, 2), word(args, 3), word(args, 4), word(args, 5)
    n, group, rest_at = word(args, 6), word(args, 7), word(args, 8)
    rest, width = word(args, 9), word(args, 10)
    scratch, rows = scratch_of(frame, thread), rows_of(frame, args)
    for r in range(rows * thread // threads, rows * (thread + 1) // threads):
        x, to = latent + r * row_bytes, cached + get_i64(slots + 8 * r) * width
        for i in range(0, n, group):
            code(x + 4 * i, min(n - i, group), to + i, 1, to + n + i // group * 2, scratch)
        for i in range(rest):
            put_bf16(to + rest_at + 2 * i, get_f32(x + 4 * (n + i)))
