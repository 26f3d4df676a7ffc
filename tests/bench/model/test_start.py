"""Sides are started as they are served: a startup that keeps an image is followed by one that uses it."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace

import pytest

from plait.bench.engines.plait_engine import choose_image, describe_image, describe_loaded
from plait.bench.model.compare import Contestant
from plait.bench.model.run import start
from plait.config import EngineConfig

SIDE = '''
from pathlib import Path
class CountingSide:
    """Its first startup keeps an image, and later ones use it."""
    def __init__(self, model, threads, max_model_len, max_num_seqs, options):
        kept = Path(model)
        self.facts = {"startup_image": "used" if kept.exists() else options["first"], "options": options}
        kept.touch()
    def close(self):
        Path(self.facts["options"]["log"]).open("a").write("closed ")
'''


@pytest.mark.parametrize(("first", "then"), [("kept", "used"), ("it runs on a GPU", "it runs on a GPU")])
def test_start_runs_again_only_where_the_first_startup_kept_an_image(
    tmp_path: Path, first: str, then: str
) -> None:
    script, log = tmp_path / "counting_side.py", tmp_path / "log"
    script.write_text(SIDE)
    who = Contestant("x", script, str(tmp_path / "m"), {"first": first, "log": str(log)}, is_plait=False)
    with ExitStack() as stack:
        _, facts = start(who, 2, {"max_model_len": 8, "max_num_seqs": 1}, stack)
    assert facts["startup_image"] == then
    assert log.read_text().split() == ["closed"] * (2 if first == "kept" else 1)


def test_plait_side_describes_a_model_from_its_image() -> None:
    part = SimpleNamespace(bound={"linear": "native"}, weights_nbytes=7, dtype="bfloat16")
    program = SimpleNamespace(threads=SimpleNamespace(threads=3))
    image = SimpleNamespace(part=part, runner=SimpleNamespace(replay=SimpleNamespace(program=program)))
    found = describe_loaded(image)
    assert found == {"threads": 3, "weights_nbytes": 7, "dtype": "bfloat16", "ops": {"linear": "native"}}
    assert describe_image("m", EngineConfig(), True) == "used"
    assert choose_image({"threads": 1}) == {"threads": 1}, "this revision's images say what they run"


def test_plait_side_says_why_there_is_no_image() -> None:
    assert describe_image("m", EngineConfig(startup_image="off"), False) == "--startup-image is off"
