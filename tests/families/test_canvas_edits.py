"""Canvases of which tokens are replaced: texts are those of the published loop of LLaDA 2.1."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from plait.config import EngineConfig
from plait.errors import ConfigError
from plait.llm.llm import LLM
from plait.request import SamplingParams
from tests.families import canvases
from tests.families.canvases import SIZES, Edited, Oracle

NAME = "llada2_moe"
PROMPTS = [[3, 4, 5], [*range(1, 17)], [*range(2, 39)], [7] * 20]
LENGTH = 21
OPTIONS: dict[str, Any] = dict(
    device="cpu", dtype="float32", max_model_len=96, max_num_seqs=4, startup_image="off", packed_cache="off"
)
EDITS = {"canvas_threshold": 0.05, "canvas_edit_threshold": 0.0}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """LLaDA 2 as files, with transformers' own next to it."""
    base = tmp_path_factory.mktemp(NAME)
    canvases.save(base / "model", *canvases.write(NAME, base))
    return base


@pytest.fixture(scope="module")
def oracle(folder: Path) -> Oracle:
    return Oracle(folder, SIZES[NAME])


def greedy(**more: Any) -> SamplingParams:
    return SamplingParams(**{"temperature": 0.0, "max_tokens": LENGTH, **more})


def load(folder: Path, options: dict[str, Any], **more: Any) -> LLM:
    return LLM(str(folder / "model"), **options, **more)


def edit_all(oracle: Oracle, *how: Any) -> list[Edited]:
    return [oracle.edit(prompt, LENGTH, *how) for prompt in PROMPTS]


@pytest.mark.parametrize(
    ("threshold", "least", "passes"), [(0.05, 0.0, 16), (0.95, 0.03, 16), (0.04, 0.0, 2), (0.95, 0.03, 0)]
)
def test_texts_are_those_of_the_published_loop(
    folder: Path, oracle: Oracle, threshold: float, least: float, passes: int
) -> None:
    wanted = edit_all(oracle, threshold, least, passes)
    assert sum(len(one.replaced) for one in wanted) > 4
    if 0 < passes < 16:
        assert any(passes in one.spent for one in wanted)
    more = {"canvas_threshold": threshold, "canvas_edit_threshold": least, "canvas_edit_passes": passes}
    with load(folder, OPTIONS, **more) as model:
        for found, one in zip(model.generate(PROMPTS, greedy(logprobs=0)), wanted, strict=True):
            reply = found.outputs[0]
            assert list(reply.token_ids) == one.token_ids
            assert reply.logprobs is not None
            scores = [place[t].logprob for t, place in zip(reply.token_ids, reply.logprobs, strict=True)]
            assert scores == pytest.approx(one.scores, abs=1e-3)  # of the passes that wrote what is kept


@pytest.fixture(scope="module")
def model(folder: Path) -> Iterator[LLM]:
    with load(folder, OPTIONS, **EDITS) as loaded:
        yield loaded


def ids_of(model: LLM, prompts: Any, params: SamplingParams) -> list[list[tuple[int, ...]]]:
    return [[tuple(one.token_ids) for one in found.outputs] for found in model.generate(prompts, params)]


def test_texts_do_not_depend_on_steps(folder: Path, model: LLM) -> None:
    drawn = SamplingParams(temperature=0.7, seed=5, max_tokens=LENGTH, presence_penalty=0.5, n=2)
    wanted = ids_of(model, PROMPTS, drawn)
    assert len({ids for both in wanted for ids in both}) == 2 * len(PROMPTS)
    small = {**OPTIONS, "max_num_seqs": 2, "max_num_batched_tokens": 16}
    with load(folder, small, **EDITS) as other:
        assert [ids_of(other, [prompt], drawn)[0] for prompt in PROMPTS] == wanted
        assert ids_of(other, PROMPTS, drawn) == wanted


@pytest.mark.parametrize("presence", [0.7, -0.7])
def test_a_token_is_penalised_by_those_before_it_and_not_by_itself(
    model: LLM, oracle: Oracle, presence: float
) -> None:
    wanted = edit_all(oracle, 0.05, 0.0, 16, presence)
    assert [one.token_ids for one in wanted] != [one.token_ids for one in edit_all(oracle, 0.05, 0.0)]
    found = ids_of(model, PROMPTS, greedy(presence_penalty=presence))
    assert [list(ids) for (ids,) in found] == [one.token_ids for one in wanted]


def test_a_stop_token_that_is_replaced_ends_no_reply(model: LLM, oracle: Oracle) -> None:
    wanted = oracle.edit(PROMPTS[2], LENGTH, 0.05, 0.0)
    gone = [token for token in wanted.replaced if token not in wanted.token_ids]
    found = model.generate(PROMPTS[2:3], greedy(stop_token_ids=gone))[0].outputs[0]
    assert gone
    assert (list(found.token_ids), found.finish_reason) == (wanted.token_ids, "length")


def test_a_stop_token_that_stays_ends_the_reply(model: LLM, oracle: Oracle) -> None:
    wanted = oracle.edit(PROMPTS[2], LENGTH, 0.05, 0.0).token_ids
    at = next(i for i in range(6, LENGTH) if wanted[i] not in wanted[:i])
    found = model.generate(PROMPTS[2:3], greedy(stop_token_ids=[wanted[at]]))[0].outputs[0]
    assert (list(found.token_ids), found.finish_reason) == (wanted[:at], "stop")


def test_nothing_is_replaced_without_a_threshold(folder: Path, oracle: Oracle) -> None:
    with load(folder, OPTIONS, canvas_threshold=0.05, canvas_edit_passes=3) as model:
        found = ids_of(model, PROMPTS, greedy())
    assert [list(ids) for (ids,) in found] == [oracle.fill(prompt, LENGTH, 0.05)[0] for prompt in PROMPTS]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"canvas_edit_threshold": 1.0}, r"canvas_edit_threshold: 1\.0 is not from 0 to below 1"),
        ({"canvas_edit_threshold": -0.1}, r"canvas_edit_threshold: -0\.1 is not from 0 to below 1"),
        ({"canvas_edit_passes": -1}, "canvas_edit_passes: -1 is less than 0"),
    ],
)
def test_values_outside_are_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=f"^{words}"):
        EngineConfig(**options)
