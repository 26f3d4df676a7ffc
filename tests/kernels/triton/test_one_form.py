"""`--deterministic` on GPUs: the bits of a row depend neither on its batch nor on the number of ranks."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="Triton is not installed here")

from plait.checkpoint.divided import Cuts, divide_linear
from plait.errors import ConfigError
from plait.kernels.load import load_for_gpu
from plait.loading.kernel_trials.plan import TrialNeeds, plan_trials
from plait.ops.blocks import random_weight
from plait.ops.chip import EXAMPLES
from plait.ops.glu import glu
from plait.ops.heads import HeadRows, map_heads
from plait.ops.linear import Linear, linear
from plait.ops.ranks import Alone, ShareLinear, add_in_tree
from plait.ops.registry import OpFacts
from plait.partition import Cut, Rank, sum_of
from plait.quant.weight import Dense, Weight, as_weight
from plait.runner.device.capture import StepCapture

load_for_gpu()

FORM: Any = importlib.import_module("plait.kernels.triton.linear.one_form")
ALL = (
    "plain",
    "Q4_K",
    "Q6_K",
    "Q8_0",
    "Q4_0",
    "Q2_K",
    "Q3_K",
    "Q5_K",
    "IQ4_XS",
    "int4_g64+zeros+order",
    "nvfp4",
    "mxfp4",
    "fp8_b128",
)
STORAGES = [pytest.param(s, marks=[] if s == "plain" else pytest.mark.slow) for s in ALL]
COLS = 1024


def made(storage: str, rows: int, cols: int = COLS) -> Weight:
    torch.manual_seed(4)
    return (
        Dense(torch.randn(rows, cols) / cols**0.5)
        if storage == "plain"
        else random_weight(storage, rows, cols)
    )


def bind(fn: Any, **sizes: Any) -> Any:
    """What a GPU would bind with `--deterministic`, over tensors of the CPU."""
    return fn.bind(OpFacts("cuda", torch.float32, {"deterministic": True, **sizes}))[0]


def dtype_for(storage: str) -> torch.dtype:
    """In float32 planes have one kernel in any mode (`test_float32`)."""
    return torch.float32 if storage == "plain" else torch.float16


def one(weight: Weight, bias: Tensor | None, change: object = None) -> Linear:
    dtype = torch.float32 if isinstance(weight, Dense) else torch.float16
    return Linear([weight], [bias], bind, dtype)


@pytest.mark.parametrize("storage", STORAGES)
def test_a_row_has_the_same_bits_alone_in_a_prompt_and_in_any_batch(storage: str) -> None:
    dtype = dtype_for(storage)
    bias, x = torch.randn(70, dtype=dtype), torch.randn(37, 512, dtype=dtype)
    layer = one(made(storage, 70, 512), bias)
    whole = layer(x)
    for some in (slice(36, 37), slice(3, 4), slice(2, 10), slice(5, 31)):
        assert torch.equal(layer(x[some]), whole[some])
    assert torch.equal(layer(x.flip(0)).flip(0), whole)
    bound = linear.tolerance[dtype]
    wanted = linear.reference(x, made(storage, 70, 512), bias)
    torch.testing.assert_close(whole, wanted, atol=bound, rtol=bound)


def cuts_of(rank: Rank) -> Mapping[str, Cut]:
    return {"down": Cut(cols=sum_of(rank.divide_blocks(COLS, "features")))}


def sum_of_ranks(weight: Weight, bias: Tensor, x: Tensor, size: int) -> Tensor:
    """What ranks of this number add up: each part by itself, then the tree over them."""
    parts = []
    for index in range(size):
        rank = Rank(index, size, shares=4, block=256)
        cuts = Cuts.for_rank(Alone(rank), cuts_of)
        part = cuts.part_of("down.weight")
        kept = as_weight(part.keep(weight))
        layer = divide_linear(part, kept, bias, len(bias), cuts, one, lambda op, **_: op)
        assert isinstance(layer, ShareLinear)
        ranges = cuts.inputs("down")[index]
        parts.append(layer(x[:, ranges[0][0] : ranges[-1][1]]))
    return add_in_tree(parts, torch.add)


# Inputs in another order are gathered, and rows are divided instead.
@pytest.mark.parametrize("storage", [one for one in STORAGES if "order" not in one.values[0]])
def test_a_sum_over_inputs_has_the_same_bits_on_1_2_and_4_ranks(storage: str) -> None:
    dtype = dtype_for(storage)
    weight, bias, x = made(storage, 40), torch.randn(40, dtype=dtype), torch.randn(19, COLS, dtype=dtype)
    alone = sum_of_ranks(weight, bias, x, 1)
    for size in (2, 4):
        assert torch.equal(sum_of_ranks(weight, bias, x, size), alone)
    assert torch.equal(sum_of_ranks(weight, bias, x[7:8], 2), alone[7:8])
    assert (alone - linear.reference(x.float(), weight, bias.float())).abs().max() < 1e-4


@pytest.mark.parametrize("storage", STORAGES)
def test_rows_of_a_weight_have_the_bits_that_they_have_in_the_whole(storage: str) -> None:
    """As ranks divide query heads, gates and the head's tokens: tiles begin elsewhere."""
    weight, x = made(storage, 256, 512), torch.randn(5, 512, dtype=dtype_for(storage))
    whole = one(weight, None)(x)
    for start, stop in ((0, 128), (128, 256), (64, 128)):
        assert torch.equal(one(weight.rows(start, stop), None)(x), whole[:, start:stop])


def test_a_share_is_summed_in_float32_and_rounded_once() -> None:
    weight, x = made("plain", 48, 512), torch.randn(3, 512)
    layer = Linear([weight, made("Q8_0", 32, 512)], [None, None], bind, torch.float32)
    assert torch.equal(layer.in_float32(x), layer(x))
    packed = FORM.pack_all(weight, torch.float16)
    half = x.half()
    wide = FORM.multiply_any(half, packed, None, out=torch.empty(3, 48))
    assert wide.dtype == torch.float32
    assert torch.equal(FORM.multiply_any(half, packed, None), wide.half())
    assert not torch.equal(wide, wide.half().float())


def test_what_has_forms_by_rows_is_not_bound() -> None:
    facts = OpFacts("cuda", torch.bfloat16, {"deterministic": True, "n_in": 64, "kind": "Q8_0"})
    rows = [op.bind(facts)[1] for op in (linear, map_heads)]
    assert [row.variant for row in rows] == ["one form", "one form"]
    assert glu.bind(facts)[1].variant == "reference"
    for op in (linear, map_heads):  # in whatever order modules were imported
        by_rows = next(variant for variant in op.variants if variant.name == "triton")
        assert "by the number of rows" in (by_rows.when(facts) or "")
    plain = replace(facts, sizes={"n_in": 64, "kind": "Q8_0"})
    assert [op.bind(plain)[1].variant for op in (linear, map_heads, glu)] == ["triton"] * 3


def test_storages_without_planes_are_refused_by_name() -> None:
    with pytest.raises(ConfigError, match=r"deterministic: a int4_g8 weight of \[24, 64\] has no planes"):
        one(random_weight("int4_g8", 24, 64), None)


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    "kind", ["plain", *(pytest.param(k, marks=pytest.mark.slow) for k in ("Q8_0", "Q8_0 turned"))]
)
def test_a_matrix_per_head_has_one_form_too(kind: str) -> None:
    heads, count, cols = 2, 24, 64
    torch.manual_seed(4)
    maps: Tensor | HeadRows = torch.randn(heads, count, cols)
    if kind != "plain":
        maps = HeadRows(random_weight("Q8_0", heads * count, cols), heads, 0, count, kind.endswith("turned"))
    fn = bind(map_heads)
    packed = fn.pack(maps)
    x = torch.randn(70, heads, count if kind.endswith("turned") else cols, dtype=dtype_for(kind))
    whole = fn.apply(x, packed)
    for some in (slice(0, 1), slice(69, 70), slice(3, 12), slice(20, 60)):
        assert torch.equal(fn.apply(x[some], packed), whole[some])
    bound = 1e-4 if x.dtype == torch.float32 else map_heads.tolerance[x.dtype]
    torch.testing.assert_close(whole, map_heads.reference(x, maps), atol=bound, rtol=bound)


def test_a_prompt_and_a_decode_are_one_launch_of_one_kernel() -> None:
    packed = FORM.pack_all(made("Q4_0", 64, 512), torch.float16)
    for rows in (1, 40):
        x = torch.randn(rows, 512).half()
        with StepCapture([x, packed.counters, *packed.planes.tensors], is_dry=True) as capture:
            FORM.multiply_any(x, packed, None)
        assert [name for name in capture.launches if name != "fill_"] == ["few_planes"]


def test_trials_try_the_form_that_will_be_bound() -> None:
    chip = EXAMPLES[90]
    tried = {
        flag: {
            trial.variant
            for trial in plan_trials(TrialNeeds(chip, [torch.float32], ["Q8_0"], flag))
            if trial.op == "linear"
        }
        for flag in (False, True)
    }
    assert "one form" in tried[True] - tried[False]
    assert "triton" in tried[False] - tried[True]
