"""The formats in which models write tool calls: one table.

A new format is one entry here; if it is of a new kind, it needs one more reader. Order matters: the first
entry that a template fits is taken, so the particular come before the general.
"""

from __future__ import annotations

import string
from collections.abc import Mapping
from dataclasses import replace

from plait.text.output.call_formats import ToolFormat
from plait.text.output.call_grammar import ARGUMENTS, CALL_ID, LINE, NAME, NUMBER, Frame, json_frame
from plait.text.output.json_calls import CallSyntax, one_or_list, read_keyed_list
from plait.text.output.literal_calls import FUNCTION_GEMMA, GEMMA4, gemma_frame, gemma_syntax
from plait.text.output.marked_calls import DEEPSEEK, KIMI, SOLAR, harmony, lines, mistral, read_named_json
from plait.text.output.python_calls import call_lines, call_list, call_list_or_lines
from plait.text.output.reasoning import (
    COHERE_END,
    COHERE_FINAL,
    COHERE_TEXT,
    COHERE_TEXT_END,
    HARMONY_FINAL,
    HARMONY_TURN,
    KIMI_CLOSE,
    KIMI_FINAL,
    SOLAR_FINAL,
    SOLAR_TURN,
)
from plait.text.output.tagged_calls import (
    DSML,
    DSML_APART,
    DSML_V32,
    DSML_V41,
    DSML_WORD,
    GCML,
    GCML_WORD,
    GLM_TAGS,
    KIMI_K3,
    QWEN_TAGS,
    TAGGED,
    function_tag,
    tool_call,
)

_object_or_list = one_or_list()
_deepseek = DEEPSEEK.syntax()
_mistral = CallSyntax(mistral, ("[TOOL_CALLS]",), (), ("[ARGS]", "[CALL_ID]"))
_HARMONY = ("commentary to=functions.", "analysis to=functions.")
_known_only = one_or_list(known_only=True)
_dsml = DSML.syntax()
_dsml = replace(_dsml, opens=(*_dsml.opens, DSML_V32.begin), closes=(*_dsml.closes, DSML_V32.end))
_action = CallSyntax(_object_or_list, ("<|START_ACTION|>",), ("<|END_ACTION|>",))
_ACTION_FRAME = Frame(
    f'{{"tool_call_id": "{NUMBER}", "tool_name": "{NAME}", "parameters": {ARGUMENTS}}}',
    "<|START_ACTION|>[\n    ",
    ",\n    ",
    "\n]<|END_ACTION|>",
    name_in_json=True,
)
_LETTERS = string.ascii_letters + string.digits + "_"


def _make_tagged(name: str, *signs: tuple[str, ...]) -> ToolFormat:
    """A row of which tags say all."""
    return ToolFormat(name, TAGGED[name].syntax(), TAGGED[name].frame(), signs or None)


def _gemma(name: str, opening: str, closing: str, quote: str) -> ToolFormat:
    syntax, frame = gemma_syntax(opening, closing, quote), gemma_frame(opening, closing, quote)
    return ToolFormat(name, syntax, frame, tokens=(opening, closing))


def _json_in(
    name: str, opens: tuple[str, ...], closes: tuple[str, ...] = (), *signs: tuple[str, ...], tail: str = ""
) -> ToolFormat:
    """A row in which each call is a JSON object behind the first of `opens` and `tail`."""
    frame = json_frame(separator="\n", around=(opens[0] + tail, closes[0] if closes else ""))
    return ToolFormat(name, CallSyntax(_object_or_list, opens, closes), frame, signs or None)


FORMATS: Mapping[str, ToolFormat] = {
    form.name: form
    for form in (
        ToolFormat("dsml_v32", _dsml, DSML_V32.frame(), signs=((DSML_WORD, "function_calls"),)),
        ToolFormat("dsml_v41", DSML_V41.syntax(), DSML_V41.frame(), signs=((f"{DSML_APART}calls",),)),
        ToolFormat("dsml", _dsml, DSML.frame(), signs=((DSML_WORD,),), tokens=(DSML_WORD,)),
        ToolFormat("gcml", GCML.syntax(), GCML.frame(), signs=((GCML_WORD,),), tokens=(GCML_WORD,)),
        _make_tagged("minimax_m2"),
        _make_tagged("seed_oss"),
        _make_tagged("step3", ("steptml:invoke",)),
        _make_tagged("hy3_open", ("tool_sep", "arg_key", ":opensource")),
        _make_tagged("hy3", ("<tool_sep>", "<arg_key>")),
        ToolFormat(
            "kimi_k3",
            KIMI_K3.syntax(),
            KIMI_K3.frame((KIMI_CLOSE, KIMI_FINAL + KIMI_CLOSE)),
            signs=(("<|open|>", "<|close|>", "<|sep|>"),),
            tokens=("<|open|>", "<|close|>", "<|sep|>"),
            final=KIMI_FINAL,
            final_end=KIMI_CLOSE,
        ),
        _make_tagged("solar_open2"),
        ToolFormat(
            "solar_open",
            SOLAR.syntax(),
            SOLAR.frame(f"{NUMBER}{SOLAR.named}{NAME}{SOLAR.separator}{ARGUMENTS}"),
            tokens=(SOLAR.begin, SOLAR.call),
            asides=(("<|think|>", "<|end|>"), (SOLAR_FINAL, "<|end|>")),
            turn=SOLAR_TURN,
            final=SOLAR_FINAL,
        ),
        _make_tagged("longcat_tags", ("<longcat_tool_call>", "<longcat_arg_key>")),
        _make_tagged("iquest"),
        _make_tagged("ifm"),
        _json_in("longcat", ("<longcat_tool_call>",), ("</longcat_tool_call>",)),
        _make_tagged("minicpm5"),
        _make_tagged("atem"),
        _make_tagged("invoke", ("<function_calls>", "<invoke name=")),
        _gemma("gemma4", *GEMMA4),
        _gemma("functiongemma", *FUNCTION_GEMMA),
        ToolFormat(
            "apertus",
            CallSyntax(read_keyed_list, ("<|tools_prefix|>",), ("<|tools_suffix|>",)),
            Frame(
                f'{{"{NAME}": {ARGUMENTS}}}',
                "<|tools_prefix|>[",
                ", ",
                "]<|tools_suffix|>",
                name_in_json=True,
            ),
            tokens=("<|tools_prefix|>",),
        ),
        ToolFormat(
            "internlm",
            CallSyntax(_object_or_list, ("<|action_start|><|plugin|>",), ("<|action_end|>",)),
            json_frame(
                separator="\n", key="parameters", around=("<|action_start|><|plugin|>\n", "<|action_end|>")
            ),
            signs=(("<|action_start|>", "<|plugin|>"),),
            tokens=("<|action_start|>", "<|plugin|>"),
        ),
        ToolFormat(
            "hyperclova",
            CallSyntax(_object_or_list, (" -> tool/function_call\n", "-> tool/function_call\n")),
            json_frame(" -> tool/function_call\n[", "]"),
            signs=(("tool/function_call",),),
        ),
        _json_in("gigachat", ("<|function_call|>", "function call<|role_sep|>\n")),
        _json_in("glaive", ("<functioncall>",), (), tail=" "),
        _json_in("granite_fc", ("<function_call>",), ("</function_call>",), tail=" "),
        ToolFormat(
            "pangu",
            CallSyntax(_object_or_list, ("[unused11]",), ("[unused12]",)),
            json_frame("[unused11][", "][unused12]"),
        ),
        ToolFormat(
            "functionary",
            CallSyntax(read_named_json("\n", text_name="all"), (">>>",), bare=_LETTERS),
            Frame(f"{NAME}\n{ARGUMENTS}", separator=">>>"),
            signs=((">>>all",),),
            holds=False,
        ),
        ToolFormat(
            "functionary_v2",
            CallSyntax(
                read_named_json("<|content|>", "<|stop|>", text_name="all"),
                ("<|from|>assistant\n<|recipient|>", "<|recipient|>"),
                (),
                ("<|content|>", "<|stop|>"),
                _LETTERS,
            ),
            Frame(f"{NAME}\n<|content|>{ARGUMENTS}", separator="\n<|from|>assistant\n<|recipient|>"),
            tokens=("<|recipient|>", "<|content|>"),
            signs=(("<|recipient|>", "<|content|>"),),
            holds=False,
        ),
        ToolFormat(
            "qwen_agent",
            CallSyntax(read_named_json("✿ARGS✿:"), ("✿FUNCTION✿:",)),
            Frame(f"✿FUNCTION✿: {NAME}\n✿ARGS✿: {ARGUMENTS}", separator="\n"),
        ),
        ToolFormat(
            "react",
            CallSyntax(read_named_json("Action Input:"), ("Action:",)),
            Frame(f"Action: {NAME}\nAction Input: {ARGUMENTS}", separator="\n"),
            signs=(("Action Input:",),),
        ),
        ToolFormat(
            "gorilla",
            CallSyntax(call_list_or_lines, ("<<function>>",)),
            Frame(f"{NAME}({ARGUMENTS})", "<<function>>[", ", ", "]", "python"),
        ),
        ToolFormat(
            "raven",
            CallSyntax(call_lines, ("Call:",), ("<bot_end>",)),
            Frame(f"{NAME}({ARGUMENTS})", "Call: ", "; ", "<bot_end>", "python"),
            signs=(("<bot_end>",),),
        ),
        ToolFormat(
            "tool_code",
            CallSyntax(call_lines, ("```tool_code\n",), ("```",)),
            Frame(f"{NAME}({ARGUMENTS})", "```tool_code\n", "\n", "\n```", "python"),
            signs=(("```tool_code",),),
        ),
        ToolFormat(
            "xlam",
            CallSyntax(
                _known_only, ("<tool_call>", "[TOOL_CALLS]", "```json"), ("</tool_call>", "```"), (), "{["
            ),
            json_frame("[", "]"),
            signs=(),
        ),
        ToolFormat(
            "agent",
            CallSyntax(_object_or_list, ("<|function|>",), ("<|/function|>",)),
            json_frame(separator="\n", around=("<|function|>", "<|/function|>")),
            tokens=("<|function|>", "<|/function|>"),
        ),
        ToolFormat(
            "deepseek",
            _deepseek,
            DEEPSEEK.frame(f"function{DEEPSEEK.separator}{NAME}\n```json\n{ARGUMENTS}\n```", "\n"),
            signs=((DEEPSEEK.begin, "```json"),),
            tokens=(DEEPSEEK.begin,),
        ),
        ToolFormat("deepseek_v31", _deepseek, DEEPSEEK.frame(f"{NAME}{DEEPSEEK.separator}{ARGUMENTS}")),
        ToolFormat(
            "mistral_ids",
            _mistral,
            Frame(f"[TOOL_CALLS]{NAME}[CALL_ID]{CALL_ID}[ARGS]{ARGUMENTS}"),
            signs=(("[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"),),
            id_length=9,
        ),
        ToolFormat(
            "mistral_args",
            _mistral,
            Frame(f"[TOOL_CALLS]{NAME}[ARGS]{ARGUMENTS}"),
            signs=(("[TOOL_CALLS]", "[ARGS]"),),
            tokens=("[TOOL_CALLS]", "[ARGS]"),
            id_length=9,
        ),
        ToolFormat(
            "mistral_list",
            _mistral,
            json_frame("[TOOL_CALLS][", "]"),
            signs=(("[TOOL_CALLS][",),),
            id_length=9,
        ),
        ToolFormat(
            "mistral", _mistral, json_frame("[TOOL_CALLS] [", "]"), tokens=("[TOOL_CALLS]",), id_length=9
        ),
        ToolFormat(
            "qwen_xml",
            CallSyntax(tool_call, ("<tool_call>",), ("</tool_call>",)),
            Frame(
                f"<tool_call>\n<function={NAME}>\n{ARGUMENTS}</function>\n</tool_call>",
                separator="\n",
                style="tags",
                tags=QWEN_TAGS,
            ),
            signs=(("<tool_call>", "<function="),),
        ),
        ToolFormat(
            "glm",
            CallSyntax(tool_call, ("<tool_call>",), ("</tool_call>",), GLM_TAGS.markers),
            Frame(
                f"<tool_call>{NAME}{LINE}{ARGUMENTS}</tool_call>", separator=LINE, style="tags", tags=GLM_TAGS
            ),
            signs=(("<tool_call>", "<arg_key>"),),
            tokens=("<tool_call>", "<arg_key>"),
        ),
        ToolFormat(
            "hermes",
            CallSyntax(tool_call, ("<tool_call>",), ("</tool_call>",)),
            json_frame(separator="\n", around=("<tool_call>\n", "\n</tool_call>")),
        ),
        ToolFormat(
            "lfm2",
            CallSyntax(call_list(), ("<|tool_call_start|>",), ("<|tool_call_end|>",)),
            Frame(f"{NAME}({ARGUMENTS})", "<|tool_call_start|>[", ", ", "]<|tool_call_end|>", "python"),
            tokens=("<|tool_call_start|>",),
        ),
        ToolFormat(
            "granite",
            CallSyntax(_object_or_list, ("<|tool_call|>", "<tool_call>"), ("<|/tool_call|>", "</tool_call>")),
            json_frame("<|tool_call|>[", "]"),
            tokens=("<|tool_call|>",),
        ),
        ToolFormat(
            "nemotron",
            CallSyntax(_object_or_list, ("<TOOLCALL>",), ("</TOOLCALL>",)),
            json_frame("<TOOLCALL>[", "]</TOOLCALL>"),
        ),
        ToolFormat(
            "minimax",
            CallSyntax(_object_or_list, ("<tool_calls>",), ("</tool_calls>",)),
            json_frame("<tool_calls>\n", "\n</tool_calls>", "\n"),
            signs=tuple(("<tool_calls>", f"<tool_calls>{gap}{{") for gap in ("\n", "\\n", "")),
        ),
        ToolFormat(
            "jamba",
            CallSyntax(_object_or_list, ("<tool_calls>",), ("</tool_calls>",)),
            json_frame("<tool_calls>[", "]</tool_calls>"),
        ),
        ToolFormat(
            "function_tag",
            CallSyntax(function_tag, ("<function=",), ("</function>",)),
            Frame(f"<function={NAME}>{ARGUMENTS}</function>"),
            signs=(("<function=", "</function>"),),
        ),
        ToolFormat(
            "kimi",
            KIMI.syntax(),
            KIMI.frame(f"functions.{NAME}:{NUMBER}{KIMI.separator}{ARGUMENTS}"),
            tokens=(KIMI.begin,),
        ),
        ToolFormat(
            "olmo",
            CallSyntax(call_lines, ("<function_calls>",), ("</function_calls>",)),
            Frame(f"{NAME}({ARGUMENTS})", "<function_calls>\n", "\n", "\n</function_calls>", "python"),
        ),
        ToolFormat(
            "phi",
            CallSyntax(_object_or_list, ("functools",)),
            json_frame("functools[", "]"),
            signs=(("functools[",),),
        ),
        ToolFormat(
            "harmony",
            CallSyntax(
                harmony,
                (*(f"<|channel|>{text}" for text in _HARMONY), "<|start|>assistant to=functions."),
                ("<|call|>",),
                ("<|constrain|>", "<|message|>"),
            ),
            Frame(f"<|channel|>{_HARMONY[0]}{NAME} <|constrain|>json<|message|>{ARGUMENTS}<|call|>"),
            signs=(("<|channel|>", "to=functions."), ("<|channel|>", "<|constrain|>")),
            tokens=("<|channel|>", "<|constrain|>", "<|call|>"),
            asides=tuple(
                (f"<|channel|>{channel}<|message|>", "<|end|>") for channel in ("analysis", "commentary")
            ),
            turn=HARMONY_TURN,
            final=HARMONY_FINAL,
        ),
        ToolFormat(
            "cohere_text",
            _action,
            _ACTION_FRAME,
            signs=(("<|START_ACTION|>", "<|START_TEXT|>"),),
            plan="tool_plan",
            final=COHERE_TEXT,
            final_end=COHERE_TEXT_END,
        ),
        ToolFormat(
            "cohere",
            _action,
            _ACTION_FRAME,
            tokens=("<|START_ACTION|>", "<|END_ACTION|>"),
            plan="tool_plan",
            final=COHERE_FINAL,
            final_end=COHERE_END,
        ),
        ToolFormat(
            "command",
            CallSyntax(_known_only, ("Action: ```json",), ("```",)),
            json_frame("Action: ```json\n[", "]\n```", name="tool_name", key="parameters"),
            signs=(("Action:", "tool_name"),),
        ),
        ToolFormat(
            "glm4",
            CallSyntax(lines, bare=_LETTERS),
            Frame(f"{NAME}\n{ARGUMENTS}", separator="\n", style="line"),
            signs=(("[gMASK]", "<|observation|>", "tools"),),
        ),
        ToolFormat(
            "pythonic",
            CallSyntax(call_list(known_only=True), ("<|python_start|>",), ("<|python_end|>",), bare="["),
            Frame(f"{NAME}({ARGUMENTS})", "[", ", ", "]", "python"),
            signs=(("[func_name1(",), ("<|python_start|>",)),
            tokens=("<|python_start|>",),
        ),
        ToolFormat(
            "llama_json",
            CallSyntax(call_list(known_only=True), ("<|python_tag|>",), bare="{"),
            json_frame(separator="; ", key="parameters"),
            signs=(("<|python_tag|>",), ('"parameters": dictionary',)),
            tokens=("<|python_tag|>",),
        ),
        ToolFormat(
            "json",
            CallSyntax(_known_only, ("```json",), ("```",), bare="{["),
            json_frame(separator="\n"),
            signs=(),
        ),
    )
}
