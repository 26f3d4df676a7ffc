"""Files of a tokenizer inside a GGUF file, each as one string, where GGUF's own keys lack what they hold.

`tokenizer.huggingface.json` is GGUF's own key for it; the others are Plait's.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

TOKENIZER = "tokenizer.huggingface.json"
CONFIG = "tokenizer.huggingface.config"
SPECIAL = "tokenizer.huggingface.special_tokens_map"
GENERATION = "plait.generation_config"
CARRIED = ("tokenizer.", GENERATION)  # how the keys begin that describe text
FILES: Mapping[str, str] = MappingProxyType(
    {TOKENIZER: "tokenizer.json", CONFIG: "tokenizer_config.json", SPECIAL: "special_tokens_map.json"}
)
