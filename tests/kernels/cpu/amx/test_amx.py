"""AMX: tiles in memory do what the instructions are documented to do, and kernels on them multiply right."""

from __future__ import annotations

from collections.abc import Iterator
from fractions import Fraction
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from plait.kernels.load import executor, load_kernels
from plait.ops.attention import paged_attention
from plait.ops.blocks import random_weight
from plait.ops.linear import linear
from plait.ops.registry import OpFacts
from plait.quant.weight import Dense, Weight

load_kernels()
PACKING = {"dense": "dense", "floats": "float_codes", "linear": "blocks"}
amx = import_module("plait.kernels.cpu.codegen.amx_tiles")
check = import_module("plait.kernels.cpu.amx.check")
target = import_module("plait.kernels.cpu.codegen.target")
rows_on_tiles = import_module("plait.kernels.cpu.amx.linear")
packed_maps = import_module("plait.kernels.cpu.linear.packed")
attention = import_module("plait.kernels.cpu.amx.attention")
pairs = import_module("plait.kernels.cpu.attention.bf16")
packing = {name: import_module(f"plait.kernels.cpu.linear.{file}") for name, file in PACKING.items()}
TILE = 1024  # bytes


@pytest.fixture(scope="module")
def cpu() -> Iterator[Any]:
    made = executor(2)
    assert made is not None
    yield made
    made.close()


@pytest.fixture(scope="module")
def one() -> Iterator[Any]:
    made = executor(1)
    assert made is not None
    yield made
    made.close()


KINDS = ("software", *(() if check.refusal() else ("amx",)))  # in memory, and those of this processor


@pytest.fixture(autouse=True, params=KINDS)
def tiles(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Which tiles kernels are made for."""
    monkeypatch.setattr(rows_on_tiles, "TILES", request.param)
    monkeypatch.setattr(attention, "TILES", request.param)
    return str(request.param)


def multiplied(cpu: Any, what: str, *given: Tensor) -> Tensor:
    """c + a · b; the other products of the kernel get zeros."""
    tensors = {name: [torch.zeros(TILE, dtype=torch.uint8) for _ in range(3)] for name in check.SHAPES}
    tensors[what] = [t.clone() for t in given]
    scratch = torch.zeros(amx.MEMORY, dtype=torch.uint8)
    words = [t for name in ("bf16", "s8u8", "s8s8") for t in tensors[name]]
    cpu.launch(check.products(rows_on_tiles.TILES), scratch, *words, rows=1)
    return tensors[what][2]


def nearest(x: Fraction) -> Fraction:
    """x as float32: to nearest even, what is too small to be normal to zero."""
    if not x:
        return x
    size, power = abs(x), 0
    while size >= 2:
        size, power = size / 2, power + 1
    while size < 1:
        size, power = size * 2, power - 1
    kept = Fraction(round(size * 2**23), 2**23) * Fraction(2) ** power
    return (kept if x > 0 else -kept) if kept >= Fraction(2) ** -126 else Fraction(0)


def as_documented(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    """a: [rows, 32], b: [16 pairs, columns, 2], c: [rows, columns]: TDPBF16PS, number by number."""
    result = torch.empty_like(c)
    inputs, weights = ([Fraction(v) for v in t.double().flatten().tolist()] for t in (a, b))
    inputs, weights = ([nearest(v) for v in part] for part in (inputs, weights))
    columns = c.shape[1]
    for m in range(c.shape[0]):
        for n in range(columns):
            sums = [Fraction(0), Fraction(0)]
            for k in range(16):
                for odd in (0, 1):
                    x, y = inputs[32 * m + 2 * k + odd], weights[(k * columns + n) * 2 + odd]
                    sums[odd] = nearest(sums[odd] + x * y)
            before = nearest(Fraction(float(c[m, n])))
            result[m, n] = float(nearest(before + nearest(sums[0] + sums[1])))
    return result


def test_products_of_bfloat16_are_added_in_the_documented_order(one: Any) -> None:
    torch.manual_seed(0)
    scale = 2.0 ** torch.randint(-12, 13, (16, 32))  # so that another order would round differently
    a, b = (torch.randn(16, 32) * scale).bfloat16(), torch.randn(16, 16, 2).bfloat16()
    c = torch.randn(16, 16)
    assert torch.equal(multiplied(one, "bf16", a, b, c), as_documented(a, b, c))


def test_subnormal_numbers_count_as_zero(one: Any) -> None:
    a, b, c = torch.zeros(16, 32).bfloat16(), torch.zeros(16, 16, 2).bfloat16(), torch.zeros(16, 16)
    a[0, 0], b[0, 0, 0] = 2.0**-130, 2.0**20  # an input that is subnormal
    a[1, 1], b[0, 1, 1] = 2.0**-70, 2.0**-60  # a product that is
    c[2, 2] = 2.0**-130  # a sum that was
    a[3, 2], b[1, 3, 0] = 2.0**-60, 2.0**-60  # and one that is normal
    found = multiplied(one, "bf16", a, b, c)
    assert found[3, 3] == 2.0**-120
    assert found.count_nonzero() == 1
    assert torch.equal(found, as_documented(a, b, c))


def test_products_of_bytes_are_exact(one: Any) -> None:
    a = torch.randint(-128, 128, (16, 32), dtype=torch.int8)
    b = torch.randint(0, 256, (8, 16, 4), dtype=torch.uint8)
    a[0], b[:, 0] = -128, 255
    c = torch.randint(-(1 << 20), 1 << 20, (16, 16), dtype=torch.int32)
    for what, found in (("s8u8", b), ("s8s8", b.view(torch.int8))):
        whole = found.int().permute(0, 2, 1).reshape(32, 16)
        assert torch.equal(multiplied(one, what, a, found, c), c + a.int() @ whole)


def test_the_configuration_names_rows_and_bytes_of_each_tile() -> None:
    table = np.array(amx.configuration(((16, 64), (3, 20))), np.int32).view(np.uint8)
    assert table[0] == 1
    assert table[48:51].tolist() == [16, 3, 0]
    assert table[16:22].view(np.uint16).tolist() == [64, 20, 0]
    assert len(table) == 64
    assert not table[1:16].any()


def on_tiles(cpu: Any, weight: Weight) -> Any:
    """Packed as the variant that would be bound packs it."""
    if isinstance(weight, Dense):
        pack = packing["dense"].pack
    elif packing["floats"].records_of(weight):
        pack = packing["floats"].pack
    else:
        pack = rows_on_tiles.pack_byte_tiles
    return rows_on_tiles.pack_for_many(pack)(cpu, weight, torch.float32)


def expected(x: Tensor, weight: Weight, bias: Tensor | None) -> Tensor:
    """The op's reference of what is left after rounding."""
    numbers = weight.dequantize(torch.float32).bfloat16().double()
    out: Tensor = linear(x.bfloat16().double(), Dense(numbers), None if bias is None else bias.double())
    return out


STORAGES = ("Q4_1", "fp8_b128")
MORE = (  # that compile as long and differ in how codes and scales are read, which `linear_source` shares
    "bnb_nf4", "Q6_K", "int4_g64+zeros",
    "Q8_0", "Q5_0", "Q4_K", "Q3_K", "Q2_K", "IQ4_NL", "IQ3_S", "TQ2_0", "mxfp4", "nvfp4", "int4_g128", "int8",
)  # fmt: skip


@pytest.mark.sampled(3, across="tiles")
@pytest.mark.parametrize("kind", [*STORAGES, *(pytest.param(kind, marks=pytest.mark.slow) for kind in MORE)])
def test_every_storage_is_decoded_and_multiplied(kind: str, cpu: Any) -> None:
    torch.manual_seed(1)
    weight, bias = random_weight(kind, 50, 512), torch.randn(50)
    x = torch.randn(45, 512)
    found = packing["linear"].multiply(cpu, x, on_tiles(cpu, weight), bias, "int8")
    assert (found - expected(x, weight, bias)).abs().max() < 5e-5 * float(x.abs().max())


@pytest.mark.sampled(3, across="tiles")
@pytest.mark.parametrize("kind", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("n_in", [pytest.param(64, marks=pytest.mark.slow), 1031])
def test_plain_numbers_and_inputs_that_fill_no_tile(kind: str, n_in: int, cpu: Any) -> None:
    weight = Dense((torch.randn(70, n_in) / n_in**0.5).to(getattr(torch, kind)))
    x = torch.randn(33, n_in)
    found = packing["linear"].multiply(cpu, x, on_tiles(cpu, weight), None, "float32")
    assert (found - expected(x, weight, None)).abs().max() < 5e-5
    few = packing["linear"].multiply(cpu, x[:31], on_tiles(cpu, weight), None, "float32")
    assert (few - linear(x[:31], weight, None)).abs().max() < 5e-5  # exact activations below the limit


def test_a_row_does_not_depend_on_other_rows_nor_on_threads(cpu: Any, one: Any) -> None:
    weight = random_weight("Q4_1", 600, 288)
    x = torch.randn(600, 288)
    packed = on_tiles(cpu, weight)
    whole = packing["linear"].multiply(cpu, x, packed, None, "int8")
    part = packing["linear"].multiply(one, x[100:140], packed, None, "int8")
    assert torch.equal(whole[100:140], part)


@pytest.mark.sampled(3, across="tiles")
@pytest.mark.parametrize(
    "kind",
    [
        "Q8_0",
        "int8_g64+zeros",  # which goes without tiles: codes less their zero points are no bytes
        *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("Q6_K", "int4_g64+zeros")),
    ],
)
@pytest.mark.parametrize("activations", ["int8", "int8x2"])
def test_tiles_of_bytes_change_no_bit(kind: str, activations: Any, cpu: Any, tiles: str) -> None:
    weight, linears = random_weight(kind, 70, 512), packing["linear"]
    exact = linears.pack(cpu, weight, torch.float32)
    tiled = linears.pack(cpu, weight, torch.float32, tiles)
    for rows in (14, 15, 16, 31, 45, 200):
        x = torch.randn(rows, 512)
        a, b = (linears.multiply(cpu, x, packed, None, activations) for packed in (exact, tiled))
        assert torch.equal(a, b)


def test_tiles_that_are_as_documented_pass_the_check_and_others_do_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert check.differs("software") is None
    exact = amx.Tiles.bf16

    def wrong(tiles: Any, c: int, a: int, b: int) -> None:
        exact(tiles, c, a, b)
        exact(tiles, c, a, b)

    real = check.products("software")
    monkeypatch.setattr(amx.Tiles, "bf16", wrong)
    check.product.cache_clear()
    text = check._TEXT.format(digest="a wrong one", kind="software")
    broken = check.load_generated("amx_check_wrong", text).products
    monkeypatch.setattr(check, "products", lambda kind: broken if kind == "wrong" else real)
    assert check.differs("wrong") == "its products of bfloat16 are not what is documented"
    check.product.cache_clear()


def test_rows_of_experts_are_multiplied_group_by_group(cpu: Any) -> None:
    torch.manual_seed(2)
    weights = [random_weight("Q4_1", 40, 288) for _ in range(3)]
    maps, x, ends = [on_tiles(cpu, w) for w in weights], torch.randn(110, 288), [0, 40, 45, 110]
    addresses = torch.tensor([m.data.data_ptr() for m in maps])
    groups = packed_maps.Groups(3, torch.tensor(ends), addresses)
    found = packed_maps.multiply(cpu, x, maps[0], None, "int8", groups=groups, rows=55)
    for packed, weight, first, end in zip(maps, weights, ends, ends[1:], strict=False):
        assert (found[first:end] - expected(x[first:end], weight, None)).abs().max() < 2e-4
        if end - first >= 32:  # alone they are many enough, too
            alone = packed_maps.multiply(cpu, x[first:end], packed, None, "int8")
            assert torch.equal(found[first:end], alone)


def facts(prefill: str, **sizes: Any) -> OpFacts:
    asked = {"n_in": 512, "n_out": 64, "kind": "Q4_1", "activations": "int8", **sizes}
    return OpFacts("cpu", torch.float32, asked, SimpleNamespace(prefill=prefill, empty=None))


def bound(found: OpFacts) -> tuple[str, dict[str, str]]:
    row = linear.bind(found)[1]
    return row.variant, dict(row.skipped)


def test_what_is_bound_and_why_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check, "refusal", lambda: "there is none")
    variant, skipped = bound(facts("bf16"))
    assert variant == "native"
    assert skipped["native-amx"] == skipped["amx-bf16"] == "there is none"
    monkeypatch.setattr(check, "refusal", lambda: None)
    variant, skipped = bound(facts("same"))
    assert variant == "native-amx"
    assert "--prefill bf16 was not requested" in skipped["amx-bf16"]
    assert bound(facts("bf16"))[0] == "amx-bf16"
    plain = facts("bf16", kind="bfloat16", activations="float32")
    assert bound(plain)[0] == "amx-bf16-dense"
    assert bound(facts("bf16", kind="fp8_b128", activations="float32"))[0] == "amx-bf16-floats"
    assert bound(facts("same", kind="bfloat16", activations="float32"))[0] == "native-dense"


def test_a_wrong_result_is_reported_and_nothing_is_bound(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(check, "no_amx", lambda: None)
    monkeypatch.setattr(check, "differs", lambda kind: "its products are wrong")
    check.refusal.cache_clear()
    with caplog.at_level("WARNING", "plait"):
        assert check.refusal() == "its products are wrong"
    assert "AMX is not used: its products are wrong" in caplog.text
    check.refusal.cache_clear()


def test_without_the_processor_or_the_permission_there_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(target, "host_features", lambda: frozenset(target.NEEDED["amx"] - {"amx-bf16"}))
    if target.platform.system() != "Linux" or target.platform.machine() != "x86_64":
        pytest.skip("other systems give another reason")
    assert target.no_amx() == "this processor has no amx-bf16"
    monkeypatch.setattr(target, "host_features", lambda: frozenset(target.NEEDED["amx"]))
    monkeypatch.setattr(target, "_level", [import_module("plait.kernels.cpu.codegen.levels").LEVELS[1]])
    assert target.no_amx() == "kernels are compiled for x86-64-v4-vnni", "to be shipped, which tiles are not"
    monkeypatch.setattr(target, "_level", [])
    monkeypatch.setattr(target.config, "CPU_NAME", None)
    monkeypatch.setattr(target.amx_permission, "PERMISSION", (158, 0x1023, 63))  # no such state
    assert "the system does not allow it" in target.no_amx()
    monkeypatch.setattr(target.config, "CPU_NAME", "haswell")
    assert target.no_amx() == "kernels are compiled for haswell"


ATTENTION = (
    dict(seqs=[33], heads=4, kv_heads=2, dim=32, window=None, softcap=None),
    dict(seqs=[300, 2], heads=9, kv_heads=3, dim=64, window=None, softcap=None),
    dict(seqs=[530, 4], heads=4, kv_heads=2, dim=96, window=70, softcap=30.0),
    dict(seqs=[300, 2, 1], heads=6, kv_heads=2, dim=32, window=None, softcap=None, sinks=True),
)


@pytest.mark.sampled(3, across="tiles")
@pytest.mark.parametrize("case", ATTENTION, ids=str)
def test_attention_of_many_tokens(case: Any, cpu: Any) -> None:
    torch.manual_seed(4)
    args, more = paged_attention.make({**case, "kv_dtype": "bfloat16"}, torch.float32, "cpu")
    caches = [c.clone() for c in args[3:5]]
    assert len(args[0]) >= 32
    found = attention.paged_attention_on_tiles(cpu, *args, **more)
    args = (*args[:3], *caches, *args[5:])
    wanted = paged_attention(*args, **more)
    assert (found - wanted).abs().max() < 2e-2


def test_attention_of_few_tokens_is_that_without_tiles(cpu: Any) -> None:
    case = dict(seqs=[20, 5], heads=4, kv_heads=2, dim=32, window=None, softcap=None, kv_dtype="bfloat16")
    args, more = paged_attention.make(case, torch.float32, "cpu")
    tokens = min(len(args[0]), 31)
    assert len(args[0]) == tokens
    exact = pairs.paged_attention_by_pairs(cpu, *args, **more)
    assert torch.equal(attention.paged_attention_on_tiles(cpu, *args, **more), exact)


def test_memory_is_requested_whichever_attention_computes(cpu: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    case = dict(seqs=[20, 5], heads=4, kv_heads=2, dim=32, window=None, softcap=None, kv_dtype="bfloat16")
    args, more = paged_attention.make(case, torch.float32, "cpu")
    asked: list[int] = []
    launch = type(cpu).launch

    def spy(self: Any, *words: Any, scratch: int = 0, **how: Any) -> None:
        asked.append(scratch)
        launch(self, *words, scratch=scratch, **how)

    monkeypatch.setattr(type(cpu), "launch", spy)
    pairs.paged_attention_by_pairs(cpu, *args, **more)
    attention.paged_attention_on_tiles(cpu, *args, **more)
    few, many = asked[1], asked[3]  # each stores first
    assert many >= few > 0


def test_attention_of_a_prompt_in_two_chunks_is_that_of_the_whole(cpu: Any) -> None:
    case = dict(seqs=[400], heads=4, kv_heads=2, dim=64, window=None, softcap=None, kv_dtype="bfloat16")
    args, more = paged_attention.make(case, torch.float32, "cpu")
    whole = attention.paged_attention_on_tiles(cpu, *args, **more)
    rows, (table, slots, _, _), rest = args[:3], args[5:9], args[9:]
    parts = []
    for first, end in ((0, 270), (270, 400)):
        where = (table, slots[first:end], torch.tensor([0, end - first]), torch.tensor([end]))
        given = (*(x[first:end] for x in rows), *args[3:5], *where, *rest)
        parts.append(attention.paged_attention_on_tiles(cpu, *given, **more))
    assert torch.equal(torch.cat(parts), whole)


def test_which_attention_is_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check, "refusal", lambda: None)
    sizes = {"kv_dtype": "bfloat16", "block_size": 16, "dim": 64}

    def chosen(prefill: str, **more: Any) -> str:
        found = OpFacts("cpu", torch.float32, {**sizes, **more}, SimpleNamespace(prefill=prefill))
        return str(paged_attention.bind(found)[1].variant)

    assert chosen("bf16") == "amx-bf16"
    assert chosen("same") == chosen("bf16", dim=80) == chosen("bf16", kv_dtype="int8") == "native"
