"""Products of a block's quads of bytes in fewer instructions of x86-64 than one `dot` for each quad takes.

AVX2 adds two products in 16 bits, of which several may be added. Codes of few bits leave bits free: eight
quads of four-bit codes, a whole block, join the sums of 32 bits at once. Codes of eight bits are made signed
and multiplied by their size, with the sign moved to the other factor. What must be taken off them is then in
them, and both halves of a byte cost one product.

VNNI multiplies upper halves of bytes where they lie, sixteenfold. A byte has two codes. The lower one takes a
mask; the upper one would take a shift and a mask. But a dot product of bytes takes all eight bits. Without
the shift a sum is sixteen times as large, and one shift of the sum, which is exact, does for a whole block.
So there are two sums, which do not wait for each other.

    byte   uuuu llll        sum of l · a                 + (sum of 16 u · a) / 16
           & 0x0F  -> l     & 0xF0  -> 16 u
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from llvmlite import ir

from plait.kernels.cpu.codegen.byte_dot import by_halves, join_pairs, multiply_unsigned
from plait.kernels.cpu.codegen.llvm_writer import Value, Word, Writer
from plait.kernels.cpu.codegen.plain_x86 import call
from plait.kernels.cpu.codegen.target import DOT, X86_64
from plait.kernels.cpu.codegen.vec import DEFINED, VI, _ints, i8, i16, vi32

BY_TWOS = DOT == "avx2"
BY_FOURS = DOT in ("vnni", "avx-vnni")
LARGEST = 127  # of a rounded activation; the smallest is -127
FEW = 2  # rows of codes up to which shifts that are saved outweigh those of sums
UPPER = 0xF0F0F0F0 - (1 << 32)
LINE = 64  # bytes of a quad of both halves
_v64i8, _v32i8, _v32i16 = ir.VectorType(i8, 64), ir.VectorType(i8, 32), ir.VectorType(i16, 32)

DEFINED["sixteenth"] = (VI, (VI,), lambda b, x: b.ashr(x, _ints(4)))


def _multiply_signed(b: ir.IRBuilder, u: ir.Value, v: ir.Value) -> ir.Value:
    u, v = b.bitcast(u, _v32i8), b.bitcast(v, _v32i8)
    size = call(b, "llvm.abs.v32i8", _v32i8, u, ir.Constant(ir.IntType(1), 0))
    return multiply_unsigned(b, size, call(b, "llvm.x86.avx2.psign.b", _v32i8, v, u))


def _as(kind: ir.Type, operation: str, b: ir.IRBuilder, x: ir.Value, y: ir.Value) -> ir.Value:
    return b.bitcast(getattr(b, operation)(b.bitcast(x, kind), b.bitcast(y, kind)), vi32)


if X86_64:  # no other processor has them
    DEFINED.update(
        {
            "twos": (VI, (VI, VI), partial(by_halves, multiply_unsigned)),  # u in 0..127
            "signed_twos": (VI, (VI, VI), partial(by_halves, _multiply_signed)),  # v in -127..127
            "add_twos": (VI, (VI, VI), partial(_as, _v32i16, "add")),
            "join_twos": (VI, (VI, VI), lambda b, s, x: b.add(s, by_halves(join_pairs, b, x))),
            "sub_bytes": (VI, (VI, VI), partial(_as, _v64i8, "sub")),
        }
    )


def together(largest: int, zero: int | None) -> int:
    """How many quads of codes 0..largest less `zero` are added in 16 bits; 0: none, take `dot8`."""
    if largest <= LARGEST:
        return 32767 // (2 * LARGEST * largest)
    return int(zero is not None and largest - LARGEST <= zero <= 128)


def add_by_twos(
    w: Writer,
    codes: Sequence[Callable[[], Value]],
    place: Callable[[int, int], Word],
    sums: Sequence[ir.Value],
    largest: int,
    zero: int | None,
    base: int,
) -> list[ir.Value]:
    """Sums of as many rows: `sums` and the products of every quad, which `codes` reads.

    place(r, i): where the four activations of row r for quad i are. With codes above 127, `sums` must be
    `base` and what taking `zero` from each comes to, and only `base` is added: the codes have the rest.
    """
    signed, most, rows = largest > LARGEST, together(largest, zero), range(len(sums))
    product, found = (w.signed_twos, [w.spread_int(base) for _ in rows]) if signed else (w.twos, list(sums))
    for start in range(0, len(codes), most):
        pairs: list[Value] = []
        for i in range(start, min(start + most, len(codes))):
            u = codes[i]()
            if signed:
                u = w.sub_bytes(u, w.spread_int((zero or 0) * 0x01010101))
            more = [product(u, w.spread_i32(place(r, i))) for r in rows]
            pairs = [w.add_twos(x, y) for x, y in zip(pairs, more, strict=True)] if pairs else more
        found = [w.join_twos(n, x) for n, x in zip(found, pairs, strict=True)]
    return found


def add_by_halves(w: Writer, p: Word, a: Word, sums: Sequence[Value], quads: range) -> list[Value]:
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
