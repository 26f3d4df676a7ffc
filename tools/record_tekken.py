"""Record how mistral_common cuts texts and renders conversations, for the tests.

python tools/record_tekken.py TEKKEN_JSON

It runs where mistral_common is installed. TEKKEN_JSON is a published tekken.json, of which the first tokens
are kept. `tests/text/tekken.json` gets these tokens, and texts and conversations with their ids.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
OUT = ROOT / "tests" / "text" / "tekken.json"
NUM_TOKENS = 900
SPECIALS = """
<unk> <s> </s> [INST] [/INST] [AVAILABLE_TOOLS] [/AVAILABLE_TOOLS] [TOOL_RESULTS] [/TOOL_RESULTS] [TOOL_CALLS]
[IMG] <pad> [IMG_BREAK] [IMG_END] [PREFIX] [MIDDLE] [SUFFIX] [SYSTEM_PROMPT] [/SYSTEM_PROMPT] [TOOL_CONTENT]
"""
LATER = "[ARGS] [CALL_ID] [THINK] [/THINK] [MODEL_SETTINGS] [/MODEL_SETTINGS]"
NUM_SPECIAL = 32
VERSIONS = ("v3", "v7", "v11", "v13", "v15")
BUILDER = {
    "reasoning_effort": {"type": "enum", "values": ["none", "high"], "accepts_none": True, "default": "none"}
}
TEXTS = (
    *("", " ", "Hello, world!", "   \n\n \t x", "I'll don't 12345 3.14 \u00bd \u0663\u0664"),
    *(
        "\r\n\r\n/a/b//\n/",
        "[INST] hi [/INST]<s></s>",
        "CamelCaseWORDSxyz \u01c5 \u02b0",
        "\x00\x01\x7f\x85\xa0",
    ),
    *(
        "\U0001f642\u200d\U0001f467 e\u0301 \ufb01",
        "\u65e5\u672c\u8a9e \ud55c\uad6d\uc5b4 \u0939\u093f\u0928",
    ),
    *("def f(x):\n    return x ** 2  # the\n", "!!!???...\n\n/", "<SPECIAL_20>", "a" * 99, "in the" * 20),
)
USER, SYSTEM = {"role": "user", "content": "Hello [INST]there"}, {"role": "system", "content": "Be brief."}
AGAIN = {"role": "user", "content": "And now?"}
REPLY = {"role": "assistant", "content": "Hi!  "}
TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather \u2014 now",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
BARE_TOOL = {
    "type": "function",
    "function": {"name": "stop", "parameters": {"type": "object", "properties": {}}},
}


def call(call_id: str, arguments: str) -> dict[str, object]:
    """A call of the tool."""
    return {"id": call_id, "type": "function", "function": {"name": "weather", "arguments": arguments}}


def answer(call_id: str, content: str) -> dict[str, object]:
    """The result of a call."""
    return {"role": "tool", "name": "weather", "tool_call_id": call_id, "content": content}


CALLS = {
    "role": "assistant",
    "content": "",
    "tool_calls": [call("abcdefgh1", '{"city":"Z\u00fcrich", "n": 1e2}'), call("abcdefgh2", "{}")],
}
RESULTS = (answer("abcdefgh2", "[1,2]"), answer("abcdefgh1", "21 \u00b0C"))
THOUGHT = {"role": "assistant", "content": "Yes.", "reasoning_content": "Is it? "}
TEXT_PARTS = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
FIRST_THOUGHT = {"type": "thinking", "thinking": "How?", "closed": True}
TAUGHT = {"role": "system", "content": [*TEXT_PARTS, FIRST_THOUGHT, {"type": "text", "text": "[/THINK]c"}]}
SENT_BACK = {"role": "assistant", "content": [FIRST_THOUGHT, *TEXT_PARTS]}
OPEN_THOUGHT = {"role": "assistant", "content": [{**FIRST_THOUGHT, "closed": False}]}
CONVERSATIONS: Mapping[str, tuple[list[Mapping[str, Any]], list[Mapping[str, Any]]]] = {
    "plain": ([USER], []),
    "system": ([SYSTEM, USER], []),
    "turns": ([SYSTEM, USER, REPLY, AGAIN], []),
    "same role": ([SYSTEM, USER, AGAIN, REPLY, {**REPLY, "content": "More"}, AGAIN], []),
    "tools": ([SYSTEM, USER, REPLY, AGAIN], [TOOL, BARE_TOOL]),
    "calls": ([USER, CALLS, *RESULTS], [TOOL]),
    "after calls": ([SYSTEM, USER, CALLS, *RESULTS, REPLY, AGAIN], [TOOL]),
    "continued": ([USER, {**REPLY, "content": "Hi, I"}], []),
    "thought": ([USER, THOUGHT, AGAIN], []),
    "thought sent back": ([{**USER, "content": TEXT_PARTS}, SENT_BACK, AGAIN], []),
    "continued thought": ([USER, OPEN_THOUGHT], []),
    "thought of the system": ([TAUGHT, USER], []),
    "text and call": ([USER, {**CALLS, "content": "Let me see."}, *RESULTS], [TOOL]),
}


def build_file(source: Mapping[str, Any], version: str) -> dict[str, Any]:
    """A tekken.json of this version with the first tokens of a published one."""
    names = (SPECIALS if version in VERSIONS[:2] else SPECIALS + LATER).split()
    made = {
        "config": {
            "pattern": source["config"]["pattern"],
            "num_vocab_tokens": NUM_TOKENS,
            "default_vocab_size": NUM_TOKENS + NUM_SPECIAL,
            "default_num_special_tokens": NUM_SPECIAL,
            "version": version,
        },
        "vocab": source["vocab"][:NUM_TOKENS],
        "special_tokens": [{"rank": i, "token_str": n, "is_control": True} for i, n in enumerate(names)],
    }
    return made | ({"model_settings_builder": BUILDER} if version == "v15" else {})


def as_theirs(message: Mapping[str, Any], is_last: bool) -> dict[str, Any]:
    """A message in mistral_common's words."""
    theirs = {key: value for key, value in message.items() if key != "reasoning_content"}
    if "reasoning_content" in message:
        thought = {"type": "thinking", "thinking": message["reasoning_content"], "closed": True}
        theirs["content"] = [thought, {"type": "text", "text": message["content"]}]
    if message["role"] == "assistant" and is_last:
        theirs["prefix"] = True
    return theirs


def left_out(name: str) -> tuple[str, ...]:
    """The versions that have no place for a conversation."""
    if name == "text and call":
        return ("v3",)
    thinks_since_v13 = VERSIONS[:3] if "thought" in name else ()
    return (*thinks_since_v13, "v15") if name == "thought of the system" else thinks_since_v13


def record_chats(path: Path, version: str) -> Iterator[dict[str, Any]]:
    """The conversations that a version can render, with their ids."""
    from mistral_common.protocol.instruct.request import ChatCompletionRequest
    from mistral_common.tokens.tokenizers.mistral import MistralTokenizer

    tokenizer = MistralTokenizer.from_file(str(path))
    for name, (messages, tools) in CONVERSATIONS.items():
        if version in left_out(name):
            continue
        last = len(messages) - 1
        request = ChatCompletionRequest(
            messages=[as_theirs(m, i == last) for i, m in enumerate(messages)],
            tools=tools or None,
            reasoning_effort="high" if version == "v15" and name == "tools" else None,
        )
        ids = tokenizer.encode_chat_completion(request).tokens
        yield {"version": version, "name": name, "messages": messages, "tools": tools, "ids": ids}


def main(source: Path) -> None:
    """Write what is recorded."""
    from mistral_common.tokens.tokenizers.tekken import Tekkenizer

    published = json.loads(source.read_text())
    chats: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "tekken.json"
        for version in VERSIONS:
            path.write_text(json.dumps(build_file(published, version)))
            chats += record_chats(path, version)
        tokenizer = Tekkenizer.from_file(path)
        texts = [[text, tokenizer.encode(text, bos=False, eos=False)] for text in TEXTS]
    made = build_file(published, "v15")
    tokens = [entry["token_bytes"] for entry in made["vocab"]]
    parts = {
        "config": made["config"],
        "special_tokens": (SPECIALS + LATER).split(),
        "model_settings_builder": BUILDER,
        "tokens": tokens,
    }
    rows = [f'"{key}": {json.dumps(value)}' for key, value in parts.items()]
    for key, found in (("texts", texts), ("chats", chats)):
        rows.append(f'"{key}": [\n' + ",\n".join(map(json.dumps, found)) + "\n]")
    OUT.write_text("{\n" + ",\n".join(rows) + "\n}\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
