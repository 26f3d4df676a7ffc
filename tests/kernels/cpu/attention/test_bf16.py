"""Attention by products of bfloat16 pairs, compared with exact fractions; what is rounded, and where."""

from __future__ import annotations

import math
from fractions import Fraction
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from plait.kernels.cpu.codegen.bf16_dot import both_bf16, dot_bf16
from plait.kernels.cpu.codegen.kernel import kernel
from plait.kernels.cpu.codegen.vec import fma, high_bf16, load_f32, load_i32, low_bf16, store_f32, store_i32
from plait.kernels.cpu.runtime.frame import word
from plait.ops.attention import paged_attention
from plait.ops.registry import OpFacts
from tests.kernels.cpu.attention.test_attention import Memory, Shape, Text, attend, bound

SMALLEST = 2.0**-126  # of normal float32


@kernel
def dots(frame: int, args: int, thread: int, threads: int) -> None:
    """sums, x, y, out by the operation, out by two multiply-adds, how many groups of sixteen."""
    for i in range(word(args, 7)):
        at = 64 * i
        s, x, y = load_f32(word(args, 2) + at), load_i32(word(args, 3) + at), load_i32(word(args, 4) + at)
        store_f32(word(args, 5) + at, dot_bf16(s, x, y))
        second = fma(high_bf16(x), high_bf16(y), s)
        store_f32(word(args, 6) + at, fma(low_bf16(x), low_bf16(y), second))


@kernel
def roundings(frame: int, args: int, thread: int, threads: int) -> None:
    """x, out: thirty-two numbers rounded to bfloat16, how many times."""
    for i in range(word(args, 4)):
        x = word(args, 2) + 128 * i
        store_i32(word(args, 3) + 64 * i, both_bf16(load_f32(x), load_f32(x + 64)))


def numbers(draw: np.random.Generator, count: int, low: int, high: int) -> Tensor:
    """Random float32 of exponents low..high, and some that are 0, 1 and the largest of those."""
    sizes = draw.uniform(1, 2, count) * 2.0 ** draw.integers(low, high, count)
    some = np.where(draw.random(count) < 0.05, draw.choice([0.0, 1.0, 2.0**high], count), sizes)
    return torch.from_numpy((some * draw.choice([-1, 1], count)).astype(np.float32))


def rounded_once(x: Fraction) -> float:
    """x as float32, to nearest even."""
    if x == 0:
        return 0.0
    step = Fraction(2) ** (max(math.frexp(float(x))[1], -125) - 24)
    return float(round(x / step) * step)


@pytest.mark.parametrize(("low", "high"), [(-3, 3), (-20, 20), (-30, 60), (-62, 62)])
def test_a_pair_is_two_multiply_adds_the_second_number_first(cpu: Any, low: int, high: int) -> None:
    draw, groups = np.random.default_rng(7), 4000
    x, y = (numbers(draw, 32 * groups, low, high).bfloat16() for _ in range(2))
    s = numbers(draw, 16 * groups, 2 * low, 2 * high)
    found, wanted = torch.empty_like(s), torch.empty_like(s)
    cpu.launch(dots, s, x, y, found, wanted, groups, rows=1)
    normal = (wanted.abs() >= SMALLEST) | (wanted == 0)
    assert torch.equal(found[normal], wanted[normal])
    for i in range(0, 16 * groups, 61):
        (a, b), (c, d) = x[2 * i : 2 * i + 2].tolist(), y[2 * i : 2 * i + 2].tolist()
        second = rounded_once(Fraction(b) * Fraction(d) + Fraction(float(s[i])))
        exact = rounded_once(Fraction(a) * Fraction(c) + Fraction(second))
        assert float(wanted[i]) == exact, i


def test_numbers_are_rounded_to_nearest_even(cpu: Any) -> None:
    draw = np.random.default_rng(3)
    x = numbers(draw, 32 * 500, -126, 120)
    ties = torch.arange(0, 32 * 8, dtype=torch.int32) * 0x8000 + 0x3F800000  # each second one is half-way
    x = torch.cat([x, ties.view(torch.float32)])
    out = torch.empty_like(x, dtype=torch.bfloat16)
    cpu.launch(roundings, x, out, len(x) // 32, rows=1)
    assert torch.equal(out, x.bfloat16())


def rounded_attention(shape: Shape, text: Text) -> Tensor:
    """Plain attention in float64 that rounds queries and weights as the kernel does."""
    ratio, n = shape.heads // shape.kv_heads, len(text.q)
    factor = float(np.float32(shape.dim**-0.5) * np.float32(math.log2(math.e)))
    q = (text.q * factor).bfloat16().double()
    k, v = (x.bfloat16().double().repeat_interleave(ratio, 1) for x in (text.k, text.v))
    scores = torch.einsum("qhd,khd->hqk", q, k)
    if shape.softcap:
        cap = shape.softcap * math.log2(math.e)
        scores = cap * torch.tanh(scores / cap)
    behind = torch.arange(n)[:, None] - torch.arange(n)
    scores = scores.masked_fill((behind < 0) | (behind >= (shape.window or n)), -math.inf)
    sinks = torch.linspace(-2.0, 3.0, shape.heads).double()[:, None, None] * math.log2(math.e)
    top = (
        torch.maximum(scores.amax(-1, keepdim=True), sinks).ceil()
        if shape.sinks
        else scores.amax(-1, True).ceil()
    )
    weights = torch.exp2(scores - top).bfloat16().double()
    total = weights.sum(-1, keepdim=True) + (torch.exp2(sinks - top) if shape.sinks else 0.0)
    return torch.einsum("hqk,khd->qhd", weights / total, v)


SHAPES = [
    Shape(heads=9, kv_heads=3, dim=64, kept=torch.bfloat16, rounds=True),
    Shape(heads=8, kv_heads=2, dim=24, window=70, softcap=8.0, kept=torch.bfloat16, rounds=True),
    Shape(heads=6, kv_heads=2, dim=256, sinks=True, kept=torch.bfloat16, rounds=True),
]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_it_rounds_queries_and_weights_and_nothing_else(cpu: Any, shape: Shape) -> None:
    """A score next to the middle of two bfloat16 may go to the other one: few do, and by one step."""
    torch.manual_seed(5)
    text = Text.of(shape, 530)
    found = attend(bound(cpu, shape), shape, [text], Memory(shape, [530]), [530], [0])[0].double()
    off = (found - rounded_attention(shape, text)).abs()
    plain = attend(paged_attention, shape, [text], Memory(shape, [530]), [530], [0])[0].double()
    cost = (found - plain).abs()
    assert off.quantile(0.9) < 5e-6
    assert off.mean() < 0.05 * cost.mean()
    assert off.max() < 5e-3
    assert 1e-5 < cost.mean() < 1e-3


def test_a_value_that_is_everywhere_the_same_comes_out_as_it_is(cpu: Any) -> None:
    """Weights are summed as they were rounded."""
    shape = SHAPES[0]
    text = Text.of(shape, 300)
    text.v[:] = 3.0
    out = attend(bound(cpu, shape), shape, [text], Memory(shape, [300]), [300], [0])[0]
    torch.testing.assert_close(out, torch.full_like(out, 3.0), rtol=1e-6, atol=0.0)


def test_scores_far_apart_do_not_overflow(cpu: Any) -> None:
    shape = Shape(heads=2, kv_heads=1, dim=16, kept=torch.bfloat16, rounds=True)
    text = Text.of(shape, 600)
    text.q.mul_(3000.0)
    out = attend(bound(cpu, shape), shape, [text], Memory(shape, [600]), [600], [0])[0]
    torch.testing.assert_close(out.double(), rounded_attention(shape, text), rtol=1e-4, atol=1e-4)


def test_a_number_that_is_none_is_not_hidden(cpu: Any) -> None:
    shape = Shape(heads=2, kv_heads=2, dim=16, kept=torch.bfloat16, rounds=True)
    for part in "qkv":
        text = Text.of(shape, 40)
        getattr(text, part)[30, 1, 5] = float("nan")
        out = attend(bound(cpu, shape), shape, [text], Memory(shape, [40]), [40], [0])[0]
        assert out[30, 1].isnan().any(), part
        assert out[:24].isfinite().all(), part
        assert out[:, 0].isfinite().all(), part


@pytest.mark.parametrize(
    ("more", "why"),
    [
        ({"activations": "int8x2"}, "activations are int8x2"),
        ({}, "activations are float32"),
        ({"activations": "int8", "kv_dtype": "float32"}, "caches of bfloat16, not of float32"),
        ({"activations": "int8", "kv_dtype": "int8"}, "caches of bfloat16, not of int8"),
        ({"activations": "int8", "dim": 9}, "even size"),
        ({"activations": "int8", "dim": 514}, "heads of at most 512, not of 514"),
    ],
    ids=str,
)
def test_it_is_bound_only_where_rounding_is_the_rule(more: dict[str, Any], why: str) -> None:
    sizes = {"kv_dtype": "bfloat16", "block_size": 16, "dim": 64, **more}
    row = paged_attention.bind(OpFacts("cpu", torch.float32, sizes, SimpleNamespace(prefill="same")))[1]
    assert why in dict(row.skipped)["native-bf16"]
