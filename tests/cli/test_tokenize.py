"""`plait tokenize` and `plait decode` with the built-in vocabularies: no model is read."""

from __future__ import annotations

import io
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

Run = Callable[..., Any]
HELLO = "9906,11,1917"  # "Hello, world" in cl100k_base, as OpenAI's tiktoken has it


def test_text_becomes_ids(plait: Run) -> None:
    result = plait("tokenize", "--vocab", "cl100k_base", "--text", "Hello, world", "--ids")
    assert (result.code, result.out, result.err) == (0, HELLO + "\n", "")


def test_ids_become_text(plait: Run) -> None:
    result = plait("decode", "--vocab", "cl100k_base", "--ids", HELLO)
    assert (result.code, result.out) == (0, "Hello, world\n")


def test_every_token_has_a_line(plait: Run) -> None:
    result = plait("tokenize", "--vocab", "cl100k_base", "--text", "Hello, world")
    assert result.out.splitlines() == ["    9906  'Hello'", "      11  ','", "    1917  ' world'"]
    assert result.err == "3 tokens, cl100k_base\n"


def test_half_a_character_is_shown_as_bytes(plait: Run) -> None:
    lines = plait("tokenize", "--vocab", "cl100k_base", "--text", "🧶").out.splitlines()
    assert any("b'" in line for line in lines)


def test_control_tokens_are_text_unless_requested(plait: Run) -> None:
    asked = ("tokenize", "--vocab", "cl100k_base", "--text", "<|endoftext|>", "--ids")
    assert "100257" not in plait(*asked).out
    assert plait(*asked, "--control").out == "100257\n"


def test_control_tokens_can_be_left_out(plait: Run) -> None:
    asked = ("decode", "--vocab", "cl100k_base", "--ids", "9906,100257")
    assert plait(*asked).out == "Hello<|endoftext|>\n"
    assert plait(*asked, "--skip-special").out == "Hello\n"


def test_both_read_stdin(plait: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def pipe(data: bytes) -> None:
        monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=io.BytesIO(data), isatty=lambda: False))

    pipe(b"Hello, world\n")
    assert plait("tokenize", "--vocab", "cl100k_base", "--ids").out == HELLO + "\n"
    pipe(b"[9906, 11, 1917]\n")
    assert plait("decode", "--vocab", "cl100k_base").out == "Hello, world\n"


@pytest.mark.parametrize("command", [("tokenize", "--text", "x"), ("decode", "--ids", "1")])
def test_a_plug_in_is_loaded_before_the_model(plait: Run, tmp_path: Path, command: tuple[str, ...]) -> None:
    plugin = tmp_path / "family.py"
    plugin.write_text("raise ValueError('it ran')")
    result = plait(*command, "--model", str(tmp_path), "--plugin", str(plugin))
    assert result.code == 2
    assert f"plug-in {plugin} cannot be loaded: ValueError: it ran" in result.err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("decode", "--ids", "1"), "--vocab"),
        (("decode", "--vocab", "klingon", "--ids", "1"), "'klingon'"),
        (("decode", "--vocab", "cl100k_base", "--ids", "100300000"), "no token has the id 100300000"),
        (("tokenize", "--vocab", "nowhere.tiktoken", "--text", "x"), "nowhere.tiktoken"),
        (("decode", "--vocab", "cl100k_base", "--plugin", "a.py", "--ids", "1"), "--plugin helps to read"),
    ],
)
def test_what_cannot_be_done_is_reported(plait: Run, arguments: tuple[str, ...], message: str) -> None:
    result = plait(*arguments)
    assert result.code == 2
    assert message in result.err
    assert result.err.count("\n") == 1
