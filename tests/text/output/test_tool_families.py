"""Each family of docs/families.md: the formats that a template in its form gets, and replies in that form.

The templates are in our own words: they have what the families' templates have in common with no other's.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from plait.text.output import tool_format
from plait.text.output.reasoning import REASONING, reasoning_format
from tests.text.output.written_calls import kind_of
from tests.text.replies import DS, Read, read

PAGE = Path(__file__).parents[3] / "docs" / "families.md"
FIRST: dict[str, Any] = {"city": "Rome <b> & {co}", "days": 2}
SECOND: dict[str, Any] = {"city": "two\nlines", "tags": ["x", 1, None]}
CALLS = [("get_weather", FIRST), ("search", SECOND)]
THOUGHT = "It may rain.\n\nI ask for both."


def objects(name: str = "name", key: str = "arguments", *, numbered: bool = False) -> list[str]:
    return [
        json.dumps({**({"tool_call_id": str(i)} if numbered else {}), name: call[0], key: call[1]})
        for i, call in enumerate(CALLS)
    ]


def each(form: str, between: str = "") -> str:
    """`form` for each call: {n} its name, {a} its arguments."""
    return between.join(form.replace("{n}", n).replace("{a}", json.dumps(a)) for n, a in CALLS)


def pairs(key: str, end: str) -> list[str]:
    """The arguments of each call between tags: strings as they are, all else as JSON."""
    text = [[(k, v if isinstance(v, str) else json.dumps(v)) for k, v in a.items()] for _, a in CALLS]
    return ["".join(f"{key.replace('{k}', k)}{v}{end}" for k, v in rows) for rows in text]


def tagged(head: str, bodies: Sequence[str], tail: str, between: str = "") -> str:
    return between.join(head.replace("{n}", n) + b + tail for (n, _), b in zip(CALLS, bodies, strict=True))


PYTHON = [f"{n}({', '.join(f'{k}={v!r}' for k, v in a.items())})" for n, a in CALLS]
GLM45 = tagged(
    "<tool_call>{n}\n", pairs("<arg_key>{k}</arg_key>\n<arg_value>", "</arg_value>\n"), "</tool_call>", "\n"
)
GLM47 = tagged("<tool_call>{n}", pairs("<arg_key>{k}</arg_key><arg_value>", "</arg_value>"), "</tool_call>")
QWEN_XML = tagged(
    "<tool_call>\n<function={n}>\n",
    pairs("<parameter={k}>\n", "\n</parameter>\n"),
    "</function>\n</tool_call>",
    "\n",
)
HERMES = "\n".join(f"<tool_call>\n{one}\n</tool_call>" for one in objects())
K3_TEMPLATE = "{{ tools }}<|open|>{{ m.role }}<|sep|>{{ m.content }}<|close|>{{ m.role }}<|sep|>"
K3 = "".join(
    f'<|open|>call tool="{name}" index="{i}"<|sep|>'
    + "".join(
        f'<|open|>argument key="{k}" type="{kind_of(v)}"<|sep|>{v if isinstance(v, str) else json.dumps(v)}'
        "<|close|>argument<|sep|>"
        for k, v in arguments.items()
    )
    + "<|close|>call<|sep|>"
    for i, (name, arguments) in enumerate(CALLS, 1)
)
K3 = f"<|open|>tools<|sep|>{K3}<|close|>tools<|sep|>"
DEEPSEEK_V3 = (
    DS["begin"]
    + each(f"{DS['call']}function{DS['sep']}{{n}}\n```json\n{{a}}\n```{DS['end']}", "\n")
    + DS["close"]
)
HARMONY = each(
    "<|channel|>commentary to=functions.{n} <|constrain|>json<|message|>{a}<|call|>", "<|start|>assistant"
)
HARMONY_THOUGHT = f"<|channel|>analysis<|message|>{THOUGHT}<|end|><|start|>assistant"
KIMI = (
    "<|tool_calls_section_begin|>"
    + each("<|tool_call_begin|>functions.{n}:0<|tool_call_argument_begin|>{a}<|tool_call_end|>")
    + "<|tool_calls_section_end|>"
)
ACTION = (
    "<|START_ACTION|>[\n    "
    + ",\n    ".join(objects("tool_name", "parameters", numbered=True))
    + "\n]<|END_ACTION|>"
)
LIST = f"[{', '.join(objects())}]"
TURNS = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>{% endfor %}"
NO_TOOLS = "{{ bos_token }}{% for m in messages %}[INST] {{ m.content }} [/INST]{% endfor %}"
HERMES_TEMPLATE = (
    TURNS + "{% if tools %}{{ tools | tojson }}\n<tool_call>\n"
    '{\\"name\\": <function-name>, \\"arguments\\": <args-json-object>}\n</tool_call>{% endif %}'
)
QWEN_XML_TEMPLATE = TURNS + "{{ tools }}<tool_call>\n<function=example>\n<parameter=p>\nv\n</parameter>"
THINKS = "{% if '</think>' in m.content %}{% endif %}"
GLM_TEMPLATE = (
    "[gMASK]<sop>{% for m in messages %}<|user|>{{ m.content }}<|observation|>{% endfor %}{{ tools }}"
    "<tool_call>{function-name}\n<arg_key>{arg-key-1}</arg_key>\n<arg_value>{arg-value-1}</arg_value></tool_call>"
)
COHERE_TEMPLATE = (
    "<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>{% for c in m.tool_calls %}<|START_THINKING|>{{ m.tool_plan }}"
    "<|END_THINKING|><|START_ACTION|>[{{ c }}]<|END_ACTION|>{% endfor %}{{ tools }}"
    "<|START_RESPONSE|>{{ m.content }}<|END_RESPONSE|>"
)


@dataclass(frozen=True)
class Form:
    """A template, the formats that it must get, and a reply in this form: thinking, then two calls."""

    template: str
    tools: str | None = None
    calls: str = ""
    reasoning: str | None = None
    thought: str = ""
    tokens: tuple[str, ...] = ()


def named(template: str, tools: str, reasoning: str | None = None) -> Form:
    """Of a format that is a row alone: `test_format_rows` reads calls of it."""
    return Form(template, tools, reasoning=reasoning)


def think(form: Form) -> Form:
    return Form(form.template + THINKS, form.tools, form.calls, "think", f"<think>\n{THOUGHT}\n</think>\n\n")


PLAIN, HERMES_FORM = Form(NO_TOOLS), Form(HERMES_TEMPLATE, "hermes", HERMES)
XML_FORM = Form(QWEN_XML_TEMPLATE, "qwen_xml", QWEN_XML)
MISTRAL = Form("{{ tools }}[AVAILABLE_TOOLS][TOOL_CALLS]", "mistral", f"[TOOL_CALLS] {LIST}")
LLAMA = Form(
    '{{ tools }}{"name": function name, "parameters": dictionary of argument name and its value}',
    "llama_json",
    "; ".join(objects(key="parameters")),
)
GRANITE = Form("{{ tools }}<|tool_call|>", "granite", f"<|tool_call|>{LIST}")
NEMOTRON = Form("{{ tools }}<TOOLCALL>[]</TOOLCALL>", "nemotron", f"<TOOLCALL>{LIST}</TOOLCALL>")
OLMO = Form(
    "{{ tools }}<function_calls>", "olmo", "<function_calls>\n" + "\n".join(PYTHON) + "\n</function_calls>"
)
PHI_4_MINI = Form(
    "{{ m.tools }}<|tool|><|/tool|>",
    "granite",
    f"<|tool_call|>{LIST}<|/tool_call|>",
    tokens=("<|tool|>", "<|/tool|>", "<|tool_call|>", "<|/tool_call|>"),
)
FAMILIES: dict[str, list[Form]] = {
    "Llama 2, 3, 3.x, SmolLM2, CodeLlama": [
        PLAIN,
        Form(TURNS),
        LLAMA,
        Form(
            "{{ tools }}<|python_tag|>", "llama_json", f"<|python_tag|>{'; '.join(objects(key='parameters'))}"
        ),
        Form("{{ tools }}[func_name1(params_name1=…)]", "pythonic", f"[{', '.join(PYTHON)}]"),
    ],
    "Mistral, Nemo, Ministral 8B, Devstral": [
        PLAIN,
        MISTRAL,
        Form("{{ tools }}[TOOL_CALLS]f[ARGS]", "mistral_args", each("[TOOL_CALLS]{n}[ARGS]{a}")),
    ],
    "Llama 4 (text)": [Form(TURNS)],
    "Seed-OSS, CWM, InternLM 3 · AFM 4.5B · Helium": [
        Form(TURNS),
        named("{{ tools }}<seed:tool_call><function=f></function></seed:think>", "seed_oss", "seed"),
    ],
    "ERNIE 4.5 · ERNIE 4.5 MoE": [Form("User: {{ m.content }}\nAssistant: ")],
    "ERNIE 4.5 VL (text)": [Form("User: {{ m.content }}\nAssistant: ")],
    "PaddleOCR-VL, Hunyuan-OCR (text)": [Form("User: {{ m.content }}\nAssistant: ")],
    "Cosmos 3 Edge (text)": [Form(TURNS)],
    "Molmo 1, 2 (text)": [Form(TURNS)],
    "EXAONE 4": [Form("[|{{ m.role }}|]\n{{ m.content }}[|endofturn|]"), think(HERMES_FORM)],
    "K-EXAONE · Flint · Aria (text)": [think(HERMES_FORM), Form(TURNS)],
    "IQuest Q1": [
        think(
            Form(
                "{{ tools }}<|iquest_assistant|><iquest_tool_call>",
                "iquest",
                GLM47.replace("tool_call>", "iquest_tool_call>"),
            )
        )
    ],
    "Domyn Edge": [Form(TURNS)],
    "Nemotron 3, 4, Minitron · StableLM 2": [Form(TURNS)],
    "Mixtral": [PLAIN, MISTRAL],
    "Snowflake Arctic": [Form(TURNS)],
    "Grok 1, 2 (2 up to 1,024 tokens)": [PLAIN],
    "SmallThinker": [Form(TURNS), HERMES_FORM],
    "Grove MoE": [HERMES_FORM],
    "Maple": [think(HERMES_FORM)],
    "PLaMo 1": [PLAIN],
    "Talkie": [PLAIN],
    "Qwen2, Qwen2.5, Qwen3": [Form(TURNS), HERMES_FORM, think(HERMES_FORM)],
    "SDAR (block diffusion)": [Form(TURNS), HERMES_FORM, think(HERMES_FORM)],
    "SDAR-MoE (block diffusion)": [Form(TURNS), HERMES_FORM, think(HERMES_FORM)],
    "LLaDA 2, 2.1 (block diffusion)": [HERMES_FORM, think(HERMES_FORM), PLAIN],
    "DiffusionGemma (block diffusion)": [
        named("{{ tools }}<|tool_call>call:f<|channel>thought<channel|>", "gemma4", "gemma4")
    ],
    "Qwen2-VL, 2.5-VL, 2.5-Omni, Qwen3-VL (text)": [Form(TURNS), HERMES_FORM, think(HERMES_FORM)],
    "Qwen2-MoE, Qwen3-MoE": [Form(TURNS), think(HERMES_FORM), XML_FORM],
    "Qwen3-VL-MoE, Qwen3-Omni (text)": [HERMES_FORM, think(HERMES_FORM)],
    "Qwen3-Next": [HERMES_FORM, think(HERMES_FORM)],
    "Qwen3.5, Qwen3.5-MoE": [think(XML_FORM)],
    "Qwen3.8-Flash-Next (Qwen4-Exp)": [think(XML_FORM)],
    "Gemma 1, VaultGemma": [Form("<start_of_turn>{{ m.role }}\n{{ m.content }}<end_of_turn>")],
    "Gemma 2, Gemma 3 (text)": [Form("<start_of_turn>{{ m.role }}\n{{ m.content }}<end_of_turn>")],
    "Gemma 4 (text)": [named("{{ tools }}<|tool_call>call:f<|channel>thought<channel|>", "gemma4", "gemma4")],
    "Rnj-1": [HERMES_FORM],
    "RecurrentGemma": [Form("<start_of_turn>{{ m.role }}\n{{ m.content }}<end_of_turn>")],
    "DeepSeek-VL2 (text)": [Form("<|User|>: {{ m.content }}\n\n<|Assistant|>: ")],
    "DeepSeek-V2, V3, R1, Kimi-K2, text of K2.5": [
        Form("User: {{ m.content }}\n\nAssistant: "),
        Form(f"{DS['begin']}{DS['call']}function{DS['sep']}f\n```json", "deepseek", DEEPSEEK_V3),
        think(Form(f"{DS['begin']}{DS['call']}function{DS['sep']}f\n```json", "deepseek", DEEPSEEK_V3)),
        Form(
            f"{DS['begin']}{DS['call']}f{DS['sep']}",
            "deepseek_v31",
            DS["begin"] + each(f"{DS['call']}{{n}}{DS['sep']}{{a}}{DS['end']}") + DS["close"],
        ),
    ],
    "GLM-4.7-Flash · Youtu-LLM": [think(Form(GLM_TEMPLATE.replace("\n", ""), "glm", GLM47))],
    "A.X K1": [Form(TURNS)],
    "A.X K2": [Form(TURNS)],
    "DeepSeek-V4": [named("{{ tools }}<｜DSML｜tool_calls></think>", "dsml", "think")],
    "DeepSeek-V4.1 (text)": [named("{{ tools }}<｜DSML｜ calls></think>", "dsml_v41", "think")],
    "Hy4": [Form(TURNS)],
    "Hy4-VL (text)": [Form(TURNS)],
    "dots3 note (text)": [Form(TURNS)],
    "MiniMax-M3 (text)": [Form(TURNS)],
    "Beam": [PLAIN],
    "DiffLlama": [Form(TURNS)],
    "Doge (dense, up to keep_window_size)": [Form(TURNS)],
    "Jet-Nemotron": [Form(TURNS)],
    "RWKV-4 · RWKV-5, RWKV-6 · RWKV-7 · as GGUF QRWKV6, ARWKV-7": [PLAIN, Form(TURNS)],
    "Step 3.5, text of 3.7": [Form(TURNS)],
    "ZAYA1": [Form(TURNS)],
    "Ministral 3, Devstral 2": [
        Form("{{ tools }}[TOOL_CALLS]f[ARGS]", "mistral_args", each("[TOOL_CALLS]{n}[ARGS]{a}"))
    ],
    "Apertus, Apertus 1.5 (text) · Jais 2": [
        named("<|tools_prefix|><|inner_prefix|><|inner_suffix|>", "apertus", "apertus"),
        Form(TURNS),
    ],
    "Mistral Small 4": [
        Form("{{ tools }}[TOOL_CALLS]f[ARGS]", "mistral_args", each("[TOOL_CALLS]{n}[ARGS]{a}"))
    ],
    "Mistral Large 4 (text)": [
        Form("{{ tools }}[TOOL_CALLS]f[ARGS]", "mistral_args", each("[TOOL_CALLS]{n}[ARGS]{a}"))
    ],
    "Muse Glimmer (text)": [Form(TURNS)],
    "Muse Spark (text)": [Form(TURNS)],
    "HRM-Text": [PLAIN],
    "Dory": [PLAIN],
    "Maincoder": [Form(TURNS)],
    "Nemotron Super 49B, Ultra 253B · DeciLM": [NEMOTRON, think(NEMOTRON)],
    "Hunyuan dense · A13B": [named("<tool_calls>[{}]</tool_calls></think><answer>", "jamba", "hunyuan")],
    "AFMoE (Trinity)": [Form(TURNS)],
    "Hy3 · Mellum 2": [
        named("<tool_calls><tool_call>f<tool_sep><arg_key></think>", "hy3", "think"),
        Form(TURNS),
    ],
    "MiMo-V2.5, V2.6 (text)": [Form(TURNS)],
    "MiMo-V2-Flash": [Form(TURNS)],
    "MiniCPM 1, 2, 4 (4.1 up to 8,191 tokens)": [Form("<用户>{{ m.content }}<AI>"), Form(TURNS)],
    "MiniCPM 3": [Form(TURNS)],
    "MiniMax-M2 · dots.llm1 · Solar Open": [
        named("{{ tools }}<minimax:tool_call><invoke name=</think>", "minimax_m2", "think"),
        Form(TURNS),
        named("<|think|><|tool_calls|><|content|><|end|>", "solar_open", "solar_open"),
    ],
    "Alice AI": [Form(TURNS)],
    "GigaChat 3.5": [named("{{ tools }}<｜GCML｜tool_calls></think>", "gcml", "think")],
    "Kimi-Linear": [Form("{{ tools }}<|tool_calls_section_begin|>", "kimi", KIMI)],
    "Kimi-K3 (text)": [
        Form(K3_TEMPLATE, "kimi_k3", K3, "kimi_k3", f"<|open|>think<|sep|>{THOUGHT}<|close|>think<|sep|>")
    ],
    "Inkling (text)": [Form(TURNS)],
    "Inkling 2 (text)": [Form(TURNS)],
    "Inkling 2 Mini (text)": [Form(TURNS)],
    "MiniCPM-SALA (up to 8,191 tokens)": [Form(TURNS)],
    "MiniMax-01, M1": [
        Form("<beginning_of_sentence>{{ m.content }}<end_of_sentence>"),
        think(
            Form(
                "{{ tools }}<tool_calls>\n{'name': <tool-name>, 'arguments': <json-object>}\n</tool_calls>",
                "minimax",
                "<tool_calls>\n" + "\n".join(objects()) + "\n</tool_calls>",
            )
        ),
    ],
    "gpt-oss": [
        Form(
            "{{ tools }} to=functions. <|channel|>analysis<|message|>",
            "harmony",
            HARMONY,
            "harmony",
            HARMONY_THOUGHT,
        )
    ],
    "OLMo 1, 2, 3": [Form("<|user|>\n{{ m.content }}"), OLMO, think(OLMO)],
    "OLMoE, FlexOlmo": [Form("<|user|>\n{{ m.content }}")],
    "OLMo-Hybrid": [OLMO],
    "Phi 1, 2 · Phi 3, 3.5, 4": [
        Form("<|{{ m.role }}|>\n{{ m.content }}<|end|>"),
        Form("{{ tools }}functools[…]", "phi", f"functools{LIST}"),
        PHI_4_MINI,
    ],
    "JetMoe": [Form(TURNS)],
    "Hymba": [Form("<extra_id_1>{{ m.role }}\n{{ m.content }}")],
    "Phi-4-mini-flash (SambaY)": [PHI_4_MINI],
    "GPT-NeoX, Pythia · GPT-J · CodeGen": [PLAIN],
    "GPT-2, StarCoder 1 · GPT-Neo": [PLAIN],
    "OPT, Galactica": [PLAIN],
    "BioGPT, XGLM, CTRL, GPT-1": [PLAIN],
    "Persimmon, Fuyu (text) · GPT-NeoX Japanese": [PLAIN],
    "nanochat": [Form(TURNS)],
    "EXAONE 3 · InternLM 2 · Qwen 1": [Form("[|{{ m.role }}|]{{ m.content }}[|endofturn|]"), Form(TURNS)],
    "InternLM 1, Aquila, Skywork, Yi, as first published": [Form(TURNS)],
    "MiMo 7B": [HERMES_FORM, think(HERMES_FORM)],
    "MiniCPM-V, MiniCPM-o (text)": [Form(TURNS)],
    "XVERSE MoE": [Form("Human: {{ m.content }}\n\nAssistant: ")],
    "Orion · openPangu Embedded, XVERSE": [Form("Human: {{ m.content }}\n\nAssistant: ")],
    "ChatGLM 2, 3, GLM-4 9B of 2024 · Baichuan 1, 2": [
        Form("[Round 1]\n\n问：{{ m.content }}\n\n答："),
        Form("[gMASK]<sop><|observation|>{{ tools }}", "glm4", each("{n}\n{a}", "\n")),
        Form("<reserved_106>{{ m.content }}<reserved_107>"),
    ],
    "TeleChat 1, 2, 3 · TeleFLM (FLM-2)": [Form("<_user>{{ m.content }}<_bot>")],
    "Solar Pro": [Form(TURNS)],
    "CodeShell": [PLAIN],
    "Jais 1 · Refact": [Form("### Instruction: {{ m.content }}\n### Response: ")],
    "Ouro": [Form(TURNS)],
    "IQuest-Coder-V1 · its loop": [Form(TURNS)],
    "OpenELM · Nanbeige 4.2": [PLAIN, HERMES_FORM, think(HERMES_FORM)],
    "PLM": [Form(TURNS)],
    "Spark X2.5": [Form(TURNS)],
    "Falcon, Falcon 2 · Falcon-RW": [PLAIN, Form(TURNS)],
    "SmolLM3": [think(Form("{{ xml_tools }}{{ python_tools }}" + HERMES_TEMPLATE, "hermes", HERMES))],
    "StarCoder2": [PLAIN, Form(TURNS)],
    "Command R, R+ · R7B, A": [
        Form(
            "{{ tools }} Write 'Action:' and a list of {\"tool_name\": …}, or directly_answer.",
            "command",
            f"Action: ```json\n[{', '.join(objects('tool_name', 'parameters'))}]\n```",
        ),
        Form(COHERE_TEMPLATE, "cohere", ACTION, "cohere", f"<|START_THINKING|>{THOUGHT}<|END_THINKING|>"),
    ],
    "Command A with experts": [
        Form(COHERE_TEMPLATE, "cohere", ACTION, "cohere", f"<|START_THINKING|>{THOUGHT}<|END_THINKING|>")
    ],
    "North Micro (text)": [Form(TURNS)],
    "GLM-4.1V, 4.6V-Flash, GLM-OCR (text)": [Form(TURNS)],
    "GLM-4 · GLM-4.5, 4.6, 4.7, text of 4.5V": [
        Form("[gMASK]<sop><|observation|>{{ tools }}", "glm4", each("{n}\n{a}", "\n")),
        think(Form(GLM_TEMPLATE, "glm", GLM45)),
        think(Form(GLM_TEMPLATE.replace("\n", ""), "glm", GLM47)),
    ],
    "Granite Docling (text)": [Form(TURNS)],
    "Granite 3 dense, MoE, text of 4 Vision": [
        GRANITE,
        Form(
            GRANITE.template + THINKS + "<response>",
            "granite",
            GRANITE.calls,
            "granite",
            f"<think>{THOUGHT}</think>",
        ),
    ],
    "Granite with windows, MoE": [GRANITE],
    "HyperCLOVA X SEED Think": [named("assistant -> tool/function_call", "hyperclova")],
    "Granite 4": [HERMES_FORM],
    "Mamba, Falcon-Mamba": [Form(TURNS)],
    "Mamba2, Codestral Mamba": [PLAIN],
    "Jamba": [Form("{{ tools }}<tool_calls>[…]</tool_calls>", "jamba", f"<tool_calls>{LIST}</tool_calls>")],
    "Bamba": [Form(TURNS)],
    "Zamba2": [Form(TURNS)],
    "Nemotron-H, Nemotron 3 Nano, Super, Puzzle": [NEMOTRON, think(NEMOTRON), think(XML_FORM)],
    "Falcon-H1": [HERMES_FORM],
    "PLaMo 2 · PLaMo 3": [Form("### {{ m.role }}:\n{{ m.content }}")],
    "LFM2, LFM2-MoE": [
        Form(
            "{{ tools }}<|tool_list_start|><|tool_call_start|>",
            "lfm2",
            f"<|tool_call_start|>[{', '.join(PYTHON)}]<|tool_call_end|>",
        )
    ],
    "LFM3": [Form(TURNS)],
    "Laguna": [Form(TURNS)],
    "Kolibri 1": [Form(TURNS)],
    "xLSTM 7B": [PLAIN],
    "Gemma 3n (text)": [Form("<start_of_turn>{{ m.role }}\n{{ m.content }}<end_of_turn>")],
    "GLM-5.3-Flash (text)": [think(Form(GLM_TEMPLATE.replace("\n", ""), "glm", GLM47))],
    "DeepSeek-V3.2 · GLM-5": [
        named("{{ tools }}'<' + '｜DSML｜' + 'function_calls>'</think>", "dsml_v32", "think"),
        think(Form(GLM_TEMPLATE.replace("\n", ""), "glm", GLM47)),
    ],
    "LongCat-Flash, Flash-Lite": [
        named("{{ tools }}<longcat_tool_call>f<longcat_arg_key></longcat_think>", "longcat_tags", "longcat"),
        Form(
            "{{ tools }}<longcat_tool_call>{}</longcat_tool_call>",
            "longcat",
            "".join(f"<longcat_tool_call>{one}</longcat_tool_call>" for one in objects()),
        ),
    ],
    "Step 1": [PLAIN],
    "Step 3 (text)": [
        named('{{ tools }}<｜tool_calls_begin｜><steptml:invoke name="f"></think>', "step3", "think")
    ],
    "K2 Horizon, K2-V2 (xLLM)": [
        Form(
            f"{TURNS}{{{{ tools }}}}<ifm|think></ifm|think><ifm|tool_calls><ifm|tool_call>",
            "ifm",
            tagged(
                "<ifm|tool_call>{n}\n",
                pairs("<ifm|arg_key>{k}</ifm|arg_key>\n<ifm|arg_value>", "</ifm|arg_value>\n"),
                "</ifm|tool_call>\n",
            ).join(("<ifm|tool_calls>\n", "</ifm|tool_calls>")),
            "ifm",
            f"<ifm|think>{THOUGHT}</ifm|think>\n",
        ),
        think(HERMES_FORM),
    ],
    "Ling 3": [think(HERMES_FORM)],
    "openPangu Ultra MoE": [Form("[unused9]{{ m.role }}：{{ m.content }}[unused10]")],
    "Param 2": [PLAIN],
    "Ling 1, 2 · DeepSeek-MoE": [HERMES_FORM, think(HERMES_FORM), PLAIN],
    "DeepSeek-OCR 2 (text)": [PLAIN],
    "Sarvam 30B · 105B": [Form(TURNS)],
    "Lara 4 Mini": [PLAIN],
    "Ling 2.5, Ring 2.5": [HERMES_FORM, think(HERMES_FORM)],
    "BLOOM, BLOOMZ · MPT": [PLAIN, Form(TURNS)],
    "DBRX · Phi-3.5-MoE": [Form(TURNS)],
    "BitNet b1.58 2B-4T, as bfloat16": [PLAIN],
    "Llama 3.2 Vision, Emu3 (text)": [PLAIN, LLAMA],
    "Chameleon (text)": [PLAIN],
    "ModernBERT as a decoder (Ettin)": [PLAIN],
    "Decoders of BERT and its kin (`is_decoder`)": [PLAIN],
    "Decoders of BART and its kin, without encoders": [PLAIN],
    "Zamba 1": [PLAIN],
    "oxidizr hybrids": [
        Form(
            "",
            "agent",
            "".join(f"<|function|>{one}<|/function|>" for one in objects()),
            "agent",
            f"<|think|>{THOUGHT}<|/think|>",
            ("<|function|>", "<|/function|>", "<|think|>", "<|/think|>", "<|plan|>", "<|/plan|>"),
        )
    ],
}
FORMS = [form for forms in FAMILIES.values() for form in forms]
REPLIES = {(form.tools, form.reasoning, form.calls): form for form in FORMS if form.calls}


def test_every_family_of_the_page_is_here() -> None:
    table = PAGE.read_text(encoding="utf-8").split("<!-- families -->")[1].split("<!-- /families -->")[0]
    rows = [row.split("|")[1].strip() for row in table.splitlines() if row.startswith("| ")]
    named = [title for title in rows if title != "family"]
    assert sorted(named) == sorted(FAMILIES)


@pytest.mark.parametrize(
    ("family", "form"),
    [pytest.param(name, form, id=name) for name, forms in FAMILIES.items() for form in forms],
)
def test_a_template_in_a_family_s_form_gets_its_formats(family: str, form: Form) -> None:
    tools = tool_format(form.template, form.tokens)
    reasoning = reasoning_format(form.template, form.tokens)
    assert (tools and tools.name, reasoning and reasoning.name) == (form.tools, form.reasoning)


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    "form", [pytest.param(form, id=f"{form.tools}-{form.reasoning}") for form in REPLIES.values()]
)
def test_a_reply_is_read_alike_wherever_it_is_cut(form: Form) -> None:
    assert form.tools is not None
    options: dict[str, Any] = {"reasoning": REASONING[form.reasoning]} if form.reasoning else {}
    text = form.thought + form.calls
    whole = read(form.tools, [text], **options)
    assert whole.calls == CALLS
    assert (whole.content, whole.reasoning, whole.complete) == (
        "",
        THOUGHT if form.thought else "",
        [True, True],
    )
    for at in range(1, len(text)):
        assert read(form.tools, [text[:at], text[at:]], **options) == whole, text[:at]
    assert read(form.tools, list(text), **options) == whole


@pytest.mark.parametrize(
    "form", [pytest.param(form, id=f"{form.tools}-{form.reasoning}") for form in REPLIES.values()]
)
def test_a_reply_that_ends_anywhere_has_only_calls_that_are_whole(form: Form) -> None:
    assert form.tools is not None
    for at in range(len(form.calls)):
        found = read(form.tools, [form.calls[:at]])
        assert [json.loads(text) for text in whole_ones(found)] == [
            a for _, a in CALLS[: sum(found.complete)]
        ]


def whole_ones(found: Read) -> list[str]:
    return [*itertools.compress(found.arguments, found.complete)]


def test_a_command_reply_without_calls_is_what_is_in_its_wrapper() -> None:
    text = f"<|START_THINKING|>{THOUGHT}<|END_THINKING|><|START_RESPONSE|>Hello.<|END_RESPONSE|>"
    for at in range(len(text)):
        found = read("cohere", [text[:at], text[at:]], reasoning=REASONING["cohere"])
        assert (found.content, found.reasoning, found.calls) == ("Hello.", THOUGHT, [])


@pytest.mark.parametrize(
    "text",
    [
        "<tool_call>get_weather</tool_call>",
        "<tool_call>get_weather\n</tool_call>",
        "<tool_call>\nget_weather\n</tool_call>",
        '<tool_call>{"name": "get_weather", "arguments": {}}</tool_call>',
        "<tool_call><function=get_weather></function></tool_call>",
    ],
)
@pytest.mark.parametrize("name", ["glm", "hermes", "qwen_xml"])
def test_a_call_without_arguments_is_one_however_it_is_written(name: str, text: str) -> None:
    found = read(name, list(text))
    assert (found.calls, found.content) == ([("get_weather", {})], "")


def test_a_glm_value_is_what_the_schema_says_to_its_last_line_end() -> None:
    schema = {
        "properties": {
            "code": {"type": "string"},
            "note": {"anyOf": [{"type": "string"}, {"type": "null"}]},
            "level": {"$ref": "#/$defs/Level"},
            "size": {"enum": [1, 2]},
            "on": {"type": "boolean"},
        },
        "$defs": {"Level": {"enum": ["1", "2"]}},
    }
    tool = {"type": "function", "function": {"name": "f", "parameters": schema}}
    rows = {
        "code": "5\n\n",
        "note": "null",
        "level": "1",
        "size": "2",
        "on": "True",
        "more": '{"a": [1]}',
        "x y": "z",
    }
    text = "".join(f"<arg_key>{k}</arg_key>\n<arg_value>{v}</arg_value>\n" for k, v in rows.items())
    found = read("glm", list(f"<tool_call>f\n{text}</tool_call>"), tools=[tool])
    assert found.calls == [
        (
            "f",
            {
                "code": "5\n\n",
                "note": None,
                "level": "1",
                "size": 2,
                "on": True,
                "more": {"a": [1]},
                "x y": "z",
            },
        )
    ]


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("glm", "<tool_call>nothing</tool_call>"),
        ("glm", "<tool_call>f\n<arg_key>a</arg_key> 5"),
        ("glm", "Say <tool_call>f and more."),
        ("glm4", "search is what I do {}"),
        ("glm4", 'nothing\n{"a": 1}'),
        ("glm4", "search\n[1]"),
        ("glm4", "f"),
        ("command", "Action: ```json\n[]\n"),
        ("command", 'Action: ```json\n[{"tool_name": "nothing", "parameters": {}}]\n```'),
    ],
)
def test_what_only_looks_like_such_a_call_is_content(name: str, text: str) -> None:
    found = read(name, list(text))
    assert (re.sub(r"\s+$", "", found.content), found.calls) == (text.rstrip(), [])
