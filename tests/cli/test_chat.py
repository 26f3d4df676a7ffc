"""`plait chat`: what is typed becomes a conversation."""

from __future__ import annotations

import io
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from plait.errors import BadTemplate, ModelNotFound

Run = Callable[..., Any]
chat_command = import_module("plait.cli.chat")


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
    assert "/dance is not known: /help lists commands, /exit leaves" in talk("/dance\n").err
    assert "/quti is not known; did you mean /quit?" in talk("/quti\n").err
    assert engine.chats == []


def test_help_and_set_list_one_a_line(talk: Run, engine: Any) -> None:
    rows = talk("/help\n").err.splitlines()
    assert "  /clear            forgets the conversation" in rows
    assert "  /exit             leaves, as /quit and /bye do" in rows
    rows = talk("/set top_p 0.5\n/set\n/set stop\n").err.splitlines()
    assert {"top_p is 0.5 now", "  top_p                  0.5", "  seed                   none"} < set(rows)
    assert "stop is []: text that ends it; may be repeated" in rows


def test_the_system_option_comes_first(talk: Run, engine: Any) -> None:
    talk("Hi\n", "--system", "Be kind.")
    assert engine.chats[0][0] == {"role": "system", "content": "Be kind."}


def test_quiet_shows_replies_only(talk: Run, engine: Any) -> None:
    assert talk("Hi\n\n", "--quiet").err == ""


def test_a_model_without_a_template_is_an_error_in_a_pipe(
    talk: Run, engine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(messages: object, params: object, terms: object) -> list[int]:
        raise BadTemplate("m has no chat template")

    monkeypatch.setattr(engine, "prepare_chat", refuse)
    result = talk("Hi\n", "--quiet")
    assert (result.code, result.err) == (2, "plait: m has no chat template\n")
    assert engine.closed == 1


def test_a_message_of_several_lines_stands_between_three_quotes(talk: Run, engine: Any) -> None:
    talk('"""def f():\n    return 1\n\n/exit"""\nNext\n"""\none\n"""\n"""left open\n')
    assert [asked[-1]["content"] for asked in engine.chats] == [
        "def f():\n    return 1\n\n/exit",
        "Next",
        "one",
    ]


def test_regen_asks_again_and_undo_takes_back(talk: Run, engine: Any) -> None:
    result = talk("/regen\n/undo\nOne\nTwo\n/regen\n/undo\nThree\n")
    asked = [[one["content"] for one in chat if one["role"] == "user"] for chat in engine.chats]
    assert asked == [["One"], ["One", "Two"], ["One", "Two"], ["One", "Three"]]
    assert "there is no reply yet" in result.err
    assert "there is no message yet" in result.err


def test_a_reply_that_fails_again_leaves_the_first_one(engine: Any, plait: Run, monkeypatch: Any) -> None:
    def typed() -> Any:
        yield "One"
        engine.error = BadTemplate("no more")
        yield "/regen"
        engine.error = None
        yield "Two"

    monkeypatch.setattr("plait.cli.chat.messages", lambda prompt: typed())
    result = plait("chat", "some/model")
    assert "plait: no more" in result.err
    assert [one["content"] for one in engine.chats[-1]] == ["One", "Hello world", "Two"]


def test_set_changes_sampling_and_refuses_what_does_not_fit(talk: Run, engine: Any) -> None:
    result = talk(
        "/set temperature 0.5\n/set top-k none\n/set temperature 9\n/set heat 1\n/set min_p\nHi\n/set\n"
    )
    assert (engine.params[0].temperature, engine.params[0].top_k) == (0.5, None)
    for said in (
        "temperature is 0.5 now",
        "plait: temperature: 9",
        "heat is not an option",
        "min_p is none: ",
    ):
        assert said in result.err


def test_a_conversation_is_saved_and_goes_on(talk: Run, engine: Any, tmp_path: Path) -> None:
    file, other = tmp_path / "talk.json", tmp_path / "other.json"
    other.write_text("{}")
    result = talk(f"Hi\n/save {file}\nMore\n/save {file}\n/save {other}\n/save\n", "--system", "Be kind.")
    assert f"4 messages are in {file}" in result.err
    assert f"{other} is there already" in result.err
    assert "/save needs a file" in result.err
    assert other.read_text() == "{}"
    talk(f"/load {file}\nAnd?\n")
    assert [one["content"] for one in engine.chats[-1]] == [
        "Be kind.", "Hi", "Hello world", "More", "Hello world", "And?",
    ]  # fmt: skip


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "[" * 9999,
        '{"system": 1, "messages": []}',
        '{"system": null, "messages": [{"role": "user"}]}',
    ],
)
def test_what_is_no_conversation_changes_nothing(talk: Run, engine: Any, tmp_path: Path, text: str) -> None:
    (tmp_path / "bad").write_text(text)
    result = talk(f"Hi\n/load {tmp_path / 'bad'}\n/load {tmp_path / 'absent'}\nMore\n")
    assert f"plait: {tmp_path / 'absent'}: No such file or directory\n" in result.err
    assert "is not a conversation" in result.err
    assert "No such file" in result.err
    assert len(engine.chats[-1]) == 3


def test_another_model_goes_on_with_the_conversation(talk: Run, engine: Any, monkeypatch: Any) -> None:
    opened, load = [], chat_command.load

    def open_model(name: str, **options: Any) -> Any:
        opened.append(name)
        if name == "absent":
            raise ModelNotFound("absent: there is no such model")
        return load(name, **options)

    monkeypatch.setattr(chat_command, "load", open_model)
    result = talk("Hi\n/model absent\nStill?\n/model other/model\nAnd now?\n")
    assert opened == ["some/model", "absent", "other/model"]
    assert "plait: absent: there is no such model" in result.err
    assert len(engine.chats[-1]) == 5


def test_typed_lines_are_kept_for_their_user_alone(monkeypatch: Any, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    with chat_command.keep_history(is_kept=False):
        pass
    assert not list(tmp_path.iterdir())
    with chat_command.keep_history(is_kept=True):
        pass
    assert (tmp_path / "plait/chat_history").stat().st_mode & 0o777 == 0o600
