"""Sums of products of bytes that are added in 16 bits first are exact."""

from __future__ import annotations

import sys
from importlib import import_module
from typing import Any

import numpy as np
import pytest
import torch

from plait.kernels.load import load_kernels

load_kernels()
kernels = import_module("plait.kernels.cpu.codegen.kernel")
straight = import_module("plait.kernels.cpu.codegen.llvm_writer")
twos = import_module("plait.kernels.cpu.codegen.quad_dot")
target = import_module("plait.kernels.cpu.codegen.target")

pytestmark = pytest.mark.skipif("avx2" not in target.host_features(), reason="no AVX2 here")

BYTES = '''"""Products of bytes: {digest}."""
import test_quad_dot as blocks

from plait.kernels.cpu.codegen.kernel import kernel
from plait.kernels.cpu.codegen.vec import word

write = blocks.{block}


@kernel
def run(frame, args, thread, threads):
    """Codes (quads of sixteen), activations, sums, out."""
    if thread == 0:
        write(word(args, 2), word(args, 3), word(args, 4), word(args, 5))
'''
QUADS, BASE = 8, 1 << 20


@pytest.fixture(autouse=True)
def _named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Under the name by which kernels import this module."""
    monkeypatch.setitem(sys.modules, "test_quad_dot", sys.modules[__name__])


def by_twos(largest: int, zero: int | None) -> Any:
    def write(w: Any, u: Any, v: Any, start: Any, out: Any) -> None:
        codes = [lambda q=q: w.load_i32(u + 64 * q) for q in range(QUADS)]
        (s,) = twos.add_by_twos(w, codes, lambda r, i: v + 4 * i, [w.load_i32(start)], largest, zero, BASE)
        w.store_i32(out, s)

    return straight.straight(write)


BY_TWOS_15, BY_TWOS_63, BY_TWOS_127 = by_twos(15, None), by_twos(63, 32), by_twos(127, 64)
BY_TWOS_240, BY_TWOS_255 = by_twos(240, 127), by_twos(255, 128)


@pytest.mark.parametrize(
    ("block", "largest", "zero"),
    [
        ("BY_TWOS_15", 15, 0),
        ("BY_TWOS_63", 63, 0),
        ("BY_TWOS_127", 127, 0),
        ("BY_TWOS_240", 240, 127),
        ("BY_TWOS_255", 255, 128),
    ],
)
@pytest.mark.parametrize("extreme", [False, True])
def test_sums_of_products_of_bytes_are_exact(
    cpu: Any, block: str, largest: int, zero: int, extreme: bool
) -> None:
    some = torch.Generator().manual_seed(largest)
    u = torch.randint(0, largest + 1, (QUADS, 16, 4), generator=some, dtype=torch.uint8)
    v = torch.randint(-127, 128, (QUADS, 4), generator=some, dtype=torch.int8)
    start = torch.randint(-1000, 1000, (16,), generator=some, dtype=torch.int32)
    if extreme:
        u[:, :8], u[:, 8:], v[:] = largest, 0, -127
    exact = torch.einsum("qlj,qj->l", u.int() - zero, v.int())
    out, digest = torch.empty(16, dtype=torch.int32), straight.digest("codegen/quad_dot.py")
    kernel = kernels.load_generated(f"twos_{block.lower()}", BYTES.format(block=block, digest=digest)).run
    cpu.launch(kernel, u, v, start, out, rows=1)
    assert out.tolist() == (exact + (BASE if zero else start)).tolist()


def test_what_is_added_in_16_bits_fits() -> None:
    for largest in (1, 3, 15, 24, 31, 63, 77, 127):
        most = twos.together(largest, None)
        assert most >= 1
        assert np.iinfo(np.int16).max >= most * 2 * 127 * largest
    assert twos.together(255, None) == 0  # 2 * 127 * 255 does not
    assert twos.together(255, 100) == 0  # 155 is no signed byte
