"""`plait chat`: what is typed becomes a conversation."""

from __future__ import annotations

import io
import sys
from collections.abc import Callable
from typing import Any

import pytest

from plait.errors import BadTemplate

Run = Callable[..., Any]


@pytest.fixture
def talk(plait: Run, monkeypatch: pytest.MonkeyPatch) -> Run:
    def call(text: str, *arguments: str) -> Any:
        monkeypatch.setattr(sys, "stdin", io.StringIO(text))
        return plait("chat", "some/model", *arguments)

    return call


def test_a_piped_conversation_keeps_its_history(talk: Run, engine: Any) -> None:
    result = talk("Hi\nAnd now?\n")
    assert (result.code, result.out) == (0, "Hello world\nHello world\n")
    assert engine.chats[1] == [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Hello world"},
        {"role": "user", "content": "And now?"},
    ]
    assert engine.params[0].max_tokens is None


def test_slash_commands_clear_set_and_exit(talk: Run, engine: Any) -> None:
    result = talk("Hi\n/clear\n/system Be terse.\nYou?\n/exit\nnever sent\n")
    assert result.code == 0
    assert engine.chats[1:] == [
        [{"role": "system", "content": "Be terse."}, {"role": "user", "content": "You?"}]
    ]


@pytest.mark.parametrize("word", ["/exit", "/quit", "/bye"])
def test_every_usual_word_leaves(talk: Run, engine: Any, word: str) -> None:
    assert talk(f"{word}\nnever sent\n").code == 0
    assert engine.chats == []


def test_an_unknown_slash_command_says_what_is_known(talk: Run, engine: Any) -> None:
    assert "/clear forgets" in talk("/dance\n").err
    assert "/quti is not known; did you mean /quit?" in talk("/quti\n").err
    assert engine.chats == []


def test_the_system_option_comes_first(talk: Run, engine: Any) -> None:
    talk("Hi\n", "--system", "Be kind.")
    assert engine.chats[0][0] == {"role": "system", "content": "Be kind."}


def test_quiet_shows_replies_only(talk: Run, engine: Any) -> None:
    assert talk("Hi\n\n", "--quiet").err == ""


def test_a_model_without_a_template_is_an_error_in_a_pipe(
    talk: Run, engine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(messages: object, params: object) -> list[int]:
        raise BadTemplate("m has no chat template")

    monkeypatch.setattr(engine, "prepare_chat", refuse)
    result = talk("Hi\n", "--quiet")
    assert (result.code, result.err) == (2, "plait: m has no chat template\n")
    assert engine.closed == 1
