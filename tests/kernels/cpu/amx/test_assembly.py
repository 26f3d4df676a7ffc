"""What kernels on tiles become for a processor that has AMX: compiled and read, not run."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

target = import_module("plait.kernels.cpu.codegen.target")

ASSEMBLY = """
import sys
from pathlib import Path

import llvmlite.binding as llvm
from numba import cfunc

from plait.kernels.cpu.codegen import target

target.keep_in(Path(sys.argv[1]))
from plait.kernels.cpu.amx import attention as amx_attention
from plait.kernels.cpu.amx import check as amx_check
from plait.kernels.cpu.amx import linear as amx_linear
from plait.kernels.cpu.linear import layout
from plait.kernels.cpu.linear import blocks_source as linear_source
from plait.kernels.cpu.codegen.kernel import SIGNATURE

kernel = {
    "check": lambda: amx_check.products("amx"),
    "many": lambda: amx_linear.many_rows("bfloat16", "amx"),
    "attention": lambda: amx_attention.attend("amx"),
    "bytes": lambda: linear_source.linear_kernel(layout.LAYOUTS["Q8_0"], "amx"),
}[sys.argv[2]]()
made = cfunc(SIGNATURE, nopython=True, nogil=True, error_model="numpy", boundscheck=False)(kernel.function)
llvm.initialize_all_targets()
llvm.initialize_all_asmprinters()
target = llvm.Target.from_triple("x86_64-unknown-linux-gnu")
machine = target.create_target_machine(cpu="sapphirerapids", opt=3)
print(machine.emit_assembly(llvm.parse_assembly(made.inspect_llvm())))
"""


def calls_beside_sums(lines: list[str]) -> list[str]:
    """Calls and returns that can follow when a tile was made zero, before one is stored."""
    labels = {line.removesuffix(":"): i for i, line in enumerate(lines) if line.endswith(":")}
    waiting = [i + 1 for i, line in enumerate(lines) if line.startswith("tilezero")]
    seen, found = set(waiting), []
    while waiting:
        line = lines[i := waiting.pop()]
        if line.startswith(("call", "ret", "tilerelease")):
            found.append(line)
        if line.startswith(("call", "ret", "tilestored", "tilerelease")):
            continue
        follow = [] if line.startswith("jmp") else [i + 1]
        if line.startswith("j"):
            follow.append(labels[line.split()[1]])
        waiting += [n for n in follow if n not in seen]
        seen.update(follow)
    return found


@pytest.mark.sampled(2, across="heavy")
@pytest.mark.skipif(target.platform.machine() != "x86_64", reason="compiles for x86-64")
@pytest.mark.parametrize(
    ("kernel", "product", "regions"),
    [
        ("check", "tdpbf16ps", 3),
        pytest.param("many", "tdpbf16ps", 1, marks=pytest.mark.slow),
        pytest.param("attention", "tdpbf16ps", 1, marks=pytest.mark.slow),
        pytest.param("bytes", "tdpbssd", 1, marks=pytest.mark.slow),
    ],
)
def test_the_instructions_for_a_processor_that_has_amx(
    kernel: str, product: str, regions: int, tmp_path: Path
) -> None:
    told = {**os.environ, "NUMBA_CPU_NAME": "sapphirerapids", "NUMBA_CPU_FEATURES": ""}
    text = subprocess.run(
        [sys.executable, "-c", ASSEMBLY, str(tmp_path), kernel],
        env=told, check=True, capture_output=True, text=True, timeout=240,
    ).stdout  # fmt: skip
    lines = [line.strip() for line in text.splitlines()]
    starts = [i for i, line in enumerate(lines) if line.startswith("ldtilecfg")]
    assert len(starts) == regions
    for i in starts:
        place = lines[i].split()[1]
        before = [line for line in lines[i - 4 : i] if line.endswith(", " + place)]
        assert before  # its 64 bytes are written just before they are read
        assert before[-1].split()[1].startswith("%zmm")
        end = next(j for j, line in enumerate(lines) if j > i and line == "tilerelease")
        region = lines[i:end]
        assert any(line.startswith(product) for line in region) or kernel == "check"
    assert product in text
    assert not calls_beside_sums(lines)
