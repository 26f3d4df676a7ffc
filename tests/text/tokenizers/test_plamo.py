"""PLaMo 2's vocabulary: the cheapest cut of a text, from its end, as the published rule has it."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

from plait.errors import BadFile
from plait.text.load import load_tokenizer
from plait.text.tokenizers.gguf import gguf_tokenizer
from plait.text.tokenizers.tokenizer import TextTokenizer

UNKNOWN_COST = 10_000_000
WORDS = [
    "a",
    "b",
    "ab",
    "abc",
    "c",
    "é",
    "日本",
    "本",
    "語",
    " ",
    "  ",
    "\n",
    "▁",
    " the",
    "the",
    "😀a",
    "bca",
]
ALPHABET = [*WORDS, "日", "d", "😀", "<0x41>", "<|plamo:eos|>", "\0", "x"]


def rows() -> list[list[Any]]:
    rng = random.Random(4)
    control = [
        [f"<|plamo:{x}|>", 0.0, kind]
        for x, kind in (("unk", "UNKNOWN"), ("bos", "CONTROL"), ("eos", "CONTROL"))
    ]
    words = [[word, -round(rng.uniform(2, 12), 4), "NORMAL"] for word in WORDS]
    return [*control, *([f"<0x{byte:02X}>", 0.0, "BYTE"] for byte in range(256)), *words]


def metadata() -> dict[str, Any]:
    kinds = {"NORMAL": 1, "UNKNOWN": 2, "CONTROL": 3, "BYTE": 6}
    return {
        "tokenizer.ggml.model": "plamo2",
        "tokenizer.ggml.tokens": [row[0] for row in rows()],
        "tokenizer.ggml.scores": [row[1] for row in rows()],
        "tokenizer.ggml.token_type": [kinds[row[2]] for row in rows()],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
    }


def tokenizer() -> TextTokenizer:
    found = gguf_tokenizer(metadata())
    assert found is not None
    return found


def cheapest(text: str) -> list[int]:
    """The published rule, plainly: from the end, each place knows its cheapest way on."""
    ids = {row[0]: (i, -round(row[1] * 1e4)) for i, row in enumerate(rows()) if row[2] == "NORMAL"}
    best: list[tuple[int, int, list[int]]] = [(0, 0, [])] * (len(text) + 1)
    for i in reversed(range(len(text))):
        byte_ids = [3 + byte for byte in text[i].encode()]
        ways = [(UNKNOWN_COST + best[i + 1][0], 1, byte_ids)]
        for end in range(i + 1, len(text) + 1):
            if text[i:end] in ids:
                token, cost = ids[text[i:end]]
                ways.append((cost + best[end][0], end - i, [token]))
        best[i] = min(ways, key=lambda way: (way[0], -way[1]))  # the longer of equals
    out, at = list[int](), 0
    while at < len(text):
        out += best[at][2]
        at += best[at][1]
    return out


def test_texts_are_cut_where_it_costs_least() -> None:
    own, rng = tokenizer(), random.Random(2)
    for _ in range(300):
        text = "".join(rng.choice(ALPHABET) for _ in range(rng.randint(0, 14)))
        ids = own.encode(text, add_special=False)
        assert ids == cheapest(text), text
        assert own.decode(ids) == text


def test_control_tokens_are_written_only_on_purpose() -> None:
    own = tokenizer()
    assert own.encode("ab<|plamo:eos|>", allow_special=True)[-1] == 2
    assert 2 not in own.encode("ab<|plamo:eos|>")
    assert own.eos_token_ids == {2}
    assert not own.add_bos


def test_a_folder_with_tokenizer_jsonl_says_the_same(tmp_path: Path) -> None:
    lines = [json.dumps(row, ensure_ascii=False) for row in rows()]
    (tmp_path / "tokenizer.jsonl").write_text("\n".join(lines), encoding="utf-8")
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"add_bos_token": True}))
    found = load_tokenizer(directory=tmp_path)
    assert found is not None
    assert found.name == "tokenizer.jsonl"
    assert found.encode("the abc") == [1, *cheapest("the abc")]


def test_files_that_are_not_such_vocabularies_are_refused(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.jsonl").write_text('["a", 1.0]\n')
    with pytest.raises(BadFile, match=r"tokenizer\.jsonl, line 1"):
        load_tokenizer(directory=tmp_path)
    few = metadata()
    few["tokenizer.ggml.token_type"][5] = 1
    with pytest.raises(BadFile, match="255 byte tokens"):
        gguf_tokenizer(few)
