"""Launches as a real GPU specializes them; the interpreter takes what no compiler does."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="Triton is not installed here")

from tests.families.every import NAMES
from tests.runner.test_capture import NO_CODES

ROOT = Path(__file__).resolve().parents[3]
PARTS = 16


def lower(module: str, *arguments: str) -> dict[str, object]:
    """In a process of its own: this one may have the interpreter's kernels."""
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", f"tests.kernels.triton.{module}", *arguments]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    found: dict[str, object] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.slow
@pytest.mark.timeout(900)  # it lowers hundreds of forms: minutes of a core
def test_every_launch_of_every_case_is_one_that_a_gpu_takes() -> None:
    found = lower("lower_launches")
    assert found["faults"] == {}
    assert int(str(found["cases"])) > 400
    assert int(str(found["forms"])) > 400


@pytest.mark.slow
@pytest.mark.sampled(8)
@pytest.mark.parametrize("options", ["", "--kept int8", "--quantize Q4_K", "--quantize Q8_0"])
@pytest.mark.parametrize("part", range(PARTS))
def test_every_launch_of_every_family_is_one_that_a_gpu_takes_and_gate_c_compiles(
    part: int, options: str
) -> None:
    check_families("bfloat16", NAMES[part::PARTS], *options.split())


@pytest.mark.slow
@pytest.mark.sampled(4)
@pytest.mark.parametrize("part", range(PARTS))
def test_every_launch_of_a_float16_model_has_a_compiled_form(part: int) -> None:
    check_families("float16", NAMES[part::PARTS])


@pytest.mark.slow
@pytest.mark.sampled(2)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("storage", ["Q4_0", "Q4_K", "Q5_0", "Q5_1", "Q6_K", "Q8_0"])
def test_every_launch_over_planes_has_a_compiled_form(storage: str, dtype: str) -> None:
    check_families(dtype, ("llama", "qwen2", "qwen3_moe", "deepseek_v2"), "--quantize", storage)


def check_families(dtype: str, names: Sequence[str], *options: str) -> None:
    """Lower steps of some families' tiny models."""
    found = lower("lower_families", dtype, *options, *names)
    assert found["faults"] == {}
    assert found["uncompiled"] == {}
    refused = {name for name in names if name in NO_CODES and "int8" in options}
    assert set(found["refused"]) == refused  # type: ignore[call-overload]
    assert found["families"] == len(names) - len(refused)
    assert int(str(found["launches"])) > 20 * len(names)
