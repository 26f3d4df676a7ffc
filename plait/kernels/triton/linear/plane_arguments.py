"""What kernels over quantized weights are given: the constants, tensors and strides of planes."""

from __future__ import annotations

from math import gcd

import torch
from torch import Tensor

from plait.kernels.triton.linear.decode_planes import base_of, make_assembly, make_scaled_assembly
from plait.quant.planes import PlaneLayout, Planes


def plane_constants(
    layout: PlaneLayout, dtype: torch.dtype, *, has_assembly: bool, whole_units: bool = False
) -> dict[str, object]:
    """What a layout is to kernels that multiply codes by x in `dtype`; without assembly for the interpreter.

    whole_units: numbers without their scale are needed, where `multiply_planes` would have them with it.
    """
    is_inside = layout.scales == "e5m3" and not whole_units
    make = make_scaled_assembly if is_inside else make_assembly
    return decode_constants(layout) | {
        "APPLY": gcd(layout.group, layout.unit), "BASE": base_of(layout, dtype),
        "CODE": make(layout, dtype) if has_assembly else "",
    }  # fmt: skip


def decode_constants(layout: PlaneLayout) -> dict[str, object]:
    """What a layout is to kernels that decode it to float32."""
    return {
        "BITS": layout.bits, "HIGH": layout.high, "VALUE": layout.value, "ZERO": layout.zero,
        "SCALES": layout.scales, "GROUP": layout.entry, "BLOCK": layout.block, "TALL": layout.tall,
    }  # fmt: skip


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
