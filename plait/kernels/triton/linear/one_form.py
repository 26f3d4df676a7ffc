"""Linear layers in one form for any number of rows, for `--deterministic`.

The kernels of 1 to 16 rows (`few_rows`) take blocks of 16 rows of x, each a program of its own, and all
inputs in one program. So a number of the result depends on its row of x, on its row of the weight and on
the length of both, and on nothing else: not on other rows of x, nor on how many of the weight's rows a rank
has.

    [block of 16 rows of x] x [tile of outputs]      blocks go fastest: they read the same weights, from L2

With x in float32 and the weight in planes it is `float32_planes`, which has one form already.

The price: up to 16 rows the inputs are not shared out among programs, and a prompt decodes a weight once for
each 16 tokens. A matrix per head (`map_heads`) has such kernels already; here they serve any number of rows.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import Any

import torch
from torch import Tensor

from plait.errors import ConfigError, ShapeMismatch
from plait.kernels.triton.forms import KernelForm, split_options
from plait.kernels.triton.linear import few_rows, heads
from plait.kernels.triton.linear.float32_planes import is_float32, multiply_in_float32
from plait.kernels.triton.linear.linear import (
    DENSE_ROWS,
    PackedNumbers,
    PackedPlanes,
    PlanesTiling,
    as_rows,
    dense_constants,
    flat_rows,
    make_result,
    pack,
    shape_of,
    why_not,
)
from plait.kernels.triton.linear.plane_arguments import plane_constants, plane_strides, plane_tensors
from plait.kernels.triton.linear.plane_forms import (
    FLOAT32_POINTERS,
    LAYOUTS,
    POINTERS,
    SHAPE,
    WIDE_LOADS,
    scale_types,
)
from plait.kernels.triton.shared_memory import LEAST_SHARED, shared_limit
from plait.ops.heads import HeadPacking, HeadRows, map_heads
from plait.ops.launch import launch
from plait.ops.linear import Activations, Packing, linear
from plait.ops.registry import OpFacts
from plait.quant.weight import Weight

NAME = "one form"
ROWS = 16  # of x, of a program
OUTPUTS = 32  # of a program: all inputs are in one, so that there must be more of them than of `few_rows`


def planes_form(tiling: PlanesTiling, limit: int = LEAST_SHARED) -> dict[str, Any]:
    """The constants of a layout and a length of rows; limit: as of `few_constants`."""
    layout = tiling.layout
    outputs = OUTPUTS
    if layout.high == 1 or (layout.value == "e2m1" and layout.scales == "plain"):
        outputs = 16  # as many as no target spills with
    elif layout.bits == 2:
        outputs = 64
    constants = tiling.few_constants(ROWS, "", limit, outputs) | {"SHARES": 1, "BLOCKS": True}
    if layout.high != 1:
        return constants
    # Left to itself, ptxas spills for sm_80 to have one block more on a processor.
    most = {"maxnreg": 255} if layout.scales == "plain" else {}
    return {name: value for name, value in constants.items() if name != "maxnreg"} | most


def numbers_form(n_in: int, dtype: torch.dtype = torch.bfloat16, limit: int = LEAST_SHARED) -> dict[str, Any]:
    """The same for plain numbers."""
    return dense_constants(DENSE_ROWS, n_in, ROWS, "", dtype, limit) | {"SHARES": 1, "BLOCKS": True}


def pack_all(weight: Weight, dtype: torch.dtype) -> PackedPlanes | PackedNumbers:
    """The weight as `linear` packs it. Raises ConfigError for a storage that has no planes."""
    packed = pack(weight, dtype)
    if not isinstance(packed, PackedPlanes | PackedNumbers):
        raise ConfigError(_refuse(weight.format, weight.shape))
    return packed


def _refuse(name: str, shape: tuple[int, ...]) -> str:
    return (
        f"deterministic: a {name} weight of {list(shape)} has no planes, so products on a GPU decode it "
        "piece by piece, and rounding may change with the batch; leave the option out, or run on a CPU "
        "(--cpu)"
    )


def multiply_any(
    x: Tensor,
    packed: PackedPlanes | PackedNumbers,
    bias: Tensor | None,
    activations: Activations = "float32",
    out: Tensor | None = None,
) -> Tensor:
    """`linear` over what `pack_all` made. out: [..., out], rows may lie apart, or be float32."""
    if activations != "float32":
        raise ShapeMismatch(f"products on a GPU do not round activations, got {activations!r}")
    n_out = shape_of(packed)[0]
    if out is None:
        out = make_result(x, n_out)
    rows, result = as_rows(x), flat_rows(out, n_out)
    if len(rows) and n_out:
        _launch(rows, packed, bias, result)
    return out


def _launch(x: Tensor, packed: PackedPlanes | PackedNumbers, bias: Tensor | None, out: Tensor) -> None:
    m, (n_out, n_in) = len(x), shape_of(packed)
    # There are no shares, so that nothing is written to `parts`.
    rest = (out if bias is None else bias, out, packed.counters, packed.counters, m, n_out, n_in)
    if isinstance(packed, PackedNumbers):
        constants = numbers_form(n_in, x.dtype, shared_limit(x.device))
        steps = -(-n_in // (constants["UNITS"] * constants["UNIT"]))
        launch(
            few_rows.few_dense, (-(-m // ROWS), -(-n_out // constants["BN"])), x, packed.weight, *rest,
            steps, x.stride(0), out.stride(0), packed.weight.stride(0), BIAS=bias is not None, **constants,
        )  # fmt: skip
        return
    planes, tiling = packed.planes, packed.tiling
    if planes.order is not None:
        x = x.index_select(1, planes.order)
    if is_float32(x):
        multiply_in_float32(x[:, None], planes, bias, out[:, None])
        return
    constants = planes_form(tiling, shared_limit(x.device))
    launch(
        few_rows.few_planes, (-(-m // ROWS), -(-n_out // constants["BN"])), x, *plane_tensors(planes), *rest,
        tiling.units, tiling.few_steps, x.stride(0), out.stride(0), *plane_strides(planes),
        BIAS=bias is not None, **constants,
        **plane_constants(planes.layout, x.dtype, has_assembly=x.is_cuda),
    )  # fmt: skip


def _why_not(facts: OpFacts) -> str | None:
    return why_not(facts) if facts.sizes.get("deterministic") else "deterministic was not asked for"


linear.variant(NAME, on="cuda", when=_why_not)(Packing(pack_all, multiply_any, make_result, widens=True))


def pack_heads(weight: Tensor | HeadRows) -> Tensor | heads.HeadPlanes:
    """A matrix per head as `heads` packs it. Raises ConfigError for a storage that has no planes."""
    packed = heads.pack(weight)
    if isinstance(packed, HeadRows):
        raise ConfigError(_refuse(packed.weight.format, packed.weight.shape))
    return packed


def multiply_any_heads(x: Tensor, packed: Tensor | heads.HeadPlanes) -> Tensor:
    """`map_heads` of what `pack_heads` made, in blocks of 16 rows."""
    return heads.multiply_in_blocks(x, packed, ROWS) if len(x) else map_heads.reference(x, packed)


def _why_not_heads(facts: OpFacts) -> str | None:
    return None if facts.sizes.get("deterministic") else "deterministic was not asked for"


map_heads.variant(NAME, on="cuda", when=_why_not_heads)(HeadPacking(pack_heads, multiply_any_heads))


def forms() -> Iterator[KernelForm]:
    """Every layout, and plain numbers, at 4,096 inputs and outputs."""
    for name, (layout, scales, _) in LAYOUTS.items():
        constants, options = split_options(planes_form(PlanesTiling(layout, *SHAPE)))
        shared = plane_constants(layout, torch.bfloat16, has_assembly=True) | {"BIAS": True}
        for out in ("bf16*", "fp32*") if name == "Q4_K" else ("bf16*",):
            yield KernelForm(
                f"one form, {name}{', float32' if out == 'fp32*' else ''}", few_rows.few_planes,
                POINTERS | scale_types(layout, scales) | {"parts": "i32*", "out": out}, shared | constants,
                **options, demands=WIDE_LOADS,
            )  # fmt: skip
    for n_in, dtype in product((SHAPE[1], 576), (torch.bfloat16, torch.float32)):
        constants, options = split_options(numbers_form(n_in, dtype))
        is_wide = dtype == torch.float32
        yield KernelForm(
            f"one form, plain, {n_in} inputs{', float32' if is_wide else ''}", few_rows.few_dense,
            (FLOAT32_POINTERS if is_wide else POINTERS) | {"parts": "i32*"}, constants | {"BIAS": True},
            **options, demands=WIDE_LOADS[:1] if is_wide else WIDE_LOADS,
        )  # fmt: skip
