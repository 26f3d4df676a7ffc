"""The lean client of `benchmarks/overload.py`: what it makes of replies, refusals and cuts."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Awaitable, Iterator
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from plait.bench.serve.client import ServerTarget
from plait.bench.serve.score import score
from plait.bench.serve.workload import Length, Workload
from plait.errors import QueueFull
from tests.server.conftest import serving
from tests.server.fake import EchoLoop, fake_front

SHORT = Workload(input_len=Length(8, 16), output_len=Length(6, 6), max_len=2048)
FILE = Path(__file__).resolve().parents[3] / "benchmarks" / "flood.py"


class Loop(EchoLoop):
    is_full = False

    def check_capacity(self) -> None:
        if self.is_full:
            raise QueueFull("max_waiting (0) requests wait already; try again later")


@pytest.fixture(scope="module")
def flood() -> ModuleType:
    spec = importlib.util.spec_from_file_location("flood", FILE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["flood"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def loop() -> Loop:
    return Loop()


@pytest.fixture
def target(loop: Loop) -> Iterator[ServerTarget]:
    front = fake_front()
    front.loop = loop
    with serving(front, api_key=("alice:secret",)) as client:
        yield ServerTarget(name="fake", base_url=client.base_url, model="fake", api_key="secret")


def send_fully(load: Any, seconds: float) -> Awaitable[None]:
    """Three clients send their requests for so long."""
    found: Awaitable[None] = load.full(3, seconds)
    return found


def test_whole_replies_are_reported_with_their_lengths_and_moments(
    flood: ModuleType, target: ServerTarget
) -> None:
    for seconds in (0.3, 3.0, 30.0):  # a busy machine takes longer until a client sends its second request
        run = flood.drive(flood.Flood.of(target, SHORT, 4), partial(send_fully, seconds=seconds))
        if len(run.outcomes) > 3:
            break
    assert len(run.outcomes) > 3
    for one in run.outcomes:
        assert (one.status, one.error, one.output_len) == (200, "", 6)
        assert one.ttft_s is not None
        assert 0 < one.ttft_s + sum(one.gaps_s) <= one.e2e_s
        assert one.input_len > 0


def test_a_rejected_client_is_counted_and_asks_on(
    flood: ModuleType, target: ServerTarget, loop: Loop
) -> None:
    loop.is_full = True
    run = flood.drive(flood.Flood.of(target, SHORT, 4), lambda load: load.at(200.0, 0.3, 1))
    facts = score(run.outcomes, run.duration_s)
    assert facts["refused"] == facts["failed"] == len(run.outcomes) > 10
    assert facts["errors"] == {"429 queue_full": len(run.outcomes)}


def test_a_reply_that_breaks_off_is_none(flood: ModuleType) -> None:
    head, event = b"HTTP/1.1 200 OK\r\n\r\n", b'data: {"choices":[{"delta":{"content":"a"}}]}\n\n'
    whole = flood.Exchange(
        0, 1.0, [(2.0, head + event[:9]), (3.0, event[9:] + b"data: [DONE]\n\n")], ended=4.0
    )
    one = flood.outcome_of(whole, 0.5)
    assert (one.error, one.started, one.ttft_s, one.e2e_s) == ("", 0.5, 2.0, 3.0)
    cut = flood.Exchange(1, 1.0, [(2.0, head + event)], ended=4.0, broken="reset")
    assert (flood.outcome_of(cut, 0.0).error, flood.outcome_of(cut, 0.0).message) == ("stream cut", "reset")
    assert flood.outcome_of(flood.Exchange(2, 1.0, ended=2.0, broken="reset"), 0.0).error == "connection cut"
