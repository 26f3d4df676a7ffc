"""Metadata that clients give to what they store, within OpenAI's limits."""

from __future__ import annotations

from collections.abc import Mapping

from plait.errors import InvalidField

MAX_METADATA, MAX_METADATA_NAME, MAX_METADATA_CHARS = 16, 64, 512


def read_metadata(value: object) -> dict[str, str]:
    """Metadata of a client, in OpenAI's limits; null is none. Raises InvalidField."""
    if value is None:
        return {}
    limits = f"send at most {MAX_METADATA} names of {MAX_METADATA_NAME} characters"
    if not isinstance(value, Mapping) or len(value) > MAX_METADATA:
        raise InvalidField(f"metadata: it must be an object of strings; {limits}", "metadata")
    for name, text in value.items():
        if len(name) > MAX_METADATA_NAME:
            raise InvalidField(f"metadata: {name!r:.80} is too long; {limits}", "metadata")
        if not isinstance(text, str) or len(text) > MAX_METADATA_CHARS:
            limits = f"a string of at most {MAX_METADATA_CHARS} characters"
            raise InvalidField(f"metadata.{name}: it must be {limits}", "metadata")
    return dict(value)
