"""The host memory that a GPU swaps into: not pinned for one swap, not given twice, no larger than needed."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from plait.state.swap import ALIGN, DeviceSwap, HostPiece, HostPool, pin_memory

SEGMENT = 4 * ALIGN


def pool_of(made: list[int]) -> HostPool:
    def make(nbytes: int) -> torch.Tensor:
        made.append(nbytes)
        return torch.zeros(nbytes, dtype=torch.uint8)

    return HostPool(make, SEGMENT)


@given(sizes=st.lists(st.tuples(st.booleans(), st.integers(0, 3 * SEGMENT)), max_size=40))
@settings(max_examples=100, deadline=None)
def test_pieces_never_overlap_and_the_pool_is_no_larger_than_what_was_in_use(
    sizes: list[tuple[bool, int]],
) -> None:
    made: list[int] = []
    pool, held, most = pool_of(made), list[tuple[HostPiece, ...]](), 0
    for takes, size in sizes:
        if takes or not held:
            pieces = pool.take(size)
            assert sum(p.nbytes for p in pieces) == -(-size // ALIGN) * ALIGN
            held.append(pieces)
        else:
            pool.give(held.pop(size % len(held)))
        spans = sorted(p for pieces in held for p in pieces)
        for one, two in pairwise(spans):
            assert one.segment < two.segment or one.stop <= two.start
        most = max(most, sum(p.nbytes for p in spans))
        assert pool.nbytes == sum(made) < most + SEGMENT or not made
    for pieces in held:
        pool.give(pieces)
    assert pool._free == [HostPiece(i, 0, SEGMENT) for i in range(len(made))], "all is whole again"


def test_memory_that_is_given_back_is_used_again_and_not_allocated() -> None:
    made: list[int] = []
    pool = pool_of(made)
    assert made == [], "nothing is pinned before the first swap"
    for _ in range(50):
        pool.give(pool.take(SEGMENT))
    assert made == [SEGMENT]
    a, b, c = (pool.take(ALIGN) for _ in range(3))
    pool.give(a)
    pool.give(c)
    scattered = pool.take(3 * ALIGN)
    assert len(scattered) == 2, "in pieces, where none is large enough"
    assert made == [SEGMENT]
    assert pool.take(0) == ()
    pool.give(b)


def test_rows_of_any_width_come_back_into_other_rows() -> None:
    widths = (1, 2, 6, 12, 24, 0)
    tensors = [torch.randint(0, 256, (6, n), dtype=torch.uint8) for n in widths]
    swap = DeviceSwap([tensors[:3], tensors[3:], []], torch.device("cpu"), pool_of([]))
    before = [t.clone() for t in tensors]
    saved = swap.save([[4, 1], [0, 5, 2], []])
    for tensor in tensors:
        tensor.fill_(7)
    swap.load([[2, 3], [1, 0, 4], []], saved)
    for tensor, old in zip(tensors[:3], before[:3], strict=True):
        assert torch.equal(tensor[[2, 3]], old[[4, 1]])
        assert bool((tensor[[0, 1, 4, 5]] == 7).all())
    for tensor, old in zip(tensors[3:], before[3:], strict=True):
        assert torch.equal(tensor[[1, 0, 4]], old[[0, 5, 2]])


class FakeStream:
    def __init__(self, log: list[str], name: str) -> None:
        self.log, self.name = log, name

    def wait_stream(self, other: FakeStream) -> None:
        self.log.append(f"{self.name} waits for {other.name}")


def test_copies_run_on_the_side_stream_in_the_order_that_keeps_them_right(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    log: list[str] = []
    current, side = FakeStream(log, "current"), FakeStream(log, "side")

    @contextmanager
    def stream(chosen: FakeStream) -> Iterator[None]:
        log.append(f"on {chosen.name}")
        yield
        log.append(f"off {chosen.name}")

    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: current)
    monkeypatch.setattr(torch.cuda, "stream", stream)
    monkeypatch.setattr(
        torch.Tensor, "record_stream", lambda tensor, used: log.append(f"kept for {used.name}")
    )
    swap = DeviceSwap([[torch.zeros(3, 8, dtype=torch.uint8)]], torch.device("cpu"), pool_of([]))
    swap._side = side  # type: ignore[assignment]
    saved = swap.save([[1]])
    assert log == ["side waits for current", "on side", "off side", "kept for side"]
    log.clear()
    swap.load([[2]], saved)
    assert log == ["on side", "off side", "current waits for side", "kept for current"]


def test_memory_that_cannot_be_pinned_is_plain_memory_with_a_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    plain = torch.empty

    def empty(*size: int, pin_memory: bool = False, **more: object) -> torch.Tensor:
        if pin_memory:
            raise RuntimeError("CUDA error: out of memory")
        return plain(*size, **more)  # type: ignore[call-overload, no-any-return]

    monkeypatch.setattr(torch, "empty", empty)
    with caplog.at_level(logging.WARNING, "plait"):
        assert pin_memory(1 << 20).numel() == 1 << 20
    assert "swap: 1 MiB cannot be pinned (CUDA error: out of memory)" in caplog.text
