"""Columns of heads, mixed by a Walsh-Hadamard transform before they become codes (`ops.entry`)."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def mix_columns(x, ROWS: tl.constexpr, COLUMNS: tl.constexpr, STAGES: tl.constexpr):
    """[ROWS, COLUMNS] float32: every 2^STAGES neighbouring columns, without a factor; the farthest apart are
    added first."""
    for i in tl.static_range(STAGES):
        pairs = tl.reshape(x, [ROWS, COLUMNS >> (STAGES - i), 2, 1 << (STAGES - 1 - i)])
        first, second = tl.split(tl.permute(pairs, (0, 1, 3, 2)))
        joined = tl.permute(tl.join(first + second, first - second), (0, 1, 3, 2))
        x = tl.reshape(joined, [ROWS, COLUMNS])
    return x


def count_stages(mixed: int) -> int:
    """How many stages mix that many columns, a power of two."""
    return mixed.bit_length() - 1
