"""The compiled forms of linear layers with a norm between them: usual layouts of planes, and plain numbers.

What follows a loop is the same behind every layout, so each end has all of its flags at one or two layouts.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch

from plait.kernels.triton.forms import FLOAT32, KernelForm, split_options
from plait.kernels.triton.linear.folded_norm import fold_dense, fold_planes, set_registers
from plait.kernels.triton.linear.linear import PlanesTiling, dense_constants
from plait.kernels.triton.linear.plane_arguments import plane_constants
from plait.kernels.triton.linear.plane_forms import (
    FLOAT32_POINTERS,
    LAYOUTS,
    POINTERS,
    SHAPE,
    WIDE_LOADS,
    scale_types,
)
from plait.ops.folded_experts import OWN_GROUP
from plait.ops.folded_norm import GROUP

FULL = ("Q4_K", "Q4_0")  # layouts that are compiled with every flag of both ends
MORE = {"squares": "fp32*", "norm": "fp32*", "eps": "fp32", "scale": "fp32"}


@dataclass(frozen=True, slots=True)
class _End:
    """One end of the norm: behind it (`begins`), maybe with an activation, or in front of it."""

    begins: bool
    act: str = ""
    is_scaled: bool = False
    has_bias: bool = False
    is_behind_experts: bool = False

    @property
    def words(self) -> str:
        what = ["behind a norm" if self.begins else "in front of a norm"]
        what += ["behind experts"] if self.is_behind_experts else []
        what += [self.act] if self.act else []
        what += ["scaled"] if self.is_scaled else []
        return ", ".join([*what, "bias"] if self.has_bias else what)

    @property
    def constants(self) -> dict[str, object]:
        sums = SHAPE[1] // (OWN_GROUP if self.is_behind_experts else GROUP) if self.begins else 1
        return {"BEGINS": self.begins, "SUMS": sums, "SCALED": self.is_scaled, "BIAS": self.has_bias}

    def types(self, pointers: Mapping[str, str]) -> dict[str, str]:
        """Of the pointers that are read or written; what is not there is another tensor."""
        return {**pointers, **MORE, **dict.fromkeys(("residual", "added"), pointers["x"])}


ENDS = (
    *(_End(True, act, has_bias=bias) for act in ("", "silu", "gelu_pytorch_tanh") for bias in (False, True)),
    *(_End(False, "", is_scaled, bias) for is_scaled in (False, True) for bias in (False, True)),
)  # fmt: skip
USUAL = (_End(True), _End(False))
BEHIND = _End(True, is_behind_experts=True)  # sums of fewer numbers, of which there are more


def forms() -> Iterator[KernelForm]:
    """4,096 inputs and outputs, 28,672 of gate and up."""
    for name in LAYOUTS:
        for end in ENDS if name in FULL else USUAL:
            yield _planes_form(name, end, 8)
        for end in USUAL:
            yield _planes_form(name, end, 16)
        if name in FULL:
            yield _planes_form(name, BEHIND, 8)
            yield _planes_form(name, BEHIND, 16)
    for end in (*ENDS, BEHIND):
        yield _dense_form(end, 8, torch.bfloat16)
    for end in (BEHIND, *USUAL):
        yield _dense_form(end, 16, torch.bfloat16)
        yield _dense_form(end, 8, torch.float32)


def _planes_form(name: str, end: _End, rows: int) -> KernelForm:
    layout, scales, most = LAYOUTS[name]
    tiling = PlanesTiling(layout, 28672 if end.act else SHAPE[0], SHAPE[1])
    constants, options = split_options(tiling.few_constants(rows, end.act) | set_registers(layout, rows))
    shared = plane_constants(layout, torch.bfloat16, has_assembly=True) | end.constants
    return KernelForm(
        f"{end.words}, {name}, {rows}", fold_planes, end.types(POINTERS | scale_types(layout, scales)),
        shared | constants, **options, demands=WIDE_LOADS,
        weights=constants["BN"] * constants["UNITS"] * layout.unit, max_per_weight=most[rows > 8],
    )  # fmt: skip


def _dense_form(end: _End, rows: int, dtype: torch.dtype) -> KernelForm:
    is_wide = dtype == torch.float32
    constants, options = split_options(dense_constants(*SHAPE, rows, end.act, dtype))
    each = 0 if is_wide else constants["BN"] * constants["UNITS"] * constants["UNIT"]
    return KernelForm(
        f"{end.words}, plain, {rows}{FLOAT32 if is_wide else ''}", fold_dense,
        end.types(FLOAT32_POINTERS if is_wide else POINTERS), end.constants | constants, **options,
        demands=WIDE_LOADS[:1] if is_wide else WIDE_LOADS, weights=each, max_per_weight=2.0,
    )  # fmt: skip
