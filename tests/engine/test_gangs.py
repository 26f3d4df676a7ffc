"""Guided choices and beams: the same tokens in any batch, also with preemption, swaps and failing steps."""

from __future__ import annotations

import random

import pytest

from plait.engine.core import Engine
from plait.errors import CapacityError, InvalidField
from plait.request import Request
from plait.schedule.costs import StepCosts
from plait.schedule.pools import CacheOptions
from tests.engine.gang_model import GangModel, beams, guided
from tests.engine.hash_model import HOST, VOCAB, Reader, engine, finish, oracle, request

EARLY = (True, False, "never")


def any_prompt(rng: random.Random) -> list[int]:
    """Half of them begin like others."""
    begin = [5, 6, 7, 8, 9, 10, 11, 12][: rng.choice([0, 8])]
    return [*begin, *(rng.randrange(VOCAB) for _ in range(rng.randrange(1, 17)))]


def guided_request(name: str, rng: random.Random, count: int, n: int = 1) -> Request:
    prompt, negative = any_prompt(rng), any_prompt(rng)
    if rng.random() < 0.3:  # both begin alike
        negative = [*prompt[: rng.randrange(1, len(prompt) + 1)], *negative[:3]]
    scale = rng.choice([0.0, 1.5, 3.0, 7.25])
    return request(
        name, prompt, more={"negative_ids": tuple(negative)}, max_tokens=count, n=n, guidance_scale=scale
    )


def beam_request(name: str, rng: random.Random, count: int, width: int, n: int = 1) -> Request:
    return request(
        name,
        any_prompt(rng),
        frozenset(rng.sample(range(VOCAB), rng.randrange(0, 12))),
        max_tokens=count,
        n=n,
        use_beam_search=True,
        beam_width=width,
        length_penalty=rng.choice([1.0, 0.0, -1.0, 2.0]),
        early_stopping=rng.choice(EARLY),
    )


def check(asked: Request, reader: Reader) -> None:
    """The reply is the formula's."""
    params, prompt = asked.params, asked.prompt_token_ids
    count = params.max_tokens or 0
    if params.use_beam_search:
        found = beams(
            prompt,
            params.num_beams,
            count,
            asked.stop_token_ids,
            params.length_penalty,
            params.early_stopping,
        )
        for index, (tokens, is_end) in enumerate(found[: params.n]):
            assert reader.tokens(asked.id, index) == tokens
            last = reader.last(asked.id, index)
            assert (last.finish_reason, last.stop_token_id is not None) == (
                "stop" if is_end else "length",
                is_end,
            )
        return
    for index in range(params.n):
        if params.is_guided:
            assert reader.tokens(asked.id, index) == guided(
                prompt, asked.negative_ids, count, params.guidance_scale
            )
        else:
            assert reader.tokens(asked.id, index) == oracle(prompt, count)


@pytest.mark.parametrize("early", EARLY)
@pytest.mark.parametrize("penalty", [-1.0, 0.0, 1.0, 2.0])
def test_beams_alone_are_those_of_the_formula(early: object, penalty: float) -> None:
    rng, e, reader = random.Random(str((early, penalty))), engine(GangModel()), Reader()
    for i in range(6):
        asked = beam_request(f"r{i}", rng, 8, rng.choice([1, 2, 4]))
        e.submit(asked, reader)
        finish(e)
        check(asked, reader)


def test_guided_choices_alone_are_those_of_the_formula_and_share_their_prompts() -> None:
    rng, model, reader = random.Random(1), GangModel(), Reader()
    e = engine(model, cache=CacheOptions())
    for i in range(6):
        asked = guided_request(f"r{i}", rng, 7, n=2)
        e.submit(asked, reader)
        finish(e)
        check(asked, reader)


@pytest.mark.parametrize("cache", [None, CacheOptions(), CacheOptions(snapshot_interval=4), HOST])
@pytest.mark.parametrize("blocks", [50, 62])
def test_gangs_in_any_batch_give_the_formulas_tokens(cache: CacheOptions | None, blocks: int) -> None:
    rng = random.Random(str((cache is HOST, blocks)))
    e = engine(GangModel(), blocks=blocks, length=70, cache=cache, max_num_seqs=10, costs=StepCosts())
    wander(e, rng, 80)
    assert blocks > 50 or e.stats()["num_preemptions"] > 0


@pytest.mark.parametrize("blocks", [50, 200])
def test_gangs_survive_steps_that_fail(blocks: int) -> None:
    rng, left = random.Random(blocks), [0]

    def breaks(_: object) -> bool:
        left[0] += 1
        return left[0] % 37 == 0

    e = engine(GangModel(breaks=breaks), blocks=blocks, length=70, cache=CacheOptions(), max_num_seqs=6)
    wander(e, rng, 30, fails=True)
    assert e.metrics.num_failed_steps > 3


def wander(e: Engine, rng: random.Random, number: int, *, fails: bool = False) -> None:
    """Submit requests of all kinds as time goes by, cancel some, and compare the rest with their formulas."""
    reader, asked, cancelled = Reader(), list[Request](), set[str]()
    while len(asked) < number or e.has_work:
        if len(asked) < number and rng.random() < 0.7:
            name, count, kind = f"r{len(asked)}", rng.randrange(1, 24), rng.randrange(3)
            if kind == 0:
                one = beam_request(
                    name, rng, count, width := rng.randrange(1, 5), rng.randrange(1, width + 1)
                )
            elif kind == 1:
                one = guided_request(name, rng, count, rng.randrange(1, 3))
            else:
                one = request(name, any_prompt(rng), max_tokens=count)
            asked.append(one)
            e.submit(one, reader)
        if asked and rng.random() < 0.01:
            cancelled.add(name := rng.choice(asked).id)
            e.cancel(name)
        e.step()
        e.scheduler.check()
    finish(e)
    assert not any(value for value in (e._choices, e._requests))
    whole = 0
    for one in asked:
        ends = reader.ends(one.id)
        assert len(ends) == one.params.n, "every choice ends once"
        if one.id in cancelled or (fails and "error" in ends):
            continue
        check(one, reader)
        whole += 1
    assert whole > number / 2


def test_log_probabilities_of_beams_are_of_their_own_tokens() -> None:
    e, reader = engine(GangModel()), Reader()
    asked = request("r", [1, 2, 3], use_beam_search=True, beam_width=3, n=3, logprobs=2, max_tokens=4)
    e.submit(asked, reader)
    finish(e)
    for index in range(3):
        event = reader.last("r", index)
        assert event.logprobs is not None
        assert tuple(lp.token_id for lp in event.logprobs) == event.token_ids
        assert all(len(lp.top) in (2, 3) and lp.token_id in dict(lp.top) for lp in event.logprobs)


def test_a_choice_that_had_ended_in_an_engine_that_died_is_not_sent_again() -> None:
    e, reader = engine(GangModel()), Reader()
    rng = random.Random(3)
    asked = beam_request("r", rng, 6, 3, 3)
    e.submit(Request(**{**_fields(asked), "resumed": ((), None, ())}), reader)
    finish(e)
    assert set(reader.events) == {("r", 0), ("r", 2)}
    found = beams(
        asked.prompt_token_ids,
        3,
        6,
        asked.stop_token_ids,
        asked.params.length_penalty,
        asked.params.early_stopping,
    )
    assert [reader.tokens("r", i) for i in (0, 2)] == [found[0][0], found[2][0]]


def test_the_first_choice_may_have_ended_in_an_engine_that_died() -> None:
    e, reader = engine(GangModel()), Reader()
    asked = beam_request("r", random.Random(3), 6, 3, 2)
    e.submit(Request(**{**_fields(asked), "resumed": (None, ())}), reader)
    finish(e)
    assert set(reader.events) == {("r", 1)}


@pytest.mark.parametrize("index", [0, 1])
def test_a_choice_of_a_search_that_is_cancelled_leaves_its_beams_to_the_others(index: int) -> None:
    e, reader = engine(GangModel()), Reader()
    asked = beam_request("r", random.Random(4), 9, 3, 2)
    e.submit(asked, reader)
    for _ in range(3):
        e.step()
    e.cancel("r", index)
    finish(e)
    found = beams(
        asked.prompt_token_ids,
        3,
        9,
        asked.stop_token_ids,
        asked.params.length_penalty,
        asked.params.early_stopping,
    )
    assert reader.tokens("r", 1 - index) == found[1 - index][0]
    assert reader.last("r", index).finish_reason == "stop"


def test_a_guided_choice_goes_on_in_a_new_engine() -> None:
    rng = random.Random(8)
    asked = guided_request("r", rng, 9)
    whole = guided(asked.prompt_token_ids, asked.negative_ids, 9, asked.params.guidance_scale)
    e, reader = engine(GangModel()), Reader()
    e.submit(Request(**{**_fields(asked), "resumed": (tuple(whole[:4]),)}), reader)
    finish(e)
    assert reader.tokens("r") == whole[4:]


def _fields(asked: Request) -> dict[str, object]:
    return {name: getattr(asked, name) for name in asked.__slots__}


def test_a_gang_that_can_never_run_is_refused_with_the_number() -> None:
    e = engine(GangModel(), blocks=12)
    with pytest.raises(CapacityError, match="4 sequences that are sampled together"):
        e.submit(request("r", range(20), use_beam_search=True, beam_width=4), Reader())
    with pytest.raises(CapacityError, match="max_num_seqs is 4"):
        engine(GangModel()).submit(request("r", [1], use_beam_search=True, beam_width=5), Reader())
    with pytest.raises(InvalidField, match="guidance_scale"):
        e.submit(request("r", [1], guidance_scale=2.0), Reader())
    with pytest.raises(InvalidField, match="negative_prompt"):
        e.submit(request("r", [1], guidance_scale=2.0, more={"negative_ids": (VOCAB,)}), Reader())
