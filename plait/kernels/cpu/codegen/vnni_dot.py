"""Products of half bytes where VNNI has them: upper halves are multiplied where they lie, sixteenfold.

A byte has two codes. The lower one takes a mask; the upper one would take a shift and a mask. But a dot
product of bytes takes all eight bits. Without the shift a sum is sixteen times as large, and one shift of the
sum, which is exact, does for a whole block. So there are two sums, which do not wait for each other.

    byte   uuuu llll        sum of l · a                 + (sum of 16 u · a) / 16
           & 0x0F  -> l     & 0xF0  -> 16 u
"""

from __future__ import annotations

from collections.abc import Sequence

from plait.kernels.cpu.codegen.llvm_writer import Value, Word, Writer
from plait.kernels.cpu.codegen.target import DOT
from plait.kernels.cpu.codegen.vec import DEFINED, VI, _ints

HERE = DOT == "vnni"
FEW = 2  # rows of codes up to which shifts that are saved outweigh those of sums
UPPER = 0xF0F0F0F0 - (1 << 32)
LINE = 64  # bytes of a quad of both halves

DEFINED["sixteenth"] = (VI, (VI,), lambda b, x: b.ashr(x, _ints(4)))


def products(w: Writer, p: Word, a: Word, sums: Sequence[Value], quads: range) -> list[Value]:
    """Sums of as many rows: `sums` and the products of those quads of half bytes.

    p: where 64 bytes for each of the quads 0 to 3 lie, with quad i + 4 in their upper halves; a: the rows'
    activations, 32 bytes each.
    """
    rows = range(len(sums))
    lower, upper = list(sums), [w.spread_int(0) for _ in rows]
    for i in range(4):
        codes = w.load_i32(p + LINE * i)
        if i in quads:
            u = w.low4(codes)
            lower = [w.dot(lower[r], u, w.spread_i32(a + 32 * r + 4 * i)) for r in rows]
        if i + 4 in quads:
            u = w.and_i32(codes, w.spread_int(UPPER))
            upper = [w.dot8(upper[r], u, w.spread_i32(a + 32 * r + 4 * (i + 4))) for r in rows]
    if quads.stop <= 4:
        return lower
    return [w.add_i32(low, w.sixteenth(up)) for low, up in zip(lower, upper, strict=True)]
