"""Products of bytes where AVX2 has them: sums of two products, 16 bits each, of which several may be added.

Codes of few bits leave bits free: eight quads of four-bit codes, a whole block, join the sums of 32 bits at
once. Codes of eight bits are made signed and multiplied by their size, with the sign moved to the other
factor. What must be taken off them is then in them, and both halves of a byte cost one product.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from llvmlite import ir

from plait.kernels.cpu.codegen.llvm_writer import Value, Word, Writer
from plait.kernels.cpu.codegen.target import DOT, X86_64
from plait.kernels.cpu.codegen.vec import DEFINED, VI, _call, i8, i16, i32, v8i32, v16i16, v32i8, vi32

HERE = DOT == "avx2"
LARGEST = 127  # of a rounded activation; the smallest is -127
_v64i8, _v32i16 = ir.VectorType(i8, 64), ir.VectorType(i16, 32)


def _by_halves(one: Callable[..., ir.Value], b: ir.IRBuilder, *given: ir.Value) -> ir.Value:
    """`one` of each of the two registers that vectors are in."""
    parts = []
    for k in (0, 8):
        order = ir.Constant(ir.VectorType(i32, 8), list(range(k, k + 8)))
        parts.append(b.bitcast(one(b, *(b.shuffle_vector(x, x, order) for x in given)), v8i32))
    return b.shuffle_vector(*parts, ir.Constant(vi32, list(range(16))))


def _multiply_unsigned(b: ir.IRBuilder, u: ir.Value, v: ir.Value) -> ir.Value:
    return _call(b, "llvm.x86.avx2.pmadd.ub.sw", v16i16, b.bitcast(u, v32i8), b.bitcast(v, v32i8))


def _multiply_signed(b: ir.IRBuilder, u: ir.Value, v: ir.Value) -> ir.Value:
    u, v = b.bitcast(u, v32i8), b.bitcast(v, v32i8)
    size = _call(b, "llvm.abs.v32i8", v32i8, u, ir.Constant(ir.IntType(1), 0))
    turned = _call(b, "llvm.x86.avx2.psign.b", v32i8, v, u)
    return _call(b, "llvm.x86.avx2.pmadd.ub.sw", v16i16, size, turned)


def _join_pairs(b: ir.IRBuilder, x: ir.Value) -> ir.Value:
    ones = ir.Constant(v16i16, [1] * 16)
    return _call(b, "llvm.x86.avx2.pmadd.wd", v8i32, b.bitcast(x, v16i16), ones)


def _as(kind: ir.Type, operation: str, b: ir.IRBuilder, x: ir.Value, y: ir.Value) -> ir.Value:
    return b.bitcast(getattr(b, operation)(b.bitcast(x, kind), b.bitcast(y, kind)), vi32)


if X86_64:  # no other processor has them
    DEFINED.update(
        {
            "twos": (VI, (VI, VI), partial(_by_halves, _multiply_unsigned)),  # u in 0..127
            "signed_twos": (VI, (VI, VI), partial(_by_halves, _multiply_signed)),  # v in -127..127
            "add_twos": (VI, (VI, VI), partial(_as, _v32i16, "add")),
            "join_twos": (VI, (VI, VI), lambda b, s, x: b.add(s, _by_halves(_join_pairs, b, x))),
            "sub_bytes": (VI, (VI, VI), partial(_as, _v64i8, "sub")),
        }
    )


def together(largest: int, zero: int | None) -> int:
    """How many quads of codes 0..largest less `zero` are added in 16 bits; 0: none, take `dot8`."""
    if largest <= LARGEST:
        return 32767 // (2 * LARGEST * largest)
    return int(zero is not None and largest - LARGEST <= zero <= 128)


def products(
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
