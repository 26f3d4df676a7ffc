"""The gate that compiles GPU kernels on a machine without a GPU: a sample of it; `make gates` runs all."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="Triton is not installed here")

from plait.kernels.triton.forms import KernelForm
from tools.compile_kernels import Compiled, count_instructions, count_loop, judge

ROOT = Path(__file__).resolve().parents[1]


def test_a_kernel_is_compiled_for_a_gpu_that_is_not_here() -> None:
    command = [sys.executable, "tools/compile_kernels.py", "--match", "count_items", "--targets", "90"]
    plain = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    made = subprocess.run(command, cwd=ROOT, env=plain, capture_output=True, text=True, check=False)
    assert made.returncode == 0, made.stderr
    assert "registers, ok" in made.stdout


def test_faults_of_a_form_are_named() -> None:
    form = KernelForm("f", None, {}, {}, demands=(("HMMA", "HGMMA"), ("LDG.128",)), max_registers=128)
    faults = judge(form, Compiled("f", 120, 200, 8, 120 << 10, instructions={"HMMA": 1}))
    assert faults == [
        "spills: 8",
        "shared memory: 122880 bytes, a block has 99 KiB",
        "registers: 200, at most 128",
        "it has no LDG.128",
    ]
    assert judge(form, Compiled("f", 90, 128, 0, 120 << 10, instructions={"HGMMA": 1, "LDG.128": 1})) == []


def test_instructions_for_each_weight_are_those_of_the_longest_loop() -> None:
    code = """
    .L_x_1:
        /*0000*/ MOV R1, R2 ;
        /*0010*/ @P0 BRA `(.L_x_1) ;
    .L_x_2:
        /*0020*/ LOP3.LUT R1, R2, R3 ;
        /*0030*/ @!P1 SHF.R.U32 R1, R2, R3 ;
        /*0040*/ HMMA.16816.F32.BF16 R4, R8, R10, R4 ;
        /*0050*/ @P0 BRA `(.L_x_2) ;
        /*0060*/ EXIT ;
    """
    assert count_loop(code) == 4
    form = KernelForm("f", None, {}, {}, weights=64, max_per_weight=3.5)
    assert judge(form, Compiled("f", 90, per_weight=3.5)) == []
    assert judge(form, Compiled("f", 90, per_weight=4.0)) == [
        "4.00 instructions for each weight, at most 3.5"
    ]


def test_loads_are_counted_by_their_width() -> None:
    code = "LDG.E.128 R4, [R2]; LDG.E.64 R4; LDG.E.U8 R4; LDG.E R1; STG.E.128 ; HMMA.16816.F32.BF16 R4"
    found = count_instructions(code)
    assert found == {"LDG.128": 1, "LDG.64": 1, "LDG.8": 1, "LDG.32": 1, "STG.128": 1, "HMMA": 1}
