"""What a format of tool calls is, and the conversations of earlier turns as its templates take them."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence

from msgspec import Struct

from plait.text.chat.contents import THOUGHTS
from plait.text.chat.template import Message
from plait.text.output.call_grammar import Frame
from plait.text.output.json_calls import CallSyntax

_PLAIN_ID = re.compile(r"[A-Za-z0-9]+")


class ToolFormat(Struct, frozen=True):
    """One format of tool calls.

    `syntax` is how its calls are read, `frame` how one that is demanded is written. `signs`: groups of texts;
    a chat template that holds all of a group is of this kind (None: one that holds the first marker that
    opens calls). `tokens`: control tokens that mean this kind
    where no template decides it. `id_length`: of the ids that its templates take; `plan`: the key under which
    they take what was thought before calls. `asides` (opening, closing) with `turn` after each, `final` and
    `final_end`: the markers of text next to calls, where that has markers. `holds`: whether calls that need
    not come can be held to their schemas (`strict`).
    """

    name: str
    syntax: CallSyntax
    frame: Frame
    signs: tuple[tuple[str, ...], ...] | None = None
    tokens: tuple[str, ...] = ()
    id_length: int | None = None
    plan: str = ""
    asides: tuple[tuple[str, str], ...] = ()
    turn: str = ""
    final: str = ""
    final_end: str = ""
    holds: bool = True

    @property
    def markers(self) -> frozenset[str]:
        """Every marker that must appear in the text: see `OutputParser.find_shown`."""
        return frozenset(self.syntax.markers)

    def history(self, messages: Sequence[Message]) -> Sequence[Message]:
        """The conversation as templates of this kind take it: see `with_short_ids` and `with_plans`."""
        if self.plan:
            messages = with_plans(messages, self.plan)
        return messages if self.id_length is None else with_short_ids(messages, self.id_length)


def with_short_ids(messages: Sequence[Message], length: int) -> list[Message]:
    """The same messages, every call's id `length` letters and digits long.

    Equal ids stay equal, in calls and in the answers to them; ids that fit already stay as they are. What is
    not a list of calls is left for `normalize_messages` to refuse.
    """
    return [_shorten_ids(m, length) if isinstance(m, Mapping) else m for m in messages]


def with_plans(messages: Sequence[Message], key: str) -> list[Message]:
    """The same messages; those with calls also have the thinking or text before the calls under `key`."""
    return [_set_plan(m, key) if isinstance(m, Mapping) and m.get("tool_calls") else m for m in messages]


def _set_plan(message: Message, key: str) -> Message:
    plan = next((text for name in (key, *THOUGHTS, "content") if (text := message.get(name))), None)
    return {**message, key: plan} if isinstance(plan, str) else message


def _shorten_ids(message: Message, length: int) -> Message:
    changed: dict[str, object] = dict(message)
    if isinstance(answered := message.get("tool_call_id"), str):
        changed["tool_call_id"] = _short(answered, length)
    calls = message.get("tool_calls")
    if isinstance(calls, Sequence) and not isinstance(calls, str):
        changed["tool_calls"] = [_shorten_id(call, length) for call in calls]
    return changed


def _shorten_id(call: object, length: int) -> object:
    if isinstance(call, Mapping) and isinstance(known := call.get("id"), str):
        return {**call, "id": _short(known, length)}
    return call


def _short(call_id: str, length: int) -> str:
    if len(call_id) == length and _PLAIN_ID.fullmatch(call_id):
        return call_id
    return hashlib.blake2b(call_id.encode("utf-8", "surrogatepass"), digest_size=length).hexdigest()[:length]
