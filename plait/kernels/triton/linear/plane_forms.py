"""The compiled forms of linear layers: every layout of planes, by the number of rows and the dtype of x.

`LAYOUTS` are those of the usual storages, in all forms. `RARE` are those of all others that `pack_planes`
lays out, where their machine code differs.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

import torch

from plait.kernels.triton.forms import FLOAT16, KernelForm, as_half, split_options
from plait.kernels.triton.linear import few_rows, float32_planes, many_rows
from plait.kernels.triton.linear.linear import PlanesTiling, dense_constants
from plait.kernels.triton.linear.plane_arguments import decode_constants, plane_constants
from plait.quant.planes import PlaneLayout

POINTERS = {
    "x": "bf16*", "codes": "i16*", "high": "i16*", "table": "fp32*", "bias": "bf16*", "out": "bf16*",
    "parts": "fp32*", "counters": "i32*", "weight": "bf16*", "n": "i32!", "n_in": "i32!", "x_row": "i32!",
    "out_row": "i32!", "weight_row": "i32!", "codes_unit": "i32!", "high_unit": "i32!", "scales_row": "i32!",
    "levels_row": "i32!",
}  # fmt: skip
FLOAT32_POINTERS = {name: kind.replace("bf16", "fp32") for name, kind in POINTERS.items()}
FLOAT16_POINTERS = as_half(POINTERS)
LEVEL_POINTERS = {"mins": "i16*", "nibbles": "u8*", "e5m3": "i32*"}
SHAPE = (4096, 4096)
HALF_MORE = 1.08  # times the instructions of bfloat16: floats of four bits have further to go
# (layout, type of scales, most instructions for each weight of up to 8 and up to 16 rows)
LAYOUTS: dict[str, tuple[PlaneLayout, str, tuple[float, float]]] = {
    "Q4_0": (PlaneLayout(4, 0, "integer", 8, "plain", 32, 32), "fp16*", (2.5, 3.1)),
    "Q4_1": (PlaneLayout(4, 0, "integer", 0, "pairs", 32, 32), "i32*", (2.7, 3.5)),
    "Q4_K": (PlaneLayout(4, 0, "integer", 0, "mins", 32, 256), "i32*", (2.9, 3.5)),
    "int4 g128 zeros": (PlaneLayout(4, 0, "integer", 8, "zeros", 128, 128), "fp16*", (2.3, 2.7)),
    "MXFP4": (PlaneLayout(4, 0, "e2m1", 0, "plain", 32, 32), "bf16*", (3.3, 3.7)),
    "NVFP4": (PlaneLayout(4, 0, "e2m1", 0, "e5m3", 16), "fp32*", (3.4, 3.5)),
    "IQ4_XS": (PlaneLayout(4, 0, "iq4", 0, "levels", 32, 256), "fp16*", (3.8, 4.3)),
    "Q2_K": (PlaneLayout(2, 0, "integer", 0, "nibbles", 16, 256), "i32*", (3.9, 5.2)),
    "Q3_K": (PlaneLayout(2, 1, "integer", 4, "levels", 16, 256), "fp16*", (4.4, 6.3)),
    "Q5_0": (PlaneLayout(4, 1, "integer", 16, "plain", 32, 32), "fp16*", (4.0, 4.8)),
    "Q5_1": (PlaneLayout(4, 1, "integer", 0, "pairs", 32, 32), "i32*", (4.0, 5.0)),
    "Q5_K": (PlaneLayout(4, 1, "integer", 0, "mins", 32, 256), "i32*", (4.0, 5.4)),
    "Q6_K": (PlaneLayout(4, 2, "integer", 32, "levels", 16, 256), "fp16*", (4.5, 5.5)),
    "Q8_0": (PlaneLayout(8, 0, "byte", 0, "plain", 32, 32), "fp16*", (3.6, 3.9)),
    "FP8 b128": (PlaneLayout(8, 0, "e4m3", 0, "plain", 128, 128, 128), "fp32*", (3.9, 4.3)),
}  # fmt: skip
RARE: dict[str, tuple[PlaneLayout, str]] = {
    "Q8_K": (PlaneLayout(8, 0, "byte", 0, "plain", 256, 256), "fp32*"),
    "IQ4_NL": (PlaneLayout(4, 0, "iq4", 0, "plain", 32, 32), "fp16*"),
    "IQ3_S": (PlaneLayout(4, 0, "table", 0, "levels", 32, 256), "fp32*"),
    "IQ2_XXS": (PlaneLayout(2, 1, "table", 0, "levels", 32, 256), "fp32*"),
    "IQ2_XS": (PlaneLayout(2, 1, "table", 0, "levels", 16, 256), "fp32*"),
    "TQ2_0": (PlaneLayout(2, 0, "integer", 1, "plain", 256, 256), "fp16*"),
    "Q2_0": (PlaneLayout(2, 0, "integer", 1, "plain", 64, 64), "fp16*"),
    "MXFP4 of GGUF": (PlaneLayout(4, 0, "e2m1 doubled", 0, "plain", 32, 32), "bf16*"),
    "nf4 b64": (PlaneLayout(4, 0, "table", 0, "plain", 64, 64), "fp32*"),
    "int3 g128": (PlaneLayout(2, 1, "integer", 4, "plain", 128, 128), "fp16*"),
    "int3 g128 zeros": (PlaneLayout(2, 1, "integer", 4, "zeros", 128, 128), "fp16*"),
    "int2 g64 zeros": (PlaneLayout(2, 0, "integer", 2, "zeros", 64, 64), "fp16*"),
    "int4 g128": (PlaneLayout(4, 0, "integer", 8, "plain", 128, 128), "fp16*"),
    "int4 g128 of bfloat16": (PlaneLayout(4, 0, "integer", 8, "plain", 128, 128), "bf16*"),
    "int4 g128 zeros of bfloat16": (PlaneLayout(4, 0, "integer", 8, "zeros", 128, 128), "bf16*"),
    "int4 rows zeros": (PlaneLayout(4, 0, "integer", 8, "zeros"), "fp16*"),
    "int5 g64": (PlaneLayout(4, 1, "integer", 16, "plain", 64, 64), "fp16*"),
    "int5 g64 zeros": (PlaneLayout(4, 1, "integer", 16, "zeros", 64, 64), "fp16*"),
    "int6 g64": (PlaneLayout(4, 2, "integer", 32, "plain", 64, 64), "fp16*"),
    "int6 g64 zeros": (PlaneLayout(4, 2, "integer", 32, "zeros", 64, 64), "fp16*"),
    "int8 g128 of bfloat16": (PlaneLayout(8, 0, "byte", 0, "plain", 128, 128), "bf16*"),
    "int8 g128 zeros": (PlaneLayout(8, 0, "byte", 0, "zeros", 128, 128), "fp16*"),
    "int8 rows": (PlaneLayout(8, 0, "byte", 0, "plain"), "fp16*"),
    "FP8 rows": (PlaneLayout(8, 0, "e4m3", 0, "plain"), "fp32*"),
}  # fmt: skip
UNBIASED = ("Q4_K", "Q5_0", "Q5_1", "Q8_0", "int4 g128 zeros")
EVERY = {name: (layout, scales) for name, (layout, scales, _) in LAYOUTS.items()} | RARE
WIDE_LOADS = (("LDG.128", "LDGSTS.128"), ("HMMA", "HGMMA"))


def scale_types(layout: PlaneLayout, scales: str) -> dict[str, str]:
    return {"scales": scales, "levels": LEVEL_POINTERS.get(layout.scales, "i8*")}


def forms() -> Iterator[KernelForm]:
    """Every layout with up to 8, 16 and more rows, at 4,096 inputs and outputs, and in float32; plain
    numbers."""
    for name, (layout, scales, most) in LAYOUTS.items():
        yield from _layout_forms(name, layout, scales, most)
    yield from _float32_forms()
    layout, scales, most = LAYOUTS["Q4_K"]
    types = POINTERS | scale_types(layout, scales)
    yield _few_form(
        "few rows, Q4_K, gate and up", PlanesTiling(layout, 28672, 4096), types, 8, "silu", most[0]
    )
    act = "gelu_pytorch_tanh"
    yield _few_form(f"few rows, Q4_K, {act}", PlanesTiling(layout, 28672, 4096), types, 8, act, most[0])
    layout, scales, most = LAYOUTS["Q4_0"]
    types = POINTERS | scale_types(layout, scales)
    yield _few_form("few rows, Q4_0, 576 inputs", PlanesTiling(layout, 576, 576), types, 8, "", 3.0)
    for (n_out, n_in), rows, act in (
        (SHAPE, 8, ""),
        (SHAPE, 16, ""),
        ((28672, 4096), 8, "silu"),
        ((576, 576), 8, ""),
    ):
        for dtype in (torch.bfloat16, torch.float32):
            yield _dense_form(n_out, n_in, rows, act, dtype)
    yield from _forms_without_bias()
    for name, (layout, scales, most) in LAYOUTS.items():
        yield from _float16_forms(name, layout, scales, most)


def float32_form(
    name: str, kernel: object, layout: PlaneLayout, types: Mapping[str, str], tile: Mapping[str, object]
) -> KernelForm:
    """Of x in float32. types: of arguments besides `FLOAT32_POINTERS` and levels."""
    constants, options = split_options({**decode_constants(layout), **tile, **float32_planes.OPTIONS})
    of = (
        FLOAT32_POINTERS
        | dict.fromkeys(("x_head", "out_head"), "i32!")
        | scale_types(layout, "")
        | dict(types)
    )
    return KernelForm(name, kernel, of, constants, **options, demands=WIDE_LOADS[:1])


def _float32_forms() -> Iterator[KernelForm]:
    """Every layout, any number of rows of x, one matrix or one for each head."""
    own = float32_planes
    for name, (layout, scales) in EVERY.items():
        types, tile = {"scales": scales}, {"BIAS": True, "BN": own.BN, "BM": own.BM}
        yield float32_form(f"float32, {name}", own.float32_planes, layout, types, tile)
        tile = {"BK": own.BK, "BM": own.BM}
        yield float32_form(f"float32, {name}, transposed", own.float32_transposed, layout, types, tile)
    layout, scales = EVERY["Q4_K"]
    tile = {"BIAS": False, "BN": own.BN, "BM": own.BM}
    yield float32_form("float32, Q4_K, no bias", own.float32_planes, layout, {"scales": scales}, tile)


def _layout_forms(
    name: str, layout: PlaneLayout, scales: str, most: tuple[float, float]
) -> Iterator[KernelForm]:
    """Of one layout in bfloat16. most: instructions for each weight of up to 8 and up to 16 rows."""
    tiling, types = PlanesTiling(layout, *SHAPE), POINTERS | scale_types(layout, scales)
    for rows, limit in zip((8, 16), most, strict=True):
        yield _few_form(f"few rows, {name}, {rows}", tiling, types, rows, "", limit)
    yield _many_form(f"many rows, {name}", tiling, types)
    yield _write_form(f"write numbers, {name}", layout, types)


def _float16_forms(
    name: str, layout: PlaneLayout, scales: str, most: tuple[float, float]
) -> Iterator[KernelForm]:
    """Of one layout in float16, as most models of that dtype have it, without a bias.

    What is written to scratch memory differs in the last conversion only, so one layout stands for all.
    """
    tiling, dtype = PlanesTiling(layout, *SHAPE), torch.float16
    types = FLOAT16_POINTERS | scale_types(layout, scales)
    for rows, limit in zip((8, 16), most, strict=True):
        named = f"few rows, {name}, {rows}, no bias{FLOAT16}"
        yield _without_bias(_few_form(named, tiling, types, rows, "", limit * HALF_MORE, dtype))
    yield _without_bias(_many_form(f"many rows, {name}, no bias{FLOAT16}", tiling, types, dtype))
    if name == "Q4_K":
        yield _write_form(f"write numbers, {name}{FLOAT16}", layout, types)


def _forms_without_bias() -> Iterator[KernelForm]:
    """Some layouts in bfloat16 without a bias, on which no loop depends: up to 8 rows, and more of one."""
    for name in UNBIASED:
        layout, scales, most = LAYOUTS[name]
        tiling, types = PlanesTiling(layout, *SHAPE), POINTERS | scale_types(layout, scales)
        yield _without_bias(_few_form(f"few rows, {name}, 8, no bias", tiling, types, 8, "", most[0]))
        if name == UNBIASED[0]:
            yield _without_bias(_many_form(f"many rows, {name}, no bias", tiling, types))
            wide = PlanesTiling(layout, 28672, 4096)
            for act in few_rows.ACTIVATIONS:
                named = f"few rows, {name}, {act}, no bias"
                yield _without_bias(_few_form(named, wide, types, 8, act, most[0]))


def _without_bias(form: KernelForm) -> KernelForm:
    return replace(form, constants={**form.constants, "BIAS": False})


def _write_form(name: str, layout: PlaneLayout, types: Mapping[str, str]) -> KernelForm:
    constants = decode_constants(layout) | {"BN": many_rows.ROWS}
    return KernelForm(name, many_rows.write_numbers, types, constants, demands=(("LDG.128",),))


def _many_form(
    name: str, tiling: PlanesTiling, types: Mapping[str, str], dtype: torch.dtype = torch.bfloat16
) -> KernelForm:
    constants, options = split_options(tiling.many_constants(128, dtype=dtype))
    shared = plane_constants(tiling.layout, dtype, has_assembly=True, whole_units=True) | {"BIAS": True}
    return KernelForm(name, many_rows.many_planes, types, shared | constants, **options, demands=WIDE_LOADS)


def _few_form(
    name: str,
    tiling: PlanesTiling,
    types: Mapping[str, str],
    rows: int,
    act: str,
    limit: float,
    dtype: torch.dtype = torch.bfloat16,
) -> KernelForm:
    constants, options = split_options(tiling.few_constants(rows, act, dtype=dtype))
    shared = plane_constants(tiling.layout, dtype, has_assembly=True) | {"BIAS": True}
    return KernelForm(
        name, few_rows.few_planes, types, shared | constants, **options, demands=WIDE_LOADS,
        weights=constants["BN"] * constants["UNITS"] * tiling.layout.unit, max_per_weight=limit,
    )  # fmt: skip


def _dense_form(n_out: int, n_in: int, rows: int, act: str, dtype: torch.dtype) -> KernelForm:
    constants, options = split_options(dense_constants(n_out, n_in, rows, act, dtype))
    is_wide = dtype == torch.float32
    each = 0 if is_wide else constants["BN"] * constants["UNITS"] * constants["UNIT"]
    return KernelForm(
        f"few rows, plain, {n_out} x {n_in}, {rows}{', float32' if is_wide else ''}", few_rows.few_dense,
        FLOAT32_POINTERS if is_wide else POINTERS, constants | {"BIAS": True}, **options,
        demands=WIDE_LOADS[:1] if is_wide else WIDE_LOADS, weights=each, max_per_weight=2.0,
    )  # fmt: skip
