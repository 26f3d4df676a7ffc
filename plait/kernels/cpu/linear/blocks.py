"""Linear layers over quantized weights: packed once, multiplied by activations rounded to int8."""

from __future__ import annotations

import torch
from torch import Tensor

from plait.errors import ShapeMismatch
from plait.kernels.cpu.codegen.amx_tiles import Kind
from plait.kernels.cpu.linear.bit_streams import find_layout, pack_streams, stream_of
from plait.kernels.cpu.linear.blocks_source import AMX_SCRATCH, linear_kernel
from plait.kernels.cpu.linear.layout import LAYOUTS, Layout
from plait.kernels.cpu.linear.pack_blocks import READERS, pack_blocks
from plait.kernels.cpu.linear.packed import PackedWeight, multiply
from plait.kernels.cpu.runtime.executor import Executor
from plait.kernels.cpu.runtime.row_checks import float32_rows
from plait.ops.linear import BLOCK, Activations, Packing, linear
from plait.ops.registry import OpFacts
from plait.quant.gguf import Gguf
from plait.quant.packed import CachedWeight
from plait.quant.weight import Weight

KNOWN = (*LAYOUTS, "mxfp4", "nvfp4")


def layout_of(weight: Weight) -> Layout:
    """How that weight is kept. Raises ShapeMismatch for what is not packed here."""
    if isinstance(weight, Gguf) and weight.format in READERS:
        return LAYOUTS[weight.format]
    if stream := stream_of(weight):
        return stream.layout
    raise ShapeMismatch(f"{weight.format} weights cannot be packed")


def pack(cpu: Executor, weight: Weight | CachedWeight, dtype: torch.dtype) -> PackedWeight:
    """A weight in tiles that keep its codes and scales as they are. `dtype` is that of x, float32."""
    return pack_on(cpu, weight, "")


def pack_on(cpu: Executor, weight: Weight | CachedWeight, kind: Kind) -> PackedWeight:
    """As `pack`; many rows are multiplied on tiles of that kind, to the same bits."""
    n_out, n_in = weight.shape
    if n_in % BLOCK:
        raise ShapeMismatch(f"{n_in} inputs of a {weight.format} weight are not whole blocks of {BLOCK}")
    if isinstance(weight, CachedWeight):
        data, layout = weight.tiles, Layout(*weight.layout)
    elif isinstance(weight, Gguf) and weight.format in READERS:
        data, layout = pack_blocks(cpu, weight), LAYOUTS[weight.format]
    else:
        data, layout = pack_streams(cpu, weight)
    order = getattr(weight, "order", None)
    # Activations may take two rows of codes each.
    shared = 2 * layout.rounded_bytes(n_in)
    made, scratch = linear_kernel(layout, kind), AMX_SCRATCH if kind else 0
    return PackedWeight(
        data, weight.format, n_out, n_in, made, shared, order, None, scratch, layout, joins=True
    )


def apply(
    cpu: Executor,
    x: Tensor,
    weight: PackedWeight,
    bias: Tensor | None,
    activations: Activations,
    out: Tensor | None = None,
) -> Tensor:
    """x: [..., in] float32 -> [..., out] float32."""
    if activations == "float32":
        raise ShapeMismatch(f"the kernel of {weight.kind} weights rounds activations: ask for int8 or int8x2")
    return multiply(cpu, x, weight, bias, activations, out)


def blocks_and_rounding(facts: OpFacts) -> str | None:
    """The `when` of quantized weights with rounded activations."""
    kind = facts.sizes.get("kind", "plain numbers")
    if kind not in KNOWN and find_layout(kind) is None:
        return f"it reads blocks and whole numbers in groups of 16 and more, not {kind}"
    if facts.sizes.get("activations", "float32") == "float32":
        return "it rounds activations to int8"
    if facts["n_in"] % BLOCK:
        return f"{facts['n_in']} inputs are not whole blocks of {BLOCK}"
    return float32_rows(facts)


native = Packing(pack=pack, apply=apply)
linear.variant("native", on="cpu", when=blocks_and_rounding, native=True)(native)
