"""Chat templates in Jinja, and how text that users write stays text.

A template writes one string in which its own `<|im_end|>` and a user's look the same. Two renderings
distinguish them. In the first, each control token's text inside a user's string is *broken* by a private
character after its first one. The template's logic then sees the text almost as it is. What still matches a
control token is the template's, unless the template glued parts of user strings together. In the second,
every character that could begin a control token is *veiled* in user strings: no user text can match at all.
If both show the same control tokens, the first is right; if not, the second is used, which is always safe.
"""

from __future__ import annotations

import logging
import re
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any

from plait.errors import BadTemplate, CapacityError, ConfigError, InvalidField
from plait.text.chat.contents import NO_PARTS, Part, probe_parts
from plait.text.chat.sandbox import Sandbox, TemplateEnded
from plait.text.chat.template import (
    QUESTION,
    TOOL,
    TOOLS,
    CallsTaken,
    Message,
    cut_at_mark,
    normalize_messages,
    probe_calls,
    refuse_unread,
)
from plait.text.tokenizers.tokenizer import Tokenizer

log = logging.getLogger("plait")
MAX_CHARS = 256 << 10  # of a template with all of its parts; those of models have a few thousand
_PARTS = ("default", "tool_use")  # of those that a template has, the ones that are rendered
_KIND = re.compile(r"""\btype['"]?\]?\s*==\s*['"](\w+)['"]""")  # of parts that a template looks for
_OTHER = "give another one with --chat-template"
_PRIVATE = (range(0xE000, 0xF8FF), range(0xF0000, 0xFFFFE), range(0x100000, 0x10FFFE))
_ROLES = frozenset({"system", "user", "assistant", "tool", "developer", "function", "ipython", "model"})
_OURS = frozenset({"messages", "tools", "documents", "add_generation_prompt", "self"})


class JinjaTemplate:
    """Chat templates by name ("default", "tool_use") over a vocabulary.

    `variables` are the special tokens a template may write (`bos_token`, …). Nothing here looks into a
    template: a process apart reads and renders it. One that fails while it is read is not tried again.
    """

    def __init__(
        self,
        name: str,
        sources: Mapping[str, str],
        tokenizer: Tokenizer,
        variables: Mapping[str, str],
        sandbox: Sandbox | None = None,
    ) -> None:
        self.name, self._sources, self._tokenizer = name, sources, tokenizer
        self._variables = variables
        self._sandbox = sandbox or Sandbox()
        self._texts = [tokenizer.token_text(i) for i in tokenizer.special_ids]
        self._starts = sorted({text[0] for text in self._texts if text})
        self.stop_token_ids = frozenset[int]()  # the vocabulary knows its own ends
        self._lock = threading.Lock()
        self._is_closed = False
        self._read: dict[str, frozenset[str]] | None = None  # by part
        self._calls: CallsTaken | None = None
        num_chars = sum(map(len, sources.values()))
        self._fault = ""
        if num_chars > MAX_CHARS:
            self._fault = f"it has {num_chars} characters, and at most {MAX_CHARS} are read"
            self._sources = {}
        self._reads = [name for name in TOOLS if name in self.source]
        self._reads_parts = NO_PARTS

    @property
    def source(self) -> str:
        """Every part of it; nothing of one that is too long."""
        return "\n".join(self._sources.values())

    @property
    def variables(self) -> frozenset[str]:
        """What it reads. Raises BadTemplate for one that cannot be used, and CapacityError."""
        return frozenset().union(*self._parts_read().values())

    @property
    def calls(self) -> CallsTaken:
        """How it takes calls of tools: some are rendered, once. Raises as `variables` does."""
        self._parts_read()
        assert self._calls is not None
        return self._calls

    def start(self, *, is_chosen: bool = False) -> None:
        """Reads the template now, so that an unusable one is known and reported before the first request.

        Chats are refused then, and nothing else is. `is_chosen`: the user named it, so ConfigError is raised.
        """
        self._is_closed = False
        try:
            self._parts_read()
        except CapacityError as error:
            if not self._is_closed:  # meanwhile, by another thread
                log.warning("the chat template is read at the first chat, not now: %s", error)
        except BadTemplate as error:
            if is_chosen:
                raise ConfigError(f"chat_template: {error}") from error
            log.warning("no chats: %s", error)

    def _parts_read(self) -> Mapping[str, frozenset[str]]:
        """The variables of each part, after they and a few conversations have been tried, once."""
        if self._read is not None:
            return self._read
        if not self._lock.acquire(timeout=self._sandbox.wait_s):
            raise CapacityError("the chat template is still being read; try again later")
        try:
            if self._read is None and not self._fault:
                try:
                    read = {p: self._sandbox.read(self._sources[p]) for p in _PARTS if p in self._sources}
                    self._calls = self._try_calls()
                    self._read = read
                except BadTemplate as error:
                    self._fault = str(error)
        finally:
            self._lock.release()
        if self._read is None:
            raise BadTemplate(f"the chat template {self.name!r} cannot be used: {self._fault}; {_OTHER}")
        return self._read

    def _try_calls(self) -> CallsTaken:
        """How it takes calls, and which parts it reads. Raises TemplateEnded for one that does not end."""
        ours = {**self._variables, "documents": None, "add_generation_prompt": True}

        def shown(messages: Sequence[Mapping[str, Any]], tools: Any = (TOOL,)) -> str:
            source = self._sources[self._part(bool(tools))]
            return self._sandbox.render(source, {**ours, **self._tools(tools), "messages": messages})

        try:
            shown([QUESTION], None)
        except TemplateEnded:
            raise
        except BadTemplate:
            pass  # it has conditions that this conversation does not meet
        self._reads_parts = probe_parts(lambda messages: shown(messages, None), _KIND.findall(self.source))
        return probe_calls(shown)

    def render(
        self,
        messages: Sequence[Message],
        /,
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, object]] | None = None,
        **kwargs: object,
    ) -> list[int]:
        """Token ids of a conversation; see `ChatTemplate.render`."""
        read = self._parts_read()
        has_calls = any(isinstance(m, Mapping) and m.get("tool_calls") for m in messages)
        plain = normalize_messages(
            messages,
            calls_as_text=has_calls and self.calls.as_text,
            parts=self._reads_parts,
        )
        for i, message in enumerate(plain):
            self._check_role(message["role"], i)
        taken = sorted(set(kwargs) & (_OURS | self._variables.keys()))
        if taken:
            raise InvalidField(
                f"chat_template_kwargs: {taken[0]!r} is not for requests to set", "chat_template_kwargs"
            )
        user = {"messages": plain, **self._tools(list(tools) if tools else None), **kwargs}
        mark = next(_free_marks("".join(_strings(user)))) if continue_final_message else ""
        if mark:  # where the text ends that is to go on: templates cut space only beyond it
            plain[-1]["content"] = _add_mark(plain[-1]["content"], mark)
        part = self._part(bool(tools))
        refuse_unread(self.name, kwargs, tools, read[part])

        def rendering(change: Callable[[str], str]) -> str:
            opens = add_generation_prompt and not continue_final_message
            ours = {**self._variables, "documents": None, "add_generation_prompt": opens}
            return self._sandbox.render(self._sources[part], {**ours, **_change_strings(user, change)})

        parts = self._parts(user, rendering)
        return self._tokenizer.encode_parts(cut_at_mark(parts, mark) if mark else parts)

    def text(self, messages: Sequence[Message], /, **options: Any) -> str:
        """The rendered conversation as one string, for people to look at."""
        return self._tokenizer.decode(self.render(messages, **options), skip_special=False)

    def close(self) -> None:
        """Ends the rendering process."""
        self._is_closed = True
        self._sandbox.close()

    def _tools(self, tools: list[object] | None) -> dict[str, object]:
        """Tools under each name that a template may read them by."""
        return {name: tools for name in TOOLS if name == "tools" or name in self._reads}

    def _part(self, with_tools: bool) -> str:
        chosen = "tool_use" if with_tools and "tool_use" in self._sources else "default"
        if chosen not in self._sources:
            raise BadTemplate(
                f"the chat template {self.name!r} has no part named 'default', only "
                f"{', '.join(self._sources)}; {_OTHER}"
            )
        return chosen

    def _check_role(self, role: str, i: int) -> None:
        """Templates write `<|` + role + `|>`: a role must not be the inside of another control token."""
        if role not in _ROLES and any(role in text for text in self._texts):
            raise BadTemplate(
                f"messages[{i}].role: {role!r} is not a role; roles are {', '.join(sorted(_ROLES))}",
                f"messages[{i}].role",
            )

    def _parts(self, user: object, rendering: Callable[[Callable[[str], str]], str]) -> list[int | str]:
        """The conversation as ids of the template's control tokens and ordinary strings."""
        written = "".join(_strings(user))
        if not any(start in written for start in self._starts):
            return self._tokenizer.split_special(rendering(str))
        private = _free_marks(written)
        breaker = next(private)
        veils: dict[int, str | int | None] = {ord(start): next(private) for start in self._starts}
        lift = {ord(str(veil)): start for start, veil in veils.items()}

        broken = self._split(rendering(lambda text: self._break_tokens(text, breaker)), {ord(breaker): None})
        veiled = self._split(rendering(lambda text: text.translate(veils)), lift)
        same = [p for p in broken if isinstance(p, int)] == [p for p in veiled if isinstance(p, int)]
        return broken if same else veiled

    def _break_tokens(self, text: str, breaker: str) -> str:
        out: list[str] = []
        for part in self._tokenizer.split_special(text) if self._tokenizer.has_special(text) else [text]:
            out.append(part if isinstance(part, str) else _insert(self._tokenizer.token_text(part), breaker))
        return "".join(out)

    def _split(self, text: str, restore: Mapping[int, str | int | None]) -> list[int | str]:
        parts = self._tokenizer.split_special(text)
        return [part.translate(restore) if isinstance(part, str) else part for part in parts]


def _add_mark(content: str | list[Part] | None, mark: str) -> str | list[Part]:
    """The content with `mark` at the end of its last text."""
    if not isinstance(content, list):
        return f"{content or ''}{mark}"
    *before, last = content
    if last["type"] != "text":
        return [*content, {"type": "text", "text": mark}]
    return [*before, {**last, "text": f"{last['text']}{mark}"}]


def _insert(text: str, breaker: str) -> str:
    return text[0] + breaker + text[1:]


def _strings(value: object) -> Iterator[str]:
    """Every string in JSON data, keys included."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield str(key)
            yield from _strings(item)
    elif isinstance(value, Sequence):
        for item in value:
            yield from _strings(item)


def _change_strings(value: object, change: Callable[[str], str]) -> Any:
    """The same JSON data with every string changed, keys included."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {change(str(key)): _change_strings(item, change) for key, item in value.items()}
    if isinstance(value, Sequence):
        return [_change_strings(item, change) for item in value]
    return value


def _free_marks(written: str) -> Iterator[str]:
    """Private characters that occur in no user string. Raises BadTemplate when there are no more."""
    used = set(written)
    yield from (chr(c) for c in chain(*_PRIVATE) if chr(c) not in used)
    raise BadTemplate("the conversation holds every private character; leave some out")
