"""Keys in messages of a chat that nothing reads: named in the header of its reply, as unknown fields are.

A message goes to the chat template with all of its keys, and so do tools, which most templates write as JSON.
Of a part of its content text and thinking are left.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from plait.text.chat.contents import THOUGHTS

READ = frozenset({"role", "content", "name", "tool_calls", "tool_call_id", "refusal", *THOUGHTS})
PART = frozenset({"type", "text", "thinking", "closed"})
# What clients send back of replies, and hints to caches. It would change no reply.
HARMLESS = frozenset(
    {
        *("annotations", "cache_control", "citations", "id", "parsed", "provider_specific_fields"),
        *("reasoning_details", "thinking_blocks"),
    }
)
_QUIET, _QUIET_PART = READ | HARMLESS, PART | HARMLESS


def list_unread_keys(
    messages: Iterable[Mapping[str, object]], is_in_template: Callable[[str], bool]
) -> list[str]:
    """Each such key once: `messages.weight`, `messages.content.detail`. Those without a value are left out.

    `is_in_template`: whether the text of the chat template has a name, so that it may read the key.
    """
    keys, parts = dict[str, None](), dict[str, None]()
    for message in messages:
        keys |= dict.fromkeys(_list_set(message, _QUIET))
        content = message.get("content")
        for part in content if isinstance(content, list) else ():
            parts |= dict.fromkeys(_list_set(part, _QUIET_PART))
    found = [f"messages.{key}" for key in keys if not is_in_template(key)]
    return found + [f"messages.content.{key}" for key in parts]


def list_keys(objects: Iterable[object], known: frozenset[str], at: str) -> list[str]:
    """Keys with a value that are not `known`, each once, as `at` names them: `tools.defer_loading`."""
    found = dict[str, None]()
    for one in objects:
        if isinstance(one, Mapping):
            found |= dict.fromkeys(str(key) for key in _list_set(one, known) if one[key] is not False)
    return [f"{at}.{key}" for key in found]


def _list_set(found: Mapping[str, object], known: frozenset[str]) -> list[str]:
    return [key for key, value in found.items() if key not in known and value not in (None, "", [], {})]
