"""Every weight storage: operations on rows and columns, and the meaning of its bytes, number by number."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from plait.errors import ShapeMismatch
from plait.ops.linear import Linear
from plait.quant.bits import pack, unpack
from plait.quant.codebook import Codebook
from plait.quant.fp4 import Fp4
from plait.quant.fp8 import Fp8
from plait.quant.grouped import Grouped
from plait.quant.weight import Scalable, Weight, stack_key
from tests.quant.storages import CUTS, STORAGES, codebook, fp8, grouped, made, nvfp4

EACH = pytest.mark.parametrize("name", STORAGES)
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def e4m3_value(byte: int) -> float:
    sign, exponent, fraction = -1 if byte >> 7 else 1, byte >> 3 & 15, byte & 7
    return sign * (fraction / 8 * 2.0**-6 if exponent == 0 else (1 + fraction / 8) * 2.0 ** (exponent - 7))


def bits_at(row: Tensor, first: int, count: int) -> int:
    return sum((int(row[(first + k) // 8]) >> (first + k) % 8 & 1) << k for k in range(count))


def number(weight: Weight, o: int, c: int) -> float:
    """w[o, c] out of the bytes, by the formula of the storage's own docstring."""
    match weight:
        case Grouped():
            code = bits_at(weight.codes[o], c * weight.bits, weight.bits)
            zero = 2 ** (weight.bits - 1) if weight.zeros is None else int(weight.zeros[o, c // weight.group])
            return float(weight.scales[o, c // weight.group]) * (code - zero)
        case Fp8():
            byte = int(weight.codes.view(torch.uint8)[o, c])
            return e4m3_value(byte) * float(weight.scale[o // weight.block[0], c // weight.block[1]])
        case Fp4():
            nibble = int(weight.codes[o, c // 2]) >> 4 * (c % 2) & 15
            value = E2M1[nibble & 7] * (-1 if nibble & 8 else 1)
            byte = int(weight.scales.view(torch.uint8)[o, c // weight.group])
            if weight.factor is None:
                return value * 2.0 ** (byte - 127)
            return value * e4m3_value(byte) * float(weight.factor[o % len(weight.factor)])
        case Codebook():
            byte, k = int(weight.codes[o, c // 2]), c // weight.block
            value = float(weight.table[byte & 15 if c % 2 else byte >> 4])
            if (inner := weight.nested) is None:
                return value * float(weight.absmax[o, k])
            scale = float(inner.scale[o, k // inner.block])
            return value * (float(inner.table[int(weight.absmax[o, k])]) * scale + float(inner.offset[o]))
    raise TypeError(weight)


@EACH
def test_every_number_is_what_the_formula_says(name: str) -> None:
    weight = made(name)
    rows, cols = weight.shape
    wanted = np.zeros((rows, cols))
    for o in range(rows):
        for c in range(cols):
            order = weight.order if isinstance(weight, Grouped) else None
            wanted[o, c if order is None else int(order[c])] = number(weight, o, c)
    found = weight.dequantize(torch.float32)
    torch.testing.assert_close(found.double(), torch.from_numpy(wanted), rtol=1e-6, atol=1e-9)
    assert torch.equal(weight.dequantize(torch.bfloat16), found.bfloat16())


@EACH
def test_rows_and_columns_are_those_of_the_whole(name: str) -> None:
    weight = made(name)
    whole, cut = weight.dequantize(torch.float32), CUTS.get(name, 16)
    index = torch.tensor([6, 0, 3, 3])
    assert torch.equal(weight.gather(index, torch.float32), whole[index])
    picked = weight.pick(index)
    assert torch.equal(picked.dequantize(torch.float32), whole[index])
    assert picked.format == weight.format
    for start, stop in ((0, 7), (2, 6), (3, 3), (1, 7)):
        part = weight.rows(start, stop)
        assert (part.shape, part.format) == ((stop - start, 64), weight.format)
        assert torch.equal(part.dequantize(torch.float32), whole[start:stop])
    assert torch.equal(weight.cols(0, 64).dequantize(torch.float32), whole)
    for start, stop in ((0, cut), (cut, 64)) if cut else ():
        assert torch.equal(weight.cols(start, stop).dequantize(torch.float32), whole[:, start:stop])


@EACH
def test_rows_put_together_again_are_the_whole(name: str) -> None:
    weight = made(name)
    parts = [weight.rows(0, 2), weight.rows(2, 3), weight.pick(torch.tensor([3, 4, 5, 6]))]
    assert len({stack_key(part) for part in parts}) == 1
    again = type(weight).cat(parts)
    assert (again.format, again.shape) == (weight.format, weight.shape)
    assert torch.equal(again.dequantize(torch.float32), weight.dequantize(torch.float32))


@EACH
@pytest.mark.parametrize("factor", [torch.tensor(0.37), torch.linspace(-2, 3, 7)], ids=["one", "by row"])
def test_rows_are_scaled_without_decoding(name: str, factor: Tensor) -> None:
    weight = made(name)
    assert isinstance(weight, Scalable)
    scaled = weight.times(factor)
    assert (type(scaled), scaled.format) == (type(weight), weight.format)
    wanted = weight.dequantize(torch.float32) * factor.reshape(-1, 1)
    torch.testing.assert_close(scaled.dequantize(torch.float32), wanted, rtol=1e-6, atol=1e-9)


@EACH
def test_what_is_not_there_is_refused(name: str) -> None:
    weight = made(name)
    cut = CUTS.get(name, 16)
    for wrong in (
        lambda: weight.rows(0, 8),
        lambda: weight.rows(-1, 3),
        lambda: weight.cols(0, 65),
        lambda: weight.pick(torch.tensor([7])),
        lambda: (
            type(weight).cat([weight, made("mxfp4" if name == "nvfp4" else "nvfp4")])
            if isinstance(weight, Fp4)
            else type(weight).cat([weight, weight.cols(0, cut) if cut else grouped(8, 8)])
        ),
    ):
        with pytest.raises(ShapeMismatch):
            wrong()
    if cut != 5:
        with pytest.raises(ShapeMismatch, match=r"cut a (group|block)|another order"):
            weight.cols(0, 8)


@EACH
def test_bytes_are_counted_exactly_and_moved(name: str) -> None:
    weight = made(name)
    parts: list[Any] = [getattr(weight, field) for field in weight.__dataclass_fields__]  # type: ignore[attr-defined]
    if isinstance(weight, Codebook) and weight.nested is not None:
        parts += [weight.nested.table, weight.nested.scale, weight.nested.offset]
    total = sum(part.numel() * part.element_size() for part in parts if isinstance(part, Tensor))
    assert weight.nbytes == total
    moved = weight.to(torch.device("meta"))
    assert (moved.shape, moved.format, moved.nbytes) == (weight.shape, weight.format, total)


def test_matrices_of_other_orders_or_zeros_and_scales_are_distinguished() -> None:
    torch.manual_seed(0)
    one, other = grouped(4, 16, order=True), grouped(4, 16, order=True)
    assert stack_key(one) != stack_key(other)
    with pytest.raises(ShapeMismatch, match="one format, width and order"):
        Grouped.cat([one, other])
    plain, shifted = grouped(4, 16), grouped(4, 16, zeros=True)
    both = Grouped.cat([plain, shifted.times(torch.tensor(2.0))])
    wanted = torch.cat([plain.dequantize(torch.float32), 2 * shifted.dequantize(torch.float32)])
    assert torch.equal(both.dequantize(torch.float32), wanted)


def test_parts_with_scales_of_their_own_become_one_with_a_scale_by_row() -> None:
    torch.manual_seed(0)
    for parts in (
        [fp8((7, 64)), fp8((3, 64), rows=3), fp8((1, 64), rows=2)],
        [nvfp4(), nvfp4(rows=2), nvfp4()],
        [codebook(nested=True), codebook(nested=True), codebook()],
    ):
        whole = type(parts[0]).cat(parts)  # type: ignore[arg-type]
        assert torch.equal(
            whole.dequantize(torch.float32), torch.cat([p.dequantize(torch.float32) for p in parts])
        )
        assert stack_key(whole) == stack_key(parts[0])


def test_a_large_matrix_is_decoded_in_chunks() -> None:
    torch.manual_seed(0)
    for weight in (grouped(4, 128, rows=700, cols=2048), fp8((128, 128), rows=1100, cols=1024)):
        whole = weight.dequantize(torch.float32)
        index = torch.tensor([0, 511, 512, 513, len(whole) - 1])
        assert torch.equal(weight.gather(index, torch.float32), whole[index])


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 8), st.integers(0, 70), st.integers(1, 3))
def test_small_integers_come_back_from_their_stream(bits: int, count: int, rows: int) -> None:
    values = torch.randint(0, 1 << bits, (rows, count), dtype=torch.uint8)
    packed = pack(values, bits)
    assert packed.shape == (rows, -(-count * bits // 8))
    assert torch.equal(unpack(packed, bits, count), values)
    for r in range(rows):
        assert [bits_at(packed[r], c * bits, bits) for c in range(count)] == values[r].tolist()


@pytest.mark.parametrize(
    "wrong",
    [
        lambda: Grouped(torch.zeros(2, 4, dtype=torch.uint8), torch.ones(2, 2), None, 4, 8),
        lambda: Grouped(torch.zeros(2, 4, dtype=torch.uint8), torch.ones(2, 1), None, 4, 0),
        lambda: Grouped(torch.zeros(2, 4, dtype=torch.uint8), torch.ones(2, 1), None, 9, 8),
        lambda: Grouped(torch.zeros(2, 4), torch.ones(2, 1), None, 4, 8),
        lambda: Grouped(torch.zeros(2, 4, dtype=torch.uint8), torch.ones(2, 1).double(), None, 4, 8),
        lambda: Fp8(torch.zeros(2, 4), torch.ones(1, 1), (2, 4)),
        lambda: Fp8(torch.zeros(2, 4).to(torch.float8_e4m3fn), torch.ones(2, 1), (2, 4)),
        lambda: Fp8(torch.zeros(2, 4).to(torch.float8_e4m3fn), torch.ones(1, 1), (0, 4)),
        lambda: Fp4(torch.zeros(2, 24, dtype=torch.uint8), torch.zeros(2, 1, dtype=torch.uint8)),
        lambda: Fp4(torch.zeros(2, 16, dtype=torch.uint8), torch.zeros(2, 1)),
        lambda: Fp4(torch.zeros(2, 16, dtype=torch.uint8), torch.zeros(2, 1).byte(), torch.ones(3)),
        lambda: Codebook(torch.zeros(2, 8).byte(), torch.ones(15), torch.ones(2, 1), 16, "nf4"),
        lambda: Codebook(torch.zeros(2, 8).byte(), torch.ones(16), torch.ones(2, 1).byte(), 16, "nf4"),
        lambda: Codebook(torch.zeros(2, 8).byte(), torch.ones(16), torch.ones(2, 1), 0, "nf4"),
    ],
)
def test_parts_that_do_not_fit_are_refused(wrong: Any) -> None:
    with pytest.raises(ShapeMismatch):
        wrong()


@pytest.mark.parametrize(
    ("weight", "rounding"),
    [
        (grouped(4, 16), "int8"),
        (nvfp4(), "int8"),
        (fp8((3, 24)), "float32"),
        (codebook(), "float32"),
        (fp8((1, 64)).cols(0, 40), "float32"),
        (grouped(4, 16, cols=48), "float32"),  # no whole blocks of 32 inputs
    ],
)
def test_inputs_are_only_rounded_for_small_integers_in_whole_blocks(weight: Weight, rounding: str) -> None:
    asked: dict[str, Any] = {}

    def bind(op: Any, **sizes: Any) -> Any:
        asked.update(sizes)
        return op.reference

    x = torch.randn(3, weight.shape[1])
    found = Linear([weight], [None], bind, torch.float32, activations="int8")(x)
    assert asked["activations"] == rounding
    wanted, near = x @ weight.dequantize(torch.float32).T, 0.05 if rounding == "int8" else 1e-5
    assert float((found - wanted).abs().max()) <= near * float(wanted.abs().max())
