"""Tool calls in a reply: the same ones however the text is cut, nothing of their markup in the content."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plait.text.output import FORMATS
from plait.text.output.reasoning import REASONING
from tests.text.replies import DS, NAMES, is_beginning_of_json, read, read_every_way

# How each family writes a call, written apart from the readers. A writer takes (name, arguments) pairs.

Call = tuple[str, dict[str, Any]]


def as_json(call: Call, key: str = "arguments") -> str:
    return json.dumps({"name": call[0], key: call[1]}, ensure_ascii=False)


def as_python(value: Any) -> str:
    return repr(value)


def python_call(call: Call) -> str:
    return f"{call[0]}({', '.join(f'{key}={as_python(value)}' for key, value in call[1].items())})"


def xml_value(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def xml_call(call: Call) -> str:
    rows = [f"<parameter={key}>\n{xml_value(value)}\n</parameter>\n" for key, value in call[1].items()]
    return f"<tool_call>\n<function={call[0]}>\n{''.join(rows)}</function>\n</tool_call>"


def deepseek_call(call: Call) -> str:
    written = json.dumps(call[1])
    return f"{DS['call']}function{DS['sep']}{call[0]}\n```json\n{written}\n```{DS['end']}"


def tagged(opening: str, closing: str) -> Callable[[list[Call]], str]:
    return lambda calls: "\n".join(f"{opening}{as_json(call)}{closing}" for call in calls)


def listed(opening: str, closing: str) -> Callable[[list[Call]], str]:
    return lambda calls: f"{opening}[{', '.join(map(as_json, calls))}]{closing}"


WRITERS: list[tuple[str, Callable[[list[Call]], str]]] = [
    ("hermes", tagged("<tool_call>\n", "\n</tool_call>")),
    ("hermes", tagged("<tool_call>", "")),
    ("granite", listed("<|tool_call|>", "")),
    ("granite", tagged("<tool_call>", "</tool_call>")),
    ("mistral", listed("[TOOL_CALLS] ", "")),
    ("mistral_list", listed("[TOOL_CALLS]", "")),
    ("mistral", lambda calls: "".join(f"[TOOL_CALLS]{n}[ARGS]{json.dumps(a)}" for n, a in calls)),
    (
        "mistral",
        lambda calls: "".join(f"[TOOL_CALLS]{n}[CALL_ID]a1b2[ARGS]{json.dumps(a)}" for n, a in calls),
    ),
    ("mistral", lambda calls: "".join(f"[TOOL_CALLS]{n}{json.dumps(a)}" for n, a in calls)),
    ("nemotron", listed("<TOOLCALL>", "</TOOLCALL>")),
    ("jamba", listed("<tool_calls>", "</tool_calls>")),
    ("agent", tagged("<|function|>", "<|/function|>")),
    ("deepseek", lambda calls: DS["begin"] + "\n".join(map(deepseek_call, calls)) + DS["close"]),
    (
        "deepseek",
        lambda calls: (
            DS["begin"]
            + "".join(f"{DS['call']}{n}{DS['sep']}{json.dumps(a)}{DS['end']}" for n, a in calls)
            + DS["close"]
        ),
    ),
    ("qwen_xml", lambda calls: "\n".join(map(xml_call, calls))),
    (
        "function_tag",
        lambda calls: "".join(f"<function={n}>{json.dumps(a)}</function>" for n, a in calls),
    ),
    (
        "harmony",
        lambda calls: "".join(
            f"<|channel|>commentary to=functions.{n} <|constrain|>json<|message|>{json.dumps(a)}<|call|>"
            for n, a in calls
        ),
    ),
    (
        "kimi",
        lambda calls: (
            "<|tool_calls_section_begin|>"
            + "".join(
                f"<|tool_call_begin|>functions.{n}:{i}<|tool_call_argument_begin|>{json.dumps(a)}<|tool_call_end|>"
                for i, (n, a) in enumerate(calls)
            )
            + "<|tool_calls_section_end|>"
        ),
    ),
    ("olmo", lambda calls: "<function_calls>\n" + "\n".join(map(python_call, calls)) + "\n</function_calls>"),
    ("phi", listed("functools", "")),
    ("lfm2", lambda calls: f"<|tool_call_start|>[{', '.join(map(python_call, calls))}]<|tool_call_end|>"),
    ("pythonic", lambda calls: f"[{', '.join(map(python_call, calls))}]"),
    ("pythonic", lambda calls: f"<|python_start|>[{','.join(map(python_call, calls))}]<|python_end|>"),
    ("llama_json", lambda calls: "; ".join(as_json(call, "parameters") for call in calls)),
    ("llama_json", lambda calls: "<|python_tag|>" + "; ".join(as_json(call, "parameters") for call in calls)),
    ("json", lambda calls: "```json\n" + "\n".join(map(as_json, calls)) + "\n```"),
    ("json", listed("", "")),
]
MARKERS = sorted({marker for form in FORMATS.values() for marker in form.markers} | {"```", "</parameter"})
TEXT = st.text(max_size=8) | st.sampled_from(
    [
        "}",
        '"',
        "\\",
        "{}",
        "]}",
        "it's",
        "\n",
        *MARKERS,
        '{"name": "f", "arguments": {}}',
        "[f(a=1)]",
        "😀",
        "\x00",
    ]
)
SCALAR = TEXT | st.integers() | st.booleans() | st.floats(allow_nan=False, allow_infinity=False)
ANY = st.recursive(
    SCALAR | st.none(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=2),
    max_leaves=5,
)
CALLS = st.lists(
    st.tuples(
        st.sampled_from(NAMES),
        st.fixed_dictionaries(
            {},
            optional={"city": TEXT, "days": st.integers(), "tags": st.lists(ANY, max_size=3), "else_": ANY},
        ),
    ),
    min_size=1,
    max_size=3,
)
CUTS = st.lists(st.integers(0, 400), max_size=8)


def fits_xml(calls: list[Call]) -> bool:
    """XML-like calls have no escapes: a closing tag in a value ends it, and `else_` has no type."""
    texts = [value for _, arguments in calls for key, value in arguments.items() if key == "city"]
    return not any("</parameter" in text for text in texts) and all("else_" not in a for _, a in calls)


@pytest.mark.parametrize(("name", "write"), WRITERS, ids=[f"{n}-{i}" for i, (n, _) in enumerate(WRITERS)])
@settings(max_examples=8, deadline=None)
@given(calls=CALLS, cuts=CUTS)
def test_every_way_of_writing_calls_is_read_however_it_is_cut(
    name: str, write: Callable[[list[Call]], str], calls: list[Call], cuts: list[int]
) -> None:
    if name == "qwen_xml" and not fits_xml(calls):
        return
    found = read_every_way(name, write(calls), cuts)
    assert found.calls == calls
    assert all(found.complete)
    assert found.content == ""


MARKED = [writer for writer in WRITERS if not FORMATS[writer[0]].syntax.bare]
SAID = st.sampled_from(
    ["Hi", "Let me see: {x} [1]", "a < b", "😀 <tool", "<", "[TOOL", "\n", "two\n\nlines", " "]
)


@pytest.mark.parametrize(("name", "write"), MARKED, ids=[f"{n}-{i}" for i, (n, _) in enumerate(MARKED)])
@settings(max_examples=8, deadline=None)
@given(calls=CALLS, before=SAID, after=SAID, cuts=CUTS)
def test_content_before_and_after_calls_stays_content(
    name: str, write: Callable[[list[Call]], str], calls: list[Call], before: str, after: str, cuts: list[int]
) -> None:
    if name == "qwen_xml" and not fits_xml(calls):
        return
    found = read_every_way(name, f"{before}\n{write(calls)}\n{after}", cuts)
    assert found.calls == calls
    assert found.content.split() == [*before.split(), *after.split()]
    assert found.content.strip(" \t\r\n") == found.content


def test_white_space_around_a_call_is_content_only_between_content() -> None:
    call = '<tool_call>{"name": "f", "arguments": {}}</tool_call>'
    assert read_every_way("hermes", f" \n{call}\n").content == ""
    assert read_every_way("hermes", f"Yes.\n\n{call}\n").content == "Yes."
    assert read_every_way("hermes", f"Yes.\n\n{call}\nNo. \n").content == "Yes.\n\n\nNo. \n"
    assert read_every_way("hermes", " no call \n").content == " no call \n"
    assert read_every_way("hermes", " \n").content == " \n"


SCRAPS = [
    *MARKERS,
    *("<think>", "</think>", "{", "}", '{"name": "f", ', '"arguments": ', '{"a": ', "[", "]", '"', "\\", "f"),
    *("(", ")", "a=", "'", "1", ",", ";", " ", "\n", "<function=", "f>", "<parameter=", "city>", "search"),
    *(
        "</parameter>",
        "</function>",
        '"name"',
        ":",
        "null",
        "```json",
        "function",
        "text",
        "{}",
        "<tool_",
        "é",
    ),
]
GARBAGE = st.lists(st.sampled_from(SCRAPS), max_size=25).map("".join)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", FORMATS)
@settings(max_examples=30, deadline=None)
@given(text=GARBAGE, cuts=CUTS, starts_open=st.booleans())
def test_garbage_never_raises_and_reads_the_same_however_it_is_cut(
    name: str, text: str, cuts: list[int], starts_open: bool
) -> None:
    found = read_every_way(name, text, cuts, reasoning=REASONING["think"], starts_open=starts_open)
    for arguments, complete in zip(found.arguments, found.complete, strict=True):
        assert isinstance(json.loads(arguments), dict) if complete else is_beginning_of_json(arguments)
    if not found.names and not starts_open and "<think>" not in text and "[]" not in text.replace(" ", ""):
        assert "".join(found.content.split()) == "".join(text.split()), "what was no call is not all there"


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("name", "write"), WRITERS, ids=[f"{n}-{i}" for i, (n, _) in enumerate(WRITERS)])
def test_a_reply_cut_anywhere_gives_a_beginning_of_what_the_whole_gives(
    name: str, write: Callable[[list[Call]], str]
) -> None:
    text = write([("f", {"city": 'a"}]\n', "days": 12}), ("search", {"tags": [{"k": None}, -1.5]})])
    whole = read(name, [text])
    for end in range(len(text)):
        cut = read_every_way(name, text[:end])
        assert whole.names[: len(cut.names)] == cut.names
        for i, (arguments, complete) in enumerate(zip(cut.arguments, cut.complete, strict=True)):
            assert whole.arguments[i] == arguments if complete else whole.arguments[i].startswith(arguments)
            assert complete or is_beginning_of_json(arguments)
        assert all(cut.complete[:-1])
