"""Conversations to token ids: what every chat template has in common.

A template's own markers become control tokens; what a user wrote never does, whatever it looks like.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, Protocol

from msgspec import Struct

from plait.errors import BadTemplate, CapacityError, InvalidField
from plait.text.chat.contents import NO_PARTS, PartsRead, list_parts, place_contents, read_parts
from plait.text.chat.sandbox import TemplateEnded

Message = Mapping[str, Any]
TOOLS = ("tools", "xml_tools")  # under which templates read them; the second is SmolLM3's
MAX_ARGUMENTS_DEPTH = 64
_HEAD_ROLES = frozenset({"system", "developer"})
_ARGUMENTS = {"probe_key": "probe value"}
_TEXT = json.dumps(_ARGUMENTS)
_IDS = ("abcdefgh1", "abcdefgh2")  # as long as Mistral's templates demand
TOOL = {
    "type": "function",
    "function": {
        "name": "probe_tool",
        "description": "A tool.",
        "parameters": {"type": "object", "properties": {"probe_key": {}}},
    },
}
QUESTION = {"role": "user", "content": "probe question"}
_Render = Callable[[Sequence[Mapping[str, object]]], str]


class CallsTaken(Struct, frozen=True):
    """`as_text`: arguments must be JSON text, not an object; `several`: a message may hold more than one."""

    as_text: bool = False
    several: bool = True


class ChatTemplate(Protocol):
    """Renders conversations. `name` says where it came from; `stop_token_ids` end a turn in its format.

    `source` is its text, "" if it has none, and `variables` what it reads; `calls`: how it takes calls.
    """

    @property
    def name(self) -> str: ...
    @property
    def stop_token_ids(self) -> frozenset[int]: ...
    @property
    def source(self) -> str: ...
    @property
    def variables(self) -> frozenset[str]: ...
    @property
    def calls(self) -> CallsTaken: ...

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
        """Token ids of a conversation, with the opening of the model's reply if that is requested.

        With `continue_final_message` they end with the last message's text, which a reply goes on from.
        Raises BadTemplate with the template's own message, InvalidField for what it cannot take.
        """
        ...

    def start(self, *, is_chosen: bool = False) -> None:
        """Makes ready what the first rendering needs. `is_chosen`: by the user. Raises ConfigError then."""
        ...

    def close(self) -> None:
        """Gives back what the template holds; it can be used again afterwards."""
        ...


def begin_start(template: ChatTemplate | None, *, is_chosen: bool) -> Callable[[], None]:
    """Start a template on a thread of its own: it waits for another process most of the time.

    What is returned waits for the end, and raises what `start` does.
    """
    done: Future[None] = Future()

    def run() -> None:
        try:
            if template is not None:
                template.start(is_chosen=is_chosen)
            done.set_result(None)
        except BaseException as error:
            done.set_exception(error)

    threading.Thread(target=run, name="plait-template", daemon=True).start()
    return done.result


def num_chars(*found: object) -> int:
    """Characters of all texts in messages and tools, keys too: what a template may write."""
    total, rest = 0, list(found)
    while rest:
        value = rest.pop()
        if isinstance(value, str):
            total += len(value)
        elif isinstance(value, Mapping):
            rest += value.keys()
            rest += value.values()
        elif isinstance(value, list | tuple):
            rest += value
    return total


def boundaries(
    template: ChatTemplate,
    messages: Sequence[Message],
    ids: Sequence[int],
    options: Mapping[str, Any],
    places: Sequence[int] = (),
) -> tuple[int, ...]:
    """Where in a prompt other requests are likely to diverge: rising positions inside it.

    After the system messages and tools, where the first user's words begin; after everything before the last
    user message, where its words begin; before the opening of the reply; and behind so many messages as the
    client says in `places`. `ids` is the conversation as
    `template` renders it with `options`. Each place is found by rendering another conversation, and is as far
    as the two have the same tokens. A conversation that the template refuses has none.
    """
    found = set()
    for other in [*_others(messages, options), *(_change_next(messages, place) for place in places)]:
        try:
            rendered = template.render(other, **{**options, "add_generation_prompt": False})
        except (TemplateEnded, CapacityError):
            break  # each further one could take as long
        except (BadTemplate, InvalidField):
            continue  # no client sent this conversation, so no error is reported
        found.add(_common_len(ids, rendered))
    return tuple(sorted(at for at in found if 0 < at < len(ids)))


def _others(messages: Sequence[Message], options: Mapping[str, object]) -> Iterator[Sequence[Message]]:
    """The conversations that diverge from this one at its boundaries."""
    head = next((i for i, m in enumerate(messages) if m["role"] not in _HEAD_ROLES), len(messages))
    last = max((i for i, m in enumerate(messages) if m["role"] == "user"), default=head)
    if (head or options.get("tools")) and head < len(messages):
        yield [*messages[:head], _another(messages[head])]
    if last > head:
        yield [*messages[:last], _another(messages[last])]
    if options.get("add_generation_prompt", True):
        yield messages


def _change_next(messages: Sequence[Message], place: int) -> Sequence[Message]:
    """The conversation with another message behind so many, which has the same role."""
    if place >= len(messages):
        return messages
    follows = messages[place]
    return [*messages[:place], {**_another(follows), "role": follows["role"]}]


def _another(message: Message) -> Message:
    """A user message with another first character: the template's own words around it stay shared."""
    content = message.get("content")
    parts = list_parts(content) if content is None or isinstance(content, str) else read_parts(content, "")
    text = next((part["text"] for part in parts if part["type"] == "text"), "")
    return {"role": "user", "content": "b" if text.lstrip().startswith("a") else "a"}


def _common_len(a: Sequence[int], b: Sequence[int]) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def normalize_messages(
    messages: Sequence[Message],
    *,
    calls_as_text: bool = False,
    parts: PartsRead = NO_PARTS,
    between: str = "\n",
) -> list[dict[str, Any]]:
    """Messages as templates expect them: contents are strings, and thinking has each of its names.

    Arguments of calls are objects, or JSON text. `parts`: what the template reads in lists; for this and
    `between` see `place_contents`.
    Raises InvalidField, naming the message, for contents that are neither text nor thinking.
    """
    if not messages:
        raise InvalidField("messages: there is none; send at least one", "messages")
    found = [_message(m, f"messages[{i}]", calls_as_text) for i, m in enumerate(messages)]
    for i, message in enumerate(found):
        place_contents(message, f"messages[{i}]", parts, between)
        if message.get("tool_calls"):
            message["content"] = message["content"] or ""
    return found


def _message(message: Message, where: str, calls_as_text: bool) -> dict[str, object]:
    if not isinstance(message, Mapping):
        raise InvalidField(f"{where}: {type(message).__name__} is not a message like {{'role': …}}", where)
    role = message.get("role")
    if not isinstance(role, str) or not role:
        raise InvalidField(f"{where}.role: {role!r} is not a role like 'user'", f"{where}.role")
    plain = {key: value for key, value in message.items() if value is not None or key == "content"}
    if message.get("tool_calls"):
        if not isinstance(message["tool_calls"], list | tuple):
            at = f"{where}.tool_calls"
            raise InvalidField(f"{at}: {type(message['tool_calls']).__name__} is not a list of calls", at)
        calls = enumerate(message["tool_calls"])
        plain["tool_calls"] = [
            _tool_call(call, f"{where}.tool_calls[{i}]", calls_as_text) for i, call in calls
        ]
    return plain


def _tool_call(call: Any, where: str, as_text: bool) -> dict[str, object]:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping):
        raise InvalidField(f"{where}: a tool call needs a function with a name and arguments", where)
    arguments = function.get("arguments")
    found, at = arguments, f"{where}.function.arguments"
    if isinstance(arguments, str):
        try:
            found = json.loads(arguments) if arguments.strip() else {}
        except (ValueError, RecursionError) as error:
            raise InvalidField(f"{at}: not JSON ({error})", at) from error
    _check_depth(found, at)
    if isinstance(arguments, str):
        arguments = found if not as_text else arguments.strip() or "{}"
    elif as_text:
        arguments = json.dumps({} if arguments is None else arguments, ensure_ascii=False)
    return {**call, "function": {**function, "arguments": arguments}}


def _check_depth(found: object, at: str) -> None:
    """Raises InvalidField for what is nested too deeply for templates, which call themselves to write it."""
    level, depth = [found], 0
    while level := [value for value in level if isinstance(value, Mapping | list | tuple)]:
        depth += 1
        if depth > MAX_ARGUMENTS_DEPTH:
            raise InvalidField(f"{at}: nested deeper than {MAX_ARGUMENTS_DEPTH} levels; make it flatter", at)
        level = [inside for value in level for inside in _members(value)]


def _members(value: Any) -> Iterable[object]:
    return value.values() if isinstance(value, Mapping) else value


def cut_at_mark(parts: Sequence[int | str], mark: str) -> list[int | str]:
    """A rendered conversation up to `mark`, which was put at the end of its last message's text.

    Raises InvalidField if the template did not write it.
    """
    for i in reversed(range(len(parts))):
        part = parts[i]
        if isinstance(part, str) and mark in part:
            kept = [*parts[:i], part.rpartition(mark)[0]]
            return [piece.replace(mark, "") if isinstance(piece, str) else piece for piece in kept]
    raise InvalidField(
        "continue_final_message: this model's chat template does not write the last message as it stands",
        "continue_final_message",
    )


def refuse_unread(name: str, kwargs: Mapping[str, object], tools: object, known: frozenset[str]) -> None:
    """Raises InvalidField for tools or template arguments that a template would not look at."""
    if tools and not known.intersection(TOOLS):
        raise InvalidField(
            f"tools: the chat template {name!r} has no place for tools; leave them out, or start the server "
            "with a template that has one (--chat-template)",
            "tools",
        )
    unknown = sorted(set(kwargs) - known)
    if unknown:
        raise InvalidField(
            f"chat_template_kwargs: the chat template {name!r} does not read {unknown[0]!r}",
            "chat_template_kwargs",
        )


def message_text(message: Mapping[str, object], i: int) -> str:
    """The content of a message that must be text. Raises BadTemplate."""
    content = message["content"]
    if content is None or message.get("tool_calls"):
        raise BadTemplate(
            f"messages[{i}].content: this chat template has no place for tool calls; send text",
            f"messages[{i}].content",
        )
    return str(content)


def probe_calls(render: _Render) -> CallsTaken:
    """How a template takes calls. `render` renders messages, and raises BadTemplate where it refuses them.

    Raises TemplateEnded when `render` does.
    """
    as_object, as_text = _render_calls(render, _ARGUMENTS), _render_calls(render, _TEXT)
    wants_text = not _holds_arguments(as_object) and _TEXT in as_text
    arguments: object = _TEXT if wants_text else _ARGUMENTS
    works_at_all = bool(as_text if wants_text else as_object)
    return CallsTaken(wants_text, not works_at_all or bool(_render_calls(render, arguments, arguments)))


def _holds_arguments(text: str) -> bool:
    """Whether the key and the value are there, and not as Python would print them."""
    return all(part in text for item in _ARGUMENTS.items() for part in item) and str(_ARGUMENTS) not in text


def _render_calls(render: _Render, *arguments: object) -> str:
    """A conversation with these calls; "" if it is refused."""
    named = list(zip(_IDS, arguments, strict=False))
    calls = [
        {"id": i, "type": "function", "function": {"name": "probe_tool", "arguments": a}} for i, a in named
    ]
    answers = [
        {"role": "tool", "tool_call_id": i, "name": "probe_tool", "content": "probe answer"} for i, _ in named
    ]
    try:
        return render([QUESTION, {"role": "assistant", "content": "", "tool_calls": calls}, *answers])
    except TemplateEnded:
        raise  # what does not end once is not tried again
    except BadTemplate:
        return ""
