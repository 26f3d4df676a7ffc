"""A matrix for each head, plain and as stored: one order of additions in every batch; recordings."""

from __future__ import annotations

import gc
import hashlib
import os
import subprocess
import sys
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from plait.errors import ShapeMismatch
from plait.kernels.load import executor, load_kernels
from plait.ops.blocks import random_weight
from plait.ops.heads import STORED, HeadRows, facts_of, map_heads
from plait.ops.registry import OpFacts
from plait.quant.halves import Halves
from plait.quant.weight import Dense
from plait.runner.program import ViewsOnly
from tests.common_storages import mark_rare
from tests.quant.storages import STORAGES, fp8, made

HEADS = 3
KINDS = [case["kind"] + case.get("more", "") for case in STORED if "float16" not in case["kind"]]


@pytest.fixture(scope="module")
def alone() -> Iterator[Any]:
    load_kernels()
    made = executor(1)
    assert made is not None
    yield made
    made.close()


def bound(cpu: Any, weight: Tensor | HeadRows) -> Any:
    fn, row = map_heads.bind(OpFacts("cpu", torch.float32, facts_of(weight), cpu))
    assert row.variant == ("native" if isinstance(weight, Tensor) else "native-stored")
    return fn


def close(a: Tensor, b: Tensor) -> None:
    torch.testing.assert_close(a, b, rtol=2e-5, atol=2e-5)


def halves(kind: str, cols: int = 512, keys: int = 37, values: int = 83) -> tuple[HeadRows, HeadRows]:
    """An up-projection in that storage."""
    weight = random_weight(kind, HEADS * (keys + values), cols)
    return HeadRows(weight, HEADS, 0, keys, turned=True), HeadRows(weight, HEADS, keys, values)


@pytest.mark.parametrize(("n", "m"), [(128, 512), (512, 128), (16, 8), (7, 33), (1, 1), (100, 17)])
def test_plain_heads_are_mapped_the_same_alone_and_in_a_batch(cpu: Any, alone: Any, n: int, m: int) -> None:
    x, weight = torch.randn(19, HEADS, n + 9), torch.randn(HEADS, m, n) / n**0.5
    part, fn = x[..., 4 : 4 + n], bound(cpu, weight)
    y = fn(part, weight)
    close(y, map_heads.reference(part, weight))
    assert torch.equal(y, bound(alone, weight)(part, weight))
    assert torch.equal(y, torch.cat([fn(row, weight) for row in part.split(1)]))


STORAGES_OF_HEADS = ["Q8_0", "Q4_K", "int4_g64+zeros+order", "fp8_b128", "bnb_nf4", "nvfp4"]


@pytest.mark.parametrize("kind", mark_rare(STORAGES_OF_HEADS))
def test_stored_heads_are_mapped_the_same_alone_and_in_a_batch(cpu: Any, alone: Any, kind: str) -> None:
    for weight in halves(kind):
        n = weight.widths[0]
        part, fn = torch.randn(21, HEADS, n + 9)[..., 4 : 4 + n], bound(cpu, weight)
        y = fn(part, weight)
        close(y, map_heads.reference(part, weight))
        assert torch.equal(y, bound(alone, weight)(part, weight))
        assert torch.equal(y, torch.cat([fn(row, weight) for row in part.split(1)]))


@pytest.mark.parametrize("name", STORAGES)
def test_every_storage_of_safetensors(cpu: Any, name: str) -> None:
    """Seven rows: of one head. Groups that end anywhere, nested magnitudes, an order of columns."""
    stored = made(name)
    x = torch.randn(5, 1, 64)
    for weight in (HeadRows(stored, 1, 2, 5), HeadRows(stored, 1, 0, 4, turned=True)):
        given = x[..., : weight.widths[0]]
        want = map_heads.reference(given, weight)
        scale = want.abs().max()
        close(bound(cpu, weight)(given, weight) / scale, want / scale)


def test_blocks_of_rows_may_lie_across_heads(cpu: Any) -> None:
    """A scale for 128 rows, heads of 40: as DeepSeek-V3's own blocks lie where sizes are not its own."""
    stored = fp8((128, 128), rows=HEADS * 40, cols=320)
    for weight in (HeadRows(stored, HEADS, 7, 20), HeadRows(stored, HEADS, 13, 27, turned=True)):
        x = torch.randn(3, HEADS, weight.widths[0])
        want = map_heads.reference(x, weight)
        close(bound(cpu, weight)(x, weight) / want.abs().max(), want / want.abs().max())


@pytest.mark.parametrize("kind", ["Q6_K", "int4_g64+zeros+order", "fp8"])
def test_products_with_rows_have_the_bits_of_plain_ones(cpu: Any, kind: str) -> None:
    _, weight = halves(kind)
    x, plain = torch.randn(18, HEADS, 512), weight.numbers(0, HEADS, torch.empty(0))
    assert torch.equal(bound(cpu, weight)(x, weight), bound(cpu, plain)(x, plain))


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_K", "fp8_b128", "int4_g64+zeros+order"])
def test_recorded_maps_of_heads(cpu: Any, kind: str) -> None:
    for weight in (torch.randn(HEADS, 40, 24), *halves(kind)):
        n = weight.shape[2] if isinstance(weight, Tensor) else weight.widths[0]
        x, fn = torch.randn(64, HEADS, n), bound(cpu, weight)
        with cpu.record(tokens=64, logits=65) as program, ViewsOnly():
            y = fn(x, weight)
        cpu.run(program, tokens=5, logits=1, seqs=1)
        assert torch.equal(y[:5], fn(x[:5], weight))
        x[:40] = torch.randn(40, HEADS, n)
        cpu.run(program, tokens=40, logits=1, seqs=1)
        assert torch.equal(y[:40], fn(x[:40], weight))


def test_the_same_kernel_may_see_one_weight_after_another(cpu: Any) -> None:
    first, second = halves("Q8_0")[0], halves("Q8_0")[0]
    x, fn = torch.randn(2, HEADS, 37), bound(cpu, first)
    for weight in (first, second, first):
        close(fn(x, weight), map_heads.reference(x, weight))


def test_a_recording_holds_what_it_reads(cpu: Any) -> None:
    """Although its kernel has seen another weight since."""
    first, second = halves("Q8_0")[0], halves("Q8_0")[0]
    x, fn = torch.randn(64, HEADS, 37), bound(cpu, first)
    with cpu.record(tokens=64, logits=65) as program:
        y = fn(x, first)
    want = map_heads.reference(x, first)
    read = [weakref.ref(tensor) for tensor in fn._seen[1].held]
    fn(x, second)
    del first
    gc.collect()
    assert None not in [tensor() for tensor in read]
    cpu.run(program, tokens=64, logits=1, seqs=1)
    close(y, want)


def test_what_does_not_fit_is_refused(cpu: Any) -> None:
    key, value = halves("Q8_0")
    for weight, x in (
        (key, torch.randn(2, HEADS, 38)),
        (value, torch.randn(2, 2, 512)),
        (key, torch.randn(2, 37)),
    ):
        with pytest.raises(ShapeMismatch):
            bound(cpu, weight)(x, weight)
    for first, count in ((-1, 3), (100, 21), (0, 121)):
        with pytest.raises(ShapeMismatch, match="of each of 3 heads are no part"):
            HeadRows(key.weight, HEADS, first, count)
    _, row = map_heads.bind(OpFacts("cpu", torch.float32, {"heads": 3, "kind": "hqq"}, cpu))
    assert row.variant == "reference"
    assert dict(row.skipped)["native-stored"] == "it cannot read hqq"
    assert "stays as it is stored" in dict(row.skipped)["native"]


@pytest.mark.parametrize("turned", [True, False])
def test_halves_are_the_whole_matrix_for_every_reader(turned: bool) -> None:
    k, v = torch.randn(HEADS, 32, 64), torch.randn(HEADS, 32, 64)
    keys = random_weight("Q8_0", HEADS * (64 if turned else 32), 32 if turned else 64)
    values = Dense(v.flatten(0, 1))
    k = keys.dequantize(torch.float32).unflatten(0, (HEADS, -1))
    whole = torch.cat([k.mT if turned else k, v], 1).flatten(0, 1)
    found = Halves(keys, values, HEADS, turned)
    assert found.shape == (HEADS * 64, 64)
    assert found.nbytes == keys.nbytes + values.nbytes
    assert found.format == "Q8_0+float32"
    assert torch.equal(found.dequantize(torch.float32), whole)
    some = torch.tensor([5, 100, 5])
    assert torch.equal(found.gather(some, torch.float32), whole[some])
    assert torch.equal(found.rows(30, 170).pick(some).dequantize(torch.float32), whole[30:170][some])
    assert found.cols(0, 64) is found
    for wrong in (lambda: found.cols(0, 32), lambda: found.rows(0, 193), lambda: Halves.cat([found, found])):
        with pytest.raises(ShapeMismatch):
            wrong()
    with pytest.raises(ShapeMismatch, match="are no halves of one up-projection"):
        Halves(keys, Dense(torch.randn(HEADS * 32, 48)), HEADS, turned)


def digest(kinds: list[str]) -> str:
    """The bits of some products, the same in every process."""
    load_kernels()
    cpu = executor(2)
    assert cpu is not None
    bits = hashlib.sha256()
    for kind in kinds:
        torch.manual_seed(5)
        for weight in halves(kind):
            x = torch.randn(18, HEADS, weight.widths[0])
            bits.update(bound(cpu, weight)(x, weight).numpy().tobytes())
    cpu.close()
    return bits.hexdigest()


def elsewhere(target: str, kinds: list[str]) -> str:
    """`digest` in a process with kernels that are made for another processor."""
    root = Path(__file__).parents[4]
    code = f"from tests.kernels.cpu.moe import test_head_maps; print(test_head_maps.digest({kinds!r}))"
    env = {**os.environ, "NUMBA_CPU_NAME": target, "NUMBA_CPU_FEATURES": "", "PYTHONPATH": str(root)}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout.split()[-1]


@pytest.mark.sampled(2, across="another processor")
def test_another_processor_gives_the_same_bits() -> None:
    assert elsewhere("haswell", ["Q8_0"]) == digest(["Q8_0"])


@pytest.mark.slow
@pytest.mark.parametrize("target", ["haswell", "x86-64"])
def test_every_format_on_other_processors(target: str) -> None:
    assert elsewhere(target, KINDS) == digest(KINDS)
