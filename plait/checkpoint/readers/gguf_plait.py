"""GGUF files of models that llama.cpp has no architecture for: read by Plait alone.

`general.architecture` is "plait". Tensors have the names, shapes and numbers of the checkpoint that the file
was made from; `plait.config` is its config.json as one string (absent if it had none). So a reader of that
checkpoint reads the file, too. Names that are too long for GGUF are in a list, and numbers stand for them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

from plait.checkpoint.readers.mmap_json import parse_json
from plait.errors import BadFile

ARCHITECTURE = "plait"
CONFIG = "plait.config"
NAMES = "plait.tensor_names"  # of the tensors that are called `stand_in(n)`, n counting them
Entry = TypeVar("Entry")
MAX_NAME_BYTES = 63  # of a tensor's name for ggml, because its strings end with a zero


def is_own(metadata: Mapping[str, Any] | None) -> bool:
    """Whether a GGUF file holds a checkpoint under its own names. `metadata`: None for other files."""
    return metadata is not None and metadata.get("general.architecture") == ARCHITECTURE


def own_config(metadata: Mapping[str, Any]) -> dict[str, Any] | None:
    """The config.json of the checkpoint in such a file, if it had one. Raises BadFile."""
    text = metadata.get(CONFIG)
    if text is None:
        return None
    if not isinstance(text, str):
        raise BadFile(f"GGUF metadata {CONFIG}: must be JSON as text, got {type(text).__name__}")
    return parse_json(text.encode("utf-8", "surrogateescape"), f"GGUF metadata {CONFIG}")


def stand_in(number: int) -> str:
    """The name that stands for one that is too long."""
    return f"plait.{number}"


def restore_names(entries: Mapping[str, Entry], metadata: Mapping[str, Any]) -> dict[str, Entry]:
    """Tensors by their own names, where the file had to call them something else. Raises BadFile."""
    listed = metadata.get(NAMES, [])
    if not isinstance(listed, list) or not all(isinstance(name, str) and name for name in listed):
        raise BadFile(f"GGUF metadata {NAMES}: must be a list of names")
    names = {stand_in(n): name for n, name in enumerate(listed)}
    if missing := names.keys() - entries.keys():
        raise BadFile(
            f"GGUF metadata {NAMES} has a name for {min(missing)!r}, which is no tensor of the file"
        )
    found = {names.get(name, name): entry for name, entry in entries.items()}
    if len(found) < len(entries):
        raise BadFile(f"GGUF metadata {NAMES}: two tensors have one name")
    return found
