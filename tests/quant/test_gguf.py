"""GGUF's block formats: known bytes, the public decoder as an oracle, and the algebra of rows and columns."""

from __future__ import annotations

import struct
import sys

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType
from gguf.quants import dequantize as oracle

from plait.errors import ShapeMismatch, UnsupportedFormat
from plait.quant import gguf_iq
from plait.quant.gguf import BLOCK_TYPES, BlockType, Gguf, block_type
from plait.quant.weight import Weight, take_rows

KINDS = pytest.mark.parametrize("kind", BLOCK_TYPES.values(), ids=lambda k: k.name)
ORACLE = [kind for kind in BLOCK_TYPES.values() if kind.name not in ("Q8_1", "Q8_K", "Q1_0", "Q2_0")]
PUBLIC = pytest.mark.parametrize("kind", ORACLE, ids=lambda k: k.name)


def random_blocks(kind: BlockType, rows: int, blocks: int, seed: int = 0) -> torch.Tensor:
    """Random bytes, with finite scales of every size where the format has its float16s."""
    rng = np.random.default_rng(seed)
    raw = rng.integers(0, 256, (rows * blocks, kind.nbytes), dtype=np.uint8)
    for at in kind.scales_at:
        scales = rng.standard_normal(rows * blocks) * 10.0 ** rng.integers(-6, 4, rows * blocks)
        raw[:, at : at + 2] = scales.astype("<f2")[:, None].view(np.uint8)
    if kind.name == "IQ1_M":  # the top nibble of its float16
        raw[:, 55] &= 0xBF
    if kind.name == "Q8_K":
        raw[:, 3] &= 0xBF
    return torch.from_numpy(raw.reshape(rows, -1))


def expected(kind: BlockType, data: torch.Tensor) -> torch.Tensor:
    with np.errstate(all="ignore"):
        return torch.from_numpy(oracle(data.numpy(), GGMLQuantizationType(kind.type_id)).copy())


@PUBLIC
def test_random_blocks_decode_as_the_public_decoder_does(kind: BlockType) -> None:
    data = random_blocks(kind, 5, 3)
    assert torch.equal(Gguf(data, kind).dequantize(torch.float32), expected(kind, data))


@PUBLIC
def test_extreme_blocks_decode_as_the_public_decoder_does(kind: BlockType) -> None:
    blocks = bytearray()
    for byte in (0x00, 0xFF, 0x0F, 0xF0, 0x80, 0x7F):
        for scale in (0.0, -0.0, 6e-8, 65504.0, -65504.0, float("inf"), float("nan")):
            block = bytearray([byte] * kind.nbytes)
            for at in kind.scales_at:
                struct.pack_into("<e", block, at, scale)
            blocks += block
    data = torch.frombuffer(blocks, dtype=torch.uint8).view(-1, kind.nbytes)
    got, want = Gguf(data, kind).dequantize(torch.float32), expected(kind, data)
    assert torch.equal(got.isnan(), want.isnan())
    assert torch.equal(got.nan_to_num(), want.nan_to_num())
    one = Gguf(data[3:4], kind)  # a view with bytes that start anywhere
    assert torch.equal(one.dequantize(torch.float32).nan_to_num(), want[3:4].nan_to_num())


def test_hand_written_q4_0() -> None:
    block = struct.pack("<e", 0.5) + bytes([0x80 + j for j in range(16)])  # low nibble j, high nibble 8
    values = Gguf(torch.frombuffer(bytearray(block), dtype=torch.uint8).view(1, 18), block_type("Q4_0"))
    wanted = [0.5 * (j - 8) for j in range(16)] + [0.0] * 16
    assert values.dequantize(torch.float32).tolist() == [wanted]


def test_hand_written_q5_1() -> None:
    high = (1 << 0) | (1 << 31)  # the fifth bit of the first and of the last number
    block = struct.pack("<eeI", 2.0, -1.0, high) + bytes([0x21] * 16)
    values = Gguf(torch.frombuffer(bytearray(block), dtype=torch.uint8).view(1, 24), block_type("Q5_1"))
    wanted = [2.0 * 17 - 1] + [2.0 * 1 - 1] * 15 + [2.0 * 2 - 1] * 15 + [2.0 * 18 - 1]
    assert values.dequantize(torch.float32).tolist() == [wanted]


def test_hand_written_q8_0() -> None:
    block = struct.pack("<e32b", 0.25, *range(-16, 16))
    values = Gguf(torch.frombuffer(bytearray(block), dtype=torch.uint8).view(1, 34), block_type("Q8_0"))
    assert values.dequantize(torch.float32).tolist() == [[0.25 * j for j in range(-16, 16)]]


def test_hand_written_q4_k() -> None:
    """Scales 1, 2, 3, 4, 17, 34, 51, 15 and minima 0, 5, 6, 7, 1, 2, 63, 48, packed six bits each."""
    scales, minima = [1, 2, 3, 4, 17, 34, 51, 15], [0, 5, 6, 7, 1, 2, 63, 48]
    packed = [scales[j] | (scales[j + 4] >> 4) << 6 for j in range(4)]
    packed += [minima[j] | (minima[j + 4] >> 4) << 6 for j in range(4)]
    packed += [(scales[j] & 15) | (minima[j] & 15) << 4 for j in range(4, 8)]
    block = struct.pack("<ee", 1.0, 0.5) + bytes(packed) + bytes([0x93] * 128)  # low nibbles 3, high 9
    values = Gguf(torch.frombuffer(bytearray(block), dtype=torch.uint8).view(1, 144), block_type("Q4_K"))
    wanted = [[scales[g] * (9 if g % 2 else 3) - 0.5 * minima[g]] * 32 for g in range(8)]
    assert values.dequantize(torch.float32).view(8, 32).tolist() == wanted


def values_of(name: str, block: bytes) -> list[float]:
    """The numbers of one block."""
    data = torch.frombuffer(bytearray(block), dtype=torch.uint8).view(1, -1)
    return Gguf(data, block_type(name)).dequantize(torch.float32)[0].tolist()


def test_hand_written_sums_are_not_needed() -> None:
    q8_1 = struct.pack("<ee32b", 0.25, 99.0, *range(-16, 16))
    assert values_of("Q8_1", q8_1) == [0.25 * j for j in range(-16, 16)]
    q8_k = struct.pack("<f256b16h", 1e-3, *range(-128, 128), *[7] * 16)
    assert values_of("Q8_K", q8_k) == pytest.approx([1e-3 * j for j in range(-128, 128)], rel=1e-6)


def test_hand_written_one_and_two_bits() -> None:
    assert values_of("Q1_0", struct.pack("<e", 0.5) + b"\x05" + bytes(15)) == [0.5, -0.5, 0.5] + [-0.5] * 125
    two = struct.pack("<e", 2.0) + bytes([0b11_10_01_00] * 16)
    assert values_of("Q2_0", two) == [-2.0, 0.0, 2.0, 4.0] * 16


def test_hand_written_ternary() -> None:
    two = bytes([0b00_10_01_00] * 32 + [0b01_01_01_10] * 32) + struct.pack("<e", 0.5)
    wanted = [-0.5] * 32 + [0.0] * 32 + [0.5] * 32 + [-0.5] * 32 + [0.5] * 32 + [0.0] * 96
    assert values_of("TQ2_0", two) == wanted
    digits = [2, 0, 1, 0, 2]  # a byte is the fraction 0.20102 of base 3, in 256ths, rounded up
    byte = -(-256 * sum(d * 3 ** (4 - i) for i, d in enumerate(digits)) // 243)
    one = bytes([byte] * 52) + struct.pack("<e", 1.0)
    runs = [d - 1.0 for d in digits for _ in range(32)] + [d - 1.0 for d in digits for _ in range(16)]
    assert values_of("TQ1_0", one) == runs + [d - 1.0 for d in digits[:4] for _ in range(4)]


def test_hand_written_four_bit_floats() -> None:
    numbers = [0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6]
    assert values_of("MXFP4", bytes([128, *range(16)])) == [2 * v for v in numbers] + [0.0] * 16
    scales = bytes([0x38, 0x40, 0x01, 0x7F])  # 1, 2, the least, and what is no number: 0
    got = values_of("NVFP4", scales + bytes([0x21, 0x43, 0x65, 0x87, 0xA9, 0xCB, 0xED, 0x0F] * 4))
    low, high = (
        [numbers[i] for i in (1, 3, 5, 7, 9, 11, 13, 15)],
        [numbers[i] for i in (2, 4, 6, 8, 10, 12, 14, 0)],
    )
    assert got == [factor * v for factor in (1.0, 2.0, 2.0**-9, 0.0) for v in (*low, *high)]


def test_a_format_that_needs_tables_says_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    for kept in (gguf_iq.grid, gguf_iq._grid_on):
        kept.cache_clear()
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(UnsupportedFormat, match=r"IQ3_S blocks need .* pip install gguf"):
        values_of("IQ3_S", bytes(110))


@KINDS
def test_it_is_a_weight_of_exact_size(kind: BlockType) -> None:
    weight = Gguf(random_blocks(kind, 7, 2), kind)
    assert isinstance(weight, Weight)
    assert weight.shape == (7, 2 * kind.elements)
    assert weight.nbytes == 7 * 2 * kind.nbytes
    assert weight.format == kind.name
    assert weight.dequantize(torch.bfloat16).dtype is torch.bfloat16


@KINDS
def test_rows_stacked_again_are_the_whole(kind: BlockType) -> None:
    weight = Gguf(random_blocks(kind, 7, 2), kind)
    again = Gguf.cat([weight.rows(0, 3), weight.rows(3, 3), weight.rows(3, 7)])
    assert torch.equal(again.data, weight.data)
    whole = weight.dequantize(torch.float32)
    assert torch.equal(take_rows(weight, 2, 5).dequantize(torch.float32), whole[2:5])


@KINDS
def test_columns_are_the_columns_of_the_whole(kind: BlockType) -> None:
    weight = Gguf(random_blocks(kind, 4, 3), kind)
    size = kind.elements
    part = weight.cols(size, 3 * size)
    assert part.shape == (4, 2 * size)
    assert torch.equal(part.dequantize(torch.float32), weight.dequantize(torch.float32)[:, size:])


@KINDS
def test_gather_decodes_only_the_requested_rows(kind: BlockType) -> None:
    weight = Gguf(random_blocks(kind, 9, 2), kind)
    index = torch.tensor([8, 0, 0, 3])
    assert torch.equal(weight.gather(index, torch.float32), weight.dequantize(torch.float32)[index])
    assert weight.gather(torch.tensor([], dtype=torch.int64), torch.float32).shape == (0, 2 * kind.elements)


@pytest.mark.parametrize(("start", "stop"), [(1, 256), (0, 255), (0, 16), (128, 256)])
def test_columns_that_cut_a_block_are_refused(start: int, stop: int) -> None:
    weight = Gguf(random_blocks(block_type("Q6_K"), 2, 1), block_type("Q6_K"))
    with pytest.raises(ShapeMismatch, match="multiples of 256"):
        weight.cols(start, stop)


def test_ranges_outside_the_map_are_refused() -> None:
    weight = Gguf(random_blocks(block_type("Q8_0"), 4, 2), block_type("Q8_0"))
    for start, stop in [(-1, 2), (0, 5), (3, 2)]:
        with pytest.raises(ShapeMismatch, match="Q8_0"):
            weight.rows(start, stop)
    with pytest.raises(ShapeMismatch, match=r"columns 0\.\.96"):
        weight.cols(0, 96)


def test_parts_of_two_formats_or_widths_do_not_stack() -> None:
    a = Gguf(random_blocks(block_type("Q4_0"), 2, 2), block_type("Q4_0"))
    b = Gguf(random_blocks(block_type("Q8_0"), 2, 2), block_type("Q8_0"))
    for parts in ([a, b], [a, a.cols(0, 32)], []):
        with pytest.raises(ShapeMismatch, match="cannot stack"):
            Gguf.cat(parts)


def test_bytes_that_are_no_whole_blocks_are_refused() -> None:
    for data in (
        torch.zeros(2, 19, dtype=torch.uint8),
        torch.zeros(2, 18),
        torch.zeros(18, dtype=torch.uint8),
    ):
        with pytest.raises(ShapeMismatch, match="Q4_0 wants uint8"):
            Gguf(data, block_type("Q4_0"))


def test_a_large_matrix_is_decoded_piece_by_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []

    def decode(blocks: torch.Tensor) -> torch.Tensor:
        sizes.append(blocks.shape[0] * 32)
        return torch.zeros(blocks.shape[0], 32)

    kind = BlockType("spy", 999, 32, 18, decode)
    out = Gguf(torch.zeros(3000, 18 * 32, dtype=torch.uint8), kind).dequantize(torch.float32)
    assert out.shape == (3000, 1024)
    assert sum(sizes) == 3000 * 1024
    assert max(sizes) <= 1 << 20
