"""Formats that are rows alone: two calls in each, cut at every character, damaged; found by a template."""

from __future__ import annotations

import json
from typing import Any

import pytest

from plait.text.output import FORMATS, tool_format
from plait.text.output.reasoning import REASONING, reasoning_format
from tests.text.output.written_calls import WRITERS
from tests.text.replies import is_beginning_of_json, read

FIRST: dict[str, Any] = {"city": "Rome (b) & {co}", "days": 2}
SECOND: dict[str, Any] = {"city": "Bern", "tags": ["x", 1]}
CALLS = [("get_weather", FIRST), ("search", SECOND)]
BARE = {"functionary", "functionary_v2", "xlam"}


@pytest.mark.parametrize("step", [11, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", WRITERS)
def test_two_calls_are_read_alike_wherever_their_text_is_cut(name: str, step: int) -> None:
    written = WRITERS[name]([*CALLS])
    text = written if name in BARE else f"Well.\n{written}"
    whole = read(name, [text])
    assert whole.calls == CALLS
    assert (whole.content, whole.complete) == ("" if name in BARE else "Well.", [True, True])
    for at in range(1, len(text), step):
        assert read(name, [text[:at], text[at:]]) == whole, text[:at]
    assert read(name, list(text)) == whole


@pytest.mark.parametrize("step", [17, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", WRITERS)
def test_a_damaged_call_never_raises_and_gives_no_broken_arguments(name: str, step: int) -> None:
    text = WRITERS[name]([*CALLS])
    for at in range(0, len(text), step):
        for damaged in (text[:at], text[:at] + text[at + 2 :], f"{text[:at]}<x>\n{text[at:]}"):
            found = read(name, [damaged])
            for arguments, complete in zip(found.arguments, found.complete, strict=True):
                assert not complete or isinstance(json.loads(arguments), dict)
                assert is_beginning_of_json(arguments), damaged


@pytest.mark.parametrize(
    ("template", "tokens", "tools", "thinking"),
    [
        ("{{ tools }}'<' + '｜DSML｜' + 'function_calls>'</think>", (), "dsml_v32", "think"),
        ("{{ tools }}<｜DSML｜tool_calls></think>", (), "dsml", "think"),
        ("{{ tools }}<｜GCML｜tool_calls></think>", (), "gcml", "think"),
        ("{{ tools }}<｜DSML｜ calls></think>", (), "dsml_v41", "think"),
        ("{{ tools }}<minimax:tool_call><invoke name=</think>", (), "minimax_m2", "think"),
        ("{{ tools }}<seed:tool_call><function=f></function></seed:think>", (), "seed_oss", "seed"),
        ('<｜tool_calls_begin｜><steptml:invoke name="f"></think>', (), "step3", "think"),
        ("<tool_calls><tool_call>f<tool_sep><arg_key></think>", (), "hy3", "think"),
        (
            "<tool_calls:opensource><tool_sep:opensource><arg_key:opensource></think:opensource>",
            (),
            "hy3_open",
            "hy3",
        ),
        ("{{ '<|open|>' ~ tag ~ '<|sep|>' ~ '<|close|>' }}", (), "kimi_k3", "kimi_k3"),
        ("<|think|><|tool_calls|><|content|><|end|>", (), "solar_open", "solar_open"),
        ("<|tool_call:start|>f", (), "solar_open2", None),
        ("<longcat_tool_call><longcat_arg_key></longcat_think>", (), "longcat_tags", "longcat"),
        ("<longcat_tool_call>{}", (), "longcat", None),
        ("<iquest_tool_call>f<arg_key></think>", (), "iquest", "think"),
        ("<ifm|think></ifm|think><ifm|tool_calls><ifm|tool_call>", (), "ifm", "ifm"),
        ('<function name="f"><param name="a">', (), "minicpm5", None),
        ("<atem:function_calls>", (), "atem", None),
        ('<function_calls>\n<invoke name="f">', (), "invoke", None),
        ("{{ tools }}<|tool_call>call:f<|channel>thought<channel|>", (), "gemma4", "gemma4"),
        ("<start_function_call>", (), "functiongemma", None),
        ("<|tools_prefix|><|inner_prefix|><|inner_suffix|>", (), "apertus", "apertus"),
        ("{{ m }}", ("<|action_start|>", "<|plugin|>"), "internlm", None),
        ("assistant -> tool/function_call", (), "hyperclova", None),
        ("<|function_call|>", (), "gigachat", None),
        ("<functioncall>", (), "glaive", None),
        ("<function_call> {", (), "granite_fc", None),
        ("[unused11][unused17]", (), "pangu", "pangu"),
        ("{{ tools }}>>>all\n", (), "functionary", None),
        ("<|recipient|>all\n<|content|>", (), "functionary_v2", None),
        ("✿FUNCTION✿: f", (), "qwen_agent", None),
        ("Action: f\nAction Input: {}", (), "react", None),
        ("<<function>>", (), "gorilla", None),
        ("Call: f()<bot_end>", (), "raven", None),
        ("```tool_code\nf()\n```", (), "tool_code", None),
        ("<|START_THINKING|><|START_ACTION|><|START_TEXT|>", (), "cohere_text", "cohere_text"),
        ("<tool_calls>[{}]</tool_calls></think><answer>", (), "jamba", "hunyuan"),
    ],
)
def test_a_template_names_its_formats(
    template: str, tokens: tuple[str, ...], tools: str, thinking: str | None
) -> None:
    found, thought = tool_format(template, tokens), reasoning_format(template, tokens)
    assert (found and found.name, thought and thought.name) == (tools, thinking)


def test_there_are_rows_for_every_family() -> None:
    assert WRITERS.keys() < FORMATS.keys()
    assert len(FORMATS) >= 55
    assert tool_format("", (), "kimi_k3") is FORMATS["kimi_k3"]


@pytest.mark.parametrize(
    ("name", "thought", "reply"),
    [
        (
            "kimi_k3",
            "<|open|>think<|sep|>It rains.<|close|>think<|sep|>",
            "<|open|>response<|sep|>Hi.<|close|>response<|sep|>",
        ),
        ("solar_open", "<|think|>It rains.<|end|><|begin|>assistant", "<|content|>Hi.<|end|>"),
        ("gemma4", "<|channel>thought\nIt rains.\n<channel|>", "Hi."),
        ("apertus", "<|inner_prefix|>It rains.<|inner_suffix|>", "Hi."),
        ("cohere_text", "<|START_THINKING|>It rains.<|END_THINKING|>", "<|START_TEXT|>Hi.<|END_TEXT|>"),
    ],
)
def test_thinking_and_content_come_out_of_their_markers(name: str, thought: str, reply: str) -> None:
    text = thought + reply
    for at in range(len(text)):
        found = read(name, [text[:at], text[at:]], reasoning=REASONING[name])
        assert (found.content, found.reasoning, found.calls) == ("Hi.", "It rains.", []), text[:at]
    calls = WRITERS[name]([*CALLS])
    turn = "<|begin|>assistant" if name == "solar_open" else ""
    found = read(name, list(text + turn + calls), reasoning=REASONING[name])
    assert (found.calls, found.content, found.reasoning) == (CALLS, "Hi.", "It rains.")


def test_a_quoted_value_says_itself_whether_it_is_text() -> None:
    row = '<｜DSML｜parameter name="{}" string="{}">{}</｜DSML｜parameter>\n'
    rows = (
        row.format("a", "true", "5")
        + row.format("b", "false", "[1, null]")
        + row.format("city", "false", "7")
    )
    text = f'<｜DSML｜tool_calls>\n<｜DSML｜invoke name="f">\n{rows}</｜DSML｜invoke>\n</｜DSML｜tool_calls>'
    assert read("dsml", list(text)).calls == [("f", {"a": "5", "b": [1, None], "city": 7})]


@pytest.mark.parametrize("effort", ["", "_fast", "_faster"])
def test_calls_of_k2_horizon_have_three_forms(effort: str) -> None:
    def call(text: str) -> str:
        return f"<ifm|tool_call>{text}</ifm|tool_call>\n"

    key, value = "<ifm|arg_key>{}</ifm|arg_key>", "<ifm|arg_value>{}</ifm|arg_value>"
    kind = "<ifm|arg_type>{}</ifm|arg_type>\n"
    plain = call("search\n" + "".join(f"{key.format(k)}{value.format(v)}" for k, v in (("city", "5"),)))
    typed = call("search" + key.format("tags") + kind.format("array[string]") + value.format('["x", 1]'))
    as_json = call('\n{"name": "search", "arguments": {"city": "Rome", "tags": []}}\n')
    thought = f"<ifm|think{effort}>It rains.</ifm|think{effort}>\n"
    text = f"{thought}<ifm|tool_calls>\n{plain}{typed}{as_json}{call('search')}</ifm|tool_calls>"
    wanted = [{"city": "5"}, {"tags": ["x", 1]}, {"city": "Rome", "tags": []}, {}]
    for parts in ([text], list(text)):
        found = read("ifm", parts, reasoning=REASONING["ifm"])
        assert (found.calls, found.content) == ([("search", one) for one in wanted], "")
        assert found.reasoning == "It rains."


@pytest.mark.parametrize("starts_open", [False, True])
@pytest.mark.parametrize("effort", ["", "_fast", "_faster"])
def test_a_call_of_k2_horizon_ends_thinking_that_nothing_closed(effort: str, starts_open: bool) -> None:
    call = "<ifm|tool_calls>\n<ifm|tool_call>search</ifm|tool_call>\n</ifm|tool_calls>"
    opening = "" if starts_open else f"<ifm|think{effort}>"
    how: dict[str, Any] = {"reasoning": REASONING["ifm"], "starts_open": starts_open}
    for closing in ("", f"</ifm|think{effort}>"):
        text = f"{opening}It <ifm| rains.\n{closing}{call}"
        whole = read("ifm", [text], **how)
        assert (whole.calls, whole.content, whole.reasoning) == ([("search", {})], "", "It <ifm| rains.")
        for at in range(1, len(text)):
            assert read("ifm", [text[:at], text[at:]], **how) == whole, text[:at]
        assert read("ifm", list(text), **how) == whole
    for other in {"", "_fast", "_faster"} - {effort}:
        found = read("ifm", [f"<ifm|think{effort}>a</ifm|think{other}>b{call}"], reasoning=REASONING["ifm"])
        assert (found.reasoning, found.content) == (f"a</ifm|think{other}>b", "")
    cut = read("ifm", list(f"{opening}It rains.<ifm|tool_ca"), **how)
    assert (cut.reasoning, cut.content, cut.calls) == ("It rains.<ifm|tool_ca", "", [])


def test_the_type_that_a_k2_horizon_call_writes_counts_where_the_schema_leaves_it_open() -> None:
    listed = {
        "either": {"type": ["string", "integer"]},
        "any_of": {"anyOf": [{"type": "string"}, {"type": "integer"}, {"type": "null"}]},
        "text": {"type": "string"},
        "number": {"type": "integer"},
        "empty": {},
    }
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"properties": listed}}}]
    rows: list[tuple[str, str, str, Any]] = [
        ("either", "integer", "5", 5),
        ("either", " Integer ", "5", 5),
        ("either", "string", "5", "5"),
        ("either", "array", "5", "5"),
        ("either", "any", "5", "5"),
        ("either", "integer", "five", "five"),
        ("any_of", "integer", "5", 5),
        ("any_of", "null", "null", None),
        ("any_of", "string", "null", "null"),
        ("text", "integer", "5", "5"),
        ("number", "string", "5", 5),
        ("empty", "string", "5", "5"),
        ("other", "string", "5", "5"),
        ("other", "integer", "5", 5),
        ("other", "array[string]", '["x"]', ["x"]),
        ("other", "any", "5", 5),
        ("other", "colour", "5", 5),
    ]
    for key, kind, value, wanted in rows:
        text = (
            f"<ifm|tool_calls><ifm|tool_call>f<ifm|arg_key>{key}</ifm|arg_key><ifm|arg_type>{kind}"
            f"</ifm|arg_type><ifm|arg_value>{value}</ifm|arg_value></ifm|tool_call></ifm|tool_calls>"
        )
        for parts in ([text], list(text)):
            assert read("ifm", parts, tools=tools).calls == [("f", {key: wanted})], (key, kind, value)


def test_gemma_values_are_nested_and_texts_hold_anything() -> None:
    text = '<|tool_call>call:f{a:{b:[1.5,true,null],c:<|"|>x "y" {z},\n<|<|"|>},d:[]}<tool_call|>'
    assert read("gemma4", list(text)).calls == [
        ("f", {"a": {"b": [1.5, True, None], "c": 'x "y" {z},\n<|'}, "d": []})
    ]


@pytest.mark.parametrize("name", ["functionary", "functionary_v2"])
def test_content_under_its_own_name_loses_the_name(name: str) -> None:
    text = {"functionary": "all\nHello.", "functionary_v2": "all\n<|content|>Hello."}[name]
    assert read(name, list(text)).content == "Hello."
