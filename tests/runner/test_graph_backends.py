"""Graphs of CUDA, with CUDA's streams and graphs made up: on which stream a step is captured."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from plait.runner.device.graph_backends import CudaGraphs


class FakeStream:
    def __init__(self, device: torch.device) -> None:
        self.device = device

    def wait_stream(self, other: FakeStream) -> None:
        assert other.device == self.device


def test_a_step_is_captured_on_a_stream_of_its_own_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's own stream for captures is one for the process, of the device that was captured on first."""
    entered: list[FakeStream] = []

    @contextlib.contextmanager
    def capture(graph: object, pool: object, stream: FakeStream, **how: object) -> Iterator[None]:
        assert how == {"capture_error_mode": "thread_local"}
        entered.append(stream)
        yield

    @contextlib.contextmanager
    def select(stream: FakeStream) -> Iterator[None]:
        entered.append(stream)
        yield

    fakes: dict[str, Any] = {
        "graph_pool_handle": lambda: (0, 1),
        "Stream": FakeStream,
        "current_stream": FakeStream,
        "stream": select,
        "graph": capture,
        "CUDAGraph": object,
    }
    for name, fake in fakes.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    graphs = [CudaGraphs(torch.device("cuda", index), None) for index in (0, 1)]
    x = torch.ones(3)

    def step() -> Tensor:
        return x + 1

    for graph in graphs:
        assert torch.equal(graph.capture(step, [x]).result, torch.full((3,), 2.0))
    assert [stream.device.index for stream in entered] == [0, 0, 0, 1, 1, 1]  # run, the caller's own, capture


def test_a_capture_that_fails_at_its_end_leaves_the_stream_of_the_caller(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """torch ends a capture before it restores the stream, so an error of the driver skips that."""
    own = FakeStream(torch.device("cuda", 0))
    now = [own]

    @contextlib.contextmanager
    def select(stream: FakeStream) -> Iterator[None]:
        before, now[0] = now[0], stream
        try:
            yield
        finally:
            now[0] = before

    @contextlib.contextmanager
    def capture(graph: object, pool: object, stream: FakeStream, **how: object) -> Iterator[None]:
        now[0] = stream
        yield
        raise RuntimeError("CUDA error: operation failed due to a previous error during capture")

    fakes: dict[str, Any] = {
        "graph_pool_handle": lambda: (0, 1),
        "Stream": FakeStream,
        "current_stream": lambda device: now[0],
        "stream": select,
        "graph": capture,
        "CUDAGraph": object,
    }
    for name, fake in fakes.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    x = torch.ones(3)
    with pytest.raises(RuntimeError, match="previous error during capture"):
        CudaGraphs(torch.device("cuda", 0), None).capture(lambda: x + 1, [x])
    assert now == [own]
