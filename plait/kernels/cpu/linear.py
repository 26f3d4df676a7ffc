"""Linear maps over block-quantized weights: packed once, multiplied by activations rounded to int8."""

from __future__ import annotations

import torch
from torch import Tensor

from plait.errors import ShapeMismatch
from plait.kernels.cpu.executor import Executor
from plait.kernels.cpu.layout import LAYOUTS
from plait.kernels.cpu.linear_source import linear_kernel
from plait.kernels.cpu.pack import packed
from plait.kernels.cpu.packed import Packed, multiply
from plait.kernels.cpu.rows import float32_rows
from plait.ops.linear import BLOCK, Activations, Packing, linear
from plait.ops.registry import Facts
from plait.quant.gguf import Gguf
from plait.quant.weight import Weight


def pack(cpu: Executor, weight: Weight, dtype: torch.dtype) -> Packed:
    """A weight in one of GGUF's block formats, in tiles. `dtype` is that of x, float32."""
    if not isinstance(weight, Gguf) or weight.format not in LAYOUTS:
        raise ShapeMismatch(f"only {', '.join(LAYOUTS)} are packed here, not {weight.format}")
    n_out, n_in = weight.shape
    layout = LAYOUTS[weight.format]
    # Activations may take two rows of codes each.
    return Packed(
        packed(cpu, weight),
        weight.format,
        n_out,
        n_in,
        linear_kernel(layout),
        2 * layout.rounded_bytes(n_in),
    )


def apply(
    cpu: Executor,
    x: Tensor,
    weight: Packed,
    bias: Tensor | None,
    activations: Activations,
    out: Tensor | None = None,
) -> Tensor:
    """x: [..., in] float32 -> [..., out] float32."""
    if activations == "float32":
        raise ShapeMismatch(f"the kernel of {weight.kind} weights rounds activations: ask for int8 or int8x2")
    return multiply(cpu, x, weight, bias, activations, out)


def blocks_and_rounding(facts: Facts) -> str | None:
    """The `when` of weights in blocks beside rounded activations."""
    kind = facts.sizes.get("kind", "plain numbers")
    if kind not in LAYOUTS:
        return f"it reads {', '.join(LAYOUTS)}, not {kind}"
    if facts.sizes.get("activations", "float32") == "float32":
        return "it rounds activations to int8"
    if facts["n_in"] % BLOCK:
        return f"{facts['n_in']} inputs are not whole blocks of {BLOCK}"
    return float32_rows(facts)


native = Packing(pack=pack, apply=apply)
linear.variant("native", on="cpu", when=blocks_and_rounding, native=True)(native)
