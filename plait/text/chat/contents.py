"""What a message holds: text, and thinking, which clients send as a part of its content or as a field."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, MutableMapping, Sequence
from itertools import groupby
from types import MappingProxyType
from typing import TypedDict

from plait.errors import BadTemplate, InvalidField
from plait.text.chat.sandbox import TemplateEnded

# Fields with thinking, in messages of earlier turns.
THOUGHTS = ("reasoning_content", "reasoning", "thinking")
THINKERS = frozenset({"assistant", "system", "developer"})  # roles with parts of thinking
# Of a conversation with a message of a role.
_TURNS = {"system": ("system", "user"), "user": ("user",), "assistant": ("user", "assistant", "user")}
PartsRead = Mapping[str, Collection[str]]  # by the kind of a part: of which roles a template reads it
_Render = Callable[[Sequence[Mapping[str, object]]], str]
NO_PARTS: PartsRead = MappingProxyType({})


class Part(TypedDict, total=False):
    """As templates get it. `type`: "text", or "thinking"; a reply goes on in what is not `closed`."""

    type: str
    text: str
    thinking: str
    closed: bool


def place_contents(message: MutableMapping[str, object], where: str, reads: PartsRead, between: str) -> None:
    """Change the content of a message, and its fields of thinking, to what a template expects.

    If it reads "thinking" of the message's role, content with thinking is a list of parts, {"type":
    "thinking", "thinking": …, "closed": …} and {"type": "text", "text": …}, and the fields are gone, since
    some templates refuse to have both. Otherwise thinking is in the fields alone. If it reads "text" of the
    role, several texts stay parts. Otherwise they become one, with `between` in between. Raises InvalidField
    for what is neither, and for thinking that the template has no place for.
    """
    content, role = message.get("content"), str(message["role"])
    kinds = [kind for kind, roles in reads.items() if role in roles]
    parts = list_parts(content) if content is None or isinstance(content, str) else None
    if parts is None:
        parts = read_parts(content, f"{where}.content")
        parts = parts if "text" in kinds else join_texts(parts, between)
    thoughts = [part["thinking"] for part in parts if part["type"] == "thinking"]
    thought = next((text for name in THOUGHTS if (text := message.get(name))), None)
    if thoughts:
        check_thinker(role, f"{where}.content")
    elif isinstance(thought, str) and role == "assistant" and "thinking" in kinds:
        thoughts = [thought]
        parts.insert(0, {"type": "thinking", "thinking": thought, "closed": True})
    if thoughts and "thinking" in kinds:
        message["content"] = parts
        for name in THOUGHTS:
            message.pop(name, None)
        return
    if thoughts and role != "assistant":
        why = f"this model's chat template has no thinking in a message of the {role}'s; send text"
        raise InvalidField(f"{where}.content: {why}", f"{where}.content")
    texts = [part for part in parts if part["type"] == "text"]
    text = None if content is None else between.join(part["text"] for part in texts)
    message["content"] = texts if len(texts) > 1 and "text" in kinds else text
    if thought := thought or "\n".join(thoughts):
        message.update(dict.fromkeys(THOUGHTS, thought))


def probe_parts(render: Callable[[Sequence[Mapping[str, object]]], str], kinds: Collection[str]) -> PartsRead:
    """Of which roles a template reads parts. `kinds`: those that its text has the names of.

    One may loop over the parts of a user, and take the first of the system alone: others would be lost.
    `render` renders messages, and raises BadTemplate where it refuses them. Raises TemplateEnded as it does.
    """
    roles = {"text": ("system", "user", "assistant"), "thinking": ("system", "assistant")}
    return {
        kind: frozenset(role for role in roles[kind] if _reads_parts(render, kind, role))
        for kind in roles.keys() & set(kinds)
    }


def _reads_parts(render: _Render, kind: str, role: str) -> bool:
    """Whether all parts are shown, and not as Python would show them. An earlier reply may lose thinking."""
    parts = [{"type": kind, kind: "probe first"}, {"type": "text", "text": "probe second"}]
    turns: dict[str, Mapping[str, object]] = {
        one: {"role": one, "content": parts if one == role else "probe other"} for one in _TURNS[role]
    }
    try:
        shown = render([turns[one] for one in _TURNS[role]])
    except TemplateEnded:
        raise  # what does not end once is not tried again
    except BadTemplate:
        return False
    is_earlier = kind == "thinking" and role == "assistant"
    return "probe second" in shown and (is_earlier or "probe first" in shown) and "'type'" not in shown


def list_parts(content: str | list[Part] | None) -> list[Part]:
    """The parts of a content that has been checked."""
    if isinstance(content, list):
        return content
    return [] if content is None else [{"type": "text", "text": content}]


def read_parts(content: object, where: str) -> list[Part]:
    """A list of parts, checked: thinking has one text. Raises InvalidField, naming what is wrong."""
    if not isinstance(content, Sequence) or isinstance(content, str | bytes):
        raise InvalidField(f"{where}: {type(content).__name__} is neither text nor a list of parts", where)
    found: list[Part] = []
    for i, part in enumerate(content):
        kind, at = part.get("type") if isinstance(part, Mapping) else type(part).__name__, f"{where}[{i}]"
        if kind == "text":
            found.append({"type": "text", "text": _text(part.get("text"), f"{at}.text")})
        elif kind == "thinking":
            found.append(_read_thinking(part, at))
        else:
            raise InvalidField(f"{at}: {kind!r:.80} parts are not supported, only text", at)
    return found


def check_thinker(role: str, where: str) -> None:
    """Raises InvalidField for a role that does not think."""
    if role not in THINKERS:
        raise InvalidField(f"{where}: a message of the {role}'s has no parts of thinking, only text", where)


def join_texts(parts: Sequence[Part], between: str) -> list[Part]:
    """The parts with neighbouring texts as one."""
    joined: list[Part] = []
    for kind, group in groupby(parts, lambda part: part["type"]):
        if kind == "text":
            joined.append({"type": "text", "text": between.join(part["text"] for part in group)})
        else:
            joined += group
    return joined


def _read_thinking(part: Mapping[str, object], at: str) -> Part:
    thinking, closed = part.get("thinking"), part.get("closed", True)
    if isinstance(thinking, list):  # as Mistral's API has it
        texts = [part.get("text") if isinstance(part, Mapping) else None for part in thinking]
        thinking = "".join(_text(text, f"{at}.thinking") for text in texts)
    if not isinstance(closed, bool):
        raise InvalidField(f"{at}.closed: it must be true or false", f"{at}.closed")
    return {"type": "thinking", "thinking": _text(thinking, f"{at}.thinking"), "closed": closed}


def _text(value: object, where: str) -> str:
    if not isinstance(value, str):
        raise InvalidField(f"{where}: it must be a string", where)
    return value
