"""GGUF's block formats: known bytes, the public decoder as an oracle, and the algebra of rows and columns."""

from __future__ import annotations

import struct

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType
from gguf.quants import dequantize as oracle

from plait.errors import ShapeMismatch
from plait.quant.gguf import BLOCK_TYPES, BlockType, Gguf, block_type
from plait.quant.weight import Weight, take_rows

KINDS = pytest.mark.parametrize("kind", BLOCK_TYPES.values(), ids=lambda k: k.name)
HALVES = {"Q4_0": (0,), "Q4_1": (0, 2), "Q5_0": (0,), "Q5_1": (0, 2), "Q8_0": (0,), "Q2_K": (80, 82)} | {
    "Q3_K": (108,), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,), "IQ4_NL": (0,), "IQ4_XS": (0,)
}  # fmt: skip


def random_blocks(kind: BlockType, rows: int, blocks: int, seed: int = 0) -> torch.Tensor:
    """Random bytes, with finite scales of every size where the format has its float16s."""
    rng = np.random.default_rng(seed)
    raw = rng.integers(0, 256, (rows * blocks, kind.nbytes), dtype=np.uint8)
    for at in HALVES[kind.name]:
        scales = rng.standard_normal(rows * blocks) * 10.0 ** rng.integers(-6, 4, rows * blocks)
        raw[:, at : at + 2] = scales.astype("<f2")[:, None].view(np.uint8)
    return torch.from_numpy(raw.reshape(rows, -1))


def expected(kind: BlockType, data: torch.Tensor) -> torch.Tensor:
    return torch.from_numpy(oracle(data.numpy(), GGMLQuantizationType(kind.type_id)).copy())


@KINDS
def test_random_blocks_decode_as_the_public_decoder_does(kind: BlockType) -> None:
    data = random_blocks(kind, 5, 3)
    assert torch.equal(Gguf(data, kind).dequantize(torch.float32), expected(kind, data))


@KINDS
@pytest.mark.parametrize("byte", [0x00, 0xFF, 0x0F, 0xF0, 0x80, 0x7F])
@pytest.mark.parametrize("scale", [0.0, -0.0, 6e-8, 65504.0, -65504.0])
def test_extreme_blocks_decode_as_the_public_decoder_does(kind: BlockType, byte: int, scale: float) -> None:
    block = bytearray([byte] * kind.nbytes)
    for at in HALVES[kind.name]:
        struct.pack_into("<e", block, at, scale)
    data = torch.frombuffer(block, dtype=torch.uint8).view(1, -1)
    assert torch.equal(Gguf(data, kind).dequantize(torch.float32), expected(kind, data))


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
def test_gather_decodes_only_what_is_asked(kind: BlockType) -> None:
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
