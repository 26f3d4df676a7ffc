"""Conversations in the format of Mistral's own files, by the version that tekken.json has.

Control tokens are written by id, so what a user wrote never becomes one. This is no Jinja template, because
results of tools are parsed as JSON, and put into the order of the calls.

v3: `[INST]` around users, the system's text before the last user's, all calls as one list of JSON. v7: the
system has markers of its own. v11: each call has a marker, and its id. v13: calls without ids, tools before
the first user message instead of the last, thinking. v15: settings behind the tools.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby

from plait.errors import BadTemplate, InvalidField
from plait.text.chat.contents import THOUGHTS, Part, list_parts
from plait.text.chat.template import CallsTaken, Message, normalize_messages, refuse_unread
from plait.text.tokenizers.tekken import TEKKEN, TekkenHead
from plait.text.tokenizers.tokenizer import Tokenizer

_ROLES = {"developer": "system"} | {role: role for role in ("system", "user", "assistant", "tool")}
_BETWEEN = "\n\n"  # of texts that become one
_EFFORT, _SWITCH = "reasoning_effort", "enable_thinking"
_THINKERS = (("assistant", "system", "developer"), ("assistant",))  # before v15, and from there on
_THINK = ("[THINK]", "[/THINK]")
# Since which version each control token is written.
_MARKERS = {
    3: (
        "<s> </s> [INST] [/INST] [AVAILABLE_TOOLS] [/AVAILABLE_TOOLS] [TOOL_RESULTS] [/TOOL_RESULTS] "
        "[TOOL_CALLS]"
    ),
    7: "[SYSTEM_PROMPT] [/SYSTEM_PROMPT]",
    11: "[ARGS]",
    15: "[MODEL_SETTINGS] [/MODEL_SETTINGS]",
}
_KEYS = ("role", "content", "tool_calls", "tool_call_id")
_Parts = list[int | str]
_Group = tuple[str, Sequence[Message]]


class TekkenTemplate:
    """The format of one version over a vocabulary. `head`: of the tekken.json, in one of its known versions.

    `missing`: control tokens that the vocabulary does not have; with any of them nothing can be rendered.
    """

    calls, stop_token_ids = CallsTaken(), frozenset[int]()

    def __init__(self, head: TekkenHead, tokenizer: Tokenizer) -> None:
        self.name = f"{TEKKEN} {head.config.version}"
        self._tokenizer, self._version = tokenizer, int(head.config.version[1:])
        needed = " ".join(texts for since, texts in _MARKERS.items() if since <= self._version).split()
        if self._version in (7, 11):
            needed.append("[TOOL_CONTENT]")
        if self._version == 11:
            needed.append("[CALL_ID]")
        split = {text: tokenizer.split_special(text) for text in (*needed, *_THINK)}
        self._ids = {t: p[0] for t, p in split.items() if len(p) == 1 and isinstance(p[0], int)}
        self.missing = [text for text in needed if text not in self._ids]
        self._thinks = self._version >= 13 and self._ids.keys() >= set(_THINK)
        # No program, but what others look for in one: markers, and the keys of messages that are read.
        shown = [*needed, *((*_THINK, *THOUGHTS) if self._thinks else ()), *_KEYS]
        self.source = " ".join([*shown, *(["[TOOL_CALLS][{"] if self._version < 11 else [])])
        self._efforts, self._usual_effort = _read_efforts(head) if self._version >= 15 else ([], None)
        switches = (_EFFORT, _SWITCH) if self._efforts else ()
        self.variables = frozenset({"tools", *switches})

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
        """Token ids of a conversation; see `ChatTemplate.render`. No marker opens a reply."""
        refuse_unread(self.name, kwargs, tools, self.variables)
        plain = normalize_messages(
            [_drop_empty(message) for message in messages],
            parts={"thinking": _THINKERS[self._version >= 15]} if self._thinks else {},
            between="" if self._version >= 15 else _BETWEEN,
        )
        for i, message in enumerate(plain):
            message["role"] = self._check(message, f"messages[{i}]")
        before_user = [*self._write_tools(tools or ()), *self._write_settings(kwargs)]
        groups: list[_Group] = [
            (role, list(group)) for role, group in groupby(plain, lambda m: str(m["role"]))
        ]
        if self._version < 7:
            groups = _move_system(groups)
        if continue_final_message:
            self._check_open(plain[-1])
        parts = self._write(groups, before_user, continue_final_message)
        return self._tokenizer.encode_parts([self._ids["<s>"], *parts])

    def start(self, *, is_chosen: bool = False) -> None:
        """Nothing is read."""

    def close(self) -> None:
        """Nothing is held."""

    def _check(self, message: Message, where: str) -> str:
        """The message's role in this format. Raises BadTemplate for what the format has no place for."""
        role = _ROLES.get(message["role"])
        if role is None:
            raise BadTemplate(
                f"{where}.role: {message['role']!r} is no role of {self.name}; it knows {', '.join(_ROLES)}",
                f"{where}.role",
            )
        if role == "tool" and self._version < 13 and not isinstance(message.get("tool_call_id"), str):
            at = f"{where}.tool_call_id"
            raise BadTemplate(f"{at}: {self.name} writes the id of the call that a result is of", at)
        for n, call in enumerate(message.get("tool_calls") or ()):
            if not isinstance(call["function"].get("name"), str):
                at = f"{where}.tool_calls[{n}].function.name"
                raise BadTemplate(f"{at}: a call names its tool", at)
        return role

    def _mark(self, opening: str, text: str, closing: str) -> _Parts:
        return [self._ids[opening], text, self._ids[closing]]

    def _write(self, groups: Sequence[_Group], before_user: _Parts, ends_open: bool) -> _Parts:
        """All turns; `before_user` goes before the first or the last of the users'."""
        users = [i for i, (role, _) in enumerate(groups) if role == "user"]
        at = (users[0] if self._version >= 13 else users[-1]) if users else -1
        parts: _Parts = []
        called: list[object] = []
        for i, (role, group) in enumerate(groups):
            if role == "user":
                text = _BETWEEN.join(m["content"] for m in group if m["content"])
                parts += [*(before_user if i == at else ()), *self._mark("[INST]", text, "[/INST]")]
            elif role == "system":
                for message in group:
                    inside = [piece for part in list_parts(message["content"]) for piece in self._part(part)]
                    parts += [self._ids["[SYSTEM_PROMPT]"], *inside, self._ids["[/SYSTEM_PROMPT]"]]
            elif role == "assistant":
                parts += self._write_reply(group, ends_open and i == len(groups) - 1)
                called += [call.get("id") for message in group for call in message.get("tool_calls") or ()]
            else:
                parts += self._write_results(group, called)
                called.clear()
        return parts

    def _write_reply(self, group: Sequence[Message], is_open: bool) -> _Parts:
        """Thinking, text and calls of messages that follow each other, as one turn.

        `is_open`: a reply goes on from it, so that its text ends as it was sent.
        """
        parts: _Parts = []
        for message in group:
            for part in list_parts(message["content"]):
                written = self._part(part)
                if parts and isinstance(parts[-1], str) and written and isinstance(written[0], str):
                    written[0] = f"{parts.pop()}{_BETWEEN}{written[0]}"
                parts += written
        if is_open:
            return parts
        if len(parts) == 1:  # text alone
            parts = [str(parts[0]).rstrip(" ")]
        calls = [call for message in group for call in message.get("tool_calls") or ()]
        return [*parts, *self._write_calls(calls), self._ids["</s>"]]

    def _part(self, part: Part) -> _Parts:
        """Text, if there is any, or thinking between its markers."""
        if part["type"] == "text":
            return [part["text"]] if part["text"] else []
        marked = self._mark(_THINK[0], part["thinking"], _THINK[1])
        return marked if part["closed"] else marked[:-1]

    def _write_calls(self, calls: Sequence[Message]) -> _Parts:
        if self._version < 11:
            listed = [_as_json(call) for call in calls]
            return [self._ids["[TOOL_CALLS]"], _dump(listed)] if listed else []
        parts: _Parts = []
        for call in calls:
            found = _as_json(call)
            parts += [self._ids["[TOOL_CALLS]"], found["name"]]
            if self._version < 13 and "id" in found:
                parts += [self._ids["[CALL_ID]"], found["id"]]
            parts += [self._ids["[ARGS]"], _dump(found["arguments"])]
        return parts

    def _write_results(self, group: Sequence[Message], called: Sequence[object]) -> _Parts:
        """Results of calls, since v11 in the order of the calls, `called` being their ids."""
        if self._version >= 11:
            place = {call_id: i for i, call_id in enumerate(called)}
            group = sorted(group, key=lambda m: place.get(m.get("tool_call_id"), len(called)))
        parts: _Parts = []
        for message in group:
            text, call_id = message["content"] or "", message.get("tool_call_id")
            if self._version < 7:
                text = _dump({"content": _parse(text), "call_id": call_id})
            marked = self._mark("[TOOL_RESULTS]", text, "[/TOOL_RESULTS]")
            if 7 <= self._version < 13:
                marked[1:1] = [str(call_id), self._ids["[TOOL_CONTENT]"]]
            parts += marked
        return parts

    def _write_tools(self, tools: Iterable[Message]) -> _Parts:
        """The tools, with the fields that the format knows. Raises InvalidField for what is none."""
        listed = []
        for i, tool in enumerate(tools):
            function = tool.get("function") if isinstance(tool, Mapping) else None
            if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
                raise InvalidField(f"tools[{i}]: a tool needs a function with a name", f"tools[{i}]")
            about = {"description": function.get("description") or ""}
            about["parameters"] = function.get("parameters") or {}
            listed.append({"type": "function", "function": {"name": function["name"], **about}})
        return self._mark("[AVAILABLE_TOOLS]", _dump(listed), "[/AVAILABLE_TOOLS]") if listed else []

    def _write_settings(self, kwargs: Mapping[str, object]) -> _Parts:
        """How much the model thinks, where its file lets one choose. Raises InvalidField."""
        if not self._efforts:
            return []
        effort, switch = kwargs.get(_EFFORT), kwargs.get(_SWITCH)
        if effort is None and switch is False and "none" in self._efforts:
            effort = "none"
        elif effort is None and switch is True and self._usual_effort in (None, "none"):
            effort = self._efforts[-1]
        effort = self._usual_effort if effort is None else effort
        if effort is None:
            return []
        if effort not in self._efforts:
            raise InvalidField(f"{_EFFORT}: {effort!r} is none of {', '.join(self._efforts)}", _EFFORT)
        return self._mark("[MODEL_SETTINGS]", _dump({_EFFORT: effort}), "[/MODEL_SETTINGS]")

    def _check_open(self, message: Message) -> None:
        """Raises InvalidField for a last message that a reply cannot go on from."""
        field = "continue_final_message"
        if message["role"] != "assistant" or message.get("tool_calls"):
            raise InvalidField(f"{field}: the last message is not a text of the assistant's", field)


def _drop_empty(message: Message) -> Message:
    """The message without parts of empty text, which are not joined to others."""
    content = message.get("content") if isinstance(message, Mapping) else None
    if not isinstance(content, list | tuple):
        return message
    return {**message, "content": [part for part in content if part != {"type": "text", "text": ""}]}


def _move_system(groups: Sequence[_Group]) -> list[_Group]:
    """The turns as v3 has them: what the system says is part of the last user's, and a user is first."""
    system = _BETWEEN.join(
        m["content"] for role, group in groups for m in group if role == "system" and m["content"]
    )
    kept = [(role, group) for role, group in groups if role != "system"]
    if not kept or kept[0][0] != "user":
        kept.insert(0, ("user", []))
    last = max(i for i, (role, _) in enumerate(kept) if role == "user")
    if system:
        text = _BETWEEN.join(m["content"] for m in kept[last][1] if m["content"])
        kept[last] = ("user", [{"content": f"{system}{_BETWEEN}{text}"}])
    return kept


def _read_efforts(head: TekkenHead) -> tuple[list[str], str | None]:
    """How much a model may be made to think, and what is usual; none where the file does not say."""
    field = (head.model_settings_builder or {}).get(_EFFORT)
    if not isinstance(field, Mapping) or not isinstance(field.get("values"), list):
        return [], None
    usual = field.get("default")
    return [v for v in field["values"] if isinstance(v, str)], usual if isinstance(usual, str) else None


def _as_json(call: Message) -> Message:
    """A call of a message as the format has it."""
    arguments, call_id = call["function"].get("arguments"), call.get("id")
    found = {"name": call["function"]["name"], "arguments": {} if arguments is None else arguments}
    has_id = isinstance(call_id, str) and call_id not in ("", "null")
    return found | {"id": call_id} if has_id else found


def _parse(text: str) -> object:
    """The JSON of a text, or the text where it is none."""
    try:
        return json.loads(text or "{}")
    except (ValueError, RecursionError):
        return text


def _dump(value: object) -> str:
    try:
        return json.dumps(value, ensure_ascii=False)
    except RecursionError as error:
        raise InvalidField("messages: a result of a tool is nested too deeply; make it flatter") from error
