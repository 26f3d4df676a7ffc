"""The compile gate names addresses that 32 bits may not hold. Where Triton interprets it compiles nothing, so
another process does."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tools.narrow_addresses import find_narrow

ROOT = Path(__file__).resolve().parents[1]
KERNELS = """
import triton
import triton.language as tl
from plait.kernels.triton.forms import KernelForm
from tools.compile_kernels import measure_form

@triton.jit
def take(x, table, y, width, count, N: tl.constexpr, WIDE: tl.constexpr):
    row, lane = tl.program_id(0), tl.arange(0, N)
    head = tl.program_id(1)
    if WIDE:
        row = row.to(tl.int64)
    total = tl.zeros([N], tl.float32)
    for i in range(count):
        at = row * width  # narrow
        if i < 2:
            at += 1
        total += tl.load(x + at + i * N + lane + head * width)
    total += tl.load(x + (row + lane) * width)  # narrow
    page = tl.load(table + row)
    if WIDE:
        page = page.to(tl.int64)
    first = page * 4096  # narrow
    first += page * 5000 % 64  # 32 bits hold the pages of this test
    tl.store(y + tl.where(count > 2, first, 0) + lane, total)

types = {"x": "fp32*", "table": "i32*", "y": "fp32*"}
for wide in (False, True):
    form = KernelForm("take", take, types, {"N": 128, "WIDE": wide}, targets=(80,))
    print(*measure_form(form, 80).faults, sep="|")
"""


@pytest.mark.sampled(2, across="heavy")
def test_products_that_32_bits_may_not_hold_are_faults_where_an_address_is_made_of_them(
    tmp_path: Path,
) -> None:
    pytest.importorskip("triton")
    path = tmp_path / "kernels.py"
    path.write_text(KERNELS, "utf-8")
    narrow = [n for n, line in enumerate(KERNELS.splitlines(), 1) if line.endswith("# narrow")]
    plain = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    made = subprocess.run(
        [sys.executable, path], env={**plain, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True
    )
    assert made.returncode == 0, made.stderr
    faults, none = made.stdout.splitlines()
    assert [fault.rpartition(":")[2] for fault in faults.split("|")] == [str(n) for n in narrow]
    assert faults.count("32 bits may not hold an address") == 3
    assert none == ""


REGIONS = """
tt.func public @f(%x: !tt.ptr<f32>, %n: i32) {
  scf.for %i = %n to %n step %n : i32 {
    %a = arith.muli %n, %n : i32 loc(#loc1)
  }
  scf.if %n {
    %a = tt.make_range {end = 16 : i32, start = 0 : i32} : tensor<16xi32> loc(#loc2)
    %b = arith.muli %n, %n : i32 loc(#loc2)
    %at = tt.addptr %x, %a : tensor<16x!tt.ptr<f32>>, tensor<16xi32> loc(#loc2)
  }
}
#loc1 = loc("/plait/a.py":3:1)
#loc2 = loc("/plait/a.py":4:1)
"""


def test_a_value_of_another_region_does_not_lend_its_name() -> None:
    """`%a` of the loop may be too large, and the one behind it is not."""
    assert find_narrow(REGIONS) == []
    assert find_narrow(REGIONS.replace("%x, %a :", "%x, %b :")) == ["a.py:4"]
