"""What replaces instructions that plain x86-64 lacks gives the bits that other targets get."""

from __future__ import annotations

import ctypes
import platform
import sys
from importlib import import_module
from typing import Any

import pytest
import torch
from torch import Tensor

from plait.kernels.load import load_kernels

load_kernels()
kernels = import_module("plait.kernels.cpu.codegen.kernel")
straight = import_module("plait.kernels.cpu.codegen.llvm_writer")
plain = import_module("plait.kernels.cpu.codegen.plain_x86")

X86 = platform.machine().lower() in ("x86_64", "amd64")
pytestmark = pytest.mark.skipif(not X86, reason="instructions of x86-64")

FLOATS = '''"""Floats where instructions are missing."""
import test_plain_x86 as blocks

from plait.kernels.cpu.codegen.kernel import kernel
from plait.kernels.cpu.codegen.vec import load_f32, store_f32, word

fused, rounded = blocks.FUSED, blocks.ROUNDED


@kernel
def run(frame, args, thread, threads):
    """x, y, z, out, rounded z, bytes."""
    x, y, z, out, whole = word(args, 2), word(args, 3), word(args, 4), word(args, 5), word(args, 6)
    if thread == 0:
        for i in range(0, word(args, 7), 64):
            store_f32(out + i, fused(load_f32(x + i), load_f32(y + i), load_f32(z + i))[0])
            store_f32(whole + i, rounded(load_f32(z + i))[0])
'''
BYTES = '''"""Products of bytes."""
import test_plain_x86 as blocks

from plait.kernels.cpu.codegen.kernel import kernel
from plait.kernels.cpu.codegen.vec import word

write = blocks.BY_DOTS


@kernel
def run(frame, args, thread, threads):
    """Codes (quads of sixteen), activations, sums, out."""
    if thread == 0:
        write(word(args, 2), word(args, 3), word(args, 4), word(args, 5))
'''
QUADS = 8


@pytest.fixture(autouse=True)
def _named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Under the name by which kernels import this module."""
    monkeypatch.setitem(sys.modules, "test_plain_x86", sys.modules[__name__])


def fused(w: Any, x: Any, y: Any, z: Any) -> list[Any]:
    return [plain.fma(w._builder, x, y, z)]


def rounded(w: Any, x: Any) -> list[Any]:
    return [plain.nearest(w._builder, x)]


def by_dots(w: Any, u: Any, v: Any, start: Any, out: Any) -> None:
    s = w.load_i32(start)
    for q in range(QUADS):
        s = plain.dot(w._builder, s, w.load_i32(u + 64 * q), w.spread_i32(v + 4 * q))
    w.store_i32(out, s)


FUSED, ROUNDED = straight.straight(fused, gives=1), straight.straight(rounded, gives=1)
BY_DOTS = straight.straight(by_dots)


def numbers() -> tuple[Tensor, Tensor, Tensor]:
    """Of all sizes; sums that cancel; sums that end nearly in the middle between two floats; tiny ones."""
    n, some = 4096, torch.Generator().manual_seed(0)

    def bits() -> Tensor:
        return torch.randint(-(1 << 31), 1 << 31, (n,), generator=some).int().view(torch.float32)

    def like(low: int, high: int) -> Tensor:
        sizes = torch.randint(low, high, (n,), generator=some)
        return torch.ldexp(torch.randn(n, generator=some), sizes.float())

    few = 2.0 ** -torch.randint(15, 21, (n,), generator=some).float()
    odd = 2 * torch.randint(0, 1 << 21, (n,), generator=some).float() + 1
    middle, tiny = 1 + odd * 2**-23, odd * 2**-74 * 2**-75
    x = [bits(), like(-3, 3).bfloat16().float(), like(-70, -60), like(-3, 3), 1 + few, (1 + few) * 2**-75]
    y = [bits(), like(-3, 3), like(-70, -60), like(-3, 3), (1 - few) * 2**-24, (1 - few) * 2**-75]
    z = [
        bits(),
        like(-3, 3),
        like(-135, -120),
        -x[3] * y[3],
        middle,
        tiny,
    ]  # [3]: what rounding took away is left
    return torch.cat(x), torch.cat(y), torch.cat(z)


def test_a_fused_multiply_add_has_the_bits_of_one(cpu: Any) -> None:
    x, y, z = numbers()
    out, whole = torch.empty_like(x), torch.empty_like(x)
    kernel = kernels.load_generated("plain_floats", FLOATS).run
    cpu.launch(kernel, x, y, z, out, whole, 4 * x.numel(), rows=1)
    library = ctypes.CDLL(None)
    library.fmaf.restype, library.fmaf.argtypes = ctypes.c_float, [ctypes.c_float] * 3
    want = torch.tensor([library.fmaf(*v) for v in zip(x.tolist(), y.tolist(), z.tolist(), strict=True)])
    usual = ~want.isnan()
    assert torch.equal(out.isnan(), want.isnan())
    assert torch.equal(out[usual].view(torch.int32), want[usual].view(torch.int32))
    twice = (x.double() * y.double() + z.double()).float()  # what must not come out
    assert int((twice != want)[usual & (want >= 1)].sum()) > 0
    assert int((twice != want)[usual & (want.abs() < 2**-126)].sum()) > 0


def test_halves_are_rounded_to_even_with_their_sign(cpu: Any) -> None:
    some = [0.0, -0.0, 0.5, -0.5, 1.5, 2.5, -2.5, 0.49999997, 8388607.5, 8388608.0, -1e30, float("inf"), -0.2]
    z = torch.cat([torch.tensor([*some, *([3.3] * 3)]), torch.randn(4080) * 1000])
    out, whole = torch.empty_like(z), torch.empty_like(z)
    cpu.launch(kernels.load_generated("plain_floats", FLOATS).run, z, z, z, out, whole, 4 * z.numel(), rows=1)
    assert torch.equal(whole.view(torch.int32), torch.round(z).view(torch.int32))


@pytest.mark.parametrize("extreme", [False, True])
def test_sums_of_products_of_bytes_are_exact(cpu: Any, extreme: bool) -> None:
    some = torch.Generator().manual_seed(1)
    u = torch.randint(0, 256, (QUADS, 16, 4), generator=some, dtype=torch.uint8)
    v = torch.randint(-128, 128, (QUADS, 4), generator=some, dtype=torch.int8)
    start = torch.randint(-1000, 1000, (16,), generator=some, dtype=torch.int32)
    if extreme:
        u[:, :8], u[:, 8:], v[:] = 255, 0, -128
    out = torch.empty(16, dtype=torch.int32)
    cpu.launch(kernels.load_generated("plain_bytes", BYTES).run, u, v, start, out, rows=1)
    assert out.tolist() == (start + torch.einsum("qlj,qj->l", u.int(), v.int())).tolist()
