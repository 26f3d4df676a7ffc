"""Whether kernels are right on this processor: tried before any is bound, where tests had no such processor.

On x86-64 every form of every kernel is tested on processors that have it: nothing is done here. Those for
aarch64 have run on emulated processors only, and those for others on none. There every run first compares
a few kernels with what is known: whole numbers and bits must be equal, floats within the tolerance of their
op. If anything differs, models run on torch, and what differs is reported.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from functools import cache

import numpy as np
import torch
from torch import Tensor

from plait.kernels.cpu.attention import attention  # noqa: F401  what they register is compared
from plait.kernels.cpu.codegen import vec
from plait.kernels.cpu.codegen.kernel import kernel
from plait.kernels.cpu.codegen.target import name
from plait.kernels.cpu.linear import blocks  # noqa: F401  what they register is compared
from plait.kernels.cpu.pointwise import norm  # noqa: F401  what they register is compared
from plait.kernels.cpu.runtime.executor import Executor
from plait.kernels.cpu.runtime.frame import word
from plait.ops.attention import paged_attention
from plait.ops.linear import linear
from plait.ops.norm import rms_norm
from plait.ops.registry import Op

log = logging.getLogger("plait")

THREADS = 2  # they must also meet
STEPS = 64  # vectors of sixteen that are tried


@kernel
def byte_products(frame: int, args: int, thread: int, threads: int) -> None:
    """u and v (64 bytes each step), sums: to each, by fours, u·v is added, of seven bits of u and of all."""
    u, v, sums = word(args, 2), word(args, 3), word(args, 4)
    for i in range(thread, STEPS, threads):
        whole, other, at = vec.load_i32(u + 64 * i), vec.load_i32(v + 64 * i), sums + 128 * i
        seven = vec.and_i32(whole, vec.spread_int(np.int32(0x7F7F7F7F)))
        vec.store_i32(at, vec.dot(vec.load_i32(at), seven, other))
        vec.store_i32(at + 64, vec.dot8(vec.load_i32(at + 64), whole, other))


@kernel
def roundings(frame: int, args: int, thread: int, threads: int) -> None:
    """x (float32), then what it is as float16, bfloat16 and the nearest int32, and the first two widened."""
    x, half, brain, whole, wide = word(args, 2), word(args, 3), word(args, 4), word(args, 5), word(args, 6)
    for i in range(thread, STEPS, threads):
        v = vec.load_f32(x + 64 * i)
        vec.store_f16(half + 32 * i, v)
        vec.store_bf16(brain + 32 * i, v)
        vec.store_i32(whole + 64 * i, vec.to_i32(vec.nearest(v)))
        vec.store_f32(wide + 128 * i, vec.load_f16(half + 32 * i))
        vec.store_f32(wide + 128 * i + 64, vec.load_bf16(brain + 32 * i))


def wrong_products(cpu: Executor) -> bool:
    """Whether sums of products of bytes are not those of integers."""
    draw = np.random.default_rng(0)
    u = draw.integers(0, 256, (STEPS, 64), dtype=np.uint8)
    v = draw.integers(-128, 128, (STEPS, 64)).astype(np.int8)
    u[:8], v[:4], v[4:8] = 255, -128, 127
    sums = draw.integers(-(1 << 30), 1 << 30, (STEPS, 2, 16)).astype(np.int32)
    wanted = sums.copy()
    for k, codes in enumerate((u & 127, u)):
        products = codes.astype(np.int32) * v
        wanted[:, k] += products.reshape(STEPS, 16, 4).sum(-1, dtype=np.int32)
    found = [torch.from_numpy(a) for a in (u, v, sums)]
    cpu.launch(byte_products, *found, rows=1)
    return not np.array_equal(sums, wanted)


def wrong_roundings(cpu: Executor) -> bool:
    """Whether float16, bfloat16 or int32 are not the nearest numbers, ties to even."""
    draw = np.random.default_rng(1)
    bits = draw.integers(0, 1 << 16, (4, 2 * STEPS), dtype=np.uint32) << 11  # among them ties of both
    starts = np.array([0, 0x33000000, 0x38800000, 0x3F000000], np.uint32)  # tiny, in float16 too; and not
    ints = starts[:, None] + bits
    x = torch.from_numpy(np.concatenate([ints, ints | 0x80000000]).view(np.float32).ravel())
    half, brain = torch.empty_like(x, dtype=torch.float16), torch.empty_like(x, dtype=torch.bfloat16)
    whole, wide = torch.empty_like(x, dtype=torch.int32), x.new_empty(STEPS, 2, 16)
    cpu.launch(roundings, x, half, brain, whole, wide, rows=1)
    kept = torch.stack([half.float().view(STEPS, 16), brain.float().view(STEPS, 16)], 1)
    pairs = (half, x.half()), (brain, x.bfloat16()), (whole, x.round().int()), (wide, kept)
    return not all(torch.equal(a, b) for a, b in pairs)


def differs(op: Op, case: Mapping[str, object], cpu: Executor) -> bool:
    """Whether the native variant of an op gives another result than the reference."""
    variant = next(v for v in op.variants if v.name == "native")
    assert op.make is not None  # every op with cases has it
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        args, kwargs = op.make(case, torch.float32, "cpu")
    own = [a.clone() if isinstance(a, Tensor) else a for a in args]  # caches are written
    wanted, found = op.reference(*args, **kwargs), variant.bind(cpu)(*own, **kwargs)
    near = op.find_tolerance(variant, torch.float32)
    return not torch.allclose(found, wanted, rtol=near, atol=near)


def _linear_case(kind: str, rows: int, activations: str) -> dict[str, object]:
    return dict(rows=rows, n_in=256, n_out=40, kind=kind, activations=activations)


_ATTENTION = dict(seqs=[3, 40], heads=4, kv_heads=2, dim=32, window=None, softcap=None)
CHECKS: Mapping[str, Callable[[Executor], bool]] = {
    "products of bytes": wrong_products,
    "rounding": wrong_roundings,
    "RMS norm": lambda cpu: differs(rms_norm, dict(tokens=5, hidden=136, groups=1), cpu),
    "linear layers of Q8_0": lambda cpu: differs(linear, _linear_case("Q8_0", 13, "int8"), cpu),
    "linear layers of Q4_0": lambda cpu: differs(linear, _linear_case("Q4_0", 3, "int8x2"), cpu),
    "attention": lambda cpu: differs(paged_attention, _ATTENTION, cpu),
}


def failures(checks: Mapping[str, Callable[[Executor], bool]] = CHECKS) -> list[str]:
    """Names of checks with results that are not what is known, on threads of their own."""
    cpu = Executor(THREADS)
    try:
        return [what for what, is_wrong in checks.items() if is_wrong(cpu)]
    finally:
        cpu.close()


@cache
def refusal() -> str | None:
    """Why this process binds no native kernels, or None.

    Computed once, and not on x86-64: it compiles a few kernels, or loads what an earlier run kept.
    """
    if wrong := failures():
        reason = f"on this processor ({name()}) they give wrong results: {', '.join(wrong)}"
        log.warning("native kernels are not used: %s; models run on torch, many times slower", reason)
        return reason
    return None
