"""Gate and up in one launch: the bits of linear layer and activation in turn, and which models get it."""

from __future__ import annotations

import ast
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from plait.errors import ShapeMismatch
from plait.kernels.cpu.codegen.target import SHARED
from plait.kernels.cpu.linear import glu as native
from plait.kernels.cpu.linear.blocks import pack
from plait.kernels.cpu.linear.packed import multiply
from plait.kernels.cpu.moe import experts as native_experts
from plait.kernels.load import executor, load_kernels
from plait.ops.activation import activate
from plait.ops.blocks import random_weight
from plait.ops.glu import glu
from plait.ops.linear import KINDS, Linear
from plait.ops.moe import experts
from plait.ops.registry import Op, OpFacts
from plait.quant.weight import Dense
from tests.common_storages import mark_rare

load_kernels()
ROWS = (1, 2, 3, 7, 15, 16, 17, 40, 49, 130)  # every bundle, and pieces taken one by one
STORED = ("int4_g128", "int4_g64+zeros", "int8", "mxfp4", "nvfp4")


def bound(op: Op, cpu: Any, **sizes: Any) -> tuple[Any, Any]:
    return op.bind(OpFacts("cpu", torch.float32, sizes, cpu))


def map_of(
    cpu: Any, kind: str | None, n_in: int, size: int, biased: bool = False, rounding: Any = "int8"
) -> Linear:
    """To gate and up of so many outputs each."""
    halves = [random_weight(kind, size, n_in) if kind else Dense(torch.randn(size, n_in)) for _ in range(2)]
    biases = [torch.randn(size) if biased else None for _ in range(2)]
    rounded = rounding if kind else "float32"
    return Linear(halves, biases, lambda op, **sizes: bound(op, cpu, **sizes)[0], torch.float32, rounded)


def one_after_the_other(cpu: Any, x: torch.Tensor, up: Linear, kind: str) -> torch.Tensor:
    apply, _ = bound(activate, cpu, kind=kind)
    return apply(up(x), kind, True)  # type: ignore[no-any-return]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("kind", mark_rare([*KINDS, *STORED]))
def test_one_launch_has_the_bits_of_two(cpu: Any, kind: str) -> None:
    up = map_of(cpu, kind, 512, 80, biased=True)
    fn, row = bound(glu, cpu, kind="silu", up=up)
    assert row.variant == "native"
    for rows in ROWS:
        x = torch.randn(rows, 512)
        assert torch.equal(fn(x, up, "silu", None), one_after_the_other(cpu, x, up, "silu")), rows


@pytest.mark.parametrize("rounding", ["int8", "int8x2"])
@pytest.mark.parametrize("kind", list(native.JOINS))
def test_every_activation(cpu: Any, kind: str, rounding: Any) -> None:
    up = map_of(cpu, "Q4_K", 512, 208, rounding=rounding)
    fn, row = bound(glu, cpu, kind=kind, up=up)
    assert row.variant == "native"
    for rows in ROWS:
        x = 4 * torch.randn(rows, 512)
        assert torch.equal(fn(x, up, kind, None), one_after_the_other(cpu, x, up, kind)), rows


@pytest.mark.parametrize("threads", [1, 3])
def test_threads_change_nothing(cpu: Any, threads: int) -> None:
    up = map_of(cpu, "Q8_0", 320, 112)
    other = executor(threads)
    assert other is not None
    weight, _, rounding = up.parts[0]
    try:
        for rows in ROWS:
            x = torch.randn(rows, 320)
            join = native.JOINS["silu"]
            made = multiply(other, x, weight, None, rounding, join=join)
            assert torch.equal(made, one_after_the_other(cpu, x, up, "silu")), rows
    finally:
        other.close()


def test_rows_of_a_wider_result(cpu: Any) -> None:
    up = map_of(cpu, "Q4_1", 256, 64)
    weight, _, rounding = up.parts[0]
    for rows in (1, 5, 16, 70):
        x, out = torch.randn(rows, 256), torch.zeros(rows, 100)
        multiply(cpu, x, weight, None, rounding, out[:, 20:84], join=native.JOINS["silu"])
        assert torch.equal(out[:, 20:84], one_after_the_other(cpu, x, up, "silu"))
        assert not out[:, :20].any()
        assert not out[:, 84:].any()


def test_tiles_of_bytes_have_the_same_bits(cpu: Any) -> None:
    """AMX's kernel, on what stands for its tiles."""
    stored = random_weight("Q8_0", 192, 256)
    plain, tiled = (pack(cpu, stored, torch.float32, kind) for kind in ("", "software"))
    for rows in (1, 15, 16, 33, 64):
        x = torch.randn(rows, 256)
        made = [multiply(cpu, x, w, None, "int8", join=native.JOINS["silu"]) for w in (plain, tiled)]
        assert torch.equal(*made), rows


@pytest.mark.parametrize("kind", ["silu", "swiglu_oai"])
def test_experts_join_too(cpu: Any, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    count, k, hidden, size = 5, 2, 64, 96
    up = [map_of(cpu, "Q4_1", hidden, size) for _ in range(count)]
    down = [plain_map(cpu, random_weight("Q4_1", hidden, size)) for _ in range(count)]
    fn, _ = bound(experts, cpu)
    for tokens in (1, 6, 40):
        x = torch.randn(tokens, hidden)
        weight, index = torch.rand(tokens, count).topk(k, -1)
        args = (x, weight, index, up, down, (kind, True), None)
        together = fn(*args)
        with monkeypatch.context() as apart:
            apart.setattr(native_experts, "join_of", lambda *_: None)
            assert torch.equal(together, fn(*args)), tokens


def test_what_cannot_be_joined_is_reported(cpu: Any) -> None:
    """Half tiles, other activations, split matrices and plain numbers: the reference composes those."""
    mixed = Linear(
        [random_weight("Q4_K", 64, 256), random_weight("Q6_K", 64, 256)],
        [None, None],
        lambda op, **sizes: bound(op, cpu, **sizes)[0],
        torch.float32,
        "int8",
    )
    packed = map_of(cpu, "Q4_K", 256, 64)
    for up, kind, why in (
        (map_of(cpu, "Q4_K", 256, 40), "silu", "whole tiles of 16"),
        (packed, "sigmoid", "by sigmoid"),
        (mixed, "silu", "not one packed weight matrix"),
        (map_of(cpu, None, 256, 64), "silu", "the kernel of these float32 weights does not join"),
        (None, "silu", "not one packed weight matrix"),
    ):
        fn, row = bound(glu, cpu, kind=kind, up=up)
        assert row.variant == "reference"
        assert why in dict(row.skipped)["native"]
        if up is not None:
            x, (apply, _) = torch.randn(3, 256), bound(activate, cpu, kind=kind)
            assert torch.equal(fn(x, up, kind, apply), one_after_the_other(cpu, x, up, kind))
    weight, _, rounding = packed.parts[0]
    with pytest.raises(ShapeMismatch, match="not joined"):
        multiply(
            cpu, torch.randn(2, 256), replace(weight, joins=False), None, rounding, join=native.JOINS["silu"]
        )


def plain_map(cpu: Any, weight: Any) -> Linear:
    return Linear([weight], [None], lambda op, **s: bound(op, cpu, **s)[0], torch.float32, "int8")


def test_inline_functions_of_other_files_are_part_of_what_kernels_are_made_of() -> None:
    """Inlined code of other files is in the name of the cache's folder, or in a digest in the kernel's text.

    Numba looks at the file of a kernel alone.
    """
    folder = Path(native.__file__).resolve().parents[1]
    trees = {
        path.relative_to(folder).as_posix()[:-3].replace("/", "."): ast.parse(path.read_text())
        for path in folder.rglob("*.py")
    }
    decorated = {
        stem: {
            kind: {
                node.name
                for node in tree.body
                if isinstance(node, ast.FunctionDef)
                and any(isinstance(d, ast.Name) and d.id == kind for d in node.decorator_list)
            }
            for kind in ("inline", "kernel")
        }
        for stem, tree in trees.items()
    }
    lacking = [
        (stem, source, alias.name)
        for stem, tree in trees.items()
        if decorated[stem]["kernel"]
        for node in tree.body
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("plait.kernels.cpu.")
        for source in [(node.module or "").removeprefix("plait.kernels.cpu.")]
        for alias in node.names
        if source in decorated
        if alias.name in decorated[source]["inline"] and f"{source.replace('.', '/')}.py" not in SHARED
    ]
    assert not lacking
