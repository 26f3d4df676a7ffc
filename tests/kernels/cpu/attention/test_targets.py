"""Attention on every instruction set that kernels can be compiled for: a process for each."""

from __future__ import annotations

import subprocess
import sys
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
import torch

from plait.kernels.cpu.codegen.target import NEEDED, TARGETS, host_features
from plait.kernels.load import executor, load_kernels
from plait.ops.attention import paged_attention, paged_latent_attention
from plait.ops.registry import OpFacts

ROOT = Path(__file__).resolve().parents[4]
ABLE = [isa for isa in TARGETS if isa != "native" and NEEDED.get(isa, set()) <= host_features()]


def digest(cpu: Any, each: int = 1) -> str:
    """Of the results of cases with int8 or rounded queries, each compared with the reference first."""
    found = sha256()
    for op in (paged_attention, paged_latent_attention):
        for case in op.cases[::each]:
            rounds = "activations" in case
            if case.get("kv_dtype") != "int8" and not rounds:
                continue
            fn, row = op.bind(OpFacts("cpu", torch.float32, {**case, "block_size": 16}, cpu))
            assert row.variant == ("native-bf16" if rounds else "native"), row
            assert op.make
            torch.manual_seed(0)
            args, _ = op.make(case, torch.float32, "cpu")
            want = op(*(a.clone() if isinstance(a, torch.Tensor) else a for a in args))
            got = fn(*args)
            near = 1e-2 if rounds else 2e-5
            torch.testing.assert_close(got, want, rtol=near, atol=near)
            found.update(got.numpy().tobytes())
    return found.hexdigest()


def say(isa: str, folder: str, each: str) -> None:
    """What the process of one target does."""
    torch.set_num_threads(1)  # the first tanh of several is off by 1e-5 at times (MKL's vector maths)
    load_kernels(cache_dir=Path(folder), isa=isa)
    cpu = executor(1)
    sys.stdout.write(digest(cpu, int(each)))
    assert cpu is not None
    cpu.close()


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("isa", "each"),
    [pytest.param(isa, 1, marks=pytest.mark.slow) for isa in ABLE] + [("avx2", 9)] * ("avx2" in ABLE),
)
def test_attention_has_the_same_bits_on_every_target(isa: str, each: int, cpu: Any, tmp_path: Path) -> None:
    """What is added in one order is so everywhere, whatever a vector is cut into."""
    code = "import sys; from tests.kernels.cpu.attention.test_targets import say; say(*sys.argv[1:])"
    ask = [sys.executable, "-c", code, isa, str(tmp_path), str(each)]
    child = subprocess.run(ask, cwd=ROOT, capture_output=True, text=True, check=False)
    assert child.returncode == 0, child.stderr
    assert child.stdout == digest(cpu, each)
