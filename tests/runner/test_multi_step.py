"""Several decode steps in one plan give what as many plans give."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from plait import LLM, SamplingParams
from plait.errors import EngineError
from plait.memory import BlockGroup
from plait.runner.host.static_batch import Capacity, StaticBatch
from plait.schedule.plan import MOST_STEPS, Chunk, SamplingBatch, SamplingRow, StepPlan
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
                runner.launch(StepPlan(0, (Chunk(s, 0, ids, tables[s], 0, 1),)), rows(length - 1, GREEDY))
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
                answers = runner.launch(StepPlan(1, chunks, num_steps=num_steps), batch).wait()
                assert all(len(answer.token_ids) == num_steps for answer in answers)
                tokens = [(*old, *new.token_ids) for old, new in zip(tokens, answers, strict=True)]
            said.append(tokens)
            replay: Any = runner.replay
            logits.append(torch.from_numpy(replay.program.results.logits[:2].copy()))
        assert said[0] == said[1]
        torch.testing.assert_close(
            *logits, rtol=0, atol=0
        )  # which every token and entry before has a part in


def test_what_is_not_recorded_is_refused(folder: Path) -> None:
    with loaded(folder, ops="reference") as model:
        tables = tuple((1, 2) for _ in model.runner.groups)
        plan = StepPlan(0, (Chunk(0, 0, (3,), tables, 0, 1),), num_steps=2)
        with pytest.raises(EngineError, match="2 steps at once"):
            model.runner.launch(plan, rows(0, GREEDY))


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
        plans: list[StepPlan] = []
        runner = llm.front.loop.engine.runner
        launch = runner.launch
        runner.launch = lambda plan, sampling: (plans.append(plan), launch(plan, sampling))[1]
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


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_steps_of_a_hybrid_end_behind_a_stop_token(nano_hybrid: Path, temperature: float) -> None:
    """At every place of a plan, next to another reply; a longer prompt starts at what a reply leaves."""
    ids, other = [*range(40, 60)], [*range(90, 101)]
    sizes: Any = {"device": "cpu", "threads": 1, "max_model_len": 256, "max_num_seqs": 4}
    with LLM(str(nano_hybrid), **sizes, prefix_cache=False) as plain, LLM(str(nano_hybrid), **sizes) as llm:
        limits: Any = plain.front.loop.engine.scheduler
        limits.limits = replace(limits.limits, num_steps=1)
        params: Any = {"temperature": temperature, "seed": 5, "max_tokens": 40, "ignore_eos": True}
        forever = SamplingParams(**params)
        whole, second = (o.outputs[0].token_ids for o in plain.generate([ids, other], [forever, forever]))
        engine: Any = llm.front.loop.engine
        plans, launch = list[StepPlan](), engine.runner.launch
        engine.runner.launch = lambda plan, sampling: (plans.append(plan), launch(plan, sampling))[1]
        for at in [i for i in range(8, 26) if whole[i] not in whole[:i]][:9]:
            until = SamplingParams(**params, stop_token_ids=[whole[at]])
            found = llm.generate([ids, other], [until, forever])
            assert [o.outputs[0].token_ids for o in found] == [whole[:at], second]
            longer = [*ids, *whole[:at], 7]
            sides = [side.generate([longer], [forever])[0].outputs[0].token_ids for side in (llm, plain)]
            assert sides[0] == sides[1]
        several = [plan for plan in plans if plan.num_steps > 1]
        assert any(len(plan.chunks) == 2 for plan in several)
        assert not any(plan.moves for plan in several)
        assert not engine.audit()


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_model_that_overflows_in_a_later_step_is_found(
    folder: Path, monkeypatch: pytest.MonkeyPatch, temperature: float
) -> None:
    with LLM(str(folder), device="cpu", max_model_len=128, max_num_seqs=4) as llm:
        params = SamplingParams(temperature=temperature, max_tokens=30)
        llm.generate([[3, 4, 5]], params)
        replay: Any = llm.front.loop.engine.runner.replay.program
        follow, several = replay.follow, replay.several

        def followed(token_ids: Any) -> Any:
            logits = follow(token_ids)
            logits[0, 0] = float("nan")
            if replay.results.largest is not None:
                replay.results.largest[1][0] = float("nan")
            return logits

        def all_of_them(plan: StepPlan) -> Any:
            ids, values = several(plan)
            values[-2, 0] = float("nan")
            return ids, values

        monkeypatch.setattr(replay, "follow", followed)
        monkeypatch.setattr(replay, "several", all_of_them)
        with pytest.raises(EngineError, match="a weight or a state is broken"):
            llm.generate([[3, 4, 5]], params)


@pytest.mark.parametrize("num_groups", [0, 1, 2])
def test_the_kernel_between_two_steps_does_what_the_buffers_do(cpu: Any, num_groups: int) -> None:
    """Over the ends of blocks, for fewer sequences than the capacity."""
    groups, seqs, size, steps = [BlockGroup(str(g), None, ()) for g in range(num_groups)], 5, 4, 6
    sides = [StaticBatch(Capacity(9, 7, seqs, 8), groups, size) for _ in range(2)]
    rng = np.random.default_rng(3)
    tables = [tuple(tuple(rng.permutation(90)[:8].tolist()) for _ in groups) for _ in range(3)]
    plan = StepPlan(0, tuple(Chunk(s, 3 + 5 * s, (8,), tables[s], 0, 1) for s in range(3)))
    for side in sides:
        side.fill(plan)
    found = np.zeros(7, np.int64), np.zeros(7, np.float32)
    kept, step = (np.zeros((8, seqs), np.int64), np.zeros((8, seqs), np.float32)), np.zeros(1, np.int64)
    between = sides[0].make_between(cpu, found, kept, step)
    told = rng.integers(0, 90, (steps, 3)), rng.standard_normal((steps, 3)).astype(np.float32)
    for ids, values in zip(*told, strict=True):
        found[0][:3], found[1][:3] = ids, values
        cpu.run(between, tokens=3, logits=3, seqs=3)
        assert sides[1].follow(ids.tolist()) == 3
        for name, array in sides[0].arrays.items():
            np.testing.assert_array_equal(array, sides[1].arrays[name], err_msg=name)
    assert step[0] == steps
    for rows, wanted in zip(kept, told, strict=True):
        np.testing.assert_array_equal(rows[:steps, :3], wanted)
        assert not rows[steps:].any()
        assert not rows[:, 3:].any()
