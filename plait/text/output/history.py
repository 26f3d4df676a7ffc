"""Tool calls of earlier turns, as a family's template takes them."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence
from typing import Any

from plait.text.chat.template import THOUGHTS, Message

_PLAIN = re.compile(r"[A-Za-z0-9]+")


def with_short_ids(messages: Sequence[Message], length: int) -> list[Message]:
    """The same messages, every call's id `length` letters and digits long.

    Equal ids stay equal, in calls and in the answers to them; ids that fit already stay as they are. What is
    not a list of calls is left for `normalize_messages` to refuse.
    """
    return [_message(m, length) if isinstance(m, Mapping) else m for m in messages]


def with_plans(messages: Sequence[Message], key: str) -> list[Message]:
    """The same messages; those with calls also have the thinking or text before the calls under `key`."""
    return [_set_plan(m, key) if isinstance(m, Mapping) and m.get("tool_calls") else m for m in messages]


def _set_plan(message: Message, key: str) -> Message:
    plan = next((text for name in (key, *THOUGHTS, "content") if (text := message.get(name))), None)
    return {**message, key: plan} if isinstance(plan, str) else message


def _message(message: Message, length: int) -> Message:
    changed: dict[str, Any] = dict(message)
    if isinstance(answered := message.get("tool_call_id"), str):
        changed["tool_call_id"] = _short(answered, length)
    calls = message.get("tool_calls")
    if isinstance(calls, Sequence) and not isinstance(calls, str):
        changed["tool_calls"] = [_call(call, length) for call in calls]
    return changed


def _call(call: Any, length: int) -> Any:
    known = isinstance(call, Mapping) and isinstance(call.get("id"), str)
    return {**call, "id": _short(call["id"], length)} if known else call


def _short(call_id: str, length: int) -> str:
    if len(call_id) == length and _PLAIN.fullmatch(call_id):
        return call_id
    return hashlib.blake2b(call_id.encode("utf-8", "surrogatepass"), digest_size=length).hexdigest()[:length]
