"""Products of few rows with packed weights: a weight is read once, as it is stored, and decoded in registers.

For the decodes of a small batch, where a step costs what its weights cost to read. A program has BN outputs
and a share of the inputs; it takes `SPAN` of them at a time. Their bytes are a tile of GROUPS runs,
so that what a run has in common (a scale) is loaded once for it. A nibble's neighbours in memory are not its
neighbours in the row: x is read in the order of the bytes instead, for the two halves of each byte apart.

Decoded numbers are rounded to the dtype of x, as the reference does; sums are float32, and those of several
shares are added in one order, so that a result depends on no timing.
"""

from __future__ import annotations

import re
from math import gcd

import torch
import triton
import triton.language as tl
from torch import Tensor

from plait.ops.launch import launch
from plait.ops.linear import Activations, linear, round_activations
from plait.ops.registry import OpFacts
from plait.quant.fp8 import Fp8
from plait.quant.gguf import Gguf
from plait.quant.grouped import Grouped
from plait.quant.weight import Weight

NAME = "triton"
MOST = 16  # rows of x; more of them are worth decoding a piece for once
ROWS = 32  # outputs of a program
PROGRAMS = 528  # four for each processor of a large device: fewer outputs share their inputs out
BYTES = {"Q4_0": 18, "Q8_0": 34, "Q4_K": 144, "Q6_K": 210}  # of a block
KINDS = re.compile(r"Q4_0|Q8_0|Q4_K|Q6_K|int[48](_g\d+)?|fp8(_b\d+)?")


@triton.jit
def _half(at):
    """The float16 at any address, as float32."""
    word = tl.load(at).to(tl.uint16) | (tl.load(at + 1).to(tl.uint16) << 8)
    return word.to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def _k_level(at, group):
    """Scale and minimum of a group of Q4_K: six bits each, in twelve bytes."""
    low = group < 4
    first = tl.load(at + tl.where(low, group, group + 4)).to(tl.int32)
    top = tl.load(at + tl.where(low, group, group - 4)).to(tl.int32) >> 6
    scale = tl.where(low, first & 63, (first & 15) | (top << 4))
    second = tl.load(at + group + 4).to(tl.int32)
    high = tl.load(at + group).to(tl.int32) >> 6
    minimum = tl.where(low, second & 63, (second >> 4) | (high << 4))
    return scale.to(tl.float32), minimum.to(tl.float32)


@triton.jit
def _e4m3(code):
    """An eight-bit float is a float16 with fewer bits, 2^8 too small; 0x7f and 0xff are no numbers."""
    code = code.to(tl.uint16)
    bits = ((code & 0x80) << 8) | ((code & 0x7F) << 7)
    value = bits.to(tl.float16, bitcast=True).to(tl.float32) * 256.0
    return tl.where((code & 0x7F) == 0x7F, float("nan"), value)


@triton.jit
def _tile(row, step, g, i, KIND: tl.constexpr, GROUPS: tl.constexpr):
    """Both halves of a tile of bytes of a GGUF format, decoded; g: [1, GROUPS, 1], i: [1, 1, bytes]."""
    if KIND == "Q8_0":
        block = row + (step * GROUPS + g) * 34
        low = _half(block) * tl.load(block + 2 + i).to(tl.int8, bitcast=True).to(tl.float32)
        high = low
    elif KIND == "Q4_0":
        block = row + (step * GROUPS + g) * 18
        unit, codes = _half(block), tl.load(block + 2 + i)
        low, high = unit * ((codes & 15).to(tl.float32) - 8), unit * ((codes >> 4).to(tl.float32) - 8)
    elif KIND == "Q4_K":
        block = row + step * 144
        unit, least, codes = _half(block), _half(block + 2), tl.load(block + 16 + 32 * g + i)
        scale, minimum = _k_level(block + 4, 2 * g)
        low = unit * scale * (codes & 15).to(tl.float32) - least * minimum
        scale, minimum = _k_level(block + 4, 2 * g + 1)
        high = unit * scale * (codes >> 4).to(tl.float32) - least * minimum
    else:  # Q6_K
        block = row + step * 210
        unit, codes = _half(block + 208), tl.load(block + 16 * g + i).to(tl.int32)
        more = tl.load(block + 128 + 32 * (g // 4) + 16 * (g % 2) + i).to(tl.int32) >> (g % 4 // 2 * 2)
        level = block + 192 + 8 * (g // 4) + g % 4
        scale = unit * tl.load(level).to(tl.int8, bitcast=True).to(tl.float32)
        low = scale * (((codes & 15) | ((more & 3) << 4)) - 32).to(tl.float32)
        scale = unit * tl.load(level + 4).to(tl.int8, bitcast=True).to(tl.float32)
        high = scale * (((codes >> 4) | ((more >> 4 & 3) << 4)) - 32).to(tl.float32)
    return low, high


@triton.jit
def _plane(
    row, scales, zeros, line, step, g, i,
    KIND: tl.constexpr, SPAN: tl.constexpr, GROUP: tl.constexpr, ZEROS: tl.constexpr,
):  # fmt: skip
    """The same of integers in groups and of eight-bit floats, with scales stored apart; line: [BN, 1, 1]."""
    each: tl.constexpr = 16 if KIND == "int4" else 32  # bytes of a run, 32 columns
    codes = tl.load(row + step * (SPAN // 32 * each) + each * g + i)
    at = line + (step * SPAN + 32 * g) // GROUP
    scale = tl.load(scales + at).to(tl.float32)
    if KIND == "fp8":
        low = scale * _e4m3(codes)
        high = low
    elif KIND == "int8":
        zero = tl.load(zeros + at).to(tl.float32) if ZEROS else 128.0
        low = scale * (codes.to(tl.float32) - zero)
        high = low
    else:
        zero = tl.load(zeros + at).to(tl.float32) if ZEROS else 8.0
        low = scale * ((codes & 15).to(tl.float32) - zero)
        high = scale * ((codes >> 4).to(tl.float32) - zero)
    return low, high


@triton.jit
def _columns(h, KIND: tl.constexpr):
    """The columns of a step that byte h of it holds: of its low half (or the whole), of its high half."""
    if KIND == "Q4_0":
        low = h // 16 * 32 + h % 16
        high = low + 16
    elif KIND == "Q4_K":
        low = h // 32 * 64 + h % 32
        high = low + 32
    elif KIND == "Q6_K":
        low = h // 64 * 128 + h % 64
        high = low + 64
    elif KIND == "int4":
        low = 2 * h
        high = low + 1
    else:
        low = h
        high = h
    return low, high


@triton.jit
def small_product(
    x, codes, scales, zeros, out, m, n, n_in, row_bytes, scale_row,
    KIND: tl.constexpr, SPAN: tl.constexpr, STEPS: tl.constexpr, GROUP: tl.constexpr, TALL: tl.constexpr,
    ZEROS: tl.constexpr, GROUPS: tl.constexpr, RUN: tl.constexpr, PAIRS: tl.constexpr, STORED: tl.constexpr,
    BN: tl.constexpr, BM: tl.constexpr,
):  # fmt: skip
    """x: [m, n_in] -> out [shares, m, n] float32, of STEPS steps each. TALL: rows of a weight for a scale."""
    outputs, tokens = tl.program_id(0) * BN + tl.arange(0, BN), tl.arange(0, BM)
    rows, share = tl.minimum(outputs, n - 1).to(tl.int64), tl.program_id(1)
    row = codes + (rows * row_bytes)[:, None, None]
    line = (rows // TALL * scale_row)[:, None, None]
    g, i = tl.arange(0, GROUPS)[None, :, None], tl.arange(0, RUN)[None, None, :]
    low_at, high_at = _columns(tl.arange(0, GROUPS * RUN), KIND)
    total = tl.zeros([BN, BM], tl.float32)
    for s in range(STEPS):
        step = share * STEPS + s
        if STORED:
            low, high = _tile(row, step, g, i, KIND, GROUPS)
        else:
            low, high = _plane(row, scales, zeros, line, step, g, i, KIND, SPAN, GROUP, ZEROS)
        line_x = x + tokens[None, :] * n_in + step * SPAN
        given = tl.load(line_x + low_at[:, None], mask=tokens[None, :] < m, other=0.0)
        numbers = tl.reshape(low, [BN, GROUPS * RUN]).to(given.dtype)
        total = tl.dot(numbers, given, total, input_precision="ieee")
        if PAIRS:
            given = tl.load(line_x + high_at[:, None], mask=tokens[None, :] < m, other=0.0)
            numbers = tl.reshape(high, [BN, GROUPS * RUN]).to(given.dtype)
            total = tl.dot(numbers, given, total, input_precision="ieee")
    place = out + share.to(tl.int64) * m * n + tokens[None, :] * n + outputs[:, None]
    tl.store(place, total, mask=(outputs[:, None] < n) & (tokens[None, :] < m))


def span_of(kind: str, n_in: int) -> int:
    """Inputs of a step: the block of a K-quant, else as many runs of 32 as divide the inputs; 0: none do."""
    if kind in ("Q4_K", "Q6_K"):
        return 0 if n_in % 256 else 256
    return gcd(n_in, 256) if n_in % 32 == 0 else 0


def shares_of(n_out: int, steps: int) -> int:
    """How many programs share the inputs of the same outputs: a divisor of the steps."""
    wanted = max(1, PROGRAMS // -(-n_out // ROWS))
    return max(count for count in range(1, steps + 1) if steps % count == 0 and count <= wanted)


def reads(weight: Weight) -> bool:
    """Whether the kernel reads this weight: columns in their own order, groups of whole runs."""
    match weight:
        case Gguf():
            return weight.format in BYTES and weight.data.stride(1) == 1
        case Grouped():
            whole = weight.group % 32 == 0 or weight.group >= weight.shape[1]
            return weight.bits in (4, 8) and weight.order is None and whole
        case Fp8():
            return weight.block[1] % 32 == 0 or weight.block[1] >= weight.shape[1]
    return False


def multiply(x: Tensor, weight: Weight, bias: Tensor | None, activations: Activations = "float32") -> Tensor:
    """`linear` over packed weights: few rows by the kernel, more by the reference, piece by piece."""
    n_out, n_in = weight.shape
    count = x.numel() // max(1, n_in)
    if not 0 < count <= MOST or not n_out or not reads(weight):
        return linear.reference(x, weight, bias, activations)
    given = (
        (x if activations == "float32" else round_activations(x, activations))
        .reshape(count, n_in)
        .contiguous()
    )
    result = _multiply_rows(given, weight)
    result = result if bias is None else result + bias
    return result.to(x.dtype).view(*x.shape[:-1], n_out)


def _multiply_rows(x: Tensor, weight: Weight) -> Tensor:
    kind = weight.format.partition("_g")[0].partition("_b")[0]
    (m, n_in), n_out, span = x.shape, weight.shape[0], span_of(kind, weight.shape[1])
    codes, scales, zeros, tall, group = _split_storage(weight)
    pairs = kind in ("Q4_0", "Q4_K", "Q6_K", "int4")
    run = 32 if kind == "Q4_K" or not pairs else 16
    shares = shares_of(n_out, n_in // span)
    out = torch.empty(shares, m, n_out, dtype=torch.float32, device=x.device)
    launch(
        small_product, (triton.cdiv(n_out, ROWS), shares),
        x, codes, scales, codes if zeros is None else zeros, out,
        m, n_out, n_in, codes.stride(0), scales.stride(0) if scales is not codes else 0,
        KIND=kind, SPAN=span, STEPS=n_in // span // shares, GROUP=group, TALL=tall, ZEROS=zeros is not None,
        GROUPS=span // run // (2 if pairs else 1), RUN=run, PAIRS=pairs, STORED=kind in BYTES,
        BN=ROWS, BM=MOST,
    )  # fmt: skip
    return out[0] if shares == 1 else out.sum(0)


def _split_storage(weight: Weight) -> tuple[Tensor, Tensor, Tensor | None, int, int]:
    """(bytes, scales, zero points, rows of a scale, columns of a scale); scales lie in GGUF's own bytes."""
    match weight:
        case Grouped():
            zeros = None if weight.zeros is None else weight.zeros.contiguous()  # in the lines of the scales
            return weight.codes, weight.scales.contiguous(), zeros, 1, weight.group
        case Fp8():
            return weight.codes.view(torch.uint8), weight.scale.contiguous(), None, *weight.block
    assert isinstance(weight, Gguf)
    return weight.data, weight.data, None, 1, 1


def why_unreadable(facts: OpFacts) -> str | None:
    """The `when` of the kernel: a format that it reads."""
    kind = str(facts.sizes.get("kind", "plain numbers"))
    if not KINDS.fullmatch(kind):
        return f"it reads {', '.join(BYTES)}, int4, int8 and fp8, not {kind}"
    short = kind.partition("_g")[0].partition("_b")[0]
    if not span_of(short, facts["n_in"]):
        return f"{facts['n_in']} inputs are no whole blocks"
    return None


linear.variant(NAME, on="cuda", when=why_unreadable)(multiply)
