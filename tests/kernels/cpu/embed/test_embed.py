"""Embedding tables in every format: the kernel's bits are the reference's."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from plait.errors import ShapeMismatch
from plait.kernels.cpu.embed.embed import _embed, why_unknown_format
from plait.kernels.cpu.embed.skeleton import KERNELS
from plait.kernels.load import executor
from plait.ops.blocks import random_blocks, random_weight
from plait.ops.registry import OpFacts
from plait.ops.rows import embed
from plait.quant.fp4 import Fp4
from plait.quant.fp8 import Fp8
from plait.quant.gguf import BLOCK_TYPES, BlockType, Gguf, block_type
from plait.quant.weight import Dense
from tests.common_storages import mark_rare
from tests.quant.storages import made

IDS = torch.tensor([0, 39, 7, 7, 12])
FORMATS = list(BLOCK_TYPES.values())


def bits(x: Tensor) -> Tensor:
    return x.view(torch.int32)


def blocks(kind: BlockType) -> Gguf:
    """40 rows of random bytes; their scales are any finite float16."""
    table = random_blocks(kind.name, 40, 3 * kind.elements)
    each = table.data.view(-1, kind.nbytes)
    for at in kind.scales_at:
        raw = torch.randint(0, 256, (len(each), 2), dtype=torch.uint8)
        raw[raw[:, 1] & 0x7C == 0x7C, 1] &= 0x83  # infinities and NaN become denormals
        each[:, at : at + 2] = raw
    return table


def test_every_format_of_a_file_has_a_kernel() -> None:
    assert set(KERNELS) == {kind.name for kind in FORMATS} | {"float32", "bfloat16", "float16"}
    assert why_unknown_format(OpFacts("cpu", torch.float32, {"kind": "Q4_K"})) is None
    assert why_unknown_format(OpFacts("cpu", torch.float32, {"kind": "hqq"})) == "it cannot read hqq"
    assert why_unknown_format(OpFacts("cpu", torch.float32, {"kind": "int4_g128"})) is None


@pytest.mark.parametrize("name", mark_rare([kind.name for kind in FORMATS]))
def test_blocks_have_the_bits_of_the_reference(cpu: Any, name: str) -> None:
    kind = block_type(name)
    table = blocks(kind)
    for scale in (1.0, 0.3):
        want = embed(IDS, table, scale, torch.float32)
        assert torch.equal(bits(_embed(cpu, IDS, table, scale, torch.float32)), bits(want))
    part = table.rows(3, 30).cols(kind.elements, 3 * kind.elements)  # a view: its rows lie apart
    ids = torch.tensor([26, 0])
    want = embed(ids, part, 1.0, torch.float32)
    assert torch.equal(bits(_embed(cpu, ids, part, 1.0, torch.float32)), bits(want))


@pytest.mark.parametrize(
    "kind",
    [
        *("int4_g128", "int4_g32+bfloat16+zeros", "int3_g64+zeros+order", "int8+float32", "int6_g16"),
        *("fp8", "fp8_b128", "mxfp4", "nvfp4", "bnb_nf4"),
    ],
)
def test_packed_tables_have_the_bits_of_the_reference(cpu: Any, kind: str) -> None:
    table = random_weight(kind, 40, 384)
    for part in (table, table.rows(0, 40), table.pick(torch.arange(40).flip(0))):
        for scale in (1.0, 50.3):
            want = embed(IDS, part, scale, torch.float32)
            assert torch.equal(bits(_embed(cpu, IDS, part, scale, torch.float32)), bits(want))
    if isinstance(table, Fp4):
        part = Fp4(table.codes, table.scales, torch.rand(40))
        want = embed(IDS, part, 1.0, torch.float32)
        assert torch.equal(bits(_embed(cpu, IDS, part, 1.0, torch.float32)), bits(want))


def test_every_small_float_has_the_bits_of_the_reference(cpu: Any) -> None:
    """All bytes, in lanes of vectors and in the rest of a row; what is no number is none here either."""
    every = torch.arange(256).roll(7).to(torch.uint8)
    codes = torch.stack([every, every.flip(0)])[:, :250]
    ids = torch.tensor([1, 0])
    for block in ((1, 250), (2, 24), (1, 7)):
        scale = torch.rand(-(-2 // block[0]), -(-250 // block[1]))
        table = Fp8(codes.contiguous().view(torch.float8_e4m3fn), scale, block)
        want = embed(ids, table, 1.0, torch.float32)
        found = _embed(cpu, ids, table, 1.0, torch.float32)
        torch.testing.assert_close(found, want, rtol=0, atol=0, equal_nan=True)
    fours = Fp4(
        codes[:, :240].contiguous(), torch.arange(100, 115).expand(2, -1).to(torch.uint8).contiguous()
    )
    want = embed(ids, fours, 1.0, torch.float32)
    assert torch.equal(bits(_embed(cpu, ids, fours, 1.0, torch.float32)), bits(want))


@pytest.mark.parametrize(
    "storage", ["int4 with zeros", "int4 with order", "int3 with a short last group", "nf4", "nf4, nested"]
)
def test_what_is_no_whole_vector_has_the_bits_of_the_reference(cpu: Any, storage: str) -> None:
    table = made(storage)
    ids = torch.tensor([6, 0, 3])
    for part in (table, table.rows(0, 7), table.pick(torch.arange(7).flip(0))):
        want = embed(ids, part, 3.5, torch.float32)
        assert torch.equal(bits(_embed(cpu, ids, part, 3.5, torch.float32)), bits(want))


@pytest.mark.parametrize("n", [1, 7, 15, 16, 17, 100, 256, 300])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_plain_numbers_have_the_bits_of_the_reference(cpu: Any, n: int, dtype: torch.dtype) -> None:
    table = Dense(torch.randn(40, n + 3).to(dtype)[:, 1 : n + 1])
    table.tensor[7, 0] = 1e-7  # a denormal of float16
    for scale in (1.0, 50.3):
        want = embed(IDS, table, scale, torch.float32)
        assert torch.equal(bits(_embed(cpu, IDS, table, scale, torch.float32)), bits(want))


@pytest.mark.parametrize("name", ["float32", "Q4_K", "IQ4_NL"])
def test_one_thread_and_a_recording_give_the_same(cpu: Any, name: str) -> None:
    kinds = {kind.name: kind for kind in FORMATS}
    table = blocks(kinds[name]) if name in kinds else Dense(torch.randn(40, 300))
    ids = torch.randint(0, 40, (64,))
    whole = _embed(cpu, ids, table, 2.0, torch.float32)
    alone = executor(1)
    assert alone is not None
    assert torch.equal(whole, _embed(alone, ids, table, 2.0, torch.float32))
    alone.close()
    later = ids.clone()
    with cpu.record(tokens=64, logits=65) as program:
        out = _embed(cpu, later, table, 2.0, torch.float32)
    out.zero_()
    later[:5] = ids[10:15]
    later[5:] = 1 << 40  # what is not part of the step is not read
    cpu.run(program, tokens=5, logits=1, seqs=1)
    assert torch.equal(out[:5], whole[10:15])
    assert not out[5:].any()


def test_what_a_kernel_would_misread_is_refused(cpu: Any) -> None:
    table = Dense(torch.randn(4, 8))
    for ids, weight, dtype in (
        (IDS.int(), table, torch.float32),
        (IDS[:, None, None], table, torch.float32),
        (IDS[:, None].expand(-1, 3), table, torch.float32),
        (IDS, table, torch.bfloat16),
        (IDS, Dense(torch.randn(8, 4).T), torch.float32),
        (IDS, Dense(torch.randn(4, 8).double()), torch.float32),
    ):
        with pytest.raises(ShapeMismatch):
            _embed(cpu, ids, weight, 1.0, dtype)
