"""Linear layers on GPUs, by the number of rows of x and by how the weight is stored.

    rows          planes (every quantized storage)                      plain numbers
    1 .. 16       one launch, exact scales (`few_rows`)                 one launch (`few_rows`)
    17 .. 512     one launch, tiles decoded on the way (`many_rows`)    torch's product
    more          decoded to scratch memory, torch's product            torch's product
    in float32    one launch (`float32_planes`)                         as above

Within a line a row's bits depend on no other row; from one line to the next they differ (`one_form` has one
line). Of act-order GPTQ, x is put in the order of the columns first, one launch more. A storage without
planes is decoded at each use.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from plait.errors import ShapeMismatch
from plait.kernels.triton.forms import widen
from plait.kernels.triton.linear import few_rows, many_rows
from plait.kernels.triton.linear.float32_planes import is_float32, multiply_in_float32
from plait.kernels.triton.linear.plane_arguments import (
    decode_constants,
    plane_constants,
    plane_strides,
    plane_tensors,
)
from plait.kernels.triton.shared_memory import LEAST_SHARED, dense_memory, plane_memory, shared_limit
from plait.ops.glu import glu
from plait.ops.launch import launch
from plait.ops.linear import Activations, Linear, Packing, linear
from plait.ops.registry import OpFacts, TensorFn
from plait.quant.plane_parts import pack_planes
from plait.quant.planes import PlaneLayout, Planes
from plait.quant.weight import Dense, Weight

NAME = "triton"
FEW_REGISTERS = 168  # of a thread, for four bits, and up to 8 rows of six: three blocks on a processor
BYTE_REGISTERS = 128  # for 9 to 16 rows of bytes: four blocks
MANY_REGISTERS = {"zeros": 144, "levels": 255}  # for four-bit codes times many rows of x in float16
HIGH_REGISTERS = 240  # for units of 256 columns: two blocks; given all 255, ptxas spills a few


@dataclass(frozen=True)
class PlanesTiling:
    """How the two kernels cut a weight up: from its sizes alone, never from the number of rows.

    x is in bfloat16 or float16; in float32 `float32_planes` multiplies."""

    layout: PlaneLayout
    n_out: int
    n_in: int

    @property
    def units(self) -> int:
        return self.layout.padded(self.n_in) // self.layout.unit

    def few_outputs(self, rows: int) -> int:
        """Outputs of a program of `few_planes`: as many as every target has registers for."""
        if self.layout.high == 1 and rows > 8:
            return 16
        return 32 if self.layout.high else few_rows.BN

    @property
    def few_steps(self) -> int:
        return -(-self.units // few_rows.UNITS)

    @property
    def many_units(self) -> int:
        """Units of a step of `many_planes`: 128 columns, or a unit if that is longer."""
        return max(1, 128 // self.layout.unit)

    @property
    def many_steps(self) -> int:
        return -(-self.units // self.many_units)

    def is_even(self, units: int) -> bool:
        """Whether all steps of so many units are whole, and all units."""
        return self.units % units == 0 and self.n_in % self.layout.unit == 0

    def few_stages(self, rows: int, outputs: int, limit: int) -> int:
        """Of a loop over units by programs of so many outputs, in a block of `limit` bytes."""
        unit, is_small = self.layout.unit, rows <= 8
        wanted = 3 if unit <= 64 or (unit == 256 and is_small) else 2
        memory = plane_memory(self.layout, few_rows.UNITS, outputs, 8 if is_small else 16)
        return memory.fit_stages(wanted, limit)

    def few_registers(self, rows: int, outputs: int, dtype: torch.dtype) -> dict[str, Any]:
        """How many a thread may have: left to itself, ptxas spills to have one block more on a processor."""
        layout, is_few = self.layout, rows <= 8
        is_half = layout.high == 2 and not is_few and dtype == torch.float16
        if is_half or (layout.high == 1 and layout.bits == 4):
            return {"maxnreg": HIGH_REGISTERS}
        is_nibble = layout.bits == 4 and layout.value == "integer" and (is_few or layout.scales == "plain")
        if is_nibble or (is_few and layout.high == 2):
            return {"maxnreg": FEW_REGISTERS}
        is_byte = not is_few and layout.value == "byte" and outputs == few_rows.BN
        return {"maxnreg": BYTE_REGISTERS} if is_byte else {}

    def few_constants(
        self,
        rows: int,
        act: str,
        limit: int = LEAST_SHARED,
        outputs: int | None = None,
        dtype: torch.dtype = torch.bfloat16,
    ) -> dict[str, Any]:
        """The constants of up to 8 or 16 rows of x of a dtype, on a GPU of which a block may have `limit`
        bytes of shared memory. outputs: of a program, if not `few_outputs`."""
        outputs = self.few_outputs(rows) if outputs is None else outputs
        return self.few_registers(rows, outputs, dtype) | {
            "EVEN": self.is_even(few_rows.UNITS), "ACT": act, "UNITS": few_rows.UNITS,
            "BN": outputs,
            "SHARES": few_rows.shares_of(self.n_out, self.few_steps, self.few_outputs(1)),
            "BM": 8 if rows <= 8 else 16, "num_warps": few_rows.UNITS,
            "num_stages": self.few_stages(rows, outputs, limit),
        }  # fmt: skip

    def many_constants(
        self, rows: int, limit: int = LEAST_SHARED, dtype: torch.dtype = torch.bfloat16
    ) -> dict[str, Any]:
        """The constants of so many rows of x of a dtype; limit: as of `few_constants`."""
        units = self.many_units
        memory = plane_memory(self.layout, units, many_rows.BN, many_rows.BM)
        is_tight = dtype == torch.float16 and self.layout.bits == 4 and not self.layout.high
        most = MANY_REGISTERS.get(self.layout.scales) if is_tight else None
        return ({"maxnreg": most} if most else {}) | {
            "EVEN": self.is_even(self.many_units), "IS_SPLIT": rows <= many_rows.SPLIT,
            "SHARES": few_rows.shares_of(self.n_out, self.many_steps, many_rows.BN),
            "UNITS": units, "BN": many_rows.BN, "BM": many_rows.BM, "num_warps": 4,
            "num_stages": memory.fit_stages(3, limit),
        }  # fmt: skip


@dataclass(frozen=True, eq=False)
class PackedPlanes:
    """A weight in planes as `linear` keeps it. counters: int32, one for each tile of a launch, all 0."""

    planes: Planes
    counters: Tensor

    @property
    def nbytes(self) -> int:
        return self.planes.nbytes + 4 * self.counters.numel()

    @cached_property
    def tiling(self) -> PlanesTiling:
        return PlanesTiling(self.planes.layout, *self.planes.shape)


@dataclass(frozen=True, eq=False)
class PackedNumbers:
    """A weight of plain numbers as `linear` keeps it: [out, in] in the dtype of x; counters as above."""

    weight: Tensor
    counters: Tensor

    @property
    def nbytes(self) -> int:
        return self.weight.numel() * self.weight.element_size() + 4 * self.counters.numel()


def pack(weight: Weight, dtype: torch.dtype) -> PackedPlanes | PackedNumbers | Weight:
    """The weight as kernels read it; one without planes is kept as it is."""
    n_out = weight.shape[0]
    if isinstance(weight, Dense):
        numbers = weight.dequantize(dtype).contiguous()
        return PackedNumbers(numbers, _make_counters(-(-n_out // DENSE_ROWS), numbers.device))
    planes = pack_planes(weight)
    if planes is None:
        return weight
    tiles = max(-(-n_out // (few_rows.BN // 4)), many_rows.SPLIT // many_rows.BM * -(-n_out // many_rows.BN))
    return PackedPlanes(planes, _make_counters(tiles, planes.codes.device))


def _make_counters(count: int, device: torch.device) -> Tensor:
    return torch.zeros(count, dtype=torch.int32, device=device)


DENSE_ROWS = few_rows.BN // 2  # outputs of a program of `few_dense`


def multiply(
    x: Tensor,
    packed: PackedPlanes | PackedNumbers | Weight,
    bias: Tensor | None,
    activations: Activations = "float32",
    out: Tensor | None = None,
) -> Tensor:
    """`linear` over what `pack` made. out: [..., out], rows may lie apart; None for a new one."""
    if activations != "float32":
        raise ShapeMismatch(f"products on a GPU do not round activations, got {activations!r}")
    n_out = shape_of(packed)[0]
    if out is None:
        out = torch.empty(*x.shape[:-1], n_out, dtype=x.dtype, device=x.device)
    rows, result = as_rows(x), flat_rows(out, n_out)
    count = len(rows)
    if not count or not n_out:
        return out
    match packed:
        case PackedPlanes():
            _multiply_planes(rows, packed, bias, result)
        case PackedNumbers() if count <= few_rows.MOST:
            multiply_few(rows, packed, bias, "", result)
        case PackedNumbers():
            _multiply_numbers(rows, packed.weight, bias, result)
        case _:
            result.copy_(linear.reference(rows, packed, bias))
    return out


def shape_of(packed: PackedPlanes | PackedNumbers | Weight) -> tuple[int, int]:
    """(out, in)"""
    if isinstance(packed, PackedPlanes):
        return packed.planes.shape
    n_out, n_in = packed.weight.shape if isinstance(packed, PackedNumbers) else packed.shape
    return n_out, n_in


def as_rows(x: Tensor) -> Tensor:
    """[..., in] as [rows, in], of which kernels read the numbers of a row next to each other."""
    rows = x.reshape(-1, x.shape[-1])
    return rows if rows.stride(1) == 1 else rows.contiguous()


def flat_rows(out: Tensor, n: int) -> Tensor:
    """[..., n] as [rows, n], the same memory: a part of the last dimension of a contiguous tensor, or all."""
    if out.dim() == 2:
        return out
    if out.dim() == 1:
        return out[None]
    return out.as_strided((out.numel() // max(1, n), n), (out.stride(-2), 1))


def _multiply_numbers(x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor) -> None:
    if bias is None:
        torch.mm(x, weight.T, out=out)
    else:
        torch.addmm(bias, x, weight.T, out=out)


def _multiply_planes(x: Tensor, packed: PackedPlanes, bias: Tensor | None, out: Tensor) -> None:
    planes, count = packed.planes, len(x)
    if count <= few_rows.MOST and not is_float32(x):
        multiply_few(x, packed, bias, "", out)
        return
    if planes.order is not None:
        x = x.index_select(1, planes.order)
    if is_float32(x):
        multiply_in_float32(x[:, None], planes, bias, out[:, None])
        return
    if count <= many_rows.MOST:
        _multiply_many(x, packed, bias, out)
        return
    n_out, n_in = planes.shape
    tall = planes.layout.tall
    step = max(1, many_rows.SCRATCH // n_in // tall) * tall
    for start in range(0, n_out, step):
        stop = min(start + step, n_out)
        numbers = write_scratch(planes.rows(start, stop), x.dtype)
        _multiply_numbers(x, numbers, None if bias is None else bias[start:stop], out[:, start:stop])


def multiply_few(
    x: Tensor, packed: PackedPlanes | PackedNumbers, bias: Tensor | None, act: str, out: Tensor
) -> None:
    """Up to 16 rows in one launch: x [m, in] -> out [m, out], or [m, out / 2] of gate and up under `act`.

    With planes x is not in float32.
    """
    m, (n_out, n_in) = len(x), shape_of(packed)
    if isinstance(packed, PackedPlanes) and packed.planes.order is not None:
        x = x.index_select(1, packed.planes.order)
    if isinstance(packed, PackedPlanes):
        constants = packed.tiling.few_constants(m, act, shared_limit(x.device), dtype=x.dtype)
        steps = packed.tiling.few_steps
    else:
        constants = dense_constants(n_out, n_in, m, act, x.dtype, shared_limit(x.device))
        steps = -(-n_in // (constants["UNITS"] * constants["UNIT"]))
        constants["BN"] = widen(DENSE_ROWS, n_out, 1024)
    bn, bm, shares = constants["BN"], constants["BM"], constants["SHARES"]
    tiles = -(-n_out // bn)
    parts = torch.empty(tiles * shares * bn * bm if shares > 1 else 1, dtype=torch.float32, device=x.device)
    rest = (out if bias is None else bias, out, parts, packed.counters, m, n_out, n_in)
    if isinstance(packed, PackedPlanes):
        planes = packed.planes
        launch(
            few_rows.few_planes, (tiles, shares), x, *plane_tensors(planes), *rest, packed.tiling.units,
            steps,
            x.stride(0), out.stride(0), *plane_strides(planes), BIAS=bias is not None, **constants,
            **plane_constants(planes.layout, x.dtype, has_assembly=x.is_cuda),
        )  # fmt: skip
    else:
        launch(
            few_rows.few_dense, (tiles, shares), x, packed.weight, *rest, steps, x.stride(0), out.stride(0),
            packed.weight.stride(0), BIAS=bias is not None, **constants,
        )  # fmt: skip


def dense_constants(
    n_out: int,
    n_in: int,
    rows: int,
    act: str,
    dtype: torch.dtype = torch.bfloat16,
    limit: int = LEAST_SHARED,
) -> dict[str, Any]:
    """Those of plain numbers; dtype: of x and the weight; else as `PlanesTiling.few_constants`.

    In float32, without matrix units, there are registers for half as many columns, if all may be used: left
    to itself, ptxas spills to have more blocks on a processor.
    """
    is_wide = dtype == torch.float32
    unit = few_rows.DENSE_UNIT // (2 if is_wide else 1)
    step = few_rows.UNITS * unit
    memory = dense_memory(step, DENSE_ROWS, 8 if rows <= 8 else 16, dtype)
    return ({"maxnreg": 255} if is_wide else {}) | {
        "EVEN": n_in % step == 0, "ACT": act, "UNIT": unit, "UNITS": few_rows.UNITS,
        "SHARES": few_rows.shares_of(n_out, -(-n_in // step), DENSE_ROWS), "BN": DENSE_ROWS,
        "BM": 8 if rows <= 8 else 16, "num_warps": few_rows.UNITS,
        "num_stages": memory.fit_stages(3, limit),
    }  # fmt: skip


def _multiply_many(x: Tensor, packed: PackedPlanes, bias: Tensor | None, out: Tensor) -> None:
    planes, tiling, m = packed.planes, packed.tiling, len(x)
    constants = tiling.many_constants(m, shared_limit(x.device), x.dtype)
    blocks, tiles = -(-m // many_rows.BM), -(-tiling.n_out // many_rows.BN)
    shares = constants["SHARES"] if constants["IS_SPLIT"] else 1
    size = blocks * tiles * shares * many_rows.BN * many_rows.BM if shares > 1 else 1
    parts = torch.empty(size, dtype=torch.float32, device=x.device)
    launch(
        many_rows.many_planes, (blocks, tiles, shares), x, *plane_tensors(planes),
        out if bias is None else bias, out, parts, packed.counters, m, *planes.shape, tiling.units,
        tiling.many_steps, x.stride(0), out.stride(0), *plane_strides(planes), BIAS=bias is not None,
        **constants, **plane_constants(planes.layout, x.dtype, has_assembly=x.is_cuda, whole_units=True),
    )  # fmt: skip


def write_scratch(planes: Planes, dtype: torch.dtype) -> Tensor:
    """The numbers of planes in scratch memory, [out, in in the order of columns], by one launch."""
    n_out, n_in = planes.shape
    out = torch.empty(n_out, n_in, dtype=dtype, device=planes.codes.device)
    units = planes.layout.padded(n_in) // planes.layout.unit
    launch(
        many_rows.write_numbers, (-(-n_out // many_rows.ROWS), units), *plane_tensors(planes), out,
        n_out, n_in, units, out.stride(0), *plane_strides(planes), BN=many_rows.ROWS,
        **decode_constants(planes.layout),
    )  # fmt: skip
    return out


def make_result(x: Tensor, n_out: int) -> Tensor:
    """Memory for [..., out], in the dtype of x."""
    return torch.empty(*x.shape[:-1], n_out, dtype=x.dtype, device=x.device)


def why_not(facts: OpFacts) -> str | None:
    """The `when`: exact activations; of plain numbers, rows that 16 bytes divide."""
    if facts.sizes.get("activations", "float32") != "float32":
        return "it does not round activations"
    kind = facts.sizes.get("kind")
    is_plain = kind is None or getattr(getattr(torch, kind, None), "is_floating_point", False)
    if is_plain and facts.sizes.get("n_in", 8) * facts.dtype.itemsize % 16:
        return f"rows of {facts['n_in']} numbers are no multiples of 16 bytes"
    return None


def why_several(facts: OpFacts) -> str | None:
    """The `when` of what has other forms for other numbers of rows."""
    if facts.sizes.get("deterministic"):
        return "it has several forms, by the number of rows: deterministic was asked for"
    return None


linear.variant(NAME, on="cuda", when=lambda facts: why_several(facts) or why_not(facts))(
    Packing(pack, multiply, make_result)
)


@glu.variant(NAME, on="cuda", when=why_several)
def join_gate(x: Tensor, up: Linear, kind: str, activate: TensorFn) -> Tensor:
    """`glu`: up to 16 rows in one launch where gate and up are one weight; else one op after the other, as
    over planes in float32, and in steps with adapters of gate and up."""
    packed, bias, _ = up.only_part or (None, None, "float32")
    rows = as_rows(x)
    is_known = kind in few_rows.ACTIVATIONS and 0 < len(rows) <= few_rows.MOST and not up.is_changed
    if is_known and isinstance(packed, PackedNumbers if is_float32(x) else PackedPlanes | PackedNumbers):
        out = make_result(x, up.n_out // 2)
        multiply_few(rows, packed, bias, kind, flat_rows(out, up.n_out // 2))
    else:
        out = activate(up(x), kind, True)
    return out
