"""The sampling kernel: it chooses the reference's token, whatever the row of logits looks like."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from plait.errors import ShapeMismatch
from plait.kernels.cpu.pointwise.sample import _largest, _sample
from plait.kernels.load import executor, row_functions, sampling_kernels
from plait.ops.sample import largest, sample

SIZES = (1, 2, 7, 15, 16, 17, 63, 64, 65, 100, 511, 512, 513, 1500)


def columns(
    rows: int, temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0
) -> list[Tensor]:
    return [
        torch.full((rows,), value, dtype=torch.int64 if i == 1 else torch.float64)
        for i, value in enumerate((temperature, top_k, top_p, min_p))
    ]


def numbers(rows: int) -> Tensor:
    """Random numbers that cover [0, 1) evenly."""
    return (torch.arange(rows, dtype=torch.float64) + torch.rand(rows, dtype=torch.float64)) / rows


@pytest.mark.parametrize("vocab", SIZES)
def test_the_largest_is_found_with_the_lowest_id(cpu: Any, vocab: int) -> None:
    logits = torch.randn(9, vocab + 3).round(decimals=1)[:, 2:-1]  # ties, rows that lie apart
    logits[1] = -torch.inf
    logits[2] = 0.0
    logits[3, -1] = torch.inf
    logits[4, 0] = 1e30
    logits[5] = -logits[5].abs() - 3e38
    logits[6] = torch.full_like(logits[6], -0.0)
    for got, want in zip(_largest(cpu, logits), largest(logits), strict=True):
        assert torch.equal(got, want)


@pytest.mark.parametrize("vocab", SIZES)
@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_the_first_nan_is_the_largest(cpu: Any, vocab: int, sign: float) -> None:
    logits = torch.randn(vocab, vocab) if vocab < 70 else torch.randn(8, vocab)
    for i, row in enumerate(logits):
        row[-1] = torch.inf
        row[i * 97 % vocab :: 5] = math.copysign(math.nan, sign)
    ids, values = _largest(cpu, logits)
    assert torch.equal(ids, logits.argmax(-1))
    assert values.isnan().all()


SETTINGS = [
    dict(temperature=0.7, top_k=40, top_p=0.9),
    dict(top_k=1),
    dict(temperature=2.0, top_k=1000),
    dict(temperature=1.5, top_k=5, min_p=0.2),
    dict(),
    dict(temperature=0.1),
    dict(top_p=0.5),
    dict(temperature=1.3, top_p=0.95, min_p=0.02),
    dict(min_p=0.01),
    dict(temperature=2.0, min_p=0.001),
    dict(top_p=0.0),
    dict(min_p=1.0),
    dict(temperature=1e-6),
    dict(temperature=1e9, top_p=0.99),
]
ROWS: dict[str, Callable[[int], Tensor]] = {
    "peaked": lambda vocab: 4 * torch.randn(vocab),
    "flat": lambda vocab: torch.randn(vocab) / 10,
    "with ties": lambda vocab: (2 * torch.randn(vocab)).round(),
    "all equal": torch.zeros,
    "rising": lambda vocab: torch.arange(vocab) / 100,
    "falling": lambda vocab: -torch.arange(vocab) / 100,
    "banned": lambda vocab: (
        torch.randn(vocab)
        .where(torch.rand(vocab) < 0.5, -torch.inf)
        .index_fill(0, torch.tensor([vocab // 2]), 1.0)
    ),
    "extreme": lambda vocab: 1e30 * torch.randn(vocab),
}


@pytest.mark.parametrize("vocab", [1, 7, 100, 1500])
@pytest.mark.parametrize("shape", ROWS)
@pytest.mark.parametrize("setting", SETTINGS, ids=str)
def test_a_draw_is_the_draw_of_the_reference(cpu: Any, vocab: int, shape: str, setting: Any) -> None:
    logits = torch.stack([ROWS[shape](vocab) for _ in range(12)])
    arguments = (logits, *columns(12, **setting), numbers(12))
    want = sample(*arguments)
    fast = next(v for v in sample.variants if v.name == "candidates")
    for got in (_sample(cpu, *arguments), fast.fn(*arguments)):
        # Where it falls on the border of two tokens, the last bits of a sum decide between neighbours.
        same = got == want
        assert same.all() or shape in ("all equal", "flat", "with ties", "rising", "falling")
        assert same.sum() >= 11
        near = logits.gather(1, got[:, None]) - logits.gather(1, want[:, None])
        assert (near.abs() < 1.01).all() or same.all()


@given(
    values=st.lists(st.sampled_from([-2.0, -1.0, 0.0, 0.5, 0.5, 3.0, -math.inf]), min_size=1, max_size=12),
    temperature=st.sampled_from([1e-6, 0.3, 1.0, 2.0]),
    top_k=st.integers(-1, 13),
    top_p=st.sampled_from([0.0, 0.3, 0.9, 1.0]),
    min_p=st.sampled_from([0.0, 0.2, 1.0]),
    u=st.floats(0, 1, exclude_max=True),
)
@settings(max_examples=300, deadline=None)
def test_a_draw_of_few_tokens_is_that_of_the_reference(
    cpu: Any, values: list[float], temperature: float, top_k: int, top_p: float, min_p: float, u: float
) -> None:
    if max(values) == -math.inf:
        values[0] = 0.0
    row = torch.tensor([values])
    arguments = (row, *columns(1, temperature, top_k, top_p, min_p), torch.tensor([u], dtype=torch.float64))
    chosen = int(_sample(cpu, *arguments))
    assert chosen == int(sample(*arguments))
    assert values[chosen] > -math.inf


def test_rows_are_drawn_alike_alone_and_on_one_thread(cpu: Any) -> None:
    logits = 3 * torch.randn(42, 1000)
    each = [columns(1, **SETTINGS[i % 14]) for i in range(42)]
    settings = [torch.cat([s[i] for s in each]) for i in range(4)]
    u = numbers(42)
    whole = _sample(cpu, logits, *settings, u)
    alone = executor(1)
    assert alone is not None
    assert torch.equal(whole, _sample(alone, logits, *settings, u))
    assert torch.equal(torch.stack(_largest(alone, logits)), torch.stack(_largest(cpu, logits)))
    alone.close()
    one = [_sample(cpu, logits[i : i + 1], *each[i], u[i : i + 1]) for i in range(42)]
    assert torch.equal(whole, torch.cat(one))


def test_a_recording_draws_what_the_call_draws(cpu: Any) -> None:
    logits = torch.randn(64, 100)
    arguments = (logits, *columns(64, top_k=9), numbers(64))
    want, top = _sample(cpu, *arguments), _largest(cpu, logits)
    with cpu.record(tokens=64, logits=65) as program:
        out, (ids, values) = _sample(cpu, *arguments), _largest(cpu, logits)
    for t in (out, ids, values):
        t.zero_()
    cpu.run(program, tokens=5, logits=1, seqs=1)
    for got, wanted in ((out, want), (ids, top[0]), (values, top[1])):
        assert torch.equal(got[:5], wanted[:5])
        assert not got[5:].any()


@pytest.mark.parametrize("value", [math.nan, -math.inf])
def test_rows_without_a_maximum_do_no_harm(cpu: Any, value: float) -> None:
    logits = torch.full((3, 70), value)
    for setting in SETTINGS:
        got = _sample(cpu, logits, *columns(3, **setting), numbers(3))
        assert ((got >= 0) & (got < 70)).all()


def test_what_a_kernel_would_misread_is_refused(cpu: Any) -> None:
    logits, settings, u = torch.randn(4, 8), columns(4), numbers(4)
    for call in (
        lambda: _largest(cpu, logits.double()),
        lambda: _largest(cpu, logits[:, :0]),
        lambda: _sample(cpu, logits, *settings, u.float()),
        lambda: _sample(cpu, logits, *settings, u[:3]),
        lambda: _sample(cpu, logits.T, *settings, u),
    ):
        with pytest.raises(ShapeMismatch):
            call()


def test_arrays_give_the_tokens_that_tensors_give(cpu: Any) -> None:
    """Also of rows that lie apart, as with an end of the vocabulary that may not be chosen."""
    logits = (3 * torch.randn(6, 103)).round(decimals=1)[:, :-3]
    settings = [torch.cat([column, column]) for column in columns(3, 0.8, 7, 0.9)]
    draws = [*settings, numbers(6)]
    find_largest, draw = row_functions(cpu, sampling_kernels())
    ids, values = find_largest(logits.numpy())
    assert [ids.tolist(), values.tolist()] == [part.tolist() for part in _largest(cpu, logits)]
    found = draw(logits.numpy(), tuple(setting.numpy() for setting in draws))
    assert found.tolist() == _sample(cpu, logits, *draws).tolist()
