"""Weights in planes: every storage decodes to the bits of its own `dequantize`, and nothing is lost."""

from __future__ import annotations

import pytest
import torch

from plait.ops.blocks import random_weight
from plait.ops.linear import FLOATS, KINDS, STORED
from plait.quant.codebook import Codebook
from plait.quant.plane_parts import pack_planes
from plait.quant.planes import PlaneLayout, fill_plane, read_plane
from plait.quant.weight import Dense
from tests.quant.storages import codebook, fp8, grouped, mxfp4, nvfp4

MORE = (
    "Q8_1",
    "Q8_K",
    "int4_g32+zeros+bfloat16",
    "int8_g128+zeros",
    "int5_g64",
    "int2_g32",
    "int4_g64+float32",
)
STORAGES = {
    "int4 g16 of 80": lambda: grouped(4, 16, cols=80),
    "int3 g64 zeros order": lambda: grouped(3, 64, zeros=True, order=True, cols=320),
    "int7 of 200": lambda: grouped(7, 200, cols=200),
    "fp8 of 100 columns": lambda: fp8((1, 100), 5, 100),
    "fp8 blocks cut short": lambda: fp8((16, 32), 40, 80),
    "mxfp4 of 96": lambda: mxfp4(9, 96),
    "mxfp4 factor": lambda: mxfp4(9, 96).times(torch.rand(9)),
    "nvfp4 of 96": lambda: nvfp4(9, 96),
    "nf4 nested": lambda: codebook(nested=True, rows=6, cols=128, block=32),
}


@pytest.mark.parametrize("kind", [*KINDS, *STORED, *FLOATS, *MORE])
def test_planes_decode_to_the_bits_of_the_storage(kind: str) -> None:
    weight = random_weight(kind, 37, 512)
    planes = pack_planes(weight)
    assert planes is not None
    assert torch.equal(planes.decode(torch.float32), weight.dequantize(torch.float32))
    assert torch.equal(planes.decode(torch.bfloat16), weight.dequantize(torch.bfloat16))


@pytest.mark.parametrize("name", STORAGES)
def test_unfinished_units_and_groups_decode_to_the_same_bits(name: str) -> None:
    weight = STORAGES[name]()
    planes = pack_planes(weight)
    assert planes is not None
    assert torch.equal(planes.decode(torch.float32), weight.dequantize(torch.float32))


def test_planes_are_hardly_larger_than_the_storage() -> None:
    """Bits of a weight: those of the file, and at most 4 % more where its levels become bytes."""
    for kind in (
        "Q4_0",
        "Q4_1",
        "Q5_0",
        "Q6_K",
        "Q8_0",
        "Q4_K",
        "Q5_K",
        "Q3_K",
        "IQ4_XS",
        "int4_g128",
        "fp8_b128",
        "nvfp4",
    ):
        weight = random_weight(kind, 256, 1024)
        planes = pack_planes(weight)
        assert planes is not None
        assert planes.nbytes <= 1.04 * weight.nbytes, kind


def test_what_has_no_planes_is_not_packed() -> None:
    assert pack_planes(Dense(torch.randn(4, 64))) is None
    assert pack_planes(grouped(4, 8)) is None
    assert pack_planes(fp8((1, 24), 4, 96)) is None
    assert isinstance(codebook(block=8), Codebook)
    assert pack_planes(codebook(block=8)) is None


def test_a_code_that_is_no_number_spoils_its_sums() -> None:
    weight = fp8((16, 32), 40, 80)
    weight.codes.view(torch.uint8)[17, 33] = 0xFF
    planes = pack_planes(weight)
    assert planes is not None
    wrong = planes.decode(torch.float32).isnan()
    assert bool(wrong[17, 33])
    assert not bool(wrong[:16].any() or wrong[32:].any() or wrong[:, :32].any() or wrong[:, 64:].any())


@pytest.mark.parametrize("bits", [1, 2, 4, 8])
def test_field_f_of_lane_e_is_column_16_f_plus_e(bits: int) -> None:
    unit = 256 // bits
    codes = torch.randint(0, 1 << bits, (3, 2 * unit), dtype=torch.uint8)
    plane = torch.empty(2, 3, 16, dtype=torch.int16)
    fill_plane(plane, codes, bits)
    assert torch.equal(read_plane(plane, bits), codes)
    for unit_at, row, lane, field in ((0, 0, 0, 0), (1, 2, 7, 1), (1, 1, 15, 16 // bits - 1)):
        word = int(plane[unit_at, row, lane]) & 0xFFFF
        assert word >> field * bits & ((1 << bits) - 1) == int(codes[row, unit_at * unit + 16 * field + lane])
    assert PlaneLayout(bits).unit == unit
