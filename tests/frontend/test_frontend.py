"""From prompts and messages to the engine's requests."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Literal

import pytest

from plait.config import EngineConfig
from plait.engine.admission import ServiceOptions
from plait.errors import ContextTooLong, InvalidField
from plait.frontend.frontend import Front, Language
from plait.request import SamplingParams
from plait.spec.model import AttentionSpec, BranchSpec, Mixer, ModelSpec, NormSpec, ParallelSpec
from plait.spec.recurrent import Mamba1Spec
from tests.server.fake import CONTEXT, EOS, VOCAB_SIZE, ByteTokenizer, EchoLoop, TurnTemplate

ATTENTION = AttentionSpec(1, 1, 8, 1.0)
MAMBA = Mamba1Spec(8, 4, 2, 4)
TALK = [
    {"role": "system", "content": "Fox."},
    {"role": "user", "content": "Hello?"},
    {"role": "assistant", "content": "Yes."},
    {"role": "user", "content": "Why?"},
]


class Counting(TurnTemplate):
    """Counts its renderings."""

    def __init__(self) -> None:
        self.count = 0

    def render(self, messages: Any, /, **options: Any) -> list[int]:
        self.count += 1
        return super().render(messages, **options)


def front(*mixers: Mixer, causal: bool = True, **options: Any) -> tuple[Front, Counting]:
    layers = tuple((BranchSpec("mixer", mixer, NormSpec()),) for mixer in mixers)
    spec = ModelSpec("fake", 8, VOCAB_SIZE, layers, NormSpec(), CONTEXT, causal=causal)
    template = Counting()
    language = Language(ByteTokenizer(), template, {}, frozenset({EOS}))
    return Front("fake", spec, CONTEXT, EchoLoop(), language, **options), template


def test_a_model_with_recurrent_state_gets_where_conversations_diverge() -> None:
    for mixers in ((ATTENTION, MAMBA), (ParallelSpec({"attn": ATTENTION, "ssm": MAMBA}),)):
        asked, template = front(*mixers)
        request = asked.prepare_chat(TALK, SamplingParams())
        ids = request.prompt_token_ids
        assert [bytes(ids[at : at + 4]) for at in request.boundaries] == [b"Hell", b"Why?"]
        assert template.count == 4


@pytest.mark.parametrize(
    ("mixers", "options"),
    [
        ((ATTENTION,), {}),
        ((ATTENTION, MAMBA), {"config": EngineConfig(prefix_cache=False)}),
        ((MAMBA,), {"causal": False}),
    ],
)
def test_no_other_model_pays_for_it(mixers: tuple[Mixer, ...], options: dict[str, Any]) -> None:
    asked, template = front(*mixers, **options)
    assert asked.prepare_chat(TALK, SamplingParams()).boundaries == ()
    assert template.count == 1


@pytest.mark.parametrize("sees", [True, "prompt"])
def test_tokens_that_see_later_ones_have_no_probabilities_in_order(sees: bool | Literal["prompt"]) -> None:
    asked, _ = front(replace(ATTENTION, both_ways=sees), causal=False)
    with pytest.raises(InvalidField, match="see later ones here") as error:
        asked.prepare("Why?", SamplingParams(prompt_logprobs=0))
    assert error.value.param == "prompt_logprobs"
    assert asked.prepare("Why?", SamplingParams(logprobs=1)).params.logprobs == 1
    assert front(ATTENTION)[0].prepare("Why?", SamplingParams(prompt_logprobs=0))


def test_a_conversation_that_is_too_long_is_refused_before_anything_else_is_rendered() -> None:
    asked, template = front(MAMBA)
    with pytest.raises(ContextTooLong, match="context length is"):
        asked.prepare_chat([*TALK, {"role": "user", "content": "x" * CONTEXT}], SamplingParams())
    assert template.count == 1


def test_terms_reach_the_engine() -> None:
    asked, _ = front(MAMBA)
    terms = ServiceOptions(cache_salt="me", priority=-2, timeout_s=1.5)
    for request in (
        asked.prepare("Hi", SamplingParams(), terms=terms),
        asked.prepare_chat(TALK, SamplingParams(), terms),
    ):
        assert (request.cache_salt, request.priority, request.timeout_s) == ("me", -2, 1.5)
    plain = asked.prepare("Hi", SamplingParams())
    assert (plain.cache_salt, plain.priority, plain.timeout_s, plain.boundaries) == ("", 0, None, ())


def test_best_of_is_generated_with_what_it_is_ranked_by() -> None:
    asked, _ = front(ATTENTION)

    def params(**given: Any) -> tuple[int, int | None, int | None]:
        found = asked.prepare("Hi", SamplingParams(**given)).params
        return found.n, found.best_of, found.logprobs

    assert params(n=2, best_of=5) == (5, None, 0)
    assert params(n=2, best_of=5, logprobs=3) == (5, None, 3)
    assert params(n=2, best_of=2) == (2, None, None)
    assert params(n=2) == (2, None, None)


def test_places_worth_keeping_are_tokens_of_a_prompt() -> None:
    asked, _ = front(MAMBA)
    request = asked.prepare("Hello, you", SamplingParams(), terms=ServiceOptions(cache_at=(6, 3)))
    assert request.boundaries == (6, 3)
    cut = SamplingParams(truncate_prompt_tokens=6)
    request = asked.prepare("Hello, you", cut, terms=ServiceOptions(cache_at=(7, 2)))
    assert bytes(request.prompt_token_ids[: request.boundaries[0]]) == b"o,"
    assert len(request.boundaries) == 1
    with pytest.raises(InvalidField, match="cache_at: 12 is behind the end: there are 11 tokens"):
        asked.prepare("Hello, you", SamplingParams(), terms=ServiceOptions(cache_at=(12,)))
    plain, _ = front(ATTENTION)
    assert plain.prepare("Hello", SamplingParams(), terms=ServiceOptions(cache_at=(3,))).boundaries == ()


def test_places_worth_keeping_are_messages_of_a_chat() -> None:
    asked, _ = front(MAMBA)
    talk = [*TALK, {"role": "assistant", "content": "So."}, {"role": "user", "content": "Then?"}]
    request = asked.prepare_chat(talk, SamplingParams(), ServiceOptions(cache_at=(2,)))
    ids = request.prompt_token_ids
    assert [bytes(ids[at : at + 4]) for at in request.boundaries] == [b"Hell", b"Yes.", b"Then"]
    with pytest.raises(InvalidField, match="cache_at: 7 is behind the end: there are 6 messages"):
        asked.prepare_chat(talk, SamplingParams(), ServiceOptions(cache_at=(7,)))


@pytest.mark.parametrize(
    "wrong", [3, "3", {"a": 1}, [0], [-1], [True], [1.5], ["1"], [1, 2, 3, 4, 5], [None]]
)
def test_places_that_are_none_are_refused_by_name(wrong: Any) -> None:
    with pytest.raises(InvalidField, match=r"^cache_at") as caught:
        ServiceOptions(cache_at=wrong)
    assert caught.value.param == "cache_at"
