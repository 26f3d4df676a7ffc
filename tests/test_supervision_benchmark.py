"""`benchmarks/supervision.py` with few tokens: numbers of a real server, and of a kill that is too late."""

from __future__ import annotations

import importlib
import json
import sys
from argparse import Namespace
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent
SHORT = ["--streams", "4", "--tokens", "8", "--runs", "1"]

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="/proc is needed")


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return importlib.import_module("supervision")


def test_a_server_of_few_tokens_has_numbers_and_its_engine_is_found(script: ModuleType) -> None:
    asked = Namespace(model=str(ROOT / "examples" / "nano-hybrid"), streams=4, tokens=8, runs=1)
    found = script.measured("process", asked)
    assert 0 < found["listen_s"] <= found["ready_s"]
    assert found["tokens_per_s"] > 0
    assert found["cpu_us_per_token"] >= 0, "a tick of the clock may be longer than the run"


@pytest.mark.parametrize("late_s", [0.1, None])
def test_numbers_are_printed_also_where_every_stream_ended_before_the_kill(
    script: ModuleType,
    late_s: float | None,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    times = [9.0] if late_s is None else [9.0, 10.0 + late_s]
    reply = script.Reply("ab", 2, times)

    @contextmanager
    def serving(kind: str, asked: Namespace) -> Iterator[tuple[int, int, float, float]]:
        yield 1, 2, 0.0, 0.0

    async def load(port: int, asked: Namespace) -> list[Any]:
        return [reply] * 2

    async def load_and_kill(port: int, pid: int, asked: Namespace) -> tuple[list[Any], float]:
        return [reply] * 2, 10.0

    for name, fake in (("serving", serving), ("load", load), ("load_and_kill", load_and_kill)):
        monkeypatch.setattr(script, name, fake)
    monkeypatch.setattr(script, "measured", lambda kind, asked: {"kind": kind})
    monkeypatch.setattr("sys.argv", ["supervision.py", *SHORT])
    script.main()
    found = json.loads(capsys.readouterr().out)
    assert (found["streams"], found["tokens"], found["process"]) == (4, 8, {"kind": "process"})
    if late_s is None:
        assert found["killed"]["streams_open"] == 0
        assert "give more --tokens" in found["killed"]["note"]
    else:
        assert found["killed"]["streams_open"] == found["killed"]["same"] == 2
        assert found["killed"]["first_s"] == found["killed"]["last_s"] == late_s
