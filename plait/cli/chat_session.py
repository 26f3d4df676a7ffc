"""A conversation of `plait chat`: its messages, and what slash commands do to them."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from plait.cli.common.help import suggest_word
from plait.cli.common.options import SAMPLING_HELP
from plait.cli.generate import write
from plait.errors import PlaitError, RequestError

if TYPE_CHECKING:
    from plait.cli.chat_models import ChatModel
    from plait.request import SamplingParams

LEAVE = ("/exit", "/quit", "/bye")
COMMANDS = {
    "/clear": "forgets the conversation",
    "/system TEXT": "sets the system message",
    "/regen": "answers the last message again",
    "/undo": "takes the last message and its reply back",
    "/set NAME VALUE": "changes an option of sampling; /set alone lists them",
    "/save FILE": "writes the conversation",
    "/load FILE": "goes on with a conversation that was saved",
    "/model NAME": "goes on with another model",
    "/help": "lists these commands",
    "/exit": "leaves, as /quit and /bye do",
}
SEVERAL_LINES = {'"""': "begins and ends a message of several lines"}
HELP = "\n".join(f"  {name:<17} {text}" for name, text in (COMMANDS | SEVERAL_LINES).items())
GREETING = "/help lists commands, /exit leaves"
NAMES = tuple(name for name in (each.split()[0] for each in COMMANDS) if name not in LEAVE)
MAX_FILE_BYTES = 64 << 20
Message = dict[str, str]


class ChatSession:
    """The messages so far, and what a typed line does to them.

    `load`: makes the model of a name. A command that cannot be carried out changes nothing.
    """

    def __init__(
        self, load: Callable[[str], ChatModel], params: SamplingParams, system: str | None, *, quiet: bool
    ) -> None:
        self._load_model, self._params, self._quiet = load, params, quiet
        self.system, self.messages = system, list[Message]()
        self._chat_model: ChatModel | None = None
        self._written: Path | None = None  # the file of this conversation, which may be written again

    @property
    def model(self) -> ChatModel:
        assert self._chat_model is not None
        return self._chat_model

    @property
    def name(self) -> str:
        return self.model.name

    def open_model(self, name: str) -> None:
        """Load it, and then close the one before: one that cannot be loaded leaves the other in place."""
        before, self._chat_model = self._chat_model, self._load_model(name)
        if before is not None:
            before.close()

    def close(self) -> None:
        self.model.close()

    def run(self, typed: Iterator[str]) -> None:
        for line in typed:
            if line.strip() in LEAVE:
                return
            if line.startswith("/"):
                if told := self.command(line):
                    print(told, file=sys.stderr)
            elif line.strip():
                self.reply(line)

    def command(self, line: str) -> str:
        """Carry out a slash command and return what to tell the user."""
        name, _, text = line.strip().partition(" ")
        text = text.strip()
        if name in ("/save", "/load", "/model") and not text:
            return f"{name} needs a {'model' if name == '/model' else 'file'} to be named"
        does = getattr(self, f"_{name[1:]}") if name in NAMES else None
        if does is None:
            return f"{name} is not known{suggest_word(name, (*NAMES, *LEAVE)) or ':'} {GREETING}"
        try:
            told: str = does(text)
        except PlaitError as error:
            return f"plait: {error}"
        except OSError as error:
            return f"plait: {text}: {error.strerror or error}"
        return told

    def _help(self, text: str) -> str:
        return HELP

    def _clear(self, text: str) -> str:
        self.messages = []
        return "the conversation is forgotten"

    def _system(self, text: str) -> str:
        self.system = text or None
        return "the system message is set" if self.system else "there is no system message now"

    def _model(self, text: str) -> str:
        self.open_model(text)
        return f"{self.name} goes on with the conversation"

    def _undo(self, text: str) -> str:
        if not self.messages:
            return "there is no message yet"
        self.messages = self.messages[:-2]
        return "the last message and its reply are taken back"

    def _regen(self, text: str) -> str:
        if not self.messages:
            return "there is no reply yet"
        before = self.messages
        self.messages, has_replied = before[:-2], False
        try:
            has_replied = self.reply(before[-2]["content"])
        finally:
            if not has_replied:
                self.messages = before
        return ""

    def _set(self, text: str) -> str:
        name, _, value = text.partition(" ")
        if not name:
            return "\n".join(f"  {one:<22} {self._show(one)}" for one in SAMPLING_HELP)
        name = name.lstrip("-").replace("-", "_")
        if name not in SAMPLING_HELP:
            return f"{name} is not an option{suggest_word(name, tuple(SAMPLING_HELP)) or ':'} /set lists them"
        if not value.strip():
            return f"{name} is {self._show(name)}: {SAMPLING_HELP[name]}"
        given: dict[str, Any] = {name: parse_value(value.strip())}
        self._params = replace(self._params, **given)  # which checks the value
        return f"{name} is {self._show(name)} now"

    def _show(self, name: str) -> str:
        """An option's value as /set takes it; a default of the model, or nothing, is `none`."""
        value = getattr(self._params, name)
        return "none" if value is None else json.dumps(value, ensure_ascii=False)

    def _save(self, text: str) -> str:
        path = Path(text).expanduser()
        if path.exists() and path != self._written:
            return f"{path} is there already: name another file, or remove it"
        kept = {"system": self.system, "messages": self.messages}
        partial = path.with_name(f"{path.name}.part")
        partial.write_text(json.dumps(kept, ensure_ascii=False, indent=1), encoding="utf-8")
        partial.replace(path)
        self._written = path
        return f"{len(self.messages)} messages are in {path}"

    def _load(self, text: str) -> str:
        path = Path(text).expanduser()
        if path.stat().st_size > MAX_FILE_BYTES:
            return f"{path} has {path.stat().st_size} bytes; a conversation has at most {MAX_FILE_BYTES}"
        try:
            kept = json.loads(path.read_bytes())
            system, messages = kept["system"], [dict(one) for one in kept["messages"]]
        except (ValueError, TypeError, KeyError, RecursionError):
            return f"{path} is not a conversation that /save wrote"
        if not (isinstance(system, str | None) and are_turns(messages)):
            return f"{path} is not a conversation: a system text, then messages of user and assistant in turn"
        self.system, self.messages, self._written = system, messages, path
        return f"{len(messages)} messages are back"

    def reply(self, text: str) -> bool:
        """Send a message and stream the reply; refused or stopped, the conversation stays as it was."""
        system = [{"role": "system", "content": self.system}] if self.system else []
        asked = [*system, *self.messages, {"role": "user", "content": text}]
        try:
            reply = self.model.ask(asked, self._params)
        except RequestError as error:
            if not self.messages and not sys.stdin.isatty():
                raise
            print(f"plait: {error}", file=sys.stderr)
            return False
        try:
            answer = write(reply, reply.clock)
        except KeyboardInterrupt:
            reply.cancel()
            print("\n(stopped)", file=sys.stderr)
            return False
        self.messages += [{"role": "user", "content": text}, {"role": "assistant", "content": answer}]
        if not self._quiet:
            print(reply.clock, file=sys.stderr)
            if note := reply.clock.context_note(self.model.max_model_len):
                print(note, file=sys.stderr)
        return True


def parse_value(text: str) -> object:
    """An option's value as it is typed: JSON, `none`, or else the text itself."""
    if text.lower() == "none":
        return None
    try:
        value: object = json.loads(text)
    except ValueError:
        return text
    return value


def are_turns(messages: list[Message]) -> bool:
    """Whether user and assistant take turns, each with a text, and the assistant has the last word."""
    roles = [one.get("role") for one in messages]
    texts = all(isinstance(one.get("content"), str) and len(one) == 2 for one in messages)
    return texts and roles == ["user", "assistant"] * (len(messages) // 2)
