"""Keys, values and latents become codes of eight and four bits, where a cache has them.

`plait.ops.entry` has how numbers are rounded, `attention.py` how the codes of heads lie in groups of sixteen
tokens. A latent's lie as its entry says. `seven_bits.py` has those of seven bits.
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
    load_f32,
    load_some,
    mul,
    nearest,
    peak,
    put_bf16,
    put_u8,
    smallest,
    spread,
    store_i8,
    sub,
    to_i32,
    total,
    words,
    zero_f32,
)
from plait.kernels.cpu.runtime.frame import rows_of, scratch_of

SCRATCH = 64  # bytes of each thread that writes codes


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


@inline
def code_key(x: Int, d: Int, part: Int, key: Int, lane: Int, scratch: Int) -> None:
    """One token's key of a head, as codes and scales for every `part` columns. key: of sixteen tokens."""
    for i in range(0, d, part):
        scale = key + 16 * d + 32 * (i // part) + 2 * lane
        code(x + 4 * i, min(d - i, part), key + 16 * i + lane, 16, scale, scratch)


@inline
def find_lane(item: Int, slots: Int, heads: Int, block: Int) -> tuple[Int, Int, Int, Int]:
    """Of one head of one token: both, its lane among sixteen entries, and which entry is their first."""
    token, head = item // heads, item % heads
    slot = get_i64(slots + 8 * token)
    lane = slot % 16
    return token, head, lane, (slot // block * heads + head) * block + slot % block - lane


@kernel
def store_codes(frame: int, args: int, thread: int, threads: int) -> None:
    """k, its strides, v, its strides, k_cache, v_cache, slots, kv_heads, d, block_size, columns of a key's
    scale."""
    k, k_row, k_head, v, v_row, v_head, keys, values, slots, heads, d, block, part = words(args, 2, 15)
    scratch, items = scratch_of(frame, thread), rows_of(frame, args) * heads
    for item in range(items * thread // threads, items * (thread + 1) // threads):
        token, head, lane, group = find_lane(item, slots, heads, block)
        x, y = k + token * k_row + head * k_head, v + token * v_row + head * v_head
        key, value = keys + group * (d + (d + part - 1) // part * 2), values + group * (d + 2)
        code_key(x, d, part, key, lane, scratch)
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
        token, head, lane, group = find_lane(item, slots, heads, block)
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
