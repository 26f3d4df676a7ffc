"""`plait bench model` on models that fill canvases: passes are timed behind the first canvas of each text."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from plait.bench.engines.plait_engine import PlaitSide, TimedRun, TimedStep
from plait.bench.model import run
from plait.bench.model.measure import MeasureSizes
from plait.bench.model.memory import footprint
from plait.bench.model.run import Job, WrongOutput
from tests.families import canvases

SIZE = canvases.SIZES["sdar"]
OPTIONS = {"device": "cpu", "startup_image": "off"}
PROMPTS = [[5, 6, 7, 8, 9, 10], [9, 8, 7]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    base = tmp_path_factory.mktemp("sdar")
    canvases.save(base / "model", *canvases.write("sdar", base))
    return base / "model"


def side_of(folder: Path, **options: object) -> PlaitSide:
    return PlaitSide(str(folder), 1, 64, 4, {**OPTIONS, **options})


@pytest.fixture
def sides(folder: Path) -> Iterator[dict[float, PlaitSide]]:
    """By threshold: above 0 a pass fills a canvas; above 1 it fills one place."""
    found = {threshold: side_of(folder, canvas_threshold=threshold) for threshold in (0.0, 1.0)}
    yield found
    for side in found.values():
        side.close()


def test_decode_counts_the_tokens_of_each_pass(sides: dict[float, PlaitSide]) -> None:
    for side in sides.values():
        assert side.decode([5] * 2 * SIZE, 4 * SIZE, "runner") > 0
    assert sides[0.0].observed == {"tokens_per_pass": SIZE}
    assert 0.5 < sides[1.0].observed["tokens_per_pass"] <= 1


def test_batch_counts_what_is_written_behind_all_first_canvases(sides: dict[float, PlaitSide]) -> None:
    found = sides[0.0].batch(PROMPTS, 2 * SIZE, "runner")
    assert found["tokens"] == len(PROMPTS) * 3 * SIZE
    assert found["decode_tokens"] == len(PROMPTS) * 3 * SIZE - (2 + 1), "the first canvases hold prompts, too"
    assert 0 < found["decode_seconds"] < found["seconds"]
    assert sides[0.0].prefill(PROMPTS[1], "runner") > 0, "a prompt shorter than a canvas is computed with it"


def test_time_behind_the_first_tokens_of_all() -> None:
    steps = [TimedStep(8, 2, True, seconds) for seconds in (1.0, 2.0, 4.0, 8.0)]
    timed = TimedRun(steps, [(1, "a", 3), (2, "a", 5), (2, "b", 7), (4, "a", 11), (4, "b", 13)])
    assert timed.behind_first(2) == (12.0, 24, 2)
    assert timed.behind_first(1) == (14.0, 36, 3)


def test_measures_are_of_whole_canvases(folder: Path) -> None:
    about = footprint(str(folder), OPTIONS)
    assert about.canvas == SIZE
    found = MeasureSizes(tokens=SIZE + 1).measures(100, about.canvas)
    assert {m.tokens for m in found if m.kind in ("decode", "batch")} == {2 * SIZE}
    assert not [m for m in found if (m.kind, m.level) == ("decode", "llm")]


def test_another_text_than_the_reference_ops_write_is_refused(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Ours:
        def greedy(self, prompts: list[list[int]], tokens: int) -> list[list[int]]:
            return [ids[:1] * tokens for ids in prompts]

    running: Any = [run.Running(run.Contestant(run.OURS, Path(), str(folder)), Ours(), {})]  # type: ignore[arg-type]
    about = footprint(str(folder), OPTIONS)
    prompts = run.Prompts(None, about.vocab_size)
    agreed = [16, 16, 16, 16]
    monkeypatch.setattr(run, "_compare_reference", lambda *_: (agreed, (0.0, 0.0)))
    assert run.check(Job(str(folder), OPTIONS), running, prompts, about)[0]["equals_reference_for"] == agreed
    agreed[2] = 3
    with pytest.raises(WrongOutput, match=r"write another text .* after 3 tokens, and 16 are required"):
        run.check(Job(str(folder), OPTIONS), running, prompts, about)
