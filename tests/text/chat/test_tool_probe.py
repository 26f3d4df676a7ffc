"""How chat templates take calls: as objects or as text, one or several; and what goes into them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from plait.errors import InvalidField
from plait.text.chat.jinja import JinjaTemplate
from plait.text.chat.sandbox import Sandbox
from plait.text.chat.template import CallsTaken, normalize_messages
from plait.text.tokenizers.builtin import builtin_tokenizer

HEAD = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% for c in m.tool_calls or [] %}"
TAIL = "{% endfor %}{% endfor %}"
ONE_ONLY = (
    "{% for m in messages %}{% if m.tool_calls and m.tool_calls|length > 1 %}{{ raise_exception('one') }}"
)
TEMPLATES = {
    "tojson": (HEAD + "{{ c.function.arguments | tojson }}" + TAIL, CallsTaken()),
    "concatenated": (HEAD + "{{ '<' + c.function.arguments + '>' }}" + TAIL, CallsTaken(as_text=True)),
    "printed": (HEAD + "{{ c.function.arguments }}" + TAIL, CallsTaken(as_text=True)),
    "either": (
        HEAD
        + "{{ c.function.arguments if c.function.arguments is string else c.function.arguments | tojson }}"
        + TAIL,
        CallsTaken(),
    ),
    "items": (
        HEAD + "{% for k, v in c.function.arguments.items() %}<p={{ k }}>{{ v }}</p>{% endfor %}" + TAIL,
        CallsTaken(),
    ),
    "one": (
        ONE_ONLY + "{% endif %}{% for c in m.tool_calls or [] %}{{ c.function.arguments | tojson }}" + TAIL,
        CallsTaken(several=False),
    ),
    "none": ("{% for m in messages %}{{ m.content }}{% endfor %}", CallsTaken()),
    "refusing": (
        "{% for m in messages %}{% if m.role == 'tool' %}{{ raise_exception('no') }}{% endif %}{% endfor %}",
        CallsTaken(),
    ),
}


@pytest.fixture(scope="module")
def sandbox() -> Iterator[Sandbox]:
    box = Sandbox()
    yield box
    box.close()


def template(source: str, sandbox: Sandbox) -> JinjaTemplate:
    return JinjaTemplate("test", {"default": source}, builtin_tokenizer("cl100k_base"), {}, sandbox)


def called(arguments: Any, **more: Any) -> list[dict[str, Any]]:
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": arguments}}
    message = {"role": "assistant", "content": None, "tool_calls": [call], **more}
    return [{"role": "user", "content": "q"}, message]


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_template_says_how_it_takes_calls(name: str, sandbox: Sandbox) -> None:
    source, wanted = TEMPLATES[name]
    assert template(source, sandbox).calls == wanted


@pytest.mark.parametrize("arguments", ['{"x": "é", "y": [1]}', {"x": "é", "y": [1]}])
@pytest.mark.parametrize(("name", "head"), [("tojson", ""), ("concatenated", "<"), ("either", "")])
def test_arguments_reach_the_template_as_it_expects_them(
    name: str, head: str, arguments: Any, sandbox: Sandbox
) -> None:
    text = template(TEMPLATES[name][0], sandbox).text(called(arguments), add_generation_prompt=False)
    assert text.endswith("[assistant]" + head + '{"x": "é", "y": [1]}' + (">" if head else ""))


def test_no_arguments_are_an_empty_object() -> None:
    for sent in ("", "  ", None):
        (_, message) = normalize_messages(called(sent), calls_as_text=True)
        assert message["tool_calls"][0]["function"]["arguments"] == "{}"
    (_, message) = normalize_messages(called(""))
    assert message["tool_calls"][0]["function"]["arguments"] == {}


def test_arguments_that_are_no_json_are_refused_by_name() -> None:
    for as_text in (False, True):
        with pytest.raises(InvalidField) as refused:
            normalize_messages(called("{broken"), calls_as_text=as_text)
        assert refused.value.param == "messages[1].tool_calls[0].function.arguments"


def test_a_null_with_calls_is_no_content() -> None:
    assert normalize_messages(called("{}"))[1]["content"] == ""
    assert normalize_messages(called("{}", content="so:"))[1]["content"] == "so:"


@pytest.mark.parametrize("name", ["reasoning_content", "reasoning", "thinking"])
def test_thinking_of_earlier_turns_has_every_name(name: str) -> None:
    (message,) = normalize_messages([{"role": "assistant", "content": "a", name: "because"}])
    assert [message[n] for n in ("reasoning_content", "reasoning", "thinking")] == ["because"] * 3
    (plain,) = normalize_messages([{"role": "assistant", "content": "a", name: ""}])
    assert set(plain) <= {"role", "content", name}
