"""Low-rank adapters on GPUs: two launches behind a linear layer, for rows of any adapters.

    hidden [n, parts, ranks] = x[i] down[slot of i, part]ᵀ        shrink_rows
    y[i, outputs of a part] += scale · hidden[i, part] upᵀ        expand_rows

A program has one row of x, or `MOST` neighbours in a step of many. Then it goes through the adapters that
these have, one after the other, so neighbours of one prompt read its factors once. Rows without an adapter
are not touched. A row has the same bits in both forms: tiles, and the order of sums, are those of one row.
Chen et al., "Punica: Multi-Tenant LoRA Serving" (2023) have one program for a row, too.

Behind experts a row is a pair of a token and an expert. Each adapter has a slot for each expert there, and
neighbours are pairs in the order of their experts (`moe.low_rank`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
import triton
import triton.language as tl
from torch import Tensor

from plait.errors import ShapeMismatch
from plait.kernels.triton.dependent_launch import await_previous
from plait.kernels.triton.forms import KernelForm, with_float16, with_float32
from plait.kernels.triton.linear.multiply_planes import add_units
from plait.kernels.triton.linear.plane_forms import WIDE_LOADS
from plait.ops.launch import launch
from plait.ops.low_rank import AdapterRows
from plait.ops.stacked_low_rank import MOST_RANKS, StackedSite, add_stacked_low_rank

MOST = 8  # rows of a program, the small side of a product
DECODES = 512  # up to so many rows are sequences with adapters of their own, as a rule
UNIT = 32  # inputs of a warp and step
UNITS = 4  # warps, and units of a step
BN = 64  # outputs of a program
NO_SLOT: tl.constexpr = tl.constexpr(1 << 30)


@triton.jit
def load_slots(
    slots, tokens, order, m, ROWS: tl.constexpr, BM: tl.constexpr, PICKED: tl.constexpr, E: tl.constexpr,
    K: tl.constexpr, ORDERED: tl.constexpr,
):  # fmt: skip
    """The rows of this program, [BM], and the slots of their adapters: 0 of what is no row.

    E, K: rows are pairs of a token and one of its K of E experts, of which `tokens` has the numbers; E is 0
    for other rows. ORDERED: neighbours are those in `order`.
    """
    lane = tl.arange(0, BM)
    rows = tl.program_id(0) * ROWS + lane
    there = (lane < ROWS) & (rows < m)
    if ORDERED:
        rows = tl.load(order + rows, mask=there, other=0)
    rows = rows.to(tl.int64)
    if E > 0:
        slot = tl.load(slots + rows // K, mask=there, other=0).to(tl.int32)
        expert = tl.load(tokens + rows, mask=there, other=0).to(tl.int32)
        own = tl.where(slot > 0, (slot - 1) * E + expert + 1, 0)
    else:
        token = tl.load(tokens + rows, mask=there, other=0) if PICKED else rows
        own = tl.load(slots + token, mask=there, other=0).to(tl.int32)
    return rows, own


@triton.jit
def next_slot(own, last):
    """The smallest slot of these rows above `last`, or NO_SLOT."""
    return tl.min(tl.where(own > last, own, NO_SLOT), 0)


@triton.jit(do_not_specialize=["m"])
def shrink_rows(
    x, slots, tokens, order, down, hidden, m, n_in, steps, ranks,
    x_row, x_part, down_slot, down_part, down_row, hidden_row,
    UNIT: tl.constexpr, UNITS: tl.constexpr, BN: tl.constexpr, BM: tl.constexpr, ROWS: tl.constexpr,
    PICKED: tl.constexpr, E: tl.constexpr, K: tl.constexpr, ORDERED: tl.constexpr, PER_X: tl.constexpr,
):  # fmt: skip
    """x: [m, in] or [m, parts, in] -> hidden [m, parts, ranks]. PER_X: neighbours that share a row of x.

    Grid: blocks of rows, parts, blocks of ranks.
    """
    await_previous()
    rows, own = load_slots(slots, tokens, order, m, ROWS, BM, PICKED, E, K, ORDERED)
    part, rank = tl.program_id(1).to(tl.int64), tl.program_id(2) * BN + tl.arange(0, BN)
    column = tl.arange(0, UNITS)[:, None] * UNIT + tl.arange(0, UNIT)[None, :]
    line_x = (x + part * x_part + rows // PER_X * x_row)[None, None, :]
    place = hidden + (rows * hidden_row)[None, :] + (part * ranks + rank)[:, None]
    slot = next_slot(own, 0)
    while slot < NO_SLOT:
        here = own == slot
        line = down + (slot - 1).to(tl.int64) * down_slot + part * down_part
        line_down = (line + rank.to(tl.int64) * down_row)[None, :, None]
        total = tl.zeros([UNITS, BN, BM], tl.float32)
        for step in range(steps):
            at = step * (UNITS * UNIT) + column
            inside = at < n_in
            numbers = tl.load(line_down + at[:, None, :], mask=inside[:, None, :], other=0.0)
            given = tl.load(line_x + at[:, :, None], mask=inside[:, :, None] & here[None, None, :], other=0.0)
            total = tl.dot(numbers, given.to(numbers.dtype), total, input_precision="ieee")
        found = add_units(total, UNITS, BN, BM).to(hidden.dtype.element_ty)
        tl.store(place, found, mask=tl.broadcast_to(here[None, :], [BN, BM]))
        slot = next_slot(own, slot)


@triton.jit(do_not_specialize=["m"])
def expand_rows(
    hidden, slots, tokens, order, up, scales, starts, y, m, parts, ranks, hidden_row, up_slot, y_row, y_part,
    BR: tl.constexpr, BN: tl.constexpr, BM: tl.constexpr, ROWS: tl.constexpr, PICKED: tl.constexpr,
    E: tl.constexpr, K: tl.constexpr, ORDERED: tl.constexpr, APART: tl.constexpr,
):  # fmt: skip
    """hidden: [m, parts, ranks] -> y [m, out] plus what is added; APART: y is [m, parts, out of each].

    Grid: blocks of rows, parts, tiles of a part's outputs.
    """
    await_previous()
    rows, own = load_slots(slots, tokens, order, m, ROWS, BM, PICKED, E, K, ORDERED)
    part, rank = tl.program_id(1).to(tl.int64), tl.arange(0, BR)
    first, end = tl.load(starts + part), tl.load(starts + part + 1)
    output = first + tl.program_id(2) * BN + tl.arange(0, BN)
    there = output < end
    to = y + (rows * y_row)[None, :] + (part * y_part + output - first if APART else output)[:, None]
    line = hidden + (rows * hidden_row)[None, :] + (part * ranks + rank)[:, None]
    slot = next_slot(own, 0)
    while slot < NO_SLOT:
        here = own == slot
        line_up = up + (slot - 1).to(tl.int64) * up_slot + (output * ranks)[:, None] + rank[None, :]
        total = tl.zeros([BN, BM], tl.float32)
        for at in range(0, ranks, BR):
            numbers = tl.load(line_up + at, mask=there[:, None], other=0.0)
            given = tl.load(line + at, mask=tl.broadcast_to(here[None, :], [BR, BM]), other=0.0)
            total = tl.dot(numbers, given, total, input_precision="ieee")
        shown = there[:, None] & here[None, :]
        before = tl.load(to, mask=shown, other=0.0).to(tl.float32)
        found = before + tl.load(scales + (slot - 1) * parts + part) * total  # 32 bits hold slots × parts
        tl.store(to, found.to(y.dtype.element_ty), mask=shown)
        slot = next_slot(own, slot)


@add_stacked_low_rank.variant("triton", on="cuda")
def add_low_rank(
    y: Tensor, x: Tensor, site: StackedSite, rows: AdapterRows, tokens: Tensor | None = None
) -> Tensor:
    """Two launches, which write into y."""
    check_rows(y, x, site)
    if y.stride(-1) != 1:
        return y.copy_(add_low_rank(y.contiguous(), x, site, rows, tokens))
    flags = {"PICKED": tokens is not None, "E": 0, "K": 1, "ORDERED": False}
    launch_both(y, x, site, (rows.slots, rows.slots if tokens is None else tokens, rows.slots), flags)
    return y


def launch_both(
    y: Tensor,
    x: Tensor,
    site: StackedSite,
    rows_of: tuple[Tensor, Tensor, Tensor],
    flags: Mapping[str, int],
    per_x: int = 1,
) -> None:
    """rows_of, flags: `slots`, `tokens` and `order` of `load_slots`, and its constants."""
    x = x if x.stride(-1) == 1 else x.contiguous()
    (m, parts, ranks), apart = (len(y), site.num_parts, site.up.shape[-1]), y.dim() == 3
    hidden = torch.empty(m, parts, ranks, dtype=site.up.dtype, device=y.device)
    each = 1 if m <= DECODES else MOST
    blocks, block = -(-m // each), min(ranks, MOST_RANKS)
    shared = {"BM": MOST, "ROWS": each, **flags}
    launch(
        shrink_rows, (blocks, parts, ranks // block), x, *rows_of, site.down, hidden, m, site.n_in,
        -(-site.n_in // (UNIT * UNITS)), ranks,
        x.stride(0), x.stride(1) if apart else 0, *site.down.stride()[:3], hidden.stride(0),
        UNIT=UNIT, UNITS=UNITS, BN=block, PER_X=per_x, num_warps=UNITS, num_stages=2, **shared,
    )  # fmt: skip
    launch(
        expand_rows, (blocks, parts, -(-max(site.out_sizes) // BN)), hidden, *rows_of, site.up, site.scales,
        site.starts, y, m, parts, ranks, hidden.stride(0), site.up.stride(0), y.stride(0),
        y.stride(1) if apart else 0, BR=block, BN=BN, APART=apart, num_warps=UNITS, num_stages=2, **shared,
    )  # fmt: skip


def check_rows(y: Tensor, x: Tensor, site: StackedSite) -> None:
    """Raises ShapeMismatch for rows of another layer."""
    rows, parts, widths = len(y), site.num_parts, set(site.out_sizes)
    each = (rows, parts) if y.dim() == 3 else (rows,)
    out = min(widths) if y.dim() == 3 else sum(site.out_sizes)
    if y.shape != (*each, out) or x.shape != (*each, site.n_in) or (y.dim() == 3 and len(widths) > 1):
        raise ShapeMismatch(
            f"adapters of {site.n_in} inputs and {list(site.out_sizes)} outputs add to no {list(x.shape)} -> "
            f"{list(y.shape)}"
        )


TYPES = {
    **dict.fromkeys(("x", "down", "hidden", "up", "y"), "bf16*"),
    **dict.fromkeys(("slots", "tokens", "starts"), "i64*"), "scales": "fp32*", "order": "i64*",
    **dict.fromkeys(("n_in", "ranks", "x_row", "x_part", "down_slot", "down_part", "down_row"), "i32!"),
    **dict.fromkeys(("hidden_row", "up_slot", "y_row"), "i32!"),
}  # fmt: skip


@with_float16
@with_float32
def forms() -> Iterator[KernelForm]:
    """Adapters of rank 16 and 64, of decodes and prompts, of layers, of the head's rows and of heads."""
    for ranks in (16, 64):
        for rows, picked, apart in (
            (1, False, False),
            (1, True, False),
            (1, False, True),
            (MOST, False, False),
        ):
            kind = f"{ranks} ranks, {'heads, ' * apart}{rows} rows{', picked' * picked}"
            shared = {"BM": MOST, "ROWS": rows, "PICKED": picked, "E": 0, "K": 1, "ORDERED": False}
            constants = {"UNIT": UNIT, "UNITS": UNITS, "BN": ranks, "PER_X": 1, **shared}
            yield KernelForm(
                f"adapters shrink, {kind}", shrink_rows, TYPES, constants, UNITS, demands=WIDE_LOADS
            )
            constants = {"BR": ranks, "BN": BN, "APART": apart, **shared}
            yield KernelForm(
                f"adapters expand, {kind}", expand_rows, TYPES, constants, UNITS, demands=WIDE_LOADS
            )
