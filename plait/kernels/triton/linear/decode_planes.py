"""Device functions that decode planes: codes to numbers in the dtype of x, scales to float32.

Two 16-bit lanes of a plane are one register. Assembly decodes them together: a code under the bits of 128
(bfloat16) or 1024 (float16) is that number plus the code, and who sums them takes it away from the sum
(`base_of`). Eight-bit and four-bit floats are moved to where the wider float has its exponent, and multiplied
by what the biases differ by. Numbers of IQ4 are looked up by permutations of bytes. All of this is exact.
`make_assembly` writes it for a layout and a dtype. The interpreter has no assembly: without it, the same
numbers are computed in Triton's own words.
"""

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl

from plait.quant.planes import IQ4_ORDER, LANES, PlaneLayout

PAIRS = 0x10001  # a constant of 16 bits in both lanes, if multiplied by it
IQ4_BASE = {torch.bfloat16: 211, torch.float16: 1151}  # pairs of `IQ4_ORDER` then agree in their upper bits
OR, XOR = "0xEA", "0x6A"  # lop3: (a & b) | c, (a & b) ^ c


def _place(register: str, shift: int, source: str) -> list[str]:
    """register = source, moved right by `shift`, or left if that is negative."""
    if shift == 0:
        return [f"mov.b32 {register}, {source};"]
    return [f"{'shr.u32' if shift > 0 else 'shl.b32'} {register}, {source}, {abs(shift)};"]


def _integer(layout: PlaneLayout, is_half: bool, at: int, low: str, high: str, out: str) -> list[str]:
    """A code of up to 6 bits plus `base_of`. Field `at` of a unit is in `low`, its top bits in `high`."""
    last = f"{(0x6400 if is_half else 0x4300) * PAIRS:#x}"
    lines = []
    if layout.high:
        lines = _place("b", layout.high * at - layout.bits, high)
        lines += [f"lop3.b32 b, b, {(((1 << layout.high) - 1) << layout.bits) * PAIRS:#x}, {last}, {OR};"]
        last = "b"
    lines += _place("a", layout.bits * (at % (16 // layout.bits)), low)
    return [*lines, f"lop3.b32 {out}, a, {((1 << layout.bits) - 1) * PAIRS:#x}, {last}, {OR};"]


def _byte(is_half: bool, at: int, low: str, out: str) -> list[str]:
    """A signed byte: the seven low bits, and minus 128 where the top bit is set."""
    lines = _place("a", 8 * (at % 2), low)
    if is_half:  # ten bits of mantissa: with the top bit turned it is the number plus 128
        lines += [f"lop3.b32 a, a, {0xFF * PAIRS:#x}, {0x6480 * PAIRS:#x}, {XOR};"]
        return [
            *lines,
            f"mov.b32 k, {0x3C00 * PAIRS:#x};",
            f"mov.b32 c, {_bits_of(-1152.0, True) * PAIRS:#x};",
            f"fma.rn.f16x2 {out}, a, k, c;",
        ]
    return [
        *lines,
        f"lop3.b32 b, a, {0x80 * PAIRS:#x}, {0x4300 * PAIRS:#x}, {OR};",  # 128, or 256
        f"lop3.b32 a, a, {0x7F * PAIRS:#x}, {0x4300 * PAIRS:#x}, {OR};",
        f"mov.b32 k, {0xBF80 * PAIRS:#x};",
        f"fma.rn.bf16x2 {out}, b, k, a;",
    ]


def _float(layout: PlaneLayout, is_half: bool, at: int, low: str, out: str, scale: str = "") -> list[str]:
    """E4M3 or E2M1: the bits below the sign go to the end of the exponent's field.

    scale: a register of two numbers that it is multiplied by, or "" for what the biases differ by.
    """
    wide, mantissa, bias = (8, 3, 7) if layout.value == "e4m3" else (4, 1, 1)
    whole, wide_bias = 10 if is_half else 7, 15 if is_half else 127
    power = wide_bias - bias + (layout.value == "e2m1 doubled")
    below, sign = (3 * at, 12 + (at ^ 1)) if layout.has_signs else (8 * (at % 2), 8 * (at % 2) + 7)
    first, second = below - (whole - mantissa), sign - 15  # how far right they go
    bits = (((1 << (wide - 1)) - 1) << (whole - mantissa)) * PAIRS
    lines = _place("a", first, low)
    if first == second:
        lines += [f"and.b32 a, a, {bits | 0x8000 * PAIRS:#x};"]
    else:
        lines += _place("b", second, low)
        lines += [f"and.b32 b, b, {0x8000 * PAIRS:#x};", f"lop3.b32 a, a, {bits:#x}, b, {OR};"]
    if not scale:
        lines += [f"mov.b32 k, {((power + wide_bias) << whole) * PAIRS:#x};"]
    return [
        *lines,
        f"mov.b32 c, {0x8000 * PAIRS:#x};",
        f"fma.rn.{'f16x2' if is_half else 'bf16x2'} {out}, a, {scale or 'k'}, c;",
    ]


def _table_bytes(dtype: torch.dtype) -> tuple[list[int], list[int], list[int]]:
    """(low bytes of the first eight numbers of `IQ4_ORDER`, of the last eight, high bytes of both)."""
    base = IQ4_BASE[dtype]
    words = [_bits_of(float(value + base), dtype is torch.float16) for value in IQ4_ORDER]
    assert all(low >> 7 == high >> 7 for low, high in zip(words[:8], words[8:], strict=True))
    return [w & 255 for w in words[:8]], [w & 255 for w in words[8:]], [w >> 8 for w in words[:8]]


def _iq4(dtype: torch.dtype) -> list[str]:
    """All fields of a unit of IQ4: a byte permutation looks four codes up in eight bytes.

    A selector has three bits; its fourth one asks for the sign of the byte, which is 0 here. So the numbers
    of codes with a top bit are looked up, and then what the other codes differ in. Two codes that differ in
    the top bit have the same upper nine bits of a float. The tables depend on a register that is always 0,
    which the compiler does not know: constants it would make again at each use.
    """
    first, second, high = _table_bytes(dtype)
    change = [a ^ b for a, b in zip(first, second, strict=True)]
    lines = [".reg .b32 t, p, q, r, s, u, v;", "mov.u32 t, %lanemask_lt;", "shr.u32 t, t, 31;"]
    for names, table in (("pq", change), ("rs", second), ("uv", high)):
        for name, at in zip(names, (0, 4), strict=True):
            lines += [f"xor.b32 {name}, t, {int.from_bytes(bytes(table[at : at + 4]), 'little'):#x};"]
    for half in range(2):  # fields 0 and 1 are the lower bytes of both lanes
        lines += [
            f"prmt.b32 a, $4, 0, {0x20 + 0x11 * half:#x};",
            "and.b32 b, a, 0x7777;",
            "prmt.b32 a, p, q, a;",
            "prmt.b32 c, r, s, b;",
            "prmt.b32 b, u, v, b;",
            "xor.b32 a, a, c;",
            f"prmt.b32 ${2 * half}, a, b, 0x6240;",
            f"prmt.b32 ${2 * half + 1}, a, b, 0x7351;",
        ]
    return lines


def _bits_of(number: float, is_half: bool) -> int:
    dtype = torch.float16 if is_half else torch.bfloat16
    return int(torch.tensor(number, dtype=dtype).view(torch.int16)) & 0xFFFF


def base_of(layout: PlaneLayout, dtype: torch.dtype) -> int:
    """What `decode_field` and the assembly add to an integer: sums are corrected for it, not each number."""
    if layout.value == "iq4":
        return IQ4_BASE.get(dtype, 0)
    return {torch.bfloat16: 128, torch.float16: 1024}.get(dtype, 0) if layout.value == "integer" else 0


@cache
def make_assembly(layout: PlaneLayout, dtype: torch.dtype) -> str:
    """PTX that decodes two lanes of a unit: an output for each field of 16 columns; "" if there is none."""
    if layout.value == "table" or dtype not in (torch.bfloat16, torch.float16):
        return ""
    is_half, count = dtype is torch.float16, layout.unit // LANES
    each = 16 // layout.bits
    lines = [".reg .b32 a, b, k, c;"]
    for at in range(count):
        low, high, out = f"${count + at // each}", f"${count + count // each}", f"${at}"
        if layout.value == "integer":
            lines += _integer(layout, is_half, at, low, high, out)
        elif layout.value == "byte":
            lines += _byte(is_half, at, low, out)
        elif layout.value != "iq4":
            lines += _float(layout, is_half, at, low, out)
    if layout.value == "iq4":
        lines += _iq4(dtype)
    return "{\n" + "\n".join(lines) + "\n}"


@cache
def make_scaled_assembly(layout: PlaneLayout, dtype: torch.dtype) -> str:
    """As `make_assembly`, of E2M1 under a scale of each 16 columns: numbers times 2^-7 times their scale.

    A field has an input of two 32-bit words, which are alike: the scale in both lanes (`lanes_of_level`).
    """
    if dtype not in (torch.bfloat16, torch.float16):
        return ""
    lines = [".reg .b32 a, b, c;"]
    for at in range(4):
        lines += _float(layout, dtype is torch.float16, at, "$4", f"${at}", f"${5 + 2 * at}")
    return "{\n" + "\n".join(lines) + "\n}"


@triton.jit
def load_unit(codes, high, codes_unit, BITS: tl.constexpr, HIGH: tl.constexpr):
    """The words of a unit: a tuple of one to four int16 tiles of codes, and the one of the second plane."""
    PARTS: tl.constexpr = BITS // HIGH if HIGH else 1
    if PARTS == 1:
        words = (tl.load(codes),)
    elif PARTS == 2:
        words = (tl.load(codes), tl.load(codes + codes_unit))  # type: ignore[assignment]
    else:
        words = (  # type: ignore[assignment]
            tl.load(codes),
            tl.load(codes + codes_unit),
            tl.load(codes + 2 * codes_unit),
            tl.load(codes + 3 * codes_unit),
        )
    more = words[0]
    if HIGH:
        more = tl.load(high)
    return words, more


@triton.jit
def decode_field(
    words, more, table, AT: tl.constexpr, DTYPE: tl.constexpr,
    BITS: tl.constexpr, HIGH: tl.constexpr, VALUE: tl.constexpr, BASE: tl.constexpr,
):  # fmt: skip
    """What the codes of field AT of a unit stand for, before their scale, as DTYPE; integers plus BASE."""
    EACH: tl.constexpr = 16 // BITS
    word = words[AT // EACH].to(tl.int32)
    if VALUE == "e2m1" or VALUE == "e2m1 doubled":
        code = ((word >> (3 * AT)) & 7) | (((word >> (12 + (AT ^ 1))) & 1) << 3)
    else:
        code = (word >> (BITS * (AT % EACH))) & ((1 << BITS) - 1)
    if HIGH:
        code = code | (((more.to(tl.int32) >> (HIGH * AT)) & ((1 << HIGH) - 1)) << BITS)
    if VALUE == "integer":
        number = (code + BASE).to(tl.float32)
    elif VALUE == "byte":
        number = ((code ^ 128) - 128).to(tl.float32)
    elif VALUE == "table" or VALUE == "iq4":
        number = tl.load(table + code) + BASE
    elif VALUE == "e4m3":
        bits = ((code & 128) << 24) | ((code & 127) << 20)
        number = bits.to(tl.float32, bitcast=True) * 1.329227995784916e36  # 2^120
    else:
        bits = ((code & 8) << 28) | ((code & 7) << 22)
        number = bits.to(tl.float32, bitcast=True) * 8.507059173023462e37  # 2^126
        if VALUE == "e2m1 doubled":
            number = number * 2.0
    return number.to(DTYPE)


@triton.constexpr_function
def _repeat(dtype, count):
    return (dtype,) * count


@triton.constexpr_function
def _constrain(outputs, inputs):
    """Outputs are written before all inputs are read."""
    return ",".join(["=&r"] * outputs + ["r"] * inputs)


@triton.jit
def decode_unit(words, more, CODE: tl.constexpr, DTYPE: tl.constexpr, BITS: tl.constexpr, HIGH: tl.constexpr):
    """All fields of a unit by assembly, as a tuple of DTYPE: field f is its columns 16 f .. 16 f + 15."""
    FIELDS: tl.constexpr = 16 // (HIGH if HIGH else BITS)
    PARTS: tl.constexpr = BITS // HIGH if HIGH else 1
    if HIGH == 0:
        found = tl.inline_asm_elementwise(
            CODE, _constrain(FIELDS, 1), [words[0]], _repeat(DTYPE, FIELDS), is_pure=True, pack=2
        )
    elif PARTS == 2:
        found = tl.inline_asm_elementwise(
            CODE,
            _constrain(FIELDS, 3),
            [words[0], words[1], more],
            _repeat(DTYPE, FIELDS),
            is_pure=True,
            pack=2,
        )
    else:
        found = tl.inline_asm_elementwise(
            CODE, _constrain(FIELDS, 5), [words[0], words[1], words[2], words[3], more],
            _repeat(DTYPE, FIELDS), is_pure=True, pack=2,
        )  # fmt: skip
    return found


@triton.jit
def decode_scaled(words, one, two, three, four, CODE: tl.constexpr, DTYPE: tl.constexpr):
    """The four fields of a unit by `make_scaled_assembly`; one .. four: `lanes_of_level` of each."""
    return tl.inline_asm_elementwise(
        CODE, _constrain(4, 9), [words[0], one, two, three, four], _repeat(DTYPE, 4), is_pure=True, pack=2
    )


@triton.jit
def lanes_of_level(level, DTYPE: tl.constexpr):
    """A level of E5M3 times 2^119 (bfloat16) or 2^7 (float16), in both lanes of an int32."""
    BY: tl.constexpr = 0x800080 if DTYPE.is_fp16() else 0x100010
    ADDED: tl.constexpr = 0 if DTYPE.is_fp16() else 0x70007000
    return level.to(tl.int32) * BY + ADDED


@triton.jit
def _half_of(word, SHIFT: tl.constexpr):
    """The float16 in one half of a 32-bit word, as float32."""
    return (word >> SHIFT).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def load_level(at, FIELD: tl.constexpr, SCALES: tl.constexpr):
    """Entries of levels at addresses; of E5M3 a word has those of four fields."""
    level = tl.load(at)
    if SCALES == "e5m3":
        level = (level >> (8 * (FIELD % 4))) & 255
    return level


@triton.jit
def number_of_level(level):
    """A level of E5M3 as float32; of 0 it is 2^-22."""
    return ((level.to(tl.int32) + 840) << 20).to(tl.float32, bitcast=True)


@triton.jit
def hold(scale, CODE: tl.constexpr):
    """The same numbers, made once: the compiler would make them in every thread that uses them.

    It moves no change of layout in front of assembly that may have effects.
    """
    if CODE != "":
        scale = tl.inline_asm_elementwise(
            "mov.b32 $0, $1;", "=r,r", [scale], tl.float32, is_pure=False, pack=1
        )
    return scale


@triton.jit
def scale_of(first, level, SCALES: tl.constexpr):
    """(scale, offset) of entries of scales and levels, float32. Without an offset it is the number 0."""
    scale, offset = first, 0.0
    if SCALES == "plain":
        scale = first.to(tl.float32)
    elif SCALES == "pairs":
        scale, offset = _half_of(first, 0), _half_of(first, 16)
    elif SCALES == "zeros":
        scale = first.to(tl.float32)
        offset = -scale * level.to(tl.float32)
    elif SCALES == "levels":
        scale = first.to(tl.float32) * level.to(tl.float32)
    elif SCALES == "e5m3":
        scale = first.to(tl.float32) * number_of_level(level)
    else:
        WIDE: tl.constexpr = 8 if SCALES == "mins" else 4
        low, high = level.to(tl.int32) & ((1 << WIDE) - 1), (level.to(tl.int32) >> WIDE) & ((1 << WIDE) - 1)
        scale, offset = _half_of(first, 0) * low.to(tl.float32), -_half_of(first, 16) * high.to(tl.float32)
    return scale, offset
