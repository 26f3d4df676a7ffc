"""Gate and up in one launch: the linear kernel applies the activation to each tile of both in registers.

The operations are those of `linear` and then `activate`, so the bits are the same. It saves time, because the
float32 numbers of gate and up, twice as many as are needed, do not go through memory between threads.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

from torch import Tensor

from plait.errors import ShapeMismatch
from plait.kernels.cpu.codegen.kernel import Kernel, inline, kernel
from plait.kernels.cpu.codegen.kinds import Floats
from plait.kernels.cpu.codegen.vec import load_f32, mul, store_f32
from plait.kernels.cpu.linear.layout import TILE
from plait.kernels.cpu.linear.packed import PackedWeight, multiply
from plait.kernels.cpu.pointwise.activation import (
    gelu,
    gelu_tanh,
    relu,
    relu2,
    silu,
    situ,
    swiglu_7,
    swiglu_16,
    swiglu_cut_7,
    swiglu_cut_10,
    swiglu_oai,
)
from plait.kernels.cpu.runtime.executor import Executor
from plait.kernels.cpu.runtime.row_checks import float32_rows
from plait.ops.glu import glu
from plait.ops.linear import Linear
from plait.ops.registry import OpFacts


def _join(kind: str, combine: Callable[[Floats, Floats], Floats]) -> Kernel:
    """The kernel that takes a tile of the gate, which the result replaces, bytes between its rows, the tile
    of up, rows 64 bytes apart, and how many rows there are."""

    def join(gate: int, up: int, row_bytes: int, rows: int) -> None:
        for r in range(rows):
            at = gate + r * row_bytes
            store_f32(at, combine(load_f32(at), load_f32(up + 64 * r)))

    join.__name__ = join.__qualname__ = f"join_{kind}"
    return kernel(join)


def _join_product(kind: str, activate: Callable[[Floats], Floats]) -> Kernel:
    return _join(kind, inline(lambda gate, up: mul(activate(gate), up)))


JOINS: Mapping[str, Kernel] = MappingProxyType(
    {
        "silu": _join_product("silu", silu),
        "gelu": _join_product("gelu", gelu),
        "gelu_pytorch_tanh": _join_product("gelu_tanh", gelu_tanh),
        "relu": _join_product("relu", relu),
        "relu2": _join_product("relu2", relu2),
        "swiglu_oai": _join("swiglu_oai", swiglu_oai),
        "swiglu_7": _join("swiglu_7", swiglu_7),
        "swiglu_16": _join("swiglu_16", swiglu_16),
        "swiglu_cut_7": _join("swiglu_cut_7", swiglu_cut_7),
        "swiglu_cut_10": _join("swiglu_cut_10", swiglu_cut_10),
        "situ": _join("situ", situ),
    }
)
"""What a kernel joins gate and up with, by activation."""


def join_of(up: PackedWeight, kind: str, gated: bool) -> Kernel | None:
    """The kernel that computes this layer and an activation in one launch, or None if they need two."""
    whole = gated and up.joins and up.n_out % (2 * TILE) == 0
    return JOINS.get(kind) if whole else None


def why_unjoinable(facts: OpFacts) -> str | None:
    """The `when` of a join of gate and up: one packed weight of whole tiles, and a known activation."""
    up, kind = facts.sizes.get("up"), facts["kind"]
    part = up.only_part if isinstance(up, Linear) else None
    if isinstance(up, Linear) and up.added is not None:
        return "adapters add to gate and up before the activation"
    if part is None or not isinstance(part[0], PackedWeight):
        return "gate and up are not one packed weight matrix"
    if not part[0].joins:
        return f"the kernel of these {part[0].kind} weights does not join"
    if join_of(part[0], kind, True) is None:
        half = f"{part[0].n_out / 2:g}"
        return f"it joins whole tiles of {TILE} by {', '.join(JOINS)}, not {half} outputs by {kind}"
    return float32_rows(facts)


@glu.variant("native", on="cpu", when=why_unjoinable, native=True)
def _glu(
    cpu: Executor, x: Tensor, up: Linear, kind: str, activate: Callable[[Tensor, str, bool], Tensor]
) -> Tensor:
    weight, bias, rounding = up.only_part or (None, None, "float32")
    if not isinstance(weight, PackedWeight) or (join := join_of(weight, kind, True)) is None:
        raise ShapeMismatch(f"a linear layer of {up.n_out} outputs cannot be joined by {kind} in one launch")
    return multiply(cpu, x, weight, bias, rounding, join=join)
