"""Replies under a grammar or a thinking budget, by the engine as it is."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest

from plait.engine.grammar_guide import GrammarGuide, Guides, ThinkingWatch
from plait.engine.thread import EngineLoop
from plait.errors import BadGrammar, InvalidField, OutOfMemory
from plait.frontend.frontend import Front
from plait.llm.outputs import RequestOutput, collect
from plait.request import Grammar, Request, SamplingParams, ThinkingBudget
from plait.schedule.costs import StepCosts
from plait.schedule.drafts.ngram import NgramProposer
from plait.schedule.plan import StepPlan
from plait.schedule.speculate import Speculation
from plait.text.grammar.compiler import GrammarCompiler
from tests.server.fake import EOS, VOCAB_SIZE
from tests.server.real_engine import engine_front

SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 8}, "age": {"type": "integer", "maximum": 99}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def front() -> Iterator[Front]:
    front = engine_front()
    yield front
    front.close(drain=False)


def run(front: Front, prompt: str = "Hello", **params: Any) -> RequestOutput:
    settings = SamplingParams(**{"max_tokens": 400, "temperature": 0.0, **params})
    return collect(front.submit(front.prepare(prompt, settings)), prompt, settings)


def engine_of(front: Front) -> Any:
    assert isinstance(front.loop, EngineLoop)
    return front.loop.engine


@pytest.mark.parametrize("params", [{}, {"temperature": 1.0, "seed": 4, "top_k": 0, "top_p": 1.0}])
def test_every_choice_is_what_the_schema_says_and_ends_with_it(front: Front, params: dict[str, Any]) -> None:
    out = run(front, n=3, structured_outputs={"json": SCHEMA}, **params)
    for choice in out.outputs:
        found = json.loads(choice.text)
        assert set(found) == {"name", "age"}
        assert choice.finish_reason == "stop"
    if params:
        assert len({choice.text for choice in out.outputs}) == 3


def test_reply_ends_where_its_grammar_does_whatever_else_was_requested(front: Front) -> None:
    asked = {"structured_outputs": {"choice": ["yes", "no"]}}
    for more in ({"ignore_eos": True}, {"min_tokens": 50}, {"logit_bias": {EOS: -100}}):
        (choice,) = run(front, **asked, **more).outputs
        assert choice.text in ("yes", "no")
        assert choice.finish_reason == "stop"


def test_a_grammar_cut_off_by_max_tokens_says_so(front: Front) -> None:
    (choice,) = run(front, structured_outputs={"json": SCHEMA}, max_tokens=5).outputs
    assert (len(choice.text), choice.finish_reason) == (5, "length")


def test_stop_strings_and_stop_tokens_end_a_guided_reply(front: Front) -> None:
    asked = {"structured_outputs": {"regex": "[a-z]{20}:[0-9]{5}"}}
    assert re.fullmatch("[a-z]{20}", run(front, stop=":", **asked).outputs[0].text)
    (choice,) = run(front, stop_token_ids=(ord(":"),), **asked).outputs
    assert re.fullmatch("[a-z]{20}", choice.text)
    assert choice.stop_reason == ord(":")


def test_log_probabilities_come_with_every_token(front: Front) -> None:
    (choice,) = run(front, structured_outputs={"choice": ["yes", "no"]}, logprobs=2).outputs
    assert choice.logprobs is not None
    assert len(choice.logprobs) == len(choice.token_ids) == len(choice.text)


@pytest.mark.parametrize(
    "asked",
    [{"regex": "("}, {"json": {"type": "nonsense"}}, {"json": {"minProperties": 4}}, {"grammar": "start: x"}],
)
def test_a_grammar_that_cannot_be_kept_is_refused_before_there_is_a_request(
    front: Front, asked: dict[str, Any]
) -> None:
    with pytest.raises(BadGrammar) as refused:
        run(front, structured_outputs=asked)
    assert refused.value.param == f"structured_outputs.{next(iter(asked))}"


def test_two_grammars_at_once_are_rejected(front: Front) -> None:
    with pytest.raises(InvalidField, match="both set"):
        run(front, structured_outputs={"regex": "a", "choice": ["a"]})


def test_guided_and_free_replies_share_steps_and_change_nothing_for_each_other(front: Front) -> None:
    free = run(front, "Tell me", max_tokens=40).outputs[0].text
    guided = run(front, "Tell me", structured_outputs={"json": SCHEMA}).outputs[0].text
    settings = [
        SamplingParams(max_tokens=40, temperature=0.0),
        SamplingParams(max_tokens=400, temperature=0.0, structured_outputs={"json": SCHEMA}),
    ]
    streams = [(front.submit(front.prepare("Tell me", settings[i % 2])), settings[i % 2]) for i in range(6)]
    texts = [collect(stream, None, params).outputs[0].text for stream, params in streams]
    assert texts == [free, guided] * 3


def test_a_guide_that_fails_ends_its_own_reply_with_the_reason(
    front: Front, monkeypatch: pytest.MonkeyPatch
) -> None:
    free = front.submit(front.prepare("Tell me", SamplingParams(max_tokens=300, temperature=0.0)))
    request = front.prepare("Hello", SamplingParams(temperature=0.0, structured_outputs={"json": SCHEMA}))
    wrong = replace(request, id="wrong", grammar=Grammar("regex", "(", "guided_regex"))
    with pytest.raises(BadGrammar):
        collect(front.submit(wrong), None, request.params)
    calls = iter(range(100))
    begin = GrammarGuide.begin

    def breaking(self: GrammarGuide, grammar: Any, *rest: Any) -> None:
        masks = grammar.masks

        def until(draft: Any = ()) -> Any:
            if next(calls) == 5:
                raise BadGrammar("the grammar takes too long")
            return masks(draft)

        grammar.masks = until
        begin(self, grammar, *rest)

    class Open:
        """A state with methods that can be replaced."""

        def __init__(self, state: Any) -> None:
            self._state = state

        def __getattr__(self, name: str) -> Any:
            return getattr(self._state, name)

    monkeypatch.setattr(GrammarGuide, "begin", lambda self, g, *rest: breaking(self, Open(g), *rest))
    told = list(front.submit(request))
    assert (told[-1].finish_reason, str(told[-1].error)) == ("error", "the grammar takes too long")
    assert sum(len(delta.token_ids) for delta in told) == 5
    assert list(free)[-1].finish_reason == "length"
    assert engine_of(front).metrics.num_failed_steps == 0


def test_a_reply_goes_on_in_a_new_engine_with_what_its_grammar_has_seen(front: Front) -> None:
    settings = SamplingParams(max_tokens=400, temperature=0.0, structured_outputs={"json": SCHEMA})
    request = front.prepare("Hello", settings)
    whole = collect(front.submit(request), None, settings).outputs[0].token_ids
    for cut in (1, 9, len(whole) - 1):
        again = replace(request, id=f"again {cut}", resumed=(tuple(whole[:cut]),))
        rest = [i for delta in front.submit(again) for i in delta.token_ids]
        assert rest == whole[cut:]


@pytest.mark.parametrize("params", [{}, {"temperature": 1.0, "seed": 9, "top_k": 0, "top_p": 1.0}])
def test_drafts_are_cut_by_the_grammar_and_change_no_text(params: dict[str, Any]) -> None:
    texts = []
    prompt = json.dumps({"name": "aaaaaaaa", "age": 1}) * 3
    for speculates in (False, True):
        front = engine_front()
        engine = engine_of(front)
        if speculates:
            engine.speculation = Speculation(NgramProposer(), StepCosts(), 8)
        outs = [
            run(front, prompt, n=2, structured_outputs=asked, **params).outputs
            for asked in ({"json": SCHEMA}, {"regex": "(abcabc){6}[a-c]{9}"})
        ]
        texts.append([(c.text, c.finish_reason, c.stop_reason) for out in outs for c in out])
        if speculates:
            assert engine.metrics.num_accepted_tokens > 10
        assert engine.audit() == ""
        front.close(drain=False)
    assert texts[0] == texts[1]


LONG = {"structured_outputs": {"regex": "([a-z]{10}-[0-9]{3};){12}"}, "max_tokens": 250}


def texts_of(front: Front, prompts: list[str]) -> list[str]:
    """What the prompts become, all at the same time."""
    params = SamplingParams(temperature=1.0, top_k=0, top_p=1.0, seed=8, **LONG)  # type: ignore[arg-type]
    streams = [front.submit(front.prepare(prompt, params)) for prompt in prompts]
    return [collect(stream, None, params).outputs[0].text for stream in streams]


def test_preempted_sequence_goes_on_where_its_grammar_was(front: Front) -> None:
    prompts = [f"{name} " * 20 for name in ("one", "two", "six", "ten")]
    wanted = texts_of(front, prompts)
    narrow = engine_front(num_blocks=40)
    assert texts_of(narrow, prompts) == wanted
    assert narrow.stats()["num_preemptions"] > 0
    narrow.close(drain=False)


def test_a_step_that_fails_costs_a_guided_reply_nothing(
    front: Front, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts = ["one", "two", "six"]
    wanted = texts_of(front, prompts)
    runner, shared = engine_of(front).runner, iter(range(10_000))
    launch = runner.launch

    def failing(plan: StepPlan, sampling: Any) -> Any:
        if len(plan.chunks) > 1 and next(shared) in (7, 60):
            raise OSError("a step fails")
        return launch(plan, sampling)

    monkeypatch.setattr(runner, "launch", failing)
    assert texts_of(front, prompts) == wanted
    assert engine_of(front).metrics.num_failed_steps == 2


def test_sequence_waits_for_its_grammar_and_others_go_on(front: Front) -> None:
    made: list[GrammarGuide] = []

    def slow(request: Request) -> list[GrammarGuide | None]:
        if request.grammar is None:
            return [None]
        made.append(GrammarGuide(VOCAB_SIZE))
        return [made[0]]

    engine = engine_of(front)
    usual, engine.guided = engine.guided, slow
    try:
        asked = SamplingParams(max_tokens=9, temperature=0.0, structured_outputs={"choice": ["yes"]})
        waiting = front.submit(front.prepare("Hello", asked))
        assert run(front, max_tokens=20).outputs[0].finish_reason == "length"
        assert made
        assert front.grammars is not None
        compiler = GrammarCompiler(front.grammars.tokenizer, VOCAB_SIZE)
        made[0].begin(compiler.compile(Grammar("choice", '["yes"]')).state(), None)
        compiler.close()
        assert "".join(delta.text for delta in waiting) == "yes"
        lost = front.submit(front.prepare("Hello", asked))
        lost.cancel()
        assert list(lost)[-1].finish_reason == "cancelled"
    finally:
        engine.guided = usual


def test_keys_take_turns_at_the_thread_that_compiles(front: Front) -> None:
    begun: list[str] = []
    entered, goes_on = threading.Event(), threading.Event()

    def find() -> Any:
        entered.set()
        assert goes_on.wait(60)
        raise BadGrammar("there is none")

    class Noted(Guides):
        def _begin(self, request: Request, guides: Sequence[GrammarGuide]) -> None:
            begun.append(request.id)
            super()._begin(request, guides)

    guides = Noted(find, VOCAB_SIZE)
    for number, key in enumerate("aaaab"):
        requested = Grammar("regex", "a")
        guides.open(Request(f"{key}{number}", (1,), SamplingParams(), tenant=key, grammar=requested))
    assert entered.wait(60)
    goes_on.set()
    assert guides._worker is not None
    guides._worker.shutdown()
    assert begun.index("b4") <= 2
    assert [name for name in begun if name != "b4"] == ["a0", "a1", "a2", "a3"]


def test_where_no_thread_can_be_started_the_request_fails_and_nothing_else(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refused(*_: Any) -> Any:
        raise RuntimeError("can't start new thread")

    guides = Guides(lambda: pytest.fail("it is not begun"), VOCAB_SIZE)
    request = Request("r", (1,), SamplingParams(), grammar=Grammar("regex", "a"))
    with monkeypatch.context() as patch:
        patch.setattr(ThreadPoolExecutor, "submit", refused)
        (guide,) = guides.open(request)
    assert guide is not None
    assert isinstance(guide.error, OutOfMemory)
    guides.close()


def thinking(num_tokens: int, *, is_open: bool = True) -> ThinkingBudget:
    return ThinkingBudget(num_tokens, "<think>", "</think>", tuple(b"</think>"), is_open)


def test_thinking_is_ended_when_its_budget_is_spent(front: Front) -> None:
    plain = front.prepare("Hello", SamplingParams(max_tokens=60, temperature=0.0))
    free = collect(front.submit(plain), None, plain.params).outputs[0].text
    for budget in (0, 1, 17):
        request = replace(plain, id=f"budget {budget}", thinking=thinking(budget))
        text = collect(front.submit(request), None, request.params).outputs[0].text
        assert text[:budget] == free[:budget]
        assert text[budget:].startswith("</think>")
        assert text.count("</think>") == 1
    closed = replace(plain, id="closed", thinking=thinking(3, is_open=False))
    assert collect(front.submit(closed), None, plain.params).outputs[0].text == free


def test_a_budget_and_a_grammar_hold_together(front: Front) -> None:
    lead = "start: part0\npart0[lazy]: /(?s:.*)<\\/think>/\n"
    settings = SamplingParams(max_tokens=200, temperature=0.0)
    request = front.prepare("Hello", settings)
    grammar = Grammar("json_schema", json.dumps(SCHEMA), "response_format", lead)
    request = front.constrain(request, grammar, thinking(12))
    text = collect(front.submit(request), None, settings).outputs[0].text
    thought, _, reply = text.partition("</think>")
    assert len(thought) == 12
    assert set(json.loads(reply)) == {"name", "age"}


def test_without_a_vocabulary_nothing_is_taken_that_would_need_one() -> None:
    def find() -> Any:
        raise BadGrammar("there is no tokenizer")

    guides = Guides(find, VOCAB_SIZE)
    request = Request("r", (1,), SamplingParams(), grammar=Grammar("regex", "a"))
    (guide,) = guides.open(request)
    assert guide is not None
    guides._worker.shutdown()  # type: ignore[union-attr]  # it has answered then
    assert isinstance(guide.error, BadGrammar)
    assert not guide.is_ready


@pytest.mark.parametrize("due", [(7, 8, 9), (300,)])
def test_forced_tokens_are_the_only_ones_allowed_and_are_the_draft(due: tuple[int, ...]) -> None:
    guide = GrammarGuide(320)
    budget = ThinkingBudget(0, "<think>", "</think>", due, True)
    guide.begin(None, ThinkingWatch(budget, lambda i: b"</think>" if i == due[-1] else b"x"))
    assert guide.find_forced() == due
    masks = guide.masks(due)
    assert len(masks) == len(due) + 1
    for mask, token in zip(masks, due, strict=False):
        assert int.from_bytes(mask, "little") == 1 << token
    assert masks[-1] == b""
    assert len(guide.masks((due[0] + 1,))) == 1
    for token in due:
        assert not guide.accept(token)
    assert guide.masks() == (b"",)
