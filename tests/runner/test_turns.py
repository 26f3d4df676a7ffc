"""Speculative turns in one native call give the text of single steps, greedy and drawn."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from plait import LLM, SamplingParams
from plait.errors import EngineError
from plait.kernels.cpu.runtime.executor import Executor
from plait.kernels.load import turn_kernels, turn_tables
from plait.schedule.plan import Sampled, SamplingRow, StepPlan

SIZES: dict[str, Any] = {"device": "cpu", "threads": 1, "max_model_len": 256, "max_num_seqs": 8}
PROMPT = "And it came to pass in those days, that"
SLOW = pytest.mark.slow
CHAT = "<|user|>Tell me of David.<|assistant|>"


class Side:
    """The nano hybrid with its head, drafts of a length that a test sets, and the turns that there were."""

    def __init__(self, folder: Path, **options: Any) -> None:
        self.llm = LLM(str(folder), **{**SIZES, **options}, speculate="mtp", num_draft_tokens=4)
        loop: Any = self.llm.front.loop
        engine = loop.engine
        self.engine, self.length, self.turns = engine, 1, list[Sampled]()
        engine.scheduler.costs.step_s = lambda num_tokens: (
            1e-4
        )  # turns do not depend on how busy a machine is
        governor = engine.speculation.governor
        governor.choose, governor.is_measuring = lambda count: self.length, lambda count: False
        self.native = engine.runner.replay.turns
        run = self.native.run

        def recorded(plan: StepPlan, row: SamplingRow) -> list[Sampled] | None:
            found: list[Sampled] | None = run(plan, row)
            self.turns += found or []
            return found

        self.native.run = recorded

    def reply(self, prompt: str, length: int, **params: Any) -> tuple[tuple[int, ...], str | None]:
        self.length = length
        (output,) = self.llm.generate([prompt], SamplingParams(**params))
        return tuple(output.outputs[0].token_ids), output.outputs[0].finish_reason


@pytest.fixture(scope="module")
def side(nano_hybrid: Path) -> Iterator[Side]:
    made = Side(nano_hybrid)
    with made.llm:
        yield made


@pytest.mark.parametrize(
    "params",
    [
        {"temperature": 0.0},
        {"temperature": 0.8, "seed": 3},
        pytest.param({"temperature": 1.2, "seed": 4, "top_k": 30, "top_p": 0.9}, marks=SLOW),
        pytest.param({"temperature": 1.0, "seed": 5, "min_p": 0.05, "min_tokens": 20}, marks=SLOW),
    ],
    ids=["greedy", "drawn", "top", "min"],
)
def test_turns_give_the_text_of_single_steps(side: Side, params: dict[str, Any]) -> None:
    side.turns.clear()
    for prompt, lengths in ((PROMPT, (1, 3)), (CHAT, (2,))):
        plain = side.reply(prompt, 0, max_tokens=60, **params)
        assert not side.turns
        for length in lengths:
            assert side.reply(prompt, length, max_tokens=60, **params) == plain
            assert max(answer.turns.num_turns for answer in side.turns if answer.turns) > 2
            side.turns.clear()
    assert not side.engine.audit()


def test_turns_end_behind_a_stop_token(side: Side) -> None:
    """With a stop token at every place of a turn; what follows a reply is found in the prefix cache."""
    whole, _ = side.reply(PROMPT, 0, temperature=0.0, max_tokens=60, ignore_eos=True)
    for at in (11, 12, 13, 14, 30):
        if whole[at] in whole[:at]:
            continue
        params = {"temperature": 0.0, "max_tokens": 60, "stop_token_ids": [whole[at]], "ignore_eos": True}
        side.turns.clear()
        assert side.reply(PROMPT, 2, **params) == (whole[:at], "stop")
        last = side.turns[-1]
        assert last.turns is not None
        assert whole[at] not in last.token_ids[: last.turns.num_earlier]
        tokenizer: Any = side.llm.front.tokenizer
        longer = PROMPT + tokenizer.decode(list(whole[:at]))
        assert side.reply(longer, 2, temperature=0.0, max_tokens=30) == side.reply(
            longer, 0, temperature=0.0, max_tokens=30
        )
    assert not side.engine.audit()


def test_turns_end_where_the_rows_of_one_more_would_pass_the_end(side: Side) -> None:
    plans: list[tuple[StepPlan, Sampled]] = []
    run = side.native.run

    def recorded(plan: StepPlan, row: SamplingRow) -> list[Sampled] | None:
        found: list[Sampled] | None = run(plan, row)
        plans.extend((plan, answer) for answer in found or [])
        return found

    side.native.run = recorded
    try:
        for length in range(12, 18):
            words = {"temperature": 0.0, "max_tokens": length, "ignore_eos": True}
            assert side.reply(PROMPT, 2, **words) == side.reply(PROMPT, 0, **words)
    finally:
        side.native.run = run
    assert len(plans) >= 6
    for plan, answer in plans:
        rows, turns, ended = len(plan.chunks[0].token_ids), plan.turns, answer.turns
        assert turns is not None
        assert ended is not None
        assert ended.num_earlier + rows <= turns.num_rows
        right = sum(a == b for a, b in zip(answer.token_ids[ended.num_earlier :], ended.draft, strict=False))
        assert ended.num_turns == turns.most or ended.num_earlier + right + 1 + rows > turns.num_rows


def test_drafts_grow_in_the_middle_of_a_reply(side: Side) -> None:
    lengths: list[int] = []
    run = side.native.run

    def grown(plan: StepPlan, row: SamplingRow) -> list[Sampled] | None:
        found: list[Sampled] | None = run(plan, row)
        if found:
            lengths.append(len(plan.chunks[0].token_ids) - 1)
        side.length = 4 if lengths else 1
        return found

    side.native.run = grown
    try:
        text, _ = side.reply(PROMPT, 1, temperature=0.0, max_tokens=120, ignore_eos=True)
    finally:
        side.native.run = run
    assert lengths[0] == 1
    assert lengths[-1] == 4
    assert text == side.reply(PROMPT, 0, temperature=0.0, max_tokens=120, ignore_eos=True)[0]


def test_several_sequences_have_single_steps(side: Side) -> None:
    side.turns.clear()
    side.length = 2
    params = SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True)
    several = side.llm.generate([PROMPT, CHAT], [params, params])
    assert not side.turns
    alone = [side.llm.generate([prompt], params)[0] for prompt in (PROMPT, CHAT)]
    assert side.turns
    assert [o.outputs[0].token_ids for o in several] == [o.outputs[0].token_ids for o in alone]


@pytest.mark.parametrize("params", [{"logprobs": 2}, {"presence_penalty": 0.5}, {"logit_bias": {7: 2.0}}])
def test_what_is_looked_at_between_two_tokens_has_single_steps(side: Side, params: dict[str, Any]) -> None:
    side.turns.clear()
    words = {"temperature": 0.0, "max_tokens": 20, "ignore_eos": True, **params}
    assert side.reply(PROMPT, 2, **words) == side.reply(PROMPT, 0, **words)
    assert not side.turns


def test_broken_state_in_a_later_turn_is_found(side: Side, monkeypatch: pytest.MonkeyPatch) -> None:
    read = side.native._read

    def broken(chunk: Any, place: Any, turn: Any) -> Sampled:
        turn.values[:] = np.nan
        found: Sampled = read(chunk, place, turn)
        return found

    params = {"temperature": 0.0, "max_tokens": 60, "ignore_eos": True}
    plain = side.reply(PROMPT, 0, **params)
    monkeypatch.setattr(side.native, "_read", broken)
    with pytest.raises(EngineError, match="a weight or a state is broken"):
        side.reply(PROMPT, 1, **params)
    monkeypatch.undo()
    assert side.reply(PROMPT, 1, **params) == plain
    assert not side.engine.audit()


@SLOW
@pytest.mark.parametrize("options", [{"threads": 2}, {"quantize": "q8_0"}, {"prefix_cache": False}], ids=str)
def test_turns_give_the_same_text_however_the_model_runs(nano_hybrid: Path, options: dict[str, Any]) -> None:
    side = Side(nano_hybrid, **options)
    with side.llm:
        for temperature in (0.0, 0.9):
            words = {"temperature": temperature, "seed": 8, "max_tokens": 200, "ignore_eos": True}
            plain = side.reply(PROMPT, 0, **words)
            for length in (1, 2, 4):
                side.turns.clear()
                assert side.reply(PROMPT, length, **words) == plain
                assert side.turns


def test_joined_tables_begin_at_even_places() -> None:
    executor = Executor(1)
    tables = turn_tables(executor, turn_kernels())
    one, pair = tables.glue("nothing"), tables.join([tables.glue("nothing") for _ in range(2)])
    made = tables.join([pair, one, pair, one, one, pair])
    assert made.count == 2 + 1 + 1 + 2 + 1 + 1 + 2
    executor.close()
