"""`general.file_type`: the number by which GGUF files say what most of their weights are stored in."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from types import MappingProxyType

import torch

from plait.convert.plan.choose_storage import is_map
from plait.convert.plan.storage import StorageForm

# llama.cpp's numbers (its LlamaFileType); of those with sizes (S, M, L) the one without additions.
_NUMBERS: Mapping[str, int] = MappingProxyType(
    {
        "float32": 0,
        "float16": 1,
        "Q4_0": 2,
        "Q4_1": 3,
        "Q8_0": 7,
        "Q5_0": 8,
        "Q5_1": 9,
        "Q2_K": 10,
        "Q3_K": 11,
        "Q4_K": 14,
        "Q5_K": 16,
        "Q6_K": 18,
        "IQ2_XXS": 19,
        "IQ2_XS": 20,
        "IQ3_XXS": 23,
        "IQ1_S": 24,
        "IQ4_NL": 25,
        "IQ3_S": 26,
        "IQ2_S": 28,
        "IQ4_XS": 30,
        "IQ1_M": 31,
        "bfloat16": 32,
        "TQ1_0": 36,
        "TQ2_0": 37,
        "MXFP4": 38,
        "NVFP4": 39,
    }
)
_GUESSED = 1024


def file_type(stored: Iterable[StorageForm]) -> int:
    """The number of the storage that most bytes of linear layers have."""
    sizes: Counter[str] = Counter()
    for one in stored:
        if is_map(one.made):
            for entry in one.entries:
                kind = entry.kind
                name = str(kind).removeprefix("torch.") if isinstance(kind, torch.dtype) else kind.name
                sizes[name] += entry.nbytes
    return _NUMBERS.get(sizes.most_common(1)[0][0], _GUESSED) if sizes else 0
