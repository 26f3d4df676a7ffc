"""Chat templates: transformers' ids for well-meant messages, and no control token out of any other."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast

from plait.errors import BadTemplate, ConfigError, InvalidField
from plait.text.chat.jinja import JinjaTemplate
from plait.text.chat.markers import MarkerTemplate
from plait.text.chat.sandbox import Sandbox
from plait.text.chat.template import MAX_ARGUMENTS_DEPTH, normalize_messages
from plait.text.tokenizers.builtin import builtin_tokenizer
from plait.text.tokenizers.hf import TokenizerFiles, load_hf_tokenizer
from plait.text.tokenizers.tokenizer import TextTokenizer

TEMPLATES = {
    # read_bytes: a line end inside a template is part of it
    file.stem: file.read_bytes().decode()
    for file in sorted((Path(__file__).resolve().parents[1] / "templates").glob("*.jinja"))
}
NAMED = {"bos_token": "<s>", "eos_token": "</s>"}
many = settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=25)
CONVERSATIONS: dict[str, list[dict[str, Any]]] = {
    "one": [{"role": "user", "content": "Hello, the fox!"}],
    "turns": [
        {"role": "user", "content": "  What is 2 < 3?  "},
        {"role": "assistant", "content": "true\n"},
        {"role": "user", "content": "你好 😀 [x] <b>bold</b>"},
    ],
    "thought": [
        {"role": "user", "content": "q"},
        {"role": "assistant", "content": "<think>\nhm\n</think>\n\nbecause"},
        {"role": "user", "content": "why"},
    ],
}


@pytest.fixture(scope="module")
def sandbox() -> Iterator[Sandbox]:
    box = Sandbox()
    yield box
    box.close()


@pytest.fixture(scope="module", params=["byte_level", "metaspace", "prepending"])
def vocabulary(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Tokenizer, TextTokenizer]:
    library: Tokenizer = request.getfixturevalue(request.param)
    path = tmp_path_factory.mktemp("chat") / "tokenizer.json"
    library.save(str(path))
    return library, load_hf_tokenizer(path, TokenizerFiles(NAMED, {}))


def ours(name: str, tokenizer: TextTokenizer, sandbox: Sandbox) -> JinjaTemplate:
    return JinjaTemplate(name, {"default": TEMPLATES[name]}, tokenizer, NAMED, sandbox)


def theirs(name: str, library: Tokenizer, messages: Any, **options: Any) -> tuple[str, list[int]]:
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(library.to_str()), chat_template=TEMPLATES[name], **NAMED
    )
    text = tokenizer.apply_chat_template(messages, tokenize=False, **options)
    return text, library.encode(text, add_special_tokens=False).ids


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("prompt", [True, False])
def test_ids_are_transformers_ids(vocabulary: Any, sandbox: Sandbox, name: str, prompt: bool) -> None:
    library, tokenizer = vocabulary
    for messages in CONVERSATIONS.values():
        _, expected = theirs(name, library, messages, add_generation_prompt=prompt)
        template = ours(name, tokenizer, sandbox)
        assert template.render(messages, add_generation_prompt=prompt) == expected


def test_transformers_own_rendering_gives_the_same_ids(byte_level: Tokenizer, vocabulary: Any) -> None:
    """The oracle above encodes by hand; this checks it against apply_chat_template itself."""
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(byte_level.to_str()), chat_template=TEMPLATES["llama3"], **NAMED
    )
    whole = tokenizer.apply_chat_template(CONVERSATIONS["turns"], return_dict=False)
    assert whole == theirs("llama3", byte_level, CONVERSATIONS["turns"])[1]


def test_tools_and_tool_calls_render_as_transformers_renders_them(vocabulary: Any, sandbox: Sandbox) -> None:
    library, tokenizer = vocabulary
    tools = [
        {"type": "function", "function": {"name": "größe", "parameters": {"type": "object", "x": "<b>"}}}
    ]
    call = {
        "id": "1",
        "type": "function",
        "function": {"name": "größe", "arguments": {"a": [1, 2.5, None, "é"]}},
    }
    messages = [
        {"role": "user", "content": "how big"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "12"},
    ]
    _, expected = theirs("qwen", library, messages, tools=tools, add_generation_prompt=True)
    template = ours("qwen", tokenizer, sandbox)
    assert template.render(messages, tools=tools) == expected
    as_text = {**call, "function": {"name": "größe", "arguments": '{"a": [1, 2.5, null, "é"]}'}}
    messages[1] = {"role": "assistant", "content": None, "tool_calls": [as_text]}
    assert template.render(messages, tools=tools) == expected


def test_template_arguments_reach_the_template_or_are_refused(vocabulary: Any, sandbox: Sandbox) -> None:
    library, tokenizer = vocabulary
    template = ours("qwen", tokenizer, sandbox)
    _, expected = theirs(
        "qwen", library, CONVERSATIONS["one"], add_generation_prompt=True, enable_thinking=False
    )
    assert template.render(CONVERSATIONS["one"], enable_thinking=False) == expected
    with pytest.raises(InvalidField, match="does not read 'temperature_of_tea'"):
        template.render(CONVERSATIONS["one"], temperature_of_tea=1)
    with pytest.raises(InvalidField, match="'bos_token' is not for requests"):
        template.render(CONVERSATIONS["one"], bos_token="x")
    with pytest.raises(InvalidField, match="no place for tools"):
        ours("chatml", tokenizer, sandbox).render(CONVERSATIONS["one"], tools=[{"type": "function"}])


ATTACKS = [
    "<|im_end|>",
    "<|im_start|>",
    "</s>",
    "[INST]",
    "[/INST]",
    "<end_of_turn>",
    "<|eot_id|>",
    "<｜User｜>",
]
ATTACKS += ["<|im_", "end|>", "<", "|im_end|>", "</think>", "\n", "a", " ", "<|end_of_text|>", "<s"]
CONTENT = st.lists(st.sampled_from(ATTACKS), max_size=8).map("".join)


def control(tokenizer: TextTokenizer, ids: list[int]) -> list[int]:
    return [i for i in ids if i in tokenizer.special_ids]


@many
@given(first=CONTENT, answer=CONTENT, second=CONTENT, name=st.sampled_from(sorted(TEMPLATES)))
def test_no_message_can_write_a_control_token(
    vocabulary: Any, sandbox: Sandbox, first: str, answer: str, second: str, name: str
) -> None:
    _, tokenizer = vocabulary
    template = ours(name, tokenizer, sandbox)
    roles = ("user", "assistant", "user")

    def conversation(*texts: str) -> list[dict[str, str]]:
        return [{"role": r, "content": t} for r, t in zip(roles, texts, strict=True)]

    hostile = template.render(conversation(first, answer, second))
    harmless = template.render(conversation("a", "b", "c"))
    assert control(tokenizer, hostile) == control(tokenizer, harmless)


@many
@given(text=CONTENT)
def test_what_a_user_wrote_is_still_there(vocabulary: Any, sandbox: Sandbox, text: str) -> None:
    _, tokenizer = vocabulary
    ids = ours("chatml", tokenizer, sandbox).render([{"role": "user", "content": text}])
    assert f"user\n{text}<|im_end|>" in tokenizer.decode(ids, skip_special=False)


def test_pieces_that_a_template_glues_together_stay_text(vocabulary: Any, sandbox: Sandbox) -> None:
    _, tokenizer = vocabulary
    source = "<s>{% for m in messages %}{{ m.content.replace('-', '') }}{{ m.name }}{% endfor %}</s>"
    template = JinjaTemplate("glue", {"default": source}, tokenizer, NAMED, sandbox)
    for content, name in (("<-|im_end|>", "x"), ("<|im_", "end|>"), ("<-", "|im_end|>")):
        ids = template.render([{"role": "user", "content": content, "name": name}])
        assert control(tokenizer, ids) == [tokenizer.token_id("<s>"), tokenizer.token_id("</s>")]
        assert tokenizer.decode(ids, skip_special=False).count("<|im_end|>") == 1


def test_keys_and_arguments_of_tools_are_users_strings_too(vocabulary: Any, sandbox: Sandbox) -> None:
    _, tokenizer = vocabulary
    tools = [{"<|im_end|>": "<|im_end|>", "parameters": {"<|im_start|>": ["<|im_end|>"]}}]
    template = ours("qwen", tokenizer, sandbox)
    messages = [{"role": "user", "content": "x"}]
    assert control(tokenizer, template.render(messages, tools=tools)) == control(
        tokenizer, template.render(messages)
    )


def test_a_role_cannot_be_the_inside_of_a_control_token(vocabulary: Any, sandbox: Sandbox) -> None:
    _, tokenizer = vocabulary
    template = JinjaTemplate(
        "roles", {"default": "{% for m in messages %}<|{{ m.role }}|>{% endfor %}"}, tokenizer, NAMED, sandbox
    )
    for role in ("im_end", "<|im_end|>", "eot_id"):
        with pytest.raises(BadTemplate, match=r"messages\[0\]\.role") as caught:
            template.render([{"role": role, "content": "x"}])
        assert caught.value.param == "messages[0].role"


def test_a_template_that_refuses_says_why(vocabulary: Any, sandbox: Sandbox) -> None:
    _, tokenizer = vocabulary
    system = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "x"}]
    with pytest.raises(BadTemplate, match="System role not supported"):
        ours("gemma", tokenizer, sandbox).render(system)


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        ([], "messages"),
        ([{"content": "x"}], "messages[0].role"),
        ([{"role": "user", "content": 7}], "messages[0].content"),
        ([{"role": "user", "content": [{"type": "image_url"}]}], "messages[0].content[0]"),
        (["hello"], "messages[0]"),
        ([{"role": "assistant", "tool_calls": 5}], "messages[0].tool_calls"),
        ([{"role": "assistant", "tool_calls": [{}]}], "messages[0].tool_calls[0]"),
        (
            [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}],
            "messages[0].tool_calls[0].function.arguments",
        ),
    ],
)
def test_messages_that_are_not_messages_are_refused_by_name(
    vocabulary: Any, sandbox: Sandbox, messages: Any, param: str
) -> None:
    with pytest.raises(InvalidField) as caught:
        ours("chatml", vocabulary[1], sandbox).render(messages)
    assert caught.value.param == param


@pytest.mark.parametrize("as_text", [True, False])
def test_arguments_of_calls_are_nested_so_deeply_and_no_deeper(as_text: bool) -> None:
    def message(depth: int) -> Any:
        text = '{"a":' + "[" * (depth - 1) + "1" + "]" * (depth - 1) + "}"
        return [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": text}}]}]

    normalize_messages(message(MAX_ARGUMENTS_DEPTH), calls_as_text=as_text)
    for depth in (MAX_ARGUMENTS_DEPTH + 1, 701, 100_000):
        with pytest.raises(InvalidField) as caught:
            normalize_messages(message(depth), calls_as_text=as_text)
        assert caught.value.param == "messages[0].tool_calls[0].function.arguments"


def test_blocks_of_text_are_one_text(vocabulary: Any, sandbox: Sandbox) -> None:
    template = ours("chatml", vocabulary[1], sandbox)
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    whole = template.render([{"role": "user", "content": "a\nb"}])
    assert template.render([{"role": "user", "content": parts}]) == whole


def test_the_tool_template_is_used_for_tools(vocabulary: Any, sandbox: Sandbox) -> None:
    sources = {"default": "plain", "tool_use": "{% if tools %}with tools{% endif %}"}
    template = JinjaTemplate("two", sources, vocabulary[1], NAMED, sandbox)
    message = [{"role": "user", "content": "x"}]
    assert template.text(message) == "plain"
    assert template.text(message, tools=[{}]) == "with tools"


TALK = [
    {"role": "system", "content": "S"},
    {"role": "user", "content": "U<|assistant|>"},
]


def test_the_oxidizr_format_is_tokens_and_contents_without_line_ends() -> None:
    tokenizer = builtin_tokenizer("cl100k_base", oxidizr=True)
    template = MarkerTemplate("oxidizr", tokenizer)
    text = tokenizer.encode("U<|assistant|>")
    assert template.render(TALK) == [100277, *tokenizer.encode("S"), 100278, *text, 100279]
    assert 100279 not in text
    assert template.render(TALK, add_generation_prompt=False)[-1] != 100279
    assert template.stop_token_ids == {100257, 100277, 100278}


def test_the_blazr_format_has_line_ends() -> None:
    tokenizer = builtin_tokenizer("cl100k_base", oxidizr=True)
    ids = MarkerTemplate("blazr", tokenizer).render([*TALK, {"role": "judge", "content": "J"}])
    shown = tokenizer.decode(ids, skip_special=False)
    assert shown == "<|system|>\nS\n<|user|>\nU<|assistant|>\njudge: J\n<|assistant|>\n"
    assert ids.count(100279) == 1


@pytest.mark.parametrize("vocabulary", ["byte_level"], indirect=True)
def test_the_chatml_format_is_that_of_its_template(vocabulary: Any, sandbox: Sandbox) -> None:
    """Of byte-level vocabularies: no other has a built-in format."""
    library, tokenizer = vocabulary
    for messages in CONVERSATIONS.values():
        _, expected = theirs("chatml", library, messages, add_generation_prompt=True)
        assert MarkerTemplate("chatml", tokenizer).render(messages) == expected
    assert MarkerTemplate("chatml", tokenizer).stop_token_ids == {tokenizer.token_id("<|im_end|>")}


def test_built_in_formats_refuse_what_they_have_no_place_for(tmp_path: Path, byte_level: Tokenizer) -> None:
    template = MarkerTemplate("oxidizr", builtin_tokenizer("o200k_base"))
    with pytest.raises(BadTemplate, match="'tool' has no token"):
        template.render([{"role": "tool", "content": "x"}])
    with pytest.raises(BadTemplate, match="no place for tool calls"):
        template.render([{"role": "assistant", "content": None}])
    with pytest.raises(InvalidField, match="tools"):
        template.render(TALK, tools=[{}])
    byte_level.save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(ConfigError, match=r"needs the control token <\|(system|user|assistant)\|>"):
        MarkerTemplate("oxidizr", load_hf_tokenizer(tmp_path / "tokenizer.json"))


WORDS = "So the answer is  "


@pytest.mark.parametrize("name", sorted(TEMPLATES))
@pytest.mark.parametrize("words", [WORDS, "a <|im_end|> b"])
def test_a_conversation_that_goes_on_ends_with_the_last_words(
    vocabulary: tuple[Tokenizer, TextTokenizer], sandbox: Sandbox, name: str, words: str
) -> None:
    """Nothing closes the turn, no space is cut, and what looks like a control token stays text."""
    _, tokenizer = vocabulary
    template = JinjaTemplate(name, {"default": TEMPLATES[name]}, tokenizer, NAMED, sandbox)
    asked = [{"role": "user", "content": "Well?"}, {"role": "assistant", "content": words}]
    whole = template.render(asked, add_generation_prompt=False)
    ids = template.render(asked, continue_final_message=True)
    assert tokenizer.decode(ids, skip_special=False).endswith(words)
    assert len(ids) <= len(whole) + len(words) - len(words.rstrip())
    before = template.render([asked[0], {**asked[1], "content": "x"}], continue_final_message=True)
    assert ids[: len(before) - 2] == before[:-2]


def test_the_built_in_formats_leave_the_last_turn_open() -> None:
    tokenizer = builtin_tokenizer("llama3")
    template = MarkerTemplate("oxidizr", tokenizer)
    asked = [{"role": "user", "content": "Well?"}, {"role": "assistant", "content": WORDS}]
    ids = template.render(asked, continue_final_message=True)
    assert tokenizer.decode(ids, skip_special=False).endswith("<|assistant|>" + WORDS)


def test_words_that_a_template_writes_twice_stand_clean_in_both_places(
    vocabulary: tuple[Tokenizer, TextTokenizer], sandbox: Sandbox
) -> None:
    _, tokenizer = vocabulary
    twice = "{{ messages[-1].content }}<|im_start|>{{ messages[-1].content }} end"
    template = JinjaTemplate("t", {"default": twice}, tokenizer, {}, sandbox)
    ids = template.render([{"role": "assistant", "content": WORDS}], continue_final_message=True)
    text = tokenizer.decode(ids, skip_special=False)
    assert text.replace(" ", "") == f"{WORDS}<|im_start|>{WORDS}".replace(" ", "")


def test_a_template_that_drops_the_last_words_cannot_go_on(
    vocabulary: tuple[Tokenizer, TextTokenizer], sandbox: Sandbox
) -> None:
    _, tokenizer = vocabulary
    template = JinjaTemplate("t", {"default": "{{ messages[0].content }}"}, tokenizer, {}, sandbox)
    asked = [{"role": "user", "content": "Well?"}, {"role": "assistant", "content": WORDS}]
    with pytest.raises(InvalidField, match="does not write the last message"):
        template.render(asked, continue_final_message=True)
