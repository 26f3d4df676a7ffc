"""Columns of heads, mixed by a Walsh-Hadamard transform before they become codes (`ops.entry`)."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from plait.kernels.triton.dependent_launch import await_previous
from plait.kernels.triton.forms import KernelForm
from plait.ops.entry import count_mixed
from plait.ops.launch import launch

NUMBERS = 2048  # of a program


@triton.jit
def mix_columns(x, ROWS: tl.constexpr, COLUMNS: tl.constexpr, STAGES: tl.constexpr):
    """[ROWS, COLUMNS] float32: every 2^STAGES neighbouring columns, without a factor; the farthest apart are
    added first."""
    c = tl.arange(0, COLUMNS)[None, :] + tl.zeros([ROWS, 1], tl.int32)
    for i in tl.static_range(STAGES):
        far = 1 << (STAGES - 1 - i)
        other = tl.gather(x, c ^ far, 1)
        x = tl.where((c & far) == 0, x + other, other - x)
    return x


def count_stages(mixed: int) -> int:
    """How many stages mix that many columns, a power of two."""
    return mixed.bit_length() - 1


@triton.jit(do_not_specialize=["rows"])
def turn_rows(x, out, rows, D: tl.constexpr, DP: tl.constexpr, ROWS: tl.constexpr, STAGES: tl.constexpr):
    """x: [rows, D], sums of mixed values -> out like it, sums of values. Grid: blocks of ROWS rows."""
    await_previous()
    r = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    c = tl.arange(0, DP)[None, :]
    there = (r < rows) & (c < D)
    numbers = tl.load(x + r * D + c, mask=there, other=0.0).to(tl.float32)
    factor: tl.constexpr = 1.0 / (1 << STAGES)
    numbers = mix_columns(numbers, ROWS, DP, STAGES) * factor
    tl.store(out + r * D + c, numbers.to(out.dtype.element_ty), mask=there)


def turn_back(x: Tensor, mixed: int) -> Tensor:
    """x: [T, heads, d], dense, of which every `mixed` columns were mixed -> like x."""
    out, rows, sizes = torch.empty_like(x), x.shape[0] * x.shape[1], _sizes(x.shape[2], mixed)
    launch(turn_rows, (-(-rows // sizes["ROWS"]),), x, out, rows, **sizes)
    return out


def _sizes(dim: int, mixed: int) -> dict[str, int]:
    wide = max(16, triton.next_power_of_2(dim))
    return {"D": dim, "DP": wide, "ROWS": max(1, NUMBERS // wide), "STAGES": count_stages(mixed)}


def turn_form(dim: int) -> KernelForm:
    """What heads of that size launch."""
    types = {"x": "bf16*", "out": "bf16*", "rows": "i32"}
    return KernelForm(f"turn_rows, d{dim}", turn_rows, types, _sizes(dim, count_mixed(dim)), 4)
