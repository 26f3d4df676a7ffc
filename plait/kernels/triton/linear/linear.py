"""Linear layers on GPUs, by the number of rows of x and by how the weight is stored.

    rows          planes (every quantized storage)                      plain numbers
    1 .. 16       one launch, exact scales (`few_rows`)                 one launch (`few_rows`)
    17 .. 512     one launch, tiles decoded on the way (`many_rows`)    torch's product
    more          decoded to scratch memory, torch's product            torch's product

Within a line a row's bits depend on no other row; from one line to the next they differ (`one_form` has one
line). Of act-order GPTQ, x is put in the order of the columns first, one launch more. A storage without
planes is decoded at each use.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from math import gcd
from typing import Any

import torch
from torch import Tensor

from plait.errors import ShapeMismatch
from plait.kernels.triton.forms import KernelForm, widen
from plait.kernels.triton.linear import few_rows, many_rows
from plait.kernels.triton.linear.decode_planes import base_of, make_assembly, make_scaled_assembly
from plait.kernels.triton.shared_memory import LEAST_SHARED, dense_memory, plane_memory, shared_limit
from plait.ops.glu import glu
from plait.ops.launch import launch
from plait.ops.linear import Activations, Linear, Packing, linear
from plait.ops.registry import OpFacts, TensorFn
from plait.quant.plane_parts import pack_planes
from plait.quant.planes import PlaneLayout, Planes
from plait.quant.weight import Dense, Weight

NAME = "triton"
FEW_REGISTERS = 168  # of a thread, for up to 8 rows of four-bit codes: three blocks on a processor


def plane_constants(
    layout: PlaneLayout, dtype: torch.dtype, *, has_assembly: bool, whole_units: bool = False
) -> dict[str, object]:
    """What a layout is to kernels that multiply by x in `dtype`; without assembly for the interpreter.

    whole_units: numbers without their scale are needed, where `multiply_planes` would have them with it.
    """
    is_inside = layout.scales == "e5m3" and not whole_units
    make = make_scaled_assembly if is_inside else make_assembly
    return {
        "BITS": layout.bits, "HIGH": layout.high, "VALUE": layout.value, "ZERO": layout.zero,
        "SCALES": layout.scales, "GROUP": layout.entry, "BLOCK": layout.block, "TALL": layout.tall,
        "APPLY": gcd(layout.group, layout.unit), "BASE": base_of(layout, dtype),
        "CODE": make(layout, dtype) if has_assembly else "",
    }  # fmt: skip


def decode_constants(layout: PlaneLayout) -> dict[str, object]:
    """What a layout is to kernels that decode it to float32."""
    shared = plane_constants(layout, torch.float32, has_assembly=False)
    return {name: value for name, value in shared.items() if name not in ("APPLY", "BASE", "CODE")}


def plane_tensors(planes: Planes) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """codes, high, scales, levels, table; what a layout lacks is one of the others, and is not read."""
    codes, scales = planes.codes, planes.scales
    high, levels, table = planes.high, planes.levels, planes.table
    return (
        codes,
        codes if high is None else high,
        scales,
        scales if levels is None else levels,
        scales if table is None else table,
    )


def plane_strides(planes: Planes) -> tuple[int, int, int, int]:
    """Of units of codes and of the second plane, and of entries of scales and levels, in numbers."""
    codes, high, scales, levels, _ = plane_tensors(planes)
    return codes.stride(0), high.stride(0), scales.stride(0), levels.stride(0)


@dataclass(frozen=True)
class PlanesTiling:
    """How the two kernels cut a weight up: from its sizes alone, never from the number of rows."""

    layout: PlaneLayout
    n_out: int
    n_in: int

    @property
    def units(self) -> int:
        return self.layout.padded(self.n_in) // self.layout.unit

    def few_outputs(self, rows: int) -> int:
        """Outputs of a program of `few_planes`: as many as every target has registers for."""
        small, bits, has_high = rows <= 8, self.layout.bits, self.layout.high > 0
        if bits == 2 and has_high:
            return 32 if small else 16
        return 32 if has_high or (bits == 2 and small) else few_rows.BN

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

    def few_stages(self, rows: int, outputs: int, dtype: torch.dtype, limit: int) -> int:
        """Of a loop over units by programs of so many outputs, in a block of `limit` bytes."""
        unit, is_small = self.layout.unit, rows <= 8
        wanted = 3 if unit <= 64 or (unit == 256 and is_small) else 2
        if dtype == torch.float32 and unit == 256:
            wanted = 2 if is_small else 1
        memory = plane_memory(self.layout, few_rows.UNITS, outputs, 8 if is_small else 16, dtype)
        return memory.fit_stages(wanted, limit)

    def few_constants(
        self,
        rows: int,
        act: str,
        dtype: torch.dtype = torch.bfloat16,
        limit: int = LEAST_SHARED,
        outputs: int | None = None,
    ) -> dict[str, Any]:
        """The constants of up to 8 or 16 rows of x in `dtype`, on a GPU of which a block may have `limit`
        bytes of shared memory. outputs: of a program, if not `few_outputs`."""
        layout, outputs = self.layout, self.few_outputs(rows) if outputs is None else outputs
        # Left to itself, ptxas spills for sm_80 to have one block more on a processor.
        is_tight = rows <= 8 and layout.bits == 4 and layout.value == "integer" and not layout.high
        return ({"maxnreg": FEW_REGISTERS} if is_tight else {}) | {
            "EVEN": self.is_even(few_rows.UNITS), "ACT": act, "UNITS": few_rows.UNITS,
            "BN": outputs,
            "SHARES": few_rows.shares_of(self.n_out, self.few_steps, self.few_outputs(1)),
            "BM": 8 if rows <= 8 else 16, "num_warps": few_rows.UNITS,
            "num_stages": self.few_stages(rows, outputs, dtype, limit),
        }  # fmt: skip

    def many_constants(
        self, rows: int, dtype: torch.dtype = torch.bfloat16, limit: int = LEAST_SHARED
    ) -> dict[str, Any]:
        """The constants of so many rows of x in `dtype`; limit: as of `few_constants`."""
        units, wanted = self.many_units, 2 if dtype == torch.float32 else 3
        memory = plane_memory(self.layout, units, many_rows.BN, many_rows.BM, dtype)
        return {
            "EVEN": self.is_even(self.many_units), "IS_SPLIT": rows <= many_rows.SPLIT,
            "SHARES": few_rows.shares_of(self.n_out, self.many_steps, many_rows.BN),
            "UNITS": units, "BN": many_rows.BN, "BM": many_rows.BM, "num_warps": 4,
            "num_stages": memory.fit_stages(wanted, limit),
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
    if count <= few_rows.MOST:
        multiply_few(x, packed, bias, "", out)
        return
    if planes.order is not None:
        x = x.index_select(1, planes.order)
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
    """Up to 16 rows in one launch: x [m, in] -> out [m, out], or [m, out / 2] of gate and up under `act`."""
    m, (n_out, n_in) = len(x), shape_of(packed)
    if isinstance(packed, PackedPlanes) and packed.planes.order is not None:
        x = x.index_select(1, packed.planes.order)
    if isinstance(packed, PackedPlanes):
        constants = packed.tiling.few_constants(m, act, x.dtype, shared_limit(x.device))
        steps = packed.tiling.few_steps
    else:
        steps = -(-n_in // (few_rows.UNITS * few_rows.DENSE_UNIT))
        constants = dense_constants(n_out, n_in, m, act, x.dtype, shared_limit(x.device))
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
    """Those of plain numbers; arguments as of `PlanesTiling.few_constants`."""
    step = few_rows.UNITS * few_rows.DENSE_UNIT
    memory = dense_memory(step, DENSE_ROWS, 8 if rows <= 8 else 16, dtype)
    return {
        "EVEN": n_in % step == 0, "ACT": act, "UNIT": few_rows.DENSE_UNIT, "UNITS": few_rows.UNITS,
        "SHARES": few_rows.shares_of(n_out, -(-n_in // step), DENSE_ROWS), "BN": DENSE_ROWS,
        "BM": 8 if rows <= 8 else 16, "num_warps": few_rows.UNITS,
        "num_stages": memory.fit_stages(3, limit),
    }  # fmt: skip


def _multiply_many(x: Tensor, packed: PackedPlanes, bias: Tensor | None, out: Tensor) -> None:
    planes, tiling, m = packed.planes, packed.tiling, len(x)
    constants = tiling.many_constants(m, x.dtype, shared_limit(x.device))
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
    """`glu`: up to 16 rows in one launch where gate and up are one weight; else one op after the other."""
    packed, bias, _ = up.only_part or (None, None, "float32")
    rows = as_rows(x)
    is_known = kind in few_rows.ACTIVATIONS and 0 < len(rows) <= few_rows.MOST
    if is_known and isinstance(packed, PackedPlanes | PackedNumbers):
        out = make_result(x, up.n_out // 2)
        multiply_few(rows, packed, bias, kind, flat_rows(out, up.n_out // 2))
    else:
        out = activate(up(x), kind, True)
    return out


POINTERS = {
    "x": "bf16*", "codes": "i16*", "high": "i16*", "table": "fp32*", "bias": "bf16*", "out": "bf16*",
    "parts": "fp32*", "counters": "i32*", "weight": "bf16*", "n": "i32!", "n_in": "i32!", "x_row": "i32!",
    "out_row": "i32!", "weight_row": "i32!", "codes_unit": "i32!", "high_unit": "i32!", "scales_row": "i32!",
    "levels_row": "i32!",
}  # fmt: skip
LEVEL_POINTERS = {"mins": "i16*", "nibbles": "u8*", "e5m3": "i32*"}
SHAPE = (4096, 4096)
# (layout, type of scales, most instructions for each weight of up to 8 and up to 16 rows)
LAYOUTS: dict[str, tuple[PlaneLayout, str, tuple[float, float]]] = {
    "Q4_0": (PlaneLayout(4, 0, "integer", 8, "plain", 32, 32), "fp16*", (2.5, 3.1)),
    "Q4_1": (PlaneLayout(4, 0, "integer", 0, "pairs", 32, 32), "i32*", (2.7, 3.4)),
    "Q4_K": (PlaneLayout(4, 0, "integer", 0, "mins", 32, 256), "i32*", (2.9, 3.5)),
    "int4 g128 zeros": (PlaneLayout(4, 0, "integer", 8, "zeros", 128, 128), "fp16*", (2.3, 2.7)),
    "MXFP4": (PlaneLayout(4, 0, "e2m1", 0, "plain", 32, 32), "bf16*", (3.2, 3.6)),
    "NVFP4": (PlaneLayout(4, 0, "e2m1", 0, "e5m3", 16), "fp32*", (3.4, 3.5)),
    "IQ4_XS": (PlaneLayout(4, 0, "iq4", 0, "levels", 32, 256), "fp16*", (3.8, 4.3)),
    "Q2_K": (PlaneLayout(2, 0, "integer", 0, "nibbles", 16, 256), "i32*", (6.1, 6.9)),
    "Q3_K": (PlaneLayout(2, 1, "integer", 4, "levels", 16, 256), "fp16*", (5.5, 6.3)),
    "Q5_K": (PlaneLayout(4, 1, "integer", 0, "mins", 32, 256), "i32*", (4.0, 4.8)),
    "Q6_K": (PlaneLayout(4, 2, "integer", 32, "levels", 16, 256), "fp16*", (5.6, 6.6)),
    "Q8_0": (PlaneLayout(8, 0, "byte", 0, "plain", 32, 32), "fp16*", (3.5, 3.9)),
    "FP8 b128": (PlaneLayout(8, 0, "e4m3", 0, "plain", 128, 128, 128), "fp32*", (3.9, 4.3)),
}  # fmt: skip
WIDE_LOADS = (("LDG.128", "LDGSTS.128"), ("HMMA", "HGMMA"))


def forms() -> Iterator[KernelForm]:
    """Every layout with up to 8, 16 and more rows, at 4,096 inputs and outputs; plain numbers."""
    for name, (layout, scales, most) in LAYOUTS.items():
        tiling, types = PlanesTiling(layout, *SHAPE), POINTERS | scale_types(layout, scales)
        shared = plane_constants(layout, torch.bfloat16, has_assembly=True, whole_units=True) | {"BIAS": True}
        for rows, limit in zip((8, 16), most, strict=True):
            yield _few_form(f"few rows, {name}, {rows}", tiling, types, rows, "", limit)
        constants = tiling.many_constants(128)
        options = {key: constants.pop(key) for key in ("num_warps", "num_stages")}
        yield KernelForm(
            f"many rows, {name}", many_rows.many_planes, types, shared | constants, **options,
            demands=WIDE_LOADS,
        )  # fmt: skip
        yield KernelForm(
            f"write numbers, {name}", many_rows.write_numbers, types,
            decode_constants(layout) | {"BN": many_rows.ROWS},
            demands=(("LDG.128",),),
        )  # fmt: skip
    layout, scales, most = LAYOUTS["Q4_K"]
    types = POINTERS | scale_types(layout, scales)
    yield _few_form(
        "few rows, Q4_K, gate and up", PlanesTiling(layout, 28672, 4096), types, 8, "silu", most[0]
    )
    layout, scales, most = LAYOUTS["Q4_0"]
    types = POINTERS | scale_types(layout, scales)
    yield _few_form("few rows, Q4_0, 576 inputs", PlanesTiling(layout, 576, 576), types, 8, "", 3.0)
    for (n_out, n_in), rows, act in (
        (SHAPE, 8, ""),
        (SHAPE, 16, ""),
        ((28672, 4096), 8, "silu"),
        ((576, 576), 8, ""),
    ):
        constants = dense_constants(n_out, n_in, rows, act)
        options = {key: constants.pop(key) for key in ("num_warps", "num_stages")}
        each = constants["BN"] * constants["UNITS"] * constants["UNIT"]
        yield KernelForm(
            f"few rows, plain, {n_out} x {n_in}, {rows}", few_rows.few_dense, POINTERS,
            constants | {"BIAS": True}, **options, demands=WIDE_LOADS, weights=each, max_per_weight=2.0,
        )  # fmt: skip


def scale_types(layout: PlaneLayout, scales: str) -> dict[str, str]:
    return {"scales": scales, "levels": LEVEL_POINTERS.get(layout.scales, "i8*")}


def _few_form(
    name: str, tiling: PlanesTiling, types: dict[str, str], rows: int, act: str, limit: float
) -> KernelForm:
    constants = tiling.few_constants(rows, act)
    options = {key: constants.pop(key) for key in ("num_warps", "num_stages")}
    more = {key: constants.pop(key) for key in ("maxnreg",) if key in constants}
    shared = plane_constants(tiling.layout, torch.bfloat16, has_assembly=True) | {"BIAS": True}
    return KernelForm(
        name, few_rows.few_planes, types, shared | constants, **options, demands=WIDE_LOADS,
        weights=constants["BN"] * constants["UNITS"] * tiling.layout.unit, max_per_weight=limit, options=more,
    )  # fmt: skip
