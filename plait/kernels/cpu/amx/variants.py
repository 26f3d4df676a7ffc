"""Which linear layers run on AMX: quantized ones to the same bits, and on request all of them in bfloat16."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from plait.kernels.cpu.amx import check
from plait.kernels.cpu.amx.linear import on_tiles
from plait.kernels.cpu.codegen.amx_tiles import Kind
from plait.kernels.cpu.linear import blocks, dense, float_codes
from plait.kernels.cpu.linear.packed import PackedWeight
from plait.kernels.cpu.runtime.executor import Executor
from plait.ops.linear import Packing, linear
from plait.ops.registry import OpFacts
from plait.quant.packed import CachedWeight
from plait.quant.weight import Weight

When = Callable[[OpFacts], str | None]
TILES: Kind = "amx"


def pack_byte_tiles(cpu: Executor, weight: Weight | CachedWeight, dtype: torch.dtype) -> PackedWeight:
    """As `linear.pack`; sixteen rows and more go through tiles of bytes."""
    return blocks.pack_on(cpu, weight, TILES)


def pack_blocks(cpu: Executor, weight: Weight | CachedWeight, dtype: torch.dtype) -> PackedWeight:
    """As `linear.pack`; many rows go through tiles of bfloat16, and fewer through those of bytes."""
    packed = pack_byte_tiles(cpu, weight, dtype)
    return on_tiles(packed, packed.layout, TILES)


def pack_plain(cpu: Executor, weight: Weight | CachedWeight, dtype: torch.dtype) -> PackedWeight:
    """As `dense.pack`; many rows go through tiles."""
    packed = dense.pack(cpu, weight, dtype)
    return on_tiles(packed, packed.layout or weight.format, TILES)


def pack_floats(cpu: Executor, weight: Weight | CachedWeight, dtype: torch.dtype) -> PackedWeight:
    """As `floats.pack`; many rows go through tiles."""
    packed = float_codes.pack(cpu, weight, dtype)
    return on_tiles(packed, packed.layout, TILES)


def on_amx(when: When) -> When:
    """`when`, where there is AMX besides."""
    return lambda facts: when(facts) or check.refusal()


def in_bfloat16(when: When) -> When:
    """The same, where other arithmetic in long steps is requested."""

    def refusal(facts: OpFacts) -> str | None:
        if reason := when(facts):
            return reason
        if getattr(facts.executor, "prefill", "same") != "bf16":
            return "--prefill bf16 was not asked for"
        return check.refusal()

    return refusal


linear.variant("native-amx", on="cpu", when=on_amx(blocks.blocks_and_rounding), native=True)(
    replace(blocks.native, pack=pack_byte_tiles)
)
_BFLOAT16: tuple[tuple[str, Any, When, Packing], ...] = (
    ("amx-bf16", pack_blocks, blocks.blocks_and_rounding, blocks.native),
    ("amx-bf16-dense", pack_plain, dense.plain_numbers, dense.native),
    ("amx-bf16-floats", pack_floats, float_codes.small_floats, float_codes.native),
)
for _name, _pack, _when, _native in _BFLOAT16:
    linear.variant(_name, on="cpu", when=in_bfloat16(_when), native=True)(replace(_native, pack=_pack))
