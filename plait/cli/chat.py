"""`plait chat`: a conversation in the terminal, or one line of stdin after the other."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING

import click

from plait.cli.common.help import GroupedCommand, suggest_word
from plait.cli.common.options import (
    common_options,
    engine_options,
    engine_settings,
    model_option,
    sampling_options,
    sampling_params,
)
from plait.cli.common.progress import Clock
from plait.cli.generate import load, write
from plait.errors import RequestError

if TYPE_CHECKING:
    from plait.llm.llm import LLM
    from plait.request import SamplingParams

HELP = "/clear forgets the conversation · /system TEXT sets the system message · /exit, /quit or /bye leaves"
LEAVE = ("/exit", "/quit", "/bye")
COMMANDS = ("/clear", "/system", "/help", *LEAVE)
Message = dict[str, str]


@click.command(cls=GroupedCommand)
@model_option()
@click.option("--system", help="the system message")
@sampling_options(max_tokens=None)
@engine_options()
@click.option("--quiet", "-q", is_flag=True, help="replies only: no greeting and no speed")
@common_options()
def chat(model: str, system: str | None, quiet: bool, **given: object) -> None:
    """Talk with a model in the terminal. Each line is a message; /help lists what else can be typed.

    \b
    plait chat ./model
    plait chat org/name:Q4_K_M --system "You are terse." --temperature 0
    """
    params, settings = sampling_params(given), engine_settings(given)
    llm = load(model, settings, quiet=quiet)
    try:
        if not quiet and sys.stdin.isatty():
            print(f"{llm.front.name} · {HELP}", file=sys.stderr)
        ChatSession(llm, params, system, quiet=quiet).run(lines(prompt=sys.stdin.isatty()))
    finally:
        llm.close()


def lines(*, prompt: bool) -> Iterator[str]:
    """What is typed or piped, line by line, until the end."""
    if prompt:
        import readline  # noqa: F401  (gives input() its history and line editing)
    while True:
        try:
            yield input("> " if prompt else "")
        except EOFError:
            if prompt:
                print()
            return


class ChatSession:
    """The messages so far, and what a typed line does to them."""

    def __init__(self, llm: LLM, params: SamplingParams, system: str | None, *, quiet: bool) -> None:
        self._llm, self._params, self._quiet = llm, params, quiet
        self.system, self.messages = system, list[Message]()

    def run(self, typed: Iterator[str]) -> None:
        for line in typed:
            if line.strip() in LEAVE:
                return
            if line.startswith("/"):
                print(self.command(line), file=sys.stderr)
            elif line.strip():
                self.reply(line)

    def command(self, line: str) -> str:
        """Carry out a slash command and return what to tell the user."""
        name, _, text = line.partition(" ")
        match name:
            case "/clear":
                self.messages.clear()
                return "the conversation is forgotten"
            case "/system":
                self.system = text.strip() or None
                return "the system message is set" if self.system else "there is no system message now"
            case "/help":
                return HELP
        return f"{name} is not known{suggest_word(name, COMMANDS) or ':'} {HELP}"

    def reply(self, text: str) -> None:
        """Send a message and stream the reply; refused or stopped, the conversation stays as it was."""
        system = [{"role": "system", "content": self.system}] if self.system else []
        asked = [*system, *self.messages, {"role": "user", "content": text}]
        front = self._llm.front
        try:
            request = front.prepare_chat(asked, self._params)
        except RequestError as error:
            if not self.messages and not sys.stdin.isatty():
                raise
            print(f"plait: {error}", file=sys.stderr)
            return
        clock, stream = Clock(len(request.prompt_token_ids)), front.submit(request)
        try:
            answer = write(stream, clock)
        except KeyboardInterrupt:
            stream.cancel()
            print("\n(stopped)", file=sys.stderr)
            return
        self.messages += [{"role": "user", "content": text}, {"role": "assistant", "content": answer}]
        if not self._quiet:
            print(clock, file=sys.stderr)
            if note := clock.context_note(front.max_model_len):
                print(note, file=sys.stderr)
