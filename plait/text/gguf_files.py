"""Files of a tokenizer inside a GGUF file, each as one string: where GGUF's own words do not say them.

`tokenizer.huggingface.json` is GGUF's own key for it; the others are Plait's.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from plait.errors import BadFile

TOKENIZER = "tokenizer.huggingface.json"
CONFIG = "tokenizer.huggingface.config"
SPECIAL = "tokenizer.huggingface.special_tokens_map"
GENERATION = "plait.generation_config"
CARRIED = ("tokenizer.", GENERATION)  # how the keys begin that speak of text
FILES: Mapping[str, str] = MappingProxyType(
    {TOKENIZER: "tokenizer.json", CONFIG: "tokenizer_config.json", SPECIAL: "special_tokens_map.json"}
)


def json_object(metadata: Mapping[str, Any], key: str) -> dict[str, Any]:
    """The JSON object that a key holds as text; {} without the key. Raises BadFile."""
    if key not in metadata:
        return {}
    try:
        value = json.loads(metadata[key])
    except (ValueError, TypeError, RecursionError) as error:
        raise BadFile(f"GGUF metadata {key}: not JSON ({error})") from error
    if not isinstance(value, dict):
        raise BadFile(f"GGUF metadata {key}: a JSON object was expected, found a {type(value).__name__}")
    return value
