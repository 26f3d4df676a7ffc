"""The speed that a command reports when a text has ended."""

from __future__ import annotations

import re
import time

import pytest

from plait.cli.common import progress
from plait.cli.common.progress import MIN_PROMPT, MIN_WRITTEN, Clock, LoadingBar, Status


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The time, in a list of one."""
    time = [100.0]
    monkeypatch.setattr(progress.time, "perf_counter", lambda: time[0])
    return time


def timed(now: list[float], prompt: int, written: int) -> str:
    """A reply: its first token takes half a second, and every other one a tenth."""
    clock = Clock(prompt)
    for n in range(1, written + 1):
        now[0] += 0.5 if n == 1 else 0.1
        clock.tokens(n)
    return str(clock)


def test_a_long_reply_has_both_speeds_each_of_its_own_tokens(now: list[float]) -> None:
    told = "200 prompt tokens, 400 tok/s · first token after 0.50 s · 101 tokens, 10.0 tok/s"
    assert timed(now, 200, 101) == told


@pytest.mark.parametrize("written", [1, 2, MIN_WRITTEN - 1])
def test_a_short_reply_has_no_speed(now: list[float], written: int) -> None:
    told = timed(now, 3, written)
    assert "tok/s" not in told
    assert told.startswith("3 prompt tokens · first token after 0.50 s · ")


def test_one_is_one(now: list[float]) -> None:
    assert timed(now, 1, 1) == "1 prompt token · first token after 0.50 s · 1 token"


def test_speeds_are_reported_from_so_many_tokens_on(now: list[float]) -> None:
    assert timed(now, MIN_PROMPT, MIN_WRITTEN).count("tok/s") == 2


def test_a_reply_without_a_token_says_so(now: list[float]) -> None:
    assert str(Clock(5)) == "5 prompt tokens · no token written"
    now[0] += 1
    assert str(Clock(1)) == "1 prompt token · no token written"


@pytest.fixture
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    """The lines that come every ten seconds come at once."""
    monkeypatch.setattr(progress, "EVERY_S", 0.001)


def until(said: str, capsys: pytest.CaptureFixture[str]) -> str:
    """Everything on stderr until `said` is there."""
    text = ""
    while said not in text:
        time.sleep(0.002)
        text += capsys.readouterr().err
    return text


@pytest.mark.usefixtures("often")
def test_without_a_terminal_lines_say_what_goes_on(capsys: pytest.CaptureFixture[str]) -> None:
    with Status("reading") as status:
        assert re.match(r"plait: reading, \d+ s so far\n", until("so far\n", capsys))
        status.say("packing")
        until("plait: packing, ", capsys)
    with LoadingBar("loading m") as loading:
        loading.update("weights", 1, 3)
        until("plait: loading m: weights, ", capsys)


@pytest.mark.usefixtures("often")
def test_quiet_work_says_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    with Status("reading", is_quiet=True), LoadingBar("loading m", is_quiet=True) as loading:
        loading.update("weights", 1, 3)
        time.sleep(0.02)
    assert capsys.readouterr().err == ""


def test_a_terminal_has_one_line_that_is_written_over(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(progress.sys.stderr, "isatty", lambda: True)
    with Status("reading") as status:
        status.say("packing")
    assert capsys.readouterr().err == "\r\x1b[Kpacking …\r\x1b[K"
