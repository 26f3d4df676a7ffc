"""Products with plain weights: one order of additions, whatever the batch, the threads or the layout."""

from __future__ import annotations

from collections.abc import Iterator
from importlib import import_module
from typing import Any

import pytest
import torch

from plait.kernels.cpu.linear.packed import multiply
from plait.kernels.load import executor, load_kernels
from plait.ops.linear import Linear
from plait.ops.registry import OpFacts
from plait.quant.weight import Dense

load_kernels()
dense = import_module("plait.kernels.cpu.linear.dense")
codes = import_module("plait.kernels.cpu.linear.bf16_codes")
codes_here = codes.HERE
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
SIZES = ((64, 32), (63, 130), (1025, 17), (5, 1), (2, 16), (576, 321))


@pytest.fixture(scope="module")
def alone() -> Iterator[Any]:
    made = executor(1)
    assert made is not None
    yield made
    made.close()


def linear_on(cpu: Any, weight: torch.Tensor, bias: torch.Tensor | None = None) -> Linear:
    def bind(op: Any, **sizes: Any) -> Any:
        fn, row = op.bind(OpFacts("cpu", torch.float32, sizes, cpu))
        assert row.variant == "native-dense"
        return fn

    return Linear([Dense(weight)], [bias], bind, torch.float32)


def random_map(n_in: int, n_out: int, dtype: torch.dtype) -> torch.Tensor:
    return (torch.randn(n_out, n_in) / n_in**0.5).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("n_in", "n_out"), SIZES)
def test_a_row_is_the_same_alone_in_a_batch_and_on_one_thread(
    cpu: Any, alone: Any, dtype: torch.dtype, n_in: int, n_out: int
) -> None:
    weight, bias, x = random_map(n_in, n_out, dtype), torch.randn(n_out), torch.randn(201, n_in)
    many, one = linear_on(cpu, weight, bias), linear_on(alone, weight, bias)
    y = many(x)
    torch.testing.assert_close(y, (x.double() @ weight.double().T + bias).float(), rtol=1e-5, atol=1e-5)
    assert torch.equal(y, one(x))
    assert torch.equal(y, torch.cat([many(row) for row in x.split(1)]))
    for rows in range(1, 14):
        assert torch.equal(y[:rows], many(x[:rows]))


@pytest.mark.parametrize("dtype", DTYPES)
def test_as_exact_as_torch(cpu: Any, dtype: torch.dtype) -> None:
    weight, x = random_map(4096, 48, dtype), torch.randn(20, 4096)
    want = x.double() @ weight.double().T
    ours = (linear_on(cpu, weight)(x) - want).abs().max()
    theirs = (torch.nn.functional.linear(x, weight.float()) - want).abs().max()
    assert ours < 3 * theirs


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_and_weights_may_lie_apart(cpu: Any, dtype: torch.dtype) -> None:
    wide, x = random_map(100, 48, dtype), torch.randn(9, 200)
    for weight in (wide[:, 3:70], wide[5:30], wide.T[:48], wide[::2]):
        rows = x[:, 7 : 7 + weight.shape[1]]
        want = torch.nn.functional.linear(rows, weight.float())
        torch.testing.assert_close(linear_on(cpu, weight)(rows), want, rtol=1e-5, atol=1e-5)
    weight = wide[:, :50].contiguous()
    heads = x.view(9, 4, 50)
    torch.testing.assert_close(linear_on(cpu, weight)(heads), heads @ weight.float().T, rtol=1e-5, atol=1e-5)


def test_parts_of_several_formats_share_one_result(cpu: Any) -> None:
    weights = [random_map(64, n, dtype) for n, dtype in zip((10, 33, 7), DTYPES, strict=True)]

    def bind(op: Any, **sizes: Any) -> Any:
        return op.bind(OpFacts("cpu", torch.float32, sizes, cpu))[0]

    x = torch.randn(5, 64)
    got = Linear([Dense(w) for w in weights], [None] * 3, bind, torch.float32)(x)
    torch.testing.assert_close(got, torch.cat([x @ w.float().T for w in weights], -1), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", DTYPES)
def test_nothing_is_written_behind_the_last_output(cpu: Any, dtype: torch.dtype) -> None:
    weight, x = random_map(40, 21, dtype), torch.randn(7, 40)
    out = torch.full((7, 64), 5.0)
    apply, rest = linear_on(cpu, weight)._parts[0]
    apply(x, *rest, out=out[:, :21])
    assert bool((out[:, 21:] == 5.0).all())
    torch.testing.assert_close(out[:, :21], x @ weight.float().T, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_weight_keeps_its_width(cpu: Any, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(codes, "HERE", False)
    assert linear_on(cpu, random_map(128, 64, dtype)).nbytes == 128 * 64 * dtype.itemsize


def special_map(n_in: int, n_out: int) -> torch.Tensor:
    """Numbers of usual sizes, and among them others of every kind, several side by side."""
    weight = random_map(n_in, n_out, torch.bfloat16)
    others = torch.tensor([0.0, -0.0, 1e-38, -3e-39, 1e20, -5e9, 1e-30], dtype=torch.bfloat16)
    chosen = torch.randperm(n_in * n_out)[: n_in * n_out // 64]
    weight.view(-1)[chosen] = others[torch.randint(len(others), chosen.shape)]
    weight[3, -8:] = 1e-20
    weight[:, 9] = -1e-25
    weight[n_out - 1, n_in - 1] = 1e-36
    return weight


@pytest.mark.parametrize(("n_in", "n_out"), [(512, 160), (576, 321), (768, 48), (1304, 200), (2560, 32)])
def test_twelve_bits_give_the_bits_of_sixteen(
    cpu: Any, alone: Any, n_in: int, n_out: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    weight, bias, x = special_map(n_in, n_out), torch.randn(n_out), torch.randn(201, n_in)
    short = linear_on(cpu, weight, bias)
    monkeypatch.setattr(codes, "HERE", False)
    plain = linear_on(cpu, weight, bias)
    assert short.nbytes < plain.nbytes or not codes_here
    for rows in (*range(1, 20), 201):
        assert torch.equal(short(x[:rows]), plain(x[:rows]))
    assert torch.equal(linear_on(alone, weight, bias)(x), plain(x))


@pytest.mark.skipif(not codes_here, reason="this target keeps bfloat16 as it is")
def test_every_bit_comes_back(cpu: Any) -> None:
    """A linear layer with one input at a time set: its column comes out, infinities and NaN too."""
    weight = special_map(264, 160)
    weight[5, 7], weight[6, 7], weight[7, 8] = float("inf"), float("-inf"), float("nan")
    packed = dense.pack(cpu, Dense(weight), torch.float32)
    assert packed.layout == codes.Coded()
    for k in (0, 1, 7, 8, 9, 255, 256, 263):
        x = torch.zeros(1, 264)
        x[0, k] = 1
        want = torch.nn.functional.linear(x, weight.float())
        got = multiply(cpu, x, packed, None, "float32")
        torch.testing.assert_close(got, want, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("weight", [
    torch.randint(-(2**15), 2**15, (64, 64), dtype=torch.int16).view(torch.bfloat16),
    torch.randn(64, 60).bfloat16(), torch.randn(17, 512).bfloat16(), torch.randn(40, 4).bfloat16(),
])  # fmt: skip
def test_what_twelve_bits_do_not_hold_stays_as_it_is(cpu: Any, weight: torch.Tensor) -> None:
    packed = dense.pack(cpu, Dense(weight), torch.float32)
    tiles = -(-weight.shape[0] // 16)
    assert packed.layout is None
    assert packed.nbytes == tiles * 32 * weight.shape[1]


@pytest.mark.skipif(not codes_here, reason="this target keeps bfloat16 as it is")
@pytest.mark.parametrize("value", [0.0, 1.5, -3e-39])
def test_a_matrix_of_one_number(cpu: Any, value: float) -> None:
    weight = torch.full((64, 512), value, dtype=torch.bfloat16)
    packed, x = dense.pack(cpu, Dense(weight), torch.float32), torch.randn(3, 512)
    assert packed.layout == codes.Coded()
    want = x.double() @ weight.double().T
    torch.testing.assert_close(multiply(cpu, x, packed, None, "float32").double(), want, rtol=1e-5, atol=1e-4)


def test_a_recorded_product_serves_any_number_of_rows(cpu: Any) -> None:
    wanted, x = linear_on(cpu, random_map(96, 40, torch.float32)), torch.randn(64, 96)
    with cpu.record(tokens=64, logits=65) as program:
        y = wanted(x)
    for rows in (5, 64, 1):
        x.copy_(torch.randn(64, 96))
        cpu.run(program, tokens=rows, logits=1, seqs=1)
        assert torch.equal(y[:rows], wanted(x[:rows]))
