"""Drafts from earlier replies in a whole engine: the text is the same, and salts and options are kept."""

from __future__ import annotations

from typing import Any

import pytest

from plait import LLM, SamplingParams
from plait.schedule.drafts.ngram import NgramProposer
from plait.verify.matrix import CheapRows
from tests.families import tiny

SIZES: dict[str, Any] = {"device": "cpu", "threads": 1, "max_model_len": 128, "max_num_seqs": 4}
PROMPTS = [[3, 4, 5, 6, 7, 8], [9, 1, 2]]
ENOUGH = 120  # of 200 tokens
PARAMS = SamplingParams(temperature=0.9, seed=5, max_tokens=100, ignore_eos=True)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("llama")
    tiny.write("llama", folder)
    return str(folder)


def run(model: str, **options: Any) -> tuple[list[list[int]], int, NgramProposer | None]:
    """Replies to the same prompts, twice; draft tokens that were right the second time; what drafted.

    Drafts are made whether they pay or not.
    """
    with LLM(model, **SIZES, **options) as llm:
        speculation = llm.front.loop.engine.speculation  # type: ignore[attr-defined]
        if speculation:
            speculation.costs, speculation.governor = CheapRows(), None
        found = [list(out.outputs[0].token_ids) for out in llm.generate(PROMPTS, PARAMS)]
        before = speculation.num_accepted if speculation else 0
        found += [list(out.outputs[0].token_ids) for out in llm.generate(PROMPTS, PARAMS)]
        if speculation is None:
            return found, 0, None
        assert speculation.error is None
        return found, speculation.num_accepted - before, speculation.proposer


def test_a_reply_that_was_there_is_drafted_again(model: str) -> None:
    """Drawn replies of random weights: nothing repeats itself but the reply."""
    plain, _, _ = run(model)
    found, accepted, proposer = run(model, speculate="ngram")
    assert found == plain
    assert found[:2] == found[2:]
    assert accepted >= ENOUGH
    assert proposer is not None
    assert proposer._replies.match("", found[0][:6], 3)[0] == tuple(found[0][6:9])


def test_another_salt_finds_no_reply(model: str) -> None:
    with LLM(model, **SIZES, speculate="ngram") as llm:
        speculation = llm.front.loop.engine.speculation  # type: ignore[attr-defined]
        speculation.costs, speculation.governor = CheapRows(), None
        accepted = []
        for salt in ("a", "b", "a"):
            before = speculation.num_accepted
            llm.generate(PROMPTS, PARAMS, cache_salt=salt)
            accepted.append(speculation.num_accepted - before)
    assert accepted[1] < ENOUGH <= accepted[2]


def test_without_a_prefix_cache_no_reply_is_kept(model: str) -> None:
    _, accepted, proposer = run(model, speculate="ngram", prefix_cache=False)
    assert accepted < ENOUGH
    assert proposer is not None
    assert not proposer._replies._rings
