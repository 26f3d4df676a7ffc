"""Low-rank adapters of experts on GPUs: the launches of `linear.low_rank`, each row a token and an expert."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

from plait.errors import ShapeMismatch
from plait.kernels.triton.forms import KernelForm, with_float16, with_float32
from plait.kernels.triton.linear.low_rank import (
    BN,
    DECODES,
    MOST,
    TYPES,
    UNIT,
    UNITS,
    expand_rows,
    launch_both,
    shrink_rows,
)
from plait.kernels.triton.linear.plane_forms import WIDE_LOADS
from plait.kernels.triton.moe.grouped_experts import sort_by_expert
from plait.ops.expert_low_rank import ExpertSite, add_expert_low_rank
from plait.ops.low_rank import AdapterRows


@add_expert_low_rank.variant("triton", on="cuda")
def add_to_pairs(y: Tensor, x: Tensor, site: ExpertSite, rows: AdapterRows, index: Tensor) -> Tensor:
    """Two launches, which write into y; of many pairs one more, which sorts them by expert."""
    k, is_many = index.shape[1], len(y) > DECODES
    if y.shape != (index.numel(), sum(site.stacked.out_sizes)) or len(x) not in (len(y), len(index)):
        raise ShapeMismatch(f"adapters of {k} experts a token add to no {list(x.shape)} -> {list(y.shape)}")
    index = index.contiguous()
    order = sort_by_expert(index, site.count)[1] if is_many else index
    flags = {"PICKED": False, "E": site.count, "K": k, "ORDERED": is_many}
    launch_both(y, x, site.stacked, (rows.slots, index, order), flags, len(y) // max(len(x), 1))
    return y


@with_float16
@with_float32
def forms() -> Iterator[KernelForm]:
    """Of 8 of 128 experts: gate and up, which are float32, and the way back."""
    for ranks in (16, 64):
        for rows in (1, MOST):
            shared = {"BM": MOST, "ROWS": rows, "PICKED": False, "E": 128, "K": 8, "ORDERED": rows > 1}
            types = TYPES | ({"order": "i32*"} if rows > 1 else {})
            for what, per_x, y in (("up", 8, "fp32*"), ("down", 1, TYPES["y"])):
                kind = f"{ranks} ranks, experts {what}, {rows} rows"
                constants = {"UNIT": UNIT, "UNITS": UNITS, "BN": ranks, "PER_X": per_x, **shared}
                yield KernelForm(
                    f"adapters shrink, {kind}", shrink_rows, types, constants, UNITS, demands=WIDE_LOADS
                )
                constants = {"BR": ranks, "BN": BN, "APART": False, **shared}
                yield KernelForm(
                    f"adapters expand, {kind}", expand_rows, types | {"y": y}, constants, UNITS,
                    demands=WIDE_LOADS,
                )  # fmt: skip
