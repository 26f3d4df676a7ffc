"""Several decode steps in one plan give what as many plans give."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from plait import LLM, SamplingParams
from plait.errors import EngineError
from plait.schedule.multi_step import MOST_STEPS
from plait.schedule.plan import Chunk, Plan, SamplingBatch, SamplingRow
from tests.families import tiny
from tests.runner.recordings import BLOCK, loaded

GREEDY = SamplingParams(temperature=0.0)
NAMES = ["llama", "gemma3", "deepseek_v3"]


@pytest.fixture(scope="module", params=NAMES)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp(request.param)
    tiny.write(request.param, path)
    return path


def rows(start: int, *params: SamplingParams) -> SamplingBatch:
    made = (SamplingRow(p, 1, 1, position=start + 1, seed=17 + i) for i, p in enumerate(params))
    return SamplingBatch(tuple(made))


@pytest.mark.parametrize("params", [(GREEDY, GREEDY), (GREEDY, SamplingParams(temperature=1.5))])
def test_the_steps_of_a_plan_are_those_of_as_many_plans(folder: Path, params: Any) -> None:
    """Over the end of a block, from prompts of several lengths."""
    with loaded(folder) as model:
        runner, groups = model.runner, model.runner.groups
        tables = [tuple((1 + 2 * s, 2 + 2 * s) for _ in groups) for s in range(2)]
        lens, said, logits = (BLOCK - 3, BLOCK - 6), [], []
        for num_steps in (1, 6):
            for s, length in enumerate(lens):
                ids = tuple(range(3 + s, 3 + s + length))
                runner.execute(Plan(0, (Chunk(s, 0, ids, tables[s], 0, 1),)), rows(length - 1, GREEDY))
            tokens: list[tuple[int, ...]] = [(5,), (6,)]
            while len(tokens[0]) < 7:
                done = len(tokens[0]) - 1
                chunks = tuple(
                    Chunk(s, lens[s] + done, tokens[s][-1:], tables[s], 0, 1) for s in range(len(lens))
                )
                batch = SamplingBatch(
                    tuple(
                        SamplingRow(p, 1, 1, position=lens[s] + done + 1, seed=s)
                        for s, p in enumerate(params)
                    )
                )
                answers = runner.execute(Plan(1, chunks, num_steps=num_steps), batch)
                assert all(len(answer.token_ids) == num_steps for answer in answers)
                tokens = [(*old, *new.token_ids) for old, new in zip(tokens, answers, strict=True)]
            said.append(tokens)
            replay: Any = runner._replay
            logits.append(replay._logits[:2].clone())
        assert said[0] == said[1]
        torch.testing.assert_close(
            *logits, rtol=0, atol=0
        )  # which every token and entry before has a part in


def test_what_is_not_recorded_is_refused(folder: Path) -> None:
    with loaded(folder, ops="reference") as model:
        tables = tuple((1, 2) for _ in model.runner.groups)
        plan = Plan(0, (Chunk(0, 0, (3,), tables, 0, 1),), num_steps=2)
        with pytest.raises(EngineError, match="2 steps at once"):
            model.runner.execute(plan, rows(0, GREEDY))


@pytest.mark.parametrize(
    "params",
    [
        [{"max_tokens": n} for n in (40, 33, 7, 1)],
        [{"max_tokens": 30, "temperature": 1.0, "seed": i} for i in range(4)],
        [{"max_tokens": 30, "min_tokens": 12 * i, "stop_token_ids": [*range(0, 90, 3)]} for i in range(3)],
        [{"max_tokens": 30, "logit_bias": {5: 4.0}}, {"max_tokens": 30}],
    ],
)
def test_texts_are_the_same_with_and_without(folder: Path, params: list[dict[str, Any]]) -> None:
    prompts = [[3 + i, *range(9 + 2 * i, 20 + 5 * i)] for i in range(len(params))]
    settings = [SamplingParams(**{"temperature": 0.0, **p}) for p in params]
    with LLM(str(folder), device="cpu", max_model_len=128, max_num_seqs=4) as llm:
        scheduler: Any = llm.front.loop.engine.scheduler
        assert scheduler.limits.num_steps == MOST_STEPS
        plans: list[Plan] = []
        runner = llm.front.loop.engine.runner
        execute = runner.execute
        runner.execute = lambda plan, sampling: (plans.append(plan), execute(plan, sampling))[1]
        found = []
        for num_steps in (1, MOST_STEPS):
            scheduler.limits = replace(scheduler.limits, num_steps=num_steps)
            outputs = llm.generate(prompts, settings)
            found.append([(o.outputs[0].token_ids, o.outputs[0].finish_reason) for o in outputs])
            steps = [plan.num_steps for plan in plans]
            assert (max(steps) > 1) is (num_steps > 1)
            plans.clear()
        assert found[0] == found[1]
        assert not llm.front.loop.engine.audit()


def test_a_model_that_overflows_in_a_later_step_is_found(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with LLM(str(folder), device="cpu", max_model_len=128, max_num_seqs=4) as llm:
        llm.generate([[3, 4, 5]], SamplingParams(temperature=0.0, max_tokens=8))
        replay: Any = llm.front.loop.engine.runner._replay
        follow = replay.follow

        def broken(token_ids: Any) -> torch.Tensor:
            logits: torch.Tensor = follow(token_ids)
            logits[0, 0] = torch.nan
            if replay.largest is not None:
                replay.largest[1][0] = float("nan")
            return logits

        monkeypatch.setattr(replay, "follow", broken)
        with pytest.raises(EngineError, match="a weight or a state is broken"):
            llm.generate([[3, 4, 5]], SamplingParams(temperature=0.0, max_tokens=30))
