"""`plait generate`: text on stdout, everything else on stderr."""

from __future__ import annotations

import io
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from plait.errors import OutOfBlocks

Run = Callable[..., Any]


def pipe(monkeypatch: pytest.MonkeyPatch, data: bytes) -> None:
    stdin = SimpleNamespace(buffer=io.BytesIO(data), isatty=lambda: False)
    monkeypatch.setattr(sys, "stdin", stdin)


def test_the_text_is_on_stdout_and_the_speed_on_stderr(plait: Run, engine: Any) -> None:
    result = plait("generate", "--model", "m", "--prompt", "Say")
    assert (result.code, result.out) == (0, "Hello world\n")
    assert result.err.startswith("3 prompt tokens")
    assert "2 tokens" in result.err
    assert engine.prompts == ["Say"]
    assert engine.closed == 1


def test_a_first_start_says_what_it_compiled(plait: Run, engine: Any) -> None:
    engine.step_kind = "9 launches of 3 native kernels, one call; compiled 2 of them, once: 12.1 s"
    told = "compiled 2 of them, once: 12.1 s; the next run loads them"
    assert told in plait("generate", "-m", "m", "-p", "Say").err
    assert told not in plait("generate", "-m", "m", "-p", "Say", "--quiet").err


def test_a_full_context_is_reported_on_stderr(plait: Run, engine: Any) -> None:
    assert "context" not in plait("generate", "-m", "m", "-p", "Say").err
    engine.max_model_len = 5
    told = "the context is full: prompt and text have 3 + 2 tokens, and it holds 5 (--max-model-len)"
    assert told in plait("generate", "-m", "m", "-p", "Say").err
    assert told not in plait("generate", "-m", "m", "-p", "Say", "--quiet").err


def test_a_run_that_keeps_nothing_does_not_promise_anything_of_the_next(plait: Run, engine: Any) -> None:
    engine.step_kind = "9 launches of 3 native kernels, one call; compiled 2 of them: 12.1 s"
    engine.unkept = "/cache cannot be written (Read-only file system)"
    told = plait("generate", "-m", "m", "-p", "Say").err
    assert "the next run compiles them again: /cache cannot be written" in told
    assert "loads them" not in told


def test_quiet_is_quiet(plait: Run, engine: Any) -> None:
    assert plait("generate", "-m", "m", "-p", "Say", "--quiet").err == ""


def test_the_model_may_be_an_argument(plait: Run, engine: Any) -> None:
    assert plait("generate", "some/model", "--prompt", "x").code == 0
    assert engine.settings["model"] == "some/model"


@pytest.mark.parametrize("arguments", [(), ("--prompt", "-")])
def test_the_prompt_may_come_from_a_pipe(
    plait: Run, engine: Any, monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...]
) -> None:
    pipe(monkeypatch, "Größe\nzwei\n".encode())
    assert plait("generate", "--model", "m", *arguments).code == 0
    assert engine.prompts == ["Größe\nzwei"]


def test_a_prompt_that_is_not_utf8_is_refused(
    plait: Run, engine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    pipe(monkeypatch, b"\xff\xfe")
    result = plait("generate", "--model", "m")
    assert result.code == 2
    assert "stdin is not UTF-8" in result.err


def test_an_argument_that_is_not_utf8_is_refused_before_loading(plait: Run, engine: Any) -> None:
    result = plait("generate", "--model", "m", "--prompt", "caf\udce9")
    assert (result.code, engine.prompts) == (2, [])
    assert "--prompt: 'caf\\udce9' has bytes that are not UTF-8 here" in result.err


def test_an_empty_pipe_without_a_prompt_says_what_to_give(
    plait: Run, engine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    pipe(monkeypatch, b"\n")
    result = plait("generate", "--model", "m")
    assert result.code == 2
    assert "stdin is empty: give --prompt or --ids" in result.err
    assert engine.prompts == []


@pytest.mark.parametrize("ids", ["1,2,3", "1 2 3", "[1, 2, 3]"])
def test_the_prompt_may_be_token_ids(plait: Run, engine: Any, ids: str) -> None:
    plait("generate", "--model", "m", "--ids", ids)
    assert engine.prompts == [(1, 2, 3)]


def test_two_prompts_are_one_too_many(plait: Run, engine: Any) -> None:
    result = plait("generate", "--model", "m", "--ids", "1,2", "--prompt", "x")
    assert result.code == 2
    assert "--prompt and --ids are both the prompt" in result.err
    assert engine.prompts == []


def test_a_model_without_a_tokenizer_writes_token_ids(plait: Run, engine: Any) -> None:
    engine.tokenizer = None
    assert plait("generate", "--model", "m", "--ids", "5").out == "1 2 \n"


def test_an_error_in_the_middle_ends_the_text_with_a_line(plait: Run, engine: Any) -> None:
    engine.error = OutOfBlocks("no block is free")
    result = plait("generate", "--model", "m", "--prompt", "x")
    assert result.code == 4
    assert result.err == "plait: no block is free\n"
    assert result.out.startswith("Hello world")
    assert engine.closed == 1


def test_an_interrupt_closes_the_engine(plait: Run, engine: Any) -> None:
    engine.error = KeyboardInterrupt()
    result = plait("generate", "--model", "m", "--prompt", "x")
    assert result.code == 130
    assert engine.closed == 1
