"""`plait chat`: a conversation in the terminal, or one line of stdin after the other."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import click

from plait.cli.chat_models import LocalModel
from plait.cli.chat_session import GREETING, ChatSession
from plait.cli.common.help import GroupedCommand
from plait.cli.common.options import (
    adapter_option,
    choose_adapter,
    common_options,
    engine_options,
    engine_settings,
    model_option,
    sampling_options,
    sampling_params,
)
from plait.cli.generate import load

QUOTES = '"""'
HISTORY_LINES = 1000


@click.command(cls=GroupedCommand)
@model_option()
@click.option("--system", help="the system message")
@sampling_options(max_tokens=None)
@engine_options()
@adapter_option()
@click.option("--quiet", "-q", is_flag=True, help="replies only: no greeting and no speed")
@click.option(
    "--history/--no-history", default=True, help="keep typed lines for the arrow keys of later chats"
)
@common_options()
def chat(
    model: str, system: str | None, adapter: str | None, quiet: bool, history: bool, **given: object
) -> None:
    """Talk with a model in the terminal. Each line is a message; /help lists what else can be typed.

    A message of several lines begins and ends with three quotes.

    \b
    plait chat ./model
    plait chat org/name:Q4_K_M --system "You are terse." --temperature 0
    """
    params, settings = sampling_params(given), engine_settings(given)
    chosen = choose_adapter(adapter, settings["lora"])

    def open_model(name: str) -> LocalModel:
        return LocalModel(load(name, settings=settings, quiet=quiet), chosen)

    session = ChatSession(open_model, params, system, quiet=quiet)
    session.open_model(model)
    talk(session, quiet=quiet, history=history)


def talk(session: ChatSession, *, quiet: bool, history: bool) -> None:
    """Take messages from the terminal or the pipe until their end, and close the session's model."""
    try:
        is_terminal = sys.stdin.isatty()
        if not quiet and is_terminal:
            print(f"{session.name} · {GREETING}", file=sys.stderr)
        with keep_history(is_kept=history and is_terminal):
            session.run(messages(prompt=is_terminal))
    finally:
        session.close()


def messages(*, prompt: bool) -> Iterator[str]:
    """What is typed or piped: a line, or all lines between three quotes, until the end."""
    try:
        while True:
            line = input("> " if prompt else "")
            if not line.startswith(QUOTES):
                yield line
                continue
            parts, text = list[str](), line.removeprefix(QUOTES)
            while not text.rstrip().endswith(QUOTES):
                parts.append(text)
                text = input("… " if prompt else "")
            yield "\n".join([*parts, text.rstrip().removesuffix(QUOTES)]).strip("\n")
    except EOFError:
        if prompt:
            print()


@contextmanager
def keep_history(*, is_kept: bool) -> Iterator[None]:
    """Line editing with the lines of earlier chats. The file of what is typed is for its user alone."""
    if not is_kept:
        yield
        return
    import readline

    base = os.environ.get("XDG_STATE_HOME") or "~/.local/state"
    path = Path(base).expanduser() / "plait" / "chat_history"
    with suppress(OSError):
        readline.read_history_file(path)
    readline.set_history_length(HISTORY_LINES)
    try:
        yield
    finally:
        with suppress(OSError):  # a home that cannot be written: a chat without memory
            path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            path.touch(mode=0o600)
            readline.write_history_file(path)
