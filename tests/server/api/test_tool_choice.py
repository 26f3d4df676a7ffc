from __future__ import annotations

from typing import Any

import pytest

from plait.errors import ConfigError, InvalidField
from plait.frontend.frontend import Front, Language, Parsers
from plait.server.api.validate import allow_tools
from tests.server.conftest import serving
from tests.server.fake import fake_front
from tests.server.openai.speaking import CLOCK, TOOLS, SpeakingTemplate, said_call
from tests.server.real_engine import engine_front

CLOCK_ONLY = [{"type": "function", "function": {"name": "clock"}}]


@pytest.mark.parametrize("mode", ["auto", "required"])
def test_the_tools_that_are_allowed_stay_in_both_spellings(mode: str) -> None:
    nested = {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": CLOCK_ONLY}}
    flat = {"type": "allowed_tools", "mode": mode, "tools": [{"type": "function", "name": "clock"}]}
    for choice in (nested, flat):
        tools, found = allow_tools(TOOLS, choice)
        assert [tool["function"]["name"] for tool in tools] == ["clock"]
        assert found == mode


@pytest.mark.parametrize(
    "choice", [None, "auto", "none", {"type": "function", "function": {"name": "clock"}}]
)
def test_any_other_choice_leaves_all_tools(choice: Any) -> None:
    assert allow_tools(TOOLS, choice) == (TOOLS, choice)


@pytest.mark.parametrize(
    ("told", "word"),
    [
        (3, "mode"),
        ({"mode": "none", "tools": CLOCK_ONLY}, "mode"),
        ({"mode": "auto"}, "tools"),
        ({"mode": "auto", "tools": []}, "tools"),
        ({"mode": "auto", "tools": [3]}, "tools[0]"),
        ({"mode": "auto", "tools": [{"function": {"name": "nobody"}}]}, "nobody"),
    ],
)
def test_what_cannot_be_chosen_is_refused_by_name(told: Any, word: str) -> None:
    with pytest.raises(InvalidField, match=r"tool_choice\.allowed_tools") as refused:
        allow_tools(TOOLS, {"type": "allowed_tools", "allowed_tools": told})
    assert word in str(refused.value)


def test_the_model_gets_the_allowed_tools_alone() -> None:
    template = SpeakingTemplate()
    with serving(fake_front(template=template)) as client:
        choice = {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": CLOCK_ONLY}}
        text = said_call("clock", "{}")
        found = client.chat(text, tools=TOOLS, tool_choice=choice).json["choices"][0]["message"]
        assert [call["function"]["name"] for call in found["tool_calls"]] == ["clock"]
        flat = {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "clock"}]}
        tools = [{"type": "function", **tool["function"]} for tool in TOOLS]
        answer = client.post("/v1/responses", {"input": text, "tools": tools, "tool_choice": flat})
        assert answer.status == 200, answer.body
        assert {item["type"] for item in answer.json["output"]} >= {"function_call"}


def test_the_formats_of_replies_can_be_named_and_an_unknown_one_is_refused() -> None:
    front = fake_front(template=SpeakingTemplate())
    language = front.tokenizer, front.chat_template, front.generation_config, front.stop_token_ids

    def other(**names: str) -> Front:
        return Front("x", front.spec, 64, front.loop, Language(*language), parsers=Parsers(**names))

    assert front.reply_format.tools is not None
    assert other(tools="mistral").reply_format.tools is not front.reply_format.tools
    assert other(tools="none").reply_format.tools is None
    assert other(reasoning="none").reply_format.reasoning is None
    for names in ({"tools": "telepathy"}, {"reasoning": "telepathy"}):
        with pytest.raises(ConfigError, match="telepathy"):
            other(**names)


class PlainTemplate(SpeakingTemplate):
    """Says nothing of how calls are written: they are JSON."""

    source = "{{ tools }}"


def test_a_strict_tool_is_no_reason_to_refuse_where_calls_have_no_marker() -> None:
    strict = [{**tool, "function": {**tool["function"], "strict": True}} for tool in TOOLS]
    with serving(engine_front(template=PlainTemplate())) as client:
        for choice in ("auto", None):
            answer = client.chat("Hi", tools=strict, tool_choice=choice, max_tokens=8, temperature=1, seed=5)
            assert answer.status == 200, answer.body
            assert answer.json["choices"][0]["finish_reason"] in {"stop", "length"}


class XmlToolsTemplate(SpeakingTemplate):
    """SmolLM3's first template reads tools under a name of its own."""

    name = "xml_tools"
    variables = frozenset({"messages", "xml_tools", "python_tools", "enable_thinking"})


@pytest.mark.parametrize("wrapped", [True, False])
def test_tools_may_be_where_smollm3_has_them(wrapped: bool) -> None:
    template = XmlToolsTemplate()
    text, tools = said_call("clock", "{}"), [CLOCK if wrapped else CLOCK["function"]]
    with serving(fake_front(template=template)) as client:
        for more in ({"chat_template_kwargs": {"xml_tools": tools}}, {"tools": [CLOCK]}):
            choice = client.chat(text, **more).json["choices"][0]
            assert choice["message"]["tool_calls"][0]["function"]["name"] == "clock"
            options = template.asked[-1][1]
            assert (options["tools"], "xml_tools" in options) == ([CLOCK], False)
        both = client.chat(text, tools=[CLOCK], chat_template_kwargs={"xml_tools": tools})
        assert both.error["param"] == "chat_template_kwargs.xml_tools"
        wrong = client.chat(text, chat_template_kwargs={"xml_tools": "clock"})
        assert wrong.error["param"] == "chat_template_kwargs.xml_tools"
        python = {"python_tools": ["def f(): ..."]}
        assert client.chat(text, chat_template_kwargs=python).status == 200
        assert template.asked[-1][1]["python_tools"] == ["def f(): ..."]
