"""Products of bfloat16 weights with inputs rounded to bfloat16: one order, whatever the batch or layout."""

from __future__ import annotations

import subprocess
import sys
from hashlib import sha256
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from plait.kernels.cpu.codegen.target import NEEDED, TARGETS, host_features
from plait.kernels.load import executor, load_kernels
from plait.ops.linear import Linear
from plait.ops.registry import OpFacts
from plait.quant.weight import Dense

SIZES = ((64, 32), (63, 130), (1025, 17), (5, 1), (2, 16), (576, 321))
ROOT = Path(__file__).resolve().parents[4]
ABLE = [isa for isa in TARGETS if isa != "native" and NEEDED.get(isa, set()) <= host_features()]


def kernels(name: str) -> Any:
    """A module of kernels, once it is known which target they are for."""
    return import_module(f"plait.kernels.cpu.linear.{name}")


def linear_on(cpu: Any, weight: Tensor, bias: Tensor | None = None) -> Linear:
    def bind(op: Any, **sizes: Any) -> Any:
        fn, row = op.bind(OpFacts("cpu", torch.float32, sizes, cpu))
        assert row.variant == "native-bf16"
        return fn

    return Linear([Dense(weight)], [bias], bind, torch.float32, "int8")


def random_matrix(n_in: int, n_out: int) -> Tensor:
    return (torch.randn(n_out, n_in) / n_in**0.5).bfloat16()


def in_order(x: Tensor, weight: Tensor) -> Tensor:
    """The sums of chunks, of pairs in order, the second number of each first: rounded once for each product.

    Products of two bfloat16 are exact in float32, and their sums with a float32 in float64.
    """
    n = x.shape[1]
    x, w = (torch.nn.functional.pad(t.bfloat16().double(), (0, n % 2)) for t in (x, weight))
    (out, k), chunk = (None, 0), kernels("dense").PAIRS_CHUNK
    while k < n:
        count = n - k if n - k < chunk * 3 // 2 else chunk
        s = torch.zeros(len(x), len(w))
        for p in range(k, k + count, 2):
            for i in (p + 1, p):
                s = (s.double() + x[:, i, None] * w[None, :, i]).float()
        out, k = s if out is None else out + s, k + count
    assert out is not None
    return out


@pytest.mark.parametrize(("n_in", "n_out"), SIZES)
def test_sums_are_those_of_pairs_in_order_alone_and_in_a_batch(cpu: Any, n_in: int, n_out: int) -> None:
    weight, bias, x = random_matrix(n_in, n_out), torch.randn(n_out), torch.randn(201, n_in)
    many = linear_on(cpu, weight, bias)
    y = many(x)
    assert torch.equal(y[:20], in_order(x[:20], weight) + bias)
    assert torch.equal(y, torch.cat([many(row) for row in x.split(1)]))
    for rows in range(1, 18):
        assert torch.equal(y[:rows], many(x[:rows]))


def test_threads_change_nothing(cpu: Any) -> None:
    weight, x = random_matrix(576, 321), torch.randn(201, 576)
    alone = executor(1)
    assert alone is not None
    assert torch.equal(linear_on(alone, weight)(x), linear_on(cpu, weight)(x))
    alone.close()


def test_twelve_bits_give_the_bits_of_sixteen(cpu: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    weight, x = random_matrix(1304, 200), torch.randn(201, 1304)
    weight[3, -8:], weight[:, 9], weight[199, 1303] = 1e-20, -1e-25, 1e-36
    short = linear_on(cpu, weight)
    monkeypatch.setattr(kernels("bf16_codes"), "HERE", False)
    plain = linear_on(cpu, weight)
    for rows in (1, 2, 3, 5, 12, 13, 201):
        assert torch.equal(short(x[:rows]), plain(x[:rows]))


def test_rows_may_lie_apart_and_nothing_is_written_behind_the_last_output(cpu: Any) -> None:
    weight, x = random_matrix(67, 21), torch.randn(9, 200)
    packed = kernels("dense").pack_pairs(cpu, Dense(weight), torch.float32)
    out = torch.full((9, 64), 5.0)
    kernels("packed").multiply(cpu, x[:, 7:74], packed, None, "bfloat16", out=out[:, :21])
    assert torch.equal(out[:, :21], in_order(x[:, 7:74], weight))
    assert bool((out[:, 21:] == 5.0).all())


def test_infinite_and_missing_inputs_reach_their_own_row_only(cpu: Any) -> None:
    weight, x = random_matrix(70, 40), torch.randn(6, 70)
    want = linear_on(cpu, weight)(x)
    x[1, 3], x[4, 69] = float("inf"), float("nan")
    y = linear_on(cpu, weight)(x)
    kept = [0, 2, 3, 5]
    assert torch.equal(y[kept], want[kept])
    assert not bool(y[1].isfinite().any())
    assert bool(y[4].isnan().all())


def test_inputs_stay_exact_where_that_was_requested_and_for_other_weights(cpu: Any) -> None:
    def variant(weight: Tensor, activations: Any) -> str:
        found = list[str]()

        def bind(op: Any, **sizes: Any) -> Any:
            fn, row = op.bind(OpFacts("cpu", torch.float32, sizes, cpu))
            found.append(row.variant)
            return fn

        Linear([Dense(weight)], [None], bind, torch.float32, activations)
        return found[0]

    weight = random_matrix(64, 32)
    assert [variant(weight, a) for a in ("int8", "int8x2", "float32")] == [
        "native-bf16",
        "native-dense",
        "native-dense",
    ]
    assert [variant(weight.to(d), "int8") for d in (torch.float16, torch.float32)] == ["native-dense"] * 2


def digest(cpu: Any) -> str:
    """Of products of all sizes."""
    torch.manual_seed(3)
    found = sha256()
    for n_in, n_out in SIZES:
        y = linear_on(cpu, random_matrix(n_in, n_out))(torch.randn(14, n_in))
        found.update(y.numpy().tobytes())
    odd = torch.randn(3, n_in)
    odd[0, 1], odd[1, 2], odd[2, 3] = torch.tensor([0x7FFFFFFF, -1, 0x7F800001]).int().view(torch.float32)
    y = linear_on(cpu, random_matrix(n_in, n_out))(odd)
    assert y.isnan().all()  # and not the 0 or infinity that carries give
    return found.hexdigest()


def say(isa: str, folder: str) -> None:
    """What the process of one target does."""
    load_kernels(cache_dir=Path(folder), isa=isa)
    cpu = executor(1)
    sys.stdout.write(digest(cpu))
    assert cpu is not None
    cpu.close()


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("isa", ABLE)
def test_products_have_the_same_bits_on_every_target(isa: str, cpu: Any, tmp_path: Path) -> None:
    code = "import sys; from tests.kernels.cpu.linear.test_bf16_pairs import say; say(*sys.argv[1:])"
    ask = [sys.executable, "-c", code, isa, str(tmp_path)]
    child = subprocess.run(ask, cwd=ROOT, capture_output=True, text=True, check=False)
    assert child.returncode == 0, child.stderr
    assert child.stdout == digest(cpu)
