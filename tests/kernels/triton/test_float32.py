"""Weights in planes with x in float32: one kernel for linear layers, heads and any number of rows."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="Triton is not installed here")

from plait.kernels.triton.linear import heads
from plait.kernels.triton.linear.plane_forms import EVERY
from plait.kernels.triton.moe import expert_planes, moe
from plait.ops.blocks import random_weight
from plait.ops.expert_stack import ExpertStack
from plait.ops.heads import HeadRows, map_heads
from plait.ops.linear import FLOATS, KINDS, STORED, linear
from plait.quant.plane_parts import pack_planes
from plait.quant.planes import PlaneLayout
from plait.runner.device.capture import StepCapture

LINEAR: Any = importlib.import_module("plait.kernels.triton.linear.linear")
ONE_FORM: Any = importlib.import_module("plait.kernels.triton.linear.one_form")
GROUPED = (
    *("int2_g64", "int2_g64+zeros", "int3_g64", "int3", "int3_g64+zeros", "int4_g32", "int4", "int4+zeros"),
    *("int4_g64+zeros+bfloat16", "int5_g64", "int5_g64+zeros", "int6_g64", "int6_g64+zeros", "int7_g64"),
    *("int8_g32", "int8_g128", "int8_g128+zeros", "int8_g64+bfloat16", "int4_g64+zeros+order"),
)
STORAGES = (*KINDS, "Q8_K", *STORED, *FLOATS, *GROUPED)
NEAR = 5e-7  # of the norm: sums of 512 products in float32
POINTERS = {torch.float16: "fp16*", torch.bfloat16: "bf16*", torch.float32: "fp32*", torch.int32: "i32*"}


def distance(found: Tensor, wanted: Tensor) -> float:
    return float((found.double() - wanted.double()).norm() / wanted.double().norm())


@pytest.mark.sampled(4)
@pytest.mark.parametrize("kind", STORAGES)
def test_rows_in_float32_times_every_storage_are_the_products_of_its_numbers(kind: str) -> None:
    weight, x, bias = random_weight(kind, 40, 512), torch.randn(3, 512), torch.randn(40)
    packed = LINEAR.pack(weight, torch.float32)
    assert isinstance(packed, LINEAR.PackedPlanes)
    wanted = weight.dequantize(torch.float32).double() @ x.double().T + bias.double()[:, None]
    assert distance(LINEAR.multiply(x, packed, bias), wanted.T) < NEAR


def test_the_last_columns_and_outputs_of_a_weight_need_not_be_whole_units() -> None:
    for kind, shape in (("Q8_0", (70, 96)), ("int4_g32+zeros", (33, 96)), ("fp8_b128", (130, 200))):
        weight, x = random_weight(kind, *shape), torch.randn(17, shape[1])
        packed = LINEAR.pack(weight, torch.float32)
        assert distance(LINEAR.multiply(x, packed, None), linear.reference(x, weight, None)) < NEAR


def test_a_row_has_the_same_bits_in_any_batch_and_mode() -> None:
    packed, x = LINEAR.pack(random_weight("Q4_K", 70, 256), torch.float32), torch.randn(40, 256)
    whole = LINEAR.multiply(x, packed, None)
    assert torch.equal(LINEAR.multiply(x[5:6], packed, None), whole[5:6])
    assert torch.equal(ONE_FORM.multiply_any(x[7:30], packed, None), whole[7:30])


@pytest.mark.parametrize("rows", [1, 20, 600])
def test_any_number_of_rows_is_one_launch_of_one_kernel(rows: int) -> None:
    packed, x = LINEAR.pack(random_weight("Q8_0", 8, 64), torch.float32), torch.randn(rows, 64)
    for run in (LINEAR.multiply, ONE_FORM.multiply_any):
        with StepCapture([x, packed.counters, *packed.planes.tensors], is_dry=True) as capture:
            run(x, packed, None)
        assert [name for name in capture.launches if name != "fill_"] == ["float32_planes"]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("kind", ["Q5_K", "nvfp4", "mxfp4", "fp8_b128"])
def test_a_matrix_for_each_head_in_float32(kind: str, turned: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also of more rows than other dtypes have a kernel for."""
    monkeypatch.setattr(heads, "MOST", 4)
    rows = HeadRows(random_weight(kind, 2 * 128, 256), 2, 0, 128, turned)
    packed, x = heads.pack(rows), torch.randn(5, 2, 128 if turned else 256)
    assert isinstance(packed, heads.HeadPlanes)
    found = heads.multiply_heads(x, packed)
    assert distance(found, map_heads.reference(x, rows)) < NEAR
    assert torch.equal(heads.multiply_heads(x[3:4], packed), found[3:4])


@pytest.mark.sampled(2)
@pytest.mark.parametrize("kind", ["Q6_K", "int4_g64+zeros+order"])
def test_experts_in_float32_have_the_same_bits_by_slots_and_by_groups(kind: str) -> None:
    stack = ExpertStack(3, torch.float32, moe.pack)
    weights, bias = [random_weight(kind, 80, 256) for _ in range(3)], torch.randn(3, 80)
    for e, weight in enumerate(weights):
        stack.put(e, [weight], [bias[e]])
    x, index = torch.randn(4, 256), torch.tensor([[0, 2], [2, 1], [0, 2], [1, 2]])
    groups = expert_planes.sort_by_expert(index, 3)
    silu = "silu", True
    found = [expert_planes.multiply_stack(x, stack, index, where, 2, silu, 0) for where in (None, groups)]
    assert torch.equal(*found)
    for at, e in enumerate(index.flatten().tolist()):
        gate, up = (weights[e].dequantize(torch.float32) @ x[at // 2] + bias[e]).chunk(2)
        assert distance(found[0][at], torch.nn.functional.silu(gate) * up) < 2e-6


def code_of(layout: PlaneLayout) -> tuple[object, ...]:
    """What of a layout decides which machine code there is; sizes of groups are numbers in it."""
    return layout.bits, layout.high, layout.value, layout.zero > 0, layout.scales, layout.tall > 1


@pytest.mark.parametrize("kind", STORAGES)
def test_what_a_storage_is_laid_out_as_is_compiled_in_float32(kind: str) -> None:
    compiled = {(code_of(layout), scales) for layout, scales in EVERY.values()}
    planes = pack_planes(random_weight(kind, 256, 512))
    assert planes is not None
    assert (code_of(planes.layout), POINTERS[planes.scales.dtype]) in compiled
