"""The reference of `plait bench model`: a side with the reference ops, which checks our tokens."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from plait.bench.engines.child import Child, answers
from plait.bench.model import run
from plait.bench.model.compare import SIDES, Contestant
from plait.bench.model.run import OURS, Job
from plait.unread_options import KERNELS

NANO = str(Path(__file__).resolve().parents[3] / "examples" / "nano-hybrid")
PROMPTS, TOKENS = [[5, 6, 7], [9, 8]], 4


class SideHere:
    """A side that answers the commands of its pipe in this process: a child takes seconds to load torch."""

    def __init__(self, who: Contestant, room: dict[str, Any]) -> None:
        self._child = Child(str(who.script))
        given = {"model": who.model, "threads": 1, "options": dict(who.options), **room}
        self.facts = self.ask("load", started=time.time(), **given)

    def ask(self, do: str, **given: object) -> Any:
        line = json.dumps(next(answers(self._child, iter([json.dumps({"do": do, **given})]))))
        return json.loads(line)["value"]

    def greedy(self, prompts: Sequence[Sequence[int]], tokens: int) -> Any:
        return self.ask("greedy", prompts=prompts, tokens=tokens)

    def close(self) -> None:
        self._child.side.close()


@pytest.mark.sampled(2, across="heavy")
def test_reference_agrees_with_native_kernels_and_finds_a_wrong_token(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    options: dict[str, dict[str, Any]] = {}

    def start_here(who: Contestant, threads: int | None, room: dict[str, Any], stack: ExitStack) -> Any:
        options[who.name] = dict(who.options)
        side = SideHere(who, room)
        stack.callback(side.close)
        return side, side.facts

    monkeypatch.setattr(run, "start", start_here)
    settings = {"device": "cpu", "isa": "native", "startup_image": "off"}
    with ExitStack() as stack:
        room = {"max_model_len": 16, "max_num_seqs": 2}
        ours, facts = start_here(Contestant(OURS, SIDES / "plait_engine.py", NANO, settings), 1, room, stack)
        found = ours.greedy(PROMPTS, TOKENS)
    assert facts["ops"]["linear"].startswith("native")
    wrong = [[*found[0][:-1], (found[0][-1] + 1) % 64], found[1]]
    agreed, (precise_gap, gap) = run._compare_reference(Job(NANO, settings), PROMPTS, wrong, TOKENS)
    assert agreed == [TOKENS, TOKENS]
    assert precise_gap <= run.TIE
    assert gap > 0.1, "the wrong token is below the reference's choice"
    assert options["precise"]["precise"] is True
    assert options["reference ops"]["ops"] == "reference"
    unread = options["precise"].keys() - options["reference ops"].keys()
    assert unread == {*KERNELS}, "options of native kernels have no effect there"
