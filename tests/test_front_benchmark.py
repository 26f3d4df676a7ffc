"""`benchmarks/front.py`: it measures a real server, and prints nothing of streams that are not right."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from types import ModuleType

import pytest

from plait.bench.serve.client import RequestOutcome
from plait.bench.serve.server_process import read_health
from plait.bench.serve.workload import Workload

ROOT = Path(__file__).resolve().parent.parent
SHORT = ["front.py", "--streams", "3", "--tokens", "24", "--step-ms", "1", "--turns", "1"]


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return importlib.import_module("front")


@pytest.mark.parametrize("kind", ["completions", "chat"])
def test_two_trees_take_turns_and_a_ratio_is_printed(
    script: ModuleType, kind: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    sides = {"completions": {"this"}, "chat": {"before", "this"}}[kind]
    more = ["--before", str(ROOT)] if "before" in sides else []
    monkeypatch.setattr("sys.argv", [*SHORT, "--kind", kind, *more])
    script.main()
    found = json.loads(capsys.readouterr().out)
    assert found["machine"]["cpu"]
    assert set(found["sides"]) == sides
    for numbers in found["sides"].values():
        assert numbers.keys() == {"cpu_us_per_token", "events_per_token", "time_of_engine"}
        assert numbers["cpu_us_per_token"] > 0
        assert 0 < numbers["events_per_token"] <= 1
    assert ("before_over_this" in found) == ("before" in sides)


def test_the_server_ends_with_its_context(script: ModuleType) -> None:
    with script.serving(ROOT, 1.0) as (url, _):
        assert read_health(url)[0] == 200
    assert read_health(url)[0] == 0


@pytest.mark.parametrize("cut", [slice(0, -1), slice(1, None)])
def test_a_stream_that_lacks_a_token_ends_the_run(script: ModuleType, cut: slice) -> None:
    load = Workload()
    text = load.chat(0).turns[0].text
    script.check([RequestOutcome(0, 0, 0.0, text=text)], load, len(text))
    with pytest.raises(SystemExit, match="stream 0 is not its prompt"):
        script.check([RequestOutcome(0, 0, 0.0, text=text[cut])], load, len(text))
    with pytest.raises(SystemExit, match="stream 0 failed: stream cut: gone"):
        script.check([RequestOutcome(0, 0, 0.0, error="stream cut", message="gone")], load, 1)
