"""Calls as models write them, in the formats that are rows alone: stated here, not made from the rows."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

Call = tuple[str, Mapping[str, Any]]
Writer = Callable[[list[Call]], str]
D, G, S = "｜DSML｜", "｜GCML｜", "steptml:"


def text_of(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def tags(head: str, row: str, foot: str, begin: str = "", end: str = "", between: str = "\n") -> Writer:
    """{n} a call's name, {i} its number; {k} an argument's name, {v} its value, {s} whether it is text."""

    def write(calls: list[Call]) -> str:
        found = []
        for number, (name, arguments) in enumerate(calls, 1):
            rows = [
                row.replace("{k}", k)
                .replace("{s}", json.dumps(isinstance(v, str)))
                .replace("{t}", kind_of(v))
                .replace("{v}", text_of(v))
                for k, v in arguments.items()
            ]
            found.append(head.replace("{n}", name).replace("{i}", str(number)) + "".join(rows) + foot)
        return begin + between.join(found) + end

    return write


def kind_of(value: object) -> str:
    kinds = {str: "string", bool: "boolean", int: "number", type(None): "null", list: "array"}
    return kinds.get(type(value), "object")


def objects(
    before: str = "",
    after: str = "",
    begin: str = "",
    end: str = "",
    between: str = "\n",
    key: str = "arguments",
) -> Writer:
    def write(calls: list[Call]) -> str:
        texts = [json.dumps({"name": name, key: arguments}) for name, arguments in calls]
        return begin + between.join(before + text + after for text in texts) + end

    return write


def named(form: str, between: str = "\n", begin: str = "", end: str = "") -> Writer:
    """{n} the name, {i} the number, {a} the arguments as JSON."""

    def write(calls: list[Call]) -> str:
        texts = [
            form.replace("{n}", name).replace("{i}", str(i)).replace("{a}", json.dumps(arguments))
            for i, (name, arguments) in enumerate(calls)
        ]
        return begin + between.join(texts) + end

    return write


def python(begin: str, between: str, end: str) -> Writer:
    def write(calls: list[Call]) -> str:
        texts = [f"{name}({', '.join(f'{k}={json.dumps(v)}' for k, v in a.items())})" for name, a in calls]
        return begin + between.join(texts) + end

    return write


def gemma(opening: str, closing: str, quote: str) -> Writer:
    def value(v: object) -> str:
        match v:
            case str():
                return f"{quote}{v}{quote}"
            case list():
                return f"[{','.join(map(value, v))}]"
            case dict():
                return f"{{{','.join(f'{k}:{value(one)}' for k, one in v.items())}}}"
        return json.dumps(v)

    def write(calls: list[Call]) -> str:
        return "".join(f"{opening}call:{name}{value(dict(a))}{closing}" for name, a in calls)

    return write


PARAMETER = '<{p}parameter name="{k}">{v}</{p}parameter>\n'


def invokes(prefix: str, begin: str, end: str) -> Writer:
    head, row = f'<{prefix}invoke name="{{n}}">\n', PARAMETER.replace("{p}", prefix)
    return tags(head, row, f"</{prefix}invoke>", f"{begin}\n", f"\n{end}")


def dsml(word: str, tag: str = D) -> Writer:
    row = f'<{tag}parameter name="{{k}}" string="{{s}}">{{v}}</{tag}parameter>\n'
    begin, end = f"<{tag}{word}>\n", f"\n</{tag}{word}>"
    return tags(f'<{tag}invoke name="{{n}}">\n', row, f"</{tag}invoke>", begin, end)


def hunyuan(suffix: str) -> Writer:
    row = "<arg_key@>{k}</arg_key@>\n<arg_value@>{v}</arg_value@>\n".replace("@", suffix)
    head, foot = f"<tool_call{suffix}>{{n}}<tool_sep{suffix}>\n", f"</tool_call{suffix}>"
    return tags(head, row, foot, f"<tool_calls{suffix}>\n", f"\n</tool_calls{suffix}>")


WRITERS: dict[str, Writer] = {
    "dsml_v32": dsml("function_calls"),
    "dsml": dsml("tool_calls"),
    "gcml": dsml("tool_calls", G),
    "dsml_v41": dsml("calls", f"{D} "),
    "minimax_m2": invokes("", "<minimax:tool_call>", "</minimax:tool_call>"),
    "seed_oss": tags(
        "<function={n}>\n",
        "<parameter={k}>{v}</parameter>\n",
        "</function>",
        "<seed:tool_call>\n",
        "\n</seed:tool_call>",
    ),
    "step3": tags(
        f'<｜tool_call_begin｜>function<｜tool_sep｜><{S}invoke name="{{n}}">\n',
        PARAMETER.replace("{p}", S),
        f"</{S}invoke><｜tool_call_end｜>",
        "<｜tool_calls_begin｜>\n",
        "\n<｜tool_calls_end｜>",
    ),
    "hy3_open": hunyuan(":opensource"),
    "hy3": hunyuan(""),
    "kimi_k3": tags(
        '<|open|>call tool="{n}" index="{i}"<|sep|>',
        '<|open|>argument key="{k}" type="{t}"<|sep|>{v}<|close|>argument<|sep|>',
        "<|close|>call<|sep|>",
        "<|open|>tools<|sep|>",
        "<|close|>tools<|sep|>",
        "",
    ),
    "solar_open2": tags(
        "<|tool_call:start|>{n}\n",
        "<|tool_arg:start|>{k}<|tool_arg:value|>{v}<|tool_arg:end|>\n",
        "<|tool_call:end|>",
    ),
    "solar_open": named(
        "<|tool_call:begin|>{i}<|tool_call:name|>{n}<|tool_call:args|>{a}<|tool_call:end|>",
        "",
        "<|tool_calls|>",
        "<|calls|>",
    ),
    "longcat_tags": tags(
        "<longcat_tool_call>{n}\n",
        "<longcat_arg_key>{k}</longcat_arg_key>\n<longcat_arg_value>{v}</longcat_arg_value>\n",
        "</longcat_tool_call>",
    ),
    "iquest": tags(
        "<iquest_tool_call>{n}",
        "<arg_key>{k}</arg_key><arg_value>{v}</arg_value>",
        "</iquest_tool_call>",
    ),
    "ifm": tags(
        "<ifm|tool_call>{n}\n",
        "<ifm|arg_key>{k}</ifm|arg_key>\n<ifm|arg_value>{v}</ifm|arg_value>\n",
        "</ifm|tool_call>",
        "<ifm|tool_calls>\n",
        "\n</ifm|tool_calls>",
    ),
    "longcat": objects("<longcat_tool_call>", "</longcat_tool_call>"),
    "minicpm5": tags('<function name="{n}">\n', '<param name="{k}">{v}</param>\n', "</function>"),
    "atem": invokes("atem:", "<atem:function_calls>", "</atem:function_calls>"),
    "invoke": invokes("", "<function_calls>", "</function_calls>"),
    "gemma4": gemma("<|tool_call>", "<tool_call|>", '<|"|>'),
    "functiongemma": gemma("<start_function_call>", "<end_function_call>", "<escape>"),
    "apertus": named('{"{n}": {a}}', ", ", "<|tools_prefix|>[", "]<|tools_suffix|>"),
    "internlm": objects("<|action_start|><|plugin|>\n", "<|action_end|>", key="parameters"),
    "hyperclova": objects(begin=" -> tool/function_call\n[", end="]", between=", "),
    "gigachat": objects("<|function_call|>"),
    "glaive": objects("<functioncall> "),
    "granite_fc": objects("<function_call> ", "</function_call>"),
    "pangu": objects(begin="[unused11][", end="][unused12]", between=", "),
    "functionary": named("{n}\n{a}", ">>>"),
    "functionary_v2": named("{n}\n<|content|>{a}", "\n<|from|>assistant\n<|recipient|>"),
    "qwen_agent": named("✿FUNCTION✿: {n}\n✿ARGS✿: {a}"),
    "react": named("Action: {n}\nAction Input: {a}"),
    "gorilla": python("<<function>>[", ", ", "]"),
    "raven": python("Call: ", "; ", "<bot_end>"),
    "tool_code": python("```tool_code\n", "\n", "\n```"),
    "xlam": objects(begin="[", end="]", between=", "),
    "cohere_text": named(
        '{"tool_call_id": "{i}", "tool_name": "{n}", "parameters": {a}}',
        ",\n    ",
        "<|START_ACTION|>[\n    ",
        "\n]<|END_ACTION|>",
    ),
}
