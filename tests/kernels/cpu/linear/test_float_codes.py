"""Kernels of small floats: extremes, NaN, and a row's bits do not depend on other rows."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from plait.errors import ShapeMismatch
from plait.kernels.cpu.linear.packed import multiply
from plait.kernels.load import executor, load_kernels
from plait.ops.blocks import random_weight
from plait.ops.linear import FLOATS, linear
from plait.ops.registry import OpFacts
from plait.quant.codebook import Codebook
from plait.quant.fp8 import Fp8
from plait.quant.weight import Dense, Weight

load_kernels()
floats = import_module("plait.kernels.cpu.linear.float_codes")
target = import_module("plait.kernels.cpu.codegen.target")


@pytest.fixture(scope="module")
def one() -> Iterator[Any]:
    made = executor(1)
    assert made is not None
    yield made
    made.close()


def run(cpu: Any, x: Tensor, weight: Weight, bias: Tensor | None = None) -> Tensor:
    result: Tensor = multiply(cpu, x, floats.pack(cpu, weight, torch.float32), bias, "float32")
    return result


def check(cpu: Any, x: Tensor, weight: Weight) -> None:
    """Against float64, within what float32 sums may lose of the sum of all magnitudes."""
    inputs, w = x.double(), weight.dequantize(torch.float32).double()
    error = (run(cpu, x, weight).double() - inputs @ w.T).abs()
    assert bool((error <= 2e-6 * (inputs.abs() @ w.abs().T) + 1e-30).all())


def all_codes(block: tuple[int, int]) -> Fp8:
    """Every number that there is, in rows that start elsewhere."""
    numbers = torch.arange(256, dtype=torch.uint8)
    numbers[[0x7F, 0xFF]] = 0
    codes = torch.stack([numbers.roll(i) for i in range(40)]).view(torch.float8_e4m3fn)
    shape = [-(-n // b) for n, b in zip(codes.shape, block, strict=True)]
    return Fp8(codes, torch.randn(shape) * 10.0 ** torch.randint(-6, 6, shape), block)


@pytest.mark.parametrize("block", [(128, 128), (1, 256), (40, 256), (16, 32), (7, 64)])
def test_every_eight_bit_number(block: tuple[int, int], cpu: Any) -> None:
    x = torch.randn(5, 256)
    x[1], x[2] = 0, x[2] * 1e20
    check(cpu, x, all_codes(block))


@pytest.mark.parametrize("block", [8, 16, 64, 128])
def test_blocks_of_a_table_of_any_size(block: int, cpu: Any) -> None:
    codes = torch.randint(0, 256, (21, 192), dtype=torch.uint8)
    table, absmax = torch.randn(16), torch.rand(21, 384 // block) * 30
    check(cpu, torch.randn(3, 384), Codebook(codes, table, absmax, block, "nf4"))


@pytest.mark.parametrize("kind", FLOATS)
def test_a_row_is_the_same_in_every_batch(kind: str, cpu: Any, one: Any) -> None:
    weight, x, bias = random_weight(kind, 37, 704), torch.randn(70, 704), torch.randn(37)
    whole = run(cpu, x, weight, bias)
    assert torch.equal(whole, run(one, x, weight, bias))
    for rows in (1, 2, 3, 5, 33):
        assert torch.equal(run(cpu, x[:rows], weight, bias), whole[:rows]), rows
        assert torch.equal(run(one, x[-rows:], weight, bias), whole[-rows:]), rows


def test_a_number_that_is_none_spoils_its_own_row(cpu: Any) -> None:
    weight = random_weight("fp8_b128", 20, 200)
    weight.codes.view(torch.uint8)[3, 150] = 0x7F
    weight.codes.view(torch.uint8)[18, 0] = 0xFF
    x = torch.randn(2, 200)
    got = run(cpu, x, weight)
    assert got.isnan().any(0).nonzero().flatten().tolist() == [3, 18]
    want = linear.reference(x, weight, None)
    torch.testing.assert_close(got, want, equal_nan=True, rtol=5e-5, atol=5e-5)


@pytest.mark.parametrize("kind", FLOATS)
def test_memory(kind: str, cpu: Any) -> None:
    """Packed weights take about what the file's bytes do."""
    for cols in (576, 1024):
        weight = random_weight(kind, 64, cols)
        assert floats.pack(cpu, weight, torch.float32).nbytes <= 1.12 * weight.nbytes


def test_recorded_and_in_parts_of_wider_rows(cpu: Any) -> None:
    weight, bias = random_weight("fp8", 33, 264), torch.randn(33)
    packed, x, out = floats.pack(cpu, weight, torch.float32), torch.randn(64, 300), torch.zeros(64, 40)
    with cpu.record(tokens=64, logits=65) as program:
        multiply(cpu, x[:, 20:284], packed, bias, "float32", out[:, 3:36])
    for tokens in (1, 5, 64):
        out.zero_()
        cpu.run(program, tokens=tokens, logits=1, seqs=1)
        alone = multiply(cpu, x[:tokens, 20:284].contiguous(), packed, bias, "float32")
        assert torch.equal(out[:tokens, 3:36], alone)
        assert not out[tokens:].any()
        assert not out[:, 36:].any()


def test_what_it_refuses(cpu: Any) -> None:
    for weight in (Dense(torch.randn(16, 64)), random_weight("fp8", 16, 66), all_codes((8, 20))):
        with pytest.raises(ShapeMismatch, match="cannot be packed"):
            floats.pack(cpu, weight, torch.float32)
    for sizes, why in (
        ({"kind": "fp8_b20", "n_in": 64}, "eight-bit floats"),
        ({"kind": "fp8", "n_in": 66}, "multiple of 8"),
        ({"kind": "fp8", "n_in": 64, "activations": "int8"}, "does not round"),
    ):
        _, row = linear.bind(OpFacts("cpu", torch.float32, sizes | {"n_out": 8}, cpu))
        assert row.variant == "reference"
        assert any(name == "native-floats" and why in reason for name, reason in row.skipped)
        assert any(name == "dense" and "stay as they are" in reason for name, reason in row.skipped)


def digest() -> str:
    """The bits of some products, the same in every process."""
    load_kernels()
    cpu = executor(2)
    assert cpu is not None
    bits = hashlib.sha256()
    for kind in FLOATS:
        torch.manual_seed(5)
        weight, x = random_weight(kind, 37, 512), torch.randn(15, 512)
        bits.update(run(cpu, x, weight).numpy().tobytes())
    cpu.close()
    return bits.hexdigest()


def elsewhere(processor: str, call: str) -> str:
    """What a function of this module returns in a process with kernels for another processor."""
    here = Path(__file__)
    code = (
        f"import sys; sys.path[:0] = {[str(here.parents[4]), str(here.parent)]!r}\n"
        f"import test_float_codes as it; print(it.target.name(), it.{call})"
    )
    env = {**os.environ, "NUMBA_CPU_NAME": processor, "NUMBA_CPU_FEATURES": ""}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-2000:]
    made_for, found = done.stdout.split()[-2:]
    assert made_for.startswith(processor)
    return found


@pytest.mark.slow
def test_another_processor_gives_the_same_bits() -> None:
    assert elsewhere("haswell", "digest()") == digest()


def check_every_kind() -> str:
    load_kernels()
    cpu = executor(2)
    for kind in FLOATS:
        torch.manual_seed(5)
        check(cpu, torch.randn(15, 512), random_weight(kind, 37, 512))
    return "checked"


@pytest.mark.slow
def test_sums_without_a_fused_multiply_add_are_as_exact() -> None:
    """Their bits are others than elsewhere (docs/precision.md)."""
    assert elsewhere("x86-64", "check_every_kind()") == check_every_kind()
