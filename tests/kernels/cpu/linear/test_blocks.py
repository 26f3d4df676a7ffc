"""Quantized linear kernels: every format at its extremes, and a row's bits do not depend on other rows."""

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
from plait.kernels.load import executor, load_kernels
from plait.ops.blocks import random_blocks, random_weight, with_scales
from plait.ops.linear import KINDS, STORED, Activations, Linear, linear, round_activations
from plait.ops.registry import OpFacts
from plait.quant.fp4 import Fp4
from plait.quant.gguf import Gguf, block_type
from plait.quant.grouped import Grouped
from plait.quant.weight import Dense, Weight
from tests.common_storages import DRAWN, mark_rare, marks_of

load_kernels()
layout = import_module("plait.kernels.cpu.linear.layout")
kernels = import_module("plait.kernels.cpu.linear.blocks")
packed = import_module("plait.kernels.cpu.linear.packed")
target = import_module("plait.kernels.cpu.codegen.target")


@pytest.fixture(scope="module")
def one() -> Iterator[Any]:
    load_kernels()
    made = executor(1)
    assert made is not None
    yield made
    made.close()


def run(
    cpu: Any, x: Tensor, weight: Weight, activations: Activations = "int8", bias: Tensor | None = None
) -> Tensor:
    result: Tensor = packed.multiply(cpu, x, kernels.pack(cpu, weight, torch.float32), bias, activations)
    return result


def check(cpu: Any, x: Tensor, weight: Weight, activations: Activations) -> None:
    """Against float64, within what float32 sums may lose of the sum of all magnitudes."""
    inputs, w = round_activations(x, activations).double(), weight.dequantize(torch.float32).double()
    error = (run(cpu, x, weight, activations).double() - inputs @ w.T).abs()
    assert bool((error <= 2e-6 * (inputs.abs() @ w.abs().T) + 1e-30).all())


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q4_K", "Q5_K"])
def test_packed_blocks_are_no_larger_than_in_the_file(kind: str) -> None:
    form, kept = block_type(kind), layout.LAYOUTS[kind]
    assert kept.tile_bytes(1024) == 16 * 1024 // form.elements * form.nbytes


def extreme_blocks(kind: str) -> Gguf:
    """Rows of blocks of all zeros, all ones, alternating bits and noise, under large scales of both signs."""
    form = block_type(kind)
    patterns = [torch.full((form.nbytes,), fill, dtype=torch.uint8) for fill in (0, 255, 0x55, 0xAA, 0x0F)]
    patterns += [torch.randint(0, 256, (form.nbytes,), dtype=torch.uint8) for _ in range(4)]
    rows = []
    for pattern in patterns:
        for scale in (0.0, 1.0, -1.0, 300.0, -6e-8):  # the last one is subnormal in float16
            block = pattern.clone()
            for i, at in enumerate(form.scales_at):
                half = torch.tensor([-scale if i else scale], dtype=torch.float16)
                block[at : at + 2] = half.view(torch.uint8)
            if not form.scales_at:  # scales of another kind
                block = with_scales(block[None], form, abs(scale) or 0.01)[0]
            rows.append(block)
    blocks = torch.stack(rows)
    return Gguf(torch.cat([blocks, blocks.flip(0), blocks.roll(7, 0)], 1).contiguous(), form)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("kind", mark_rare(KINDS))
def test_extreme_blocks(kind: str, cpu: Any) -> None:
    weight = extreme_blocks(kind)
    x = torch.randn(6, weight.shape[1])
    x[1] = 0
    x[2, ::3] = 1e30
    x[3] = x[3].sign()
    x[4, 32:64] = 0
    x[5] *= 1e-25
    for activations in ("int8", "int8x2"):
        check(cpu, x, weight, activations)


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_1"])
def test_the_largest_activations(kind: str, cpu: Any) -> None:
    """Those that a scale cannot be made for are no numbers, and their rows alone."""
    weight, x = random_weight(kind, 20, 64), torch.randn(6, 64)
    for row, value in enumerate((3e33, 3.6e33, 3e38, float("inf"), float("nan"))):
        x[row, 40] = value
    for activations in ("int8", "int8x2"):
        got = run(cpu, x, weight, activations)
        assert got.isfinite().all(-1).tolist() == [True, False, False, False, False, True]
        want = linear.reference(x, weight, None, activations)
        torch.testing.assert_close(got.isnan(), want.isnan())


def full_groups(bits: int, scale: torch.dtype) -> Grouped:
    """Rows of all zeros, all ones and noise, with zero points from one end to the other."""
    codes = torch.randint(0, 256, (40, 256 * bits // 8), dtype=torch.uint8)
    codes[::4], codes[1::4] = 0, 255
    zeros = torch.randint(0, 1 << bits, (40, 4), dtype=torch.uint8)
    zeros[::3], zeros[1::3] = 0, (1 << bits) - 1
    return Grouped(codes, (torch.randn(40, 4) * 10).to(scale), zeros, bits, 64)


@pytest.mark.parametrize(
    ("bits", "scale"),
    [
        # The kernel of int4_g64+zeros+order; the others compile their own.
        pytest.param(4, torch.float16, marks=marks_of("int4_g64")),
        pytest.param(8, torch.float32, marks=pytest.mark.slow),
        pytest.param(3, torch.bfloat16, marks=pytest.mark.slow),
    ],
)
def test_extreme_groups(bits: int, scale: torch.dtype, cpu: Any) -> None:
    x = torch.randn(5, 256)
    x[1, ::3] = 1e30
    x[2], x[3] = 0, x[3].sign()
    for activations in ("int8", "int8x2"):
        check(cpu, x, full_groups(bits, scale), activations)


@pytest.mark.parametrize("kind", mark_rare(["mxfp4", "nvfp4", "int4_g128"]))
def test_scales_that_are_no_numbers(kind: str, cpu: Any) -> None:
    """The rows that have them, and no others, as where the weight is decoded."""
    weight = random_weight(kind, 20, 256)
    match kind:
        case "mxfp4":
            weight.scales[3, 1], weight.scales[4, 0] = 255, 0
        case "nvfp4":
            weight.scales.view(torch.uint8)[5, 2] = 0x7F
        case _:
            weight.scales[2, 0] = float("nan")
    want = linear.reference(x := torch.randn(2, 256), weight, None, "int8")
    assert want.isnan().any(0).sum() == 1
    torch.testing.assert_close(run(cpu, x, weight), want, rtol=5e-5, atol=5e-5, equal_nan=True)


@pytest.mark.parametrize("kind", mark_rare(KINDS))
def test_blocks_of_any_bytes_are_multiplied(kind: str, cpu: Any) -> None:
    """Scales may be infinite or none: what comes out is so where it is in the reference too."""
    form = block_type(kind)
    data = torch.randint(0, 256, (37, 512 // form.elements * form.nbytes), dtype=torch.uint8)
    data[30:] = torch.randint(0, 256, (7, 1), dtype=torch.uint8)
    weight, x = Gguf(data, form), torch.randn(3, 512)
    got, want = run(cpu, x, weight), linear.reference(x, weight, None, "int8")
    # Powers up to 2**127: whether a sum of such numbers ends beyond float32 depends on its order.
    assert kind == "MXFP4" or torch.equal(got.isfinite(), want.isfinite())


@pytest.mark.slow
def test_four_bit_floats_under_factors(cpu: Any) -> None:
    x = torch.randn(3, 96)
    for kind in ("mxfp4", "nvfp4"):
        weight = random_weight(kind, 40, 96)
        for factor in (torch.tensor([0.37]), torch.rand(40) + 0.5):
            check(cpu, x, Fp4(weight.codes, weight.scales, factor), "int8")


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["int2_g64", "int5_g32", "int6_g96+float32", "int8_g16+zeros", "int4_g512"])
def test_groups_of_other_sizes(kind: str, cpu: Any) -> None:
    check(cpu, torch.randn(3, 288), random_weight(kind, 20, 288), "int8")


@pytest.mark.drawn("int4_g64", DRAWN)
def test_parts_in_several_orders(cpu: Any) -> None:
    """Weight matrices with columns in different orders are not stacked, and their results are right."""
    weights = [random_weight("int4_g64+zeros+order", n, 128) for n in (20, 12)]
    sizes = {"device": "cpu", "dtype": torch.float32, "executor": cpu}

    def bind(op: Any, **facts: Any) -> Any:
        return op.bind(OpFacts(sizes=facts, **sizes))[0]

    both = Linear(weights, [None, None], bind, torch.float32, "int8")
    x = torch.randn(3, 128)
    want = torch.cat([linear.reference(x, w, None, "int8") for w in weights], 1)
    torch.testing.assert_close(both(x), want, rtol=5e-5, atol=5e-5)


@pytest.mark.parametrize("kind", mark_rare([*KINDS, *STORED]))
def test_a_row_is_the_same_in_every_batch(kind: str, cpu: Any, one: Any) -> None:
    weight, x, bias = random_weight(kind, 37, 768), torch.randn(200, 768), torch.randn(37)
    for activations in ("int8", "int8x2"):
        whole = run(cpu, x, weight, activations, bias)
        assert torch.equal(whole, run(one, x, weight, activations, bias))
        for rows in (1, 2, 3, 5, 7, 8, 15, 16, 17, 31, 64):
            assert torch.equal(run(cpu, x[:rows], weight, activations, bias), whole[:rows]), rows
            assert torch.equal(run(one, x[-rows:], weight, activations, bias), whole[-rows:]), rows


def test_panels_of_rows(cpu: Any, one: Any) -> None:
    """So many inputs that rows pass by in several panels."""
    weight, x = random_blocks("Q8_0", 20, 8192), torch.randn(75, 8192)
    assert torch.equal(run(cpu, x, weight)[70:], run(one, x[70:], weight))
    check(cpu, x, weight, "int8")


@pytest.mark.parametrize("kind", mark_rare(("Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "IQ4_NL")))
def test_inputs_that_fill_no_step(kind: str, cpu: Any) -> None:
    for n_in in (32, 96, 160):
        check(cpu, torch.randn(3, n_in), random_blocks(kind, 5, n_in), "int8")


def test_rounding_is_that_of_the_reference(cpu: Any) -> None:
    """Through weights that are 1 on the diagonal, rounded activations come out bit for bit."""
    blocks = torch.zeros(64, 2, 34, dtype=torch.uint8)
    blocks[:, :, :2] = torch.tensor([1.0], dtype=torch.float16).view(torch.uint8)
    for i in range(64):
        blocks[i, i // 32, 2 + i % 32] = 1
    weight = Gguf(blocks.view(64, 68), block_type("Q8_0"))
    x = torch.randn(300, 64) * 10 ** (torch.rand(300, 1) * 40 - 20)
    x[7, :32] = torch.arange(32) - 15.5  # halves of a step, which go to the even side
    assert torch.equal(run(cpu, x, weight), round_activations(x, "int8"))


def test_what_is_no_number_stays_none(cpu: Any) -> None:
    weight, x = random_blocks("Q4_1", 16, 64), torch.randn(4, 64)
    clean = run(cpu, x, weight)
    x[1, 40], x[2, 3] = float("nan"), float("inf")
    got = run(cpu, x, weight)
    assert bool(got[1:3].isnan().all())
    assert torch.equal(got[[0, 3]], clean[[0, 3]])


def test_activations_too_small_to_scale_are_zeros(cpu: Any) -> None:
    x = torch.full((2, 64), 1e-40)
    assert not run(cpu, x, random_blocks("Q8_0", 16, 64)).any()


@pytest.mark.parametrize("rows", [15, 16, 33])
@pytest.mark.parametrize("kind", mark_rare(["Q8_0", "Q4_1", "Q4_0"]))
def test_rows_of_a_bundle_are_rounded_as_alone(kind: str, rows: int, cpu: Any) -> None:
    """Sixteen rows are rounded together, whatever numbers are among them; 96 inputs fill no step."""
    weight, x = random_blocks(kind, 40, 96), torch.randn(rows, 96)
    x[0, :32], x[1, 5], x[2, 40], x[3, 64:] = 0, float("nan"), float("inf"), 1e30
    x[4], x[-1, 32:64], x[-2, 70] = 1e-40, 1e-20, -float("inf")
    apart = torch.cat([run(cpu, x[r : r + 1], weight) for r in range(rows)])
    assert torch.equal(run(cpu, x, weight).nan_to_num(nan=7.0), apart.nan_to_num(nan=7.0))
    assert apart.isnan().any(1).tolist() == [r in (1, 2, rows - 2) for r in range(rows)]


def test_rows_that_lie_apart(cpu: Any) -> None:
    """x and out are columns of wider tensors, and the weight is a slice of a wider file."""
    whole = random_blocks("Q4_K", 40, 1024)
    weight = whole.cols(256, 768).rows(3, 24)
    x, out = torch.randn(9, 600)[:, 50:562], torch.full((9, 64), 7.0)
    w = kernels.pack(cpu, weight, torch.float32)
    packed.multiply(cpu, x, w, None, "int8", out[:, 30:51])
    assert torch.equal(out[:, 30:51], run(cpu, x.contiguous(), Gguf(weight.data.contiguous(), weight.kind)))
    assert bool((out[:, :30] == 7).all())
    assert bool((out[:, 51:] == 7).all())


@pytest.mark.parametrize("activations", ["int8", "int8x2"])
def test_groups(activations: Activations, cpu: Any, one: Any) -> None:
    """Rows sorted by expert give what each expert alone gives, in several sizes and with experts unused."""
    experts = [random_blocks("Q8_0", 48, 96) for _ in range(5)]
    maps = [kernels.pack(cpu, w, torch.float32) for w in experts]
    addresses = torch.tensor([m.data.data_ptr() for m in maps])
    for counts in ([0, 1, 0, 0, 0], [1, 1, 0, 0, 1], [0, 3, 17, 0, 9], [80, 0, 2, 31, 7], [0, 0, 0, 0, 0]):
        starts = torch.tensor([0, *torch.tensor(counts).cumsum(0).tolist()])
        rows = int(starts[-1])
        x, out = torch.randn(128, 96), torch.full((128, 48), 3.0)
        groups = packed.Groups(5, starts, addresses)
        for executor_ in (cpu, one):
            packed.multiply(executor_, x, maps[0], None, activations, out, groups=groups, rows=4)
            for g, w in enumerate(experts):
                at = slice(int(starts[g]), int(starts[g + 1]))
                if counts[g]:
                    assert torch.equal(out[at], run(cpu, x[at], w, activations))
            assert bool((out[rows:] == 3).all())


@pytest.mark.parametrize("kind", mark_rare(["Q6_K", "int4_g64+zeros+order"]))
def test_recorded(kind: str, cpu: Any) -> None:
    weight, bias = random_weight(kind, 33, 256), torch.randn(33)
    w, x, out = kernels.pack(cpu, weight, torch.float32), torch.randn(64, 256), torch.zeros(64, 33)
    with cpu.record(tokens=64, logits=65) as program:
        packed.multiply(cpu, x, w, bias, "int8", out)
    for tokens in (1, 5, 64):
        out.zero_()
        cpu.run(program, tokens=tokens, logits=1, seqs=1)
        assert torch.equal(out[:tokens], packed.multiply(cpu, x[:tokens], w, bias, "int8"))
        assert not out[tokens:].any()


@pytest.mark.parametrize("kind", mark_rare([*KINDS, *STORED]))
def test_memory(kind: str, cpu: Any) -> None:
    """Packed weights take about what the file's blocks do."""
    weight = random_weight(kind, 32, 512)
    w = kernels.pack(cpu, weight, torch.float32)
    widest = 4.7 if kind.startswith("IQ") else 2.3 if kind in ("TQ1_0", "Q1_0", "Q2_0") else 0
    assert w.nbytes <= max(1.07 * weight.nbytes, (widest + 0.3) / 8 * 32 * 512)
    assert w.data.data_ptr() % 64 == 0


def test_what_it_refuses(cpu: Any) -> None:
    weight = random_blocks("Q8_0", 16, 64)
    with pytest.raises(ShapeMismatch, match="rows of 32"):
        run(cpu, torch.randn(2, 32), weight)
    with pytest.raises(ShapeMismatch, match="float32"):
        run(cpu, torch.randn(2, 64, dtype=torch.float64), weight)
    with pytest.raises(ShapeMismatch, match="int8 or int8x2"):
        run(cpu, torch.randn(2, 64), weight, "float32")
    with pytest.raises(ShapeMismatch, match="dense bytes"):
        run(cpu, torch.randn(2, 64), Gguf(weight.data[:, ::2], weight.kind))
    with pytest.raises(ShapeMismatch, match="float32 weights cannot"):
        kernels.pack(cpu, Dense(torch.randn(16, 64)), torch.float32)
    sizes = {"kind": "Q8_0", "n_in": 64, "n_out": 16, "activations": "float32"}
    _, row = linear.bind(OpFacts("cpu", torch.float32, sizes, cpu))
    assert ("native", "it rounds activations to int8") in row.skipped
    _, row = linear.bind(OpFacts("cpu", torch.float32, {**sizes, "activations": "int8"}, cpu))
    assert row.variant in ("native", "native-amx")


def digest(kinds: list[str]) -> str:
    """The bits of some products, the same in every process."""
    load_kernels()
    cpu = executor(2)
    assert cpu is not None
    bits = hashlib.sha256()
    for kind in kinds:
        torch.manual_seed(5)
        weight, x = random_weight(kind, 37, 512), torch.randn(23, 512)
        for activations in ("int8", "int8x2"):
            bits.update(run(cpu, x, weight, activations).numpy().tobytes())
    cpu.close()
    return bits.hexdigest()


def elsewhere(processor: str, kinds: list[str]) -> str:
    """`digest` in a process with kernels that are made for another processor."""
    if processor == "alderlake" and "avxvnni" not in target.host_features():
        pytest.skip("no AVX-VNNI here")
    here = Path(__file__)
    code = (
        f"import sys; sys.path[:0] = {[str(here.parents[4]), str(here.parent)]!r}\n"
        f"import test_blocks as it; print(it.target.name(), it.digest({kinds!r}))"
    )
    env = {**os.environ, "NUMBA_CPU_NAME": processor, "NUMBA_CPU_FEATURES": ""}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-2000:]
    made_for, bits = done.stdout.split()[-2:]
    assert made_for.startswith(processor)
    return bits


@pytest.mark.sampled(2, across="another processor")
def test_another_processor_gives_the_same_bits() -> None:
    assert elsewhere("haswell", ["Q4_1"]) == digest(["Q4_1"])


@pytest.mark.slow
@pytest.mark.parametrize("processor", ["alderlake", "haswell", "x86-64"])
@pytest.mark.parametrize("kind", [*KINDS, *STORED])
def test_every_format_on_other_processors(processor: str, kind: str) -> None:
    assert elsewhere(processor, [kind]) == digest([kind])
