"""Earlier calls and tools as the templates of some families take them, rendered."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from plait.errors import InvalidField
from plait.text.chat.jinja import JinjaTemplate
from plait.text.chat.sandbox import Sandbox
from plait.text.reply_format import ReplyFormat
from plait.text.tokenizers.builtin import builtin_tokenizer

TOKENIZER = builtin_tokenizer("cl100k_base", True)
ARGUMENTS = '{"city": "Rome", "days": 2}'
CALL = {"id": "call_abc", "type": "function", "function": {"name": "weather", "arguments": ARGUMENTS}}
TOOL = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}
GLM = (
    "{% for m in messages %}<|{{ m.role }}|>{% for c in m.tool_calls or [] %}"
    "{{ '\n<tool_call>' + c.function.name + '\n' }}{% for k, v in c.function.arguments.items() %}"
    "{{ '<arg_key>' + k + '</arg_key>\n<arg_value>' }}"
    "{{ v if v is string else v | tojson }}{{ '</arg_value>\n' }}{% endfor %}</tool_call>{% endfor %}"
    "{{ m.content }}{% endfor %}"
)
COHERE = (
    "{% for m in messages %}{% if m.tool_calls %}<|START_THINKING|>{{ m.tool_plan }}<|END_THINKING|>"
    "<|START_ACTION|>[{% for c in m.tool_calls %}{{ c.function.name }}{{ c.function.arguments | tojson }}"
    "{% endfor %}]<|END_ACTION|>{% else %}<|START_RESPONSE|>{{ m.content }}<|END_RESPONSE|>{% endif %}"
    "{% endfor %}{% if tools %}{% endif %}"
)
SMOLLM3 = (
    "{% if xml_tools or python_tools %}{% for t in xml_tools or [] %}<tool>{{ t.function.name }}</tool>"
    '{% endfor %}{{ python_tools }}<tool_call>{"name": …}{% endif %}'
    "{% for m in messages %}{{ m.content }}{% endfor %}"
)


@pytest.fixture(scope="module")
def sandbox() -> Iterator[Sandbox]:
    box = Sandbox()
    yield box
    box.close()


def rendered(sandbox: Sandbox, source: str, message: dict[str, Any], **options: Any) -> str:
    template = JinjaTemplate("test", {"default": source}, TOKENIZER, {}, sandbox)
    messages = ReplyFormat(TOKENIZER, template).history([message])
    return template.text(messages, **options)


def test_a_glm_template_gets_arguments_that_it_can_go_through(sandbox: Sandbox) -> None:
    message = {"role": "assistant", "content": None, "tool_calls": [CALL]}
    assert rendered(sandbox, GLM, message) == (
        "<|assistant|>\n<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>Rome</arg_value>\n"
        "<arg_key>days</arg_key>\n<arg_value>2</arg_value>\n</tool_call>"
    )


@pytest.mark.parametrize(
    "more",
    [
        {"content": "I look."},
        {"content": None, "reasoning_content": "I look."},
        {"content": "Hm.", "reasoning": "I look."},
        {"content": "Hm.", "tool_plan": "I look."},
    ],
)
def test_a_command_template_gets_thinking_or_text_before_calls(
    sandbox: Sandbox, more: dict[str, Any]
) -> None:
    message = {"role": "assistant", "tool_calls": [CALL], **more}
    text = rendered(sandbox, COHERE, message)
    assert text == (
        f"<|START_THINKING|>I look.<|END_THINKING|><|START_ACTION|>[weather{ARGUMENTS}]<|END_ACTION|>"
    )
    plain = {"role": "assistant", "content": "Sunny."}
    assert rendered(sandbox, COHERE, plain) == "<|START_RESPONSE|>Sunny.<|END_RESPONSE|>"


def test_tools_reach_a_template_that_reads_them_as_xml_tools(sandbox: Sandbox) -> None:
    message = {"role": "user", "content": "Hello"}
    assert rendered(sandbox, SMOLLM3, message, tools=[TOOL]).startswith("<tool>weather</tool>")
    assert rendered(sandbox, SMOLLM3, message) == "Hello"
    assert rendered(sandbox, SMOLLM3, message, python_tools="def f").startswith("def f")
    with pytest.raises(InvalidField, match="no place for tools"):
        rendered(sandbox, "{% for m in messages %}{{ m.content }}{% endfor %}", message, tools=[TOOL])
