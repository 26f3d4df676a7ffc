"""Prompt boundaries of a conversation: where prompts diverge, and what conversations really share."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from plait.errors import InvalidField
from plait.text.chat.jinja import JinjaTemplate
from plait.text.chat.markers import MarkerTemplate
from plait.text.chat.sandbox import Sandbox
from plait.text.chat.template import boundaries
from plait.text.tokenizers.builtin import builtin_tokenizer
from plait.text.tokenizers.hf import TokenizerFiles, load_hf_tokenizer
from plait.text.tokenizers.tokenizer import TextTokenizer

TEMPLATES = {
    file.stem: file.read_bytes().decode()
    for file in sorted((Path(__file__).resolve().parents[1] / "templates").glob("*.jinja"))
}
NAMED = {"bos_token": "<s>", "eos_token": "</s>"}
SYSTEM = {"role": "system", "content": "You are a fox, and you jump."}
TURNS = [
    {"role": "user", "content": "Hello, the fox!"},
    {"role": "assistant", "content": "<think>\nhm\n</think>\n\nHello, the dog."},
    {"role": "user", "content": "How lazy are you?"},
]
REFUSES = """{%- for m in messages -%}
{%- if m.content == 'a' or m.content == 'b' -%}{{ raise_exception('too short') }}{%- endif -%}
<|im_start|>{{ m.role }} {{ m.content }}<|im_end|>
{%- endfor -%}{%- if add_generation_prompt -%}<|im_start|>assistant {% endif -%}"""


@pytest.fixture(scope="module")
def sandbox() -> Iterator[Sandbox]:
    box = Sandbox()
    yield box
    box.close()


@pytest.fixture(scope="module")
def tokenizer(byte_level: Tokenizer, tmp_path_factory: pytest.TempPathFactory) -> TextTokenizer:
    path = tmp_path_factory.mktemp("chat") / "tokenizer.json"
    byte_level.save(str(path))
    return load_hf_tokenizer(path, TokenizerFiles(NAMED, {}))


def shared(a: Sequence[int], b: Sequence[int]) -> int:
    same = 0
    while same < min(len(a), len(b)) and a[same] == b[same]:
        same += 1
    return same


@pytest.mark.parametrize("name", TEMPLATES)
def test_boundaries_are_what_other_conversations_share(
    tokenizer: TextTokenizer, sandbox: Sandbox, name: str
) -> None:
    template = JinjaTemplate(name, {"default": TEMPLATES[name]}, tokenizer, NAMED, sandbox)
    messages = TURNS if name in {"gemma", "mistral"} else [SYSTEM, *TURNS]  # they refuse system messages
    ids = template.render(messages)
    found = boundaries(template, messages, ids, {})
    another = {"role": "user", "content": "Zebras?"}
    wanted = {
        shared(ids, template.render([*messages[:-1], another])),
        shared(ids, template.render(messages, add_generation_prompt=False)),
    }
    if messages[0] is SYSTEM:
        wanted.add(shared(ids, template.render([SYSTEM, another])))
    assert set(found) == {at for at in wanted if 0 < at < len(ids)}
    assert list(found) == sorted(found)


def test_a_system_message_and_tools_end_where_the_question_begins(
    tokenizer: TextTokenizer, sandbox: Sandbox
) -> None:
    template = JinjaTemplate("qwen", {"default": TEMPLATES["qwen"]}, tokenizer, NAMED, sandbox)
    tools = [{"type": "function", "function": {"name": "jump", "parameters": {}}}]
    messages = [SYSTEM, {"role": "user", "content": "apples and foxes"}]
    ids = template.render(messages, tools=tools)
    first, last = boundaries(template, messages, ids, {"tools": tools})
    text = tokenizer.decode(ids[:first], skip_special=False)
    assert "jump" in text
    assert text.endswith("<|im_start|>user\n")
    assert tokenizer.decode(ids[:last], skip_special=False).endswith("foxes<|im_end|>\n")
    without_system = boundaries(
        template, messages[1:], template.render(messages[1:], tools=tools), {"tools": tools}
    )
    assert len(without_system) == 2


def test_a_question_alone_has_only_the_end_before_the_reply(
    tokenizer: TextTokenizer, sandbox: Sandbox
) -> None:
    template = JinjaTemplate("chatml", {"default": TEMPLATES["chatml"]}, tokenizer, NAMED, sandbox)
    ids = template.render(TURNS[:1])
    (at,) = boundaries(template, TURNS[:1], ids, {})
    assert ids[:at] == template.render(TURNS[:1], add_generation_prompt=False)
    bare = template.render(TURNS[:1], add_generation_prompt=False)
    assert boundaries(template, TURNS[:1], bare, {"add_generation_prompt": False}) == ()


def test_a_template_that_refuses_the_other_conversation_has_no_boundary_there(
    tokenizer: TextTokenizer, sandbox: Sandbox
) -> None:
    template = JinjaTemplate("short", {"default": REFUSES}, tokenizer, NAMED, sandbox)
    messages = [SYSTEM, *TURNS]
    ids = template.render(messages)
    found = boundaries(template, messages, ids, {})
    assert found == (len(template.render(messages, add_generation_prompt=False)),)


class Counting:
    """A template that counts how often it renders."""

    def __init__(self, template: MarkerTemplate) -> None:
        self.template, self.count = template, 0
        self.name, self.stop_token_ids = template.name, template.stop_token_ids

    def render(self, messages: Sequence[Mapping[str, Any]], /, **options: Any) -> list[int]:
        self.count += 1
        return self.template.render(messages, **options)

    def close(self) -> None:
        return


@pytest.mark.parametrize(
    ("messages", "renders"),
    [(TURNS[:1], 1), ([SYSTEM, TURNS[0]], 2), (TURNS, 2), ([SYSTEM, *TURNS], 3), ([SYSTEM] + TURNS * 99, 3)],
)
def test_a_conversation_of_any_length_takes_three_renderings_at_most(
    messages: list[dict[str, str]], renders: int
) -> None:
    template = Counting(MarkerTemplate("oxidizr", builtin_tokenizer("cl100k_base")))
    ids = template.template.render(messages)
    assert len(boundaries(template, messages, ids, {})) == renders
    assert template.count == renders


CONTENT = st.text(alphabet="ab <|>\n😀", max_size=6)
MESSAGE = st.builds(
    lambda role, content: {"role": role, "content": content},
    st.sampled_from(["system", "user", "assistant"]),
    CONTENT,
)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=20)
@given(messages=st.lists(MESSAGE, min_size=1, max_size=5), opens=st.booleans())
def test_boundaries_rise_and_lie_inside_the_prompt(messages: list[dict[str, str]], opens: bool) -> None:
    template = MarkerTemplate("oxidizr", builtin_tokenizer("cl100k_base"))
    ids = template.render(messages, add_generation_prompt=opens)
    found = boundaries(template, messages, ids, {"add_generation_prompt": opens})
    assert list(found) == sorted(set(found))
    assert all(0 < at < len(ids) for at in found)
    for at in found:
        assert ids[:at] == template.render(messages, add_generation_prompt=opens)[:at]


def test_parts_of_text_are_looked_at_as_text(tokenizer: TextTokenizer, sandbox: Sandbox) -> None:
    template = JinjaTemplate("chatml", {"default": TEMPLATES["chatml"]}, tokenizer, NAMED, sandbox)
    parts = [SYSTEM, {"role": "user", "content": [{"type": "text", "text": "a fox"}]}]
    plain = [SYSTEM, {"role": "user", "content": "a fox"}]
    ids = template.render(plain)
    assert boundaries(template, parts, ids, {}) == boundaries(template, plain, ids, {})


def test_no_template_argument_reaches_our_own_parameters(tokenizer: TextTokenizer, sandbox: Sandbox) -> None:
    templates = (
        JinjaTemplate("chatml", {"default": TEMPLATES["chatml"]}, tokenizer, NAMED, sandbox),
        MarkerTemplate("oxidizr", builtin_tokenizer("cl100k_base")),
    )
    taken: dict[str, Any] = {"self": 1}
    for template in templates:
        with pytest.raises(InvalidField, match="'self'"):
            template.render(TURNS, **taken)
