"""The LLVM writer: straight blocks in a kernel, and vectors where the processor lacks an instruction."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from plait.kernels.load import executor, load_kernels

load_kernels()
straight = import_module("plait.kernels.cpu.codegen.llvm_writer")
kernels = import_module("plait.kernels.cpu.codegen.kernel")
vec = import_module("plait.kernels.cpu.codegen.vec")

TEXT = '''"""Blocks in a kernel."""
import test_llvm_writer as blocks

from plait.kernels.cpu.codegen.kernel import kernel
from plait.kernels.cpu.codegen.vec import get_f32, load_f32, store_f32, word

powers, kept, sizes, odd = blocks.POWERS, blocks.KEPT, blocks.SIZES, blocks.ODD


@kernel
def run(frame, args, thread, threads):
    """x, out, n."""
    x, out, n = word(args, 2), word(args, 3), word(args, 4)
    if thread == 0:
        sums = powers((load_f32(x), load_f32(x + 64)), n)
        kept(out, sums, get_f32(x))
        a, b, c = sizes(n, 7, out)
        store_f32(out + a, load_f32(x + b))
        odd(x, out + c, n)
'''


def powers(w: Any, pair: list[Any], n: Any) -> list[Any]:
    """x and n times as much, then y and its n-th power, in a loop in a loop."""

    def again(i: Any, x: Any, y: Any) -> list[Any]:
        (more,) = w.loop(0, 1, 1, [x], lambda _, x: [w.add(x, pair[0])])
        return [more, w.mul(y, pair[1])]

    return list(w.loop(1, n, 1, pair, again))


def kept(w: Any, out: Any, sums: list[Any], number: Any) -> None:
    for i, x in enumerate(sums):
        w.store_f32(out + 64 * i, x)
    w.store_f32(out + 128, w.spread(number))


def sizes(w: Any, n: Any, seven: Any, out: Any) -> list[Any]:
    """192, 64, 256, by every operation a word has; n is 3."""
    a = (n << 6).most(seven) + (seven - n - 4)
    b = 64 * (seven.least(n) - 2)
    return [a, b, (n + 5) * 32 + (out - out) + (a >> 10)]


def odd(w: Any, x: Any, to: Any, n: Any) -> None:
    """The first number of x to n vectors, or zeros to the first if there are four."""
    for i in range(4):
        w.when(n.above(i), lambda at=to + 64 * i: w.store_f32(at, w.spread_f32(x)))
    w.when(n.equals(4), lambda: w.store_f32(to, w.zero_f32()))


def test_blocks_in_a_kernel(cpu: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "test_llvm_writer", sys.modules[__name__])
    made = kernels.load_generated("straight_blocks", TEXT)
    x, out = torch.randn(64), torch.zeros(128)
    cpu.launch(made.run, x, out, 3, rows=1)
    assert torch.equal(out[:16], x[:16] + x[:16] + x[:16])
    assert torch.equal(out[16:32], x[16:32] * x[16:32] * x[16:32])
    assert torch.equal(out[32:48], x[0].expand(16))
    assert torch.equal(out[48:64], x[16:32])
    assert torch.equal(out[64:112], x[0].expand(48))
    assert not out[112:].any()


POWERS = straight.straight(powers, gives=2)
KEPT = straight.straight(kept)
SIZES = straight.straight(sizes, gives=3, kind=vec.A)
ODD = straight.straight(odd)


def test_an_operation_that_is_none() -> None:
    with pytest.raises(AttributeError, match="no operation load_f99"):
        _ = straight.Writer(None).load_f99


def test_the_digest_is_of_every_file() -> None:
    assert straight.digest() != straight.digest("codegen/vec.py") != straight.digest("codegen/maths.py")


HALVES = '''"""Float16 to float32 and back."""
from plait.kernels.cpu.codegen.kernel import kernel
from plait.kernels.cpu.codegen.vec import get_f16, load_f16, load_f32, put_f32
from plait.kernels.cpu.codegen.vec import store_f16, store_f32
from plait.kernels.cpu.codegen.vec import word


@kernel
def widen(frame, args, thread, threads):
    """x (float16), out, out one by one, n."""
    if thread == 0:
        for i in range(0, word(args, 5), 16):
            store_f32(word(args, 3) + 4 * i, load_f16(word(args, 2) + 2 * i))
        for i in range(word(args, 5)):
            put_f32(word(args, 4) + 4 * i, get_f16(word(args, 2) + 2 * i))


@kernel
def narrow(frame, args, thread, threads):
    """x (float32), out, n."""
    if thread == 0:
        for i in range(0, word(args, 4), 16):
            store_f16(word(args, 3) + 2 * i, load_f32(word(args, 2) + 4 * i))
'''


def same(a: Tensor, b: Tensor) -> bool:
    """Bit for bit; one NaN is as good as another."""
    ints = {2: torch.int16, 4: torch.int32}[a.element_size()]
    return bool(((a.view(ints) == b.view(ints)) | (a.isnan() & b.isnan())).all())


def check_halves() -> None:
    """Every float16; and float32 of every exponent, at, next to and between what float16 has."""
    load_kernels()
    cpu = executor(1)
    assert cpu is not None
    made = kernels.load_generated("straight_halves", HALVES)
    halves = torch.arange(-32768, 32768, dtype=torch.int32).to(torch.int16).view(torch.float16)
    out, single = torch.empty(2, 65536).unbind()
    cpu.launch(made.widen, halves, out, single, 65536, rows=1)
    assert same(out, halves.float())
    assert same(single, halves.float())
    exact = halves.float().view(torch.int32)
    for step in (0, 1, -1, 0xFFF, 0x1000, 0x1001, 0x2000, -0x1000):
        x = (exact + step).view(torch.float32)
        out = torch.empty(65536, dtype=torch.float16)
        cpu.launch(made.narrow, x, out, 65536, rows=1)
        assert same(out, x.half())
    x = (torch.arange(65536, dtype=torch.int64) * 65521).to(torch.int32).view(torch.float32)
    out = torch.empty(65536, dtype=torch.float16)
    cpu.launch(made.narrow, x, out, 65536, rows=1)
    assert same(out, x.half())
    cpu.close()


@pytest.mark.parametrize("target", ["", pytest.param("x86-64", marks=pytest.mark.slow)])
def test_halves(target: str) -> None:
    """With the instructions of this processor, and by whole numbers where there are none."""
    here = Path(__file__)
    paths = [str(here.parents[4]), str(here.parent)]
    code = f"import sys; sys.path[:0] = {paths!r}\nimport test_llvm_writer; test_llvm_writer.check_halves()"
    env = {**os.environ, "NUMBA_CPU_NAME": target, "NUMBA_CPU_FEATURES": ""}
    if not target:
        env = dict(os.environ)
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-2000:]
