"""An adapter's files, read and checked as far as they go without a model."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from plait.errors import BadFile, ShapeMismatch, UnsupportedFormat

FLOATS = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True, slots=True)
class FactorPair:
    """Both factors of one weight of the checkpoint, as the file has them. down: [rank, in] or
    [experts, rank, in]; up: [out, rank] or [experts, out, rank]."""

    down: Tensor
    up: Tensor
    scale: float

    @property
    def rank(self) -> int:
        return self.down.shape[-2]


@dataclass(frozen=True, slots=True)
class AdapterFile:
    """What an adapter changes. pairs: by the name of the weight in the model's files (`….q_proj.weight`).

    naming: these are Hugging Face's names, or GGUF's. is_turned: the model's files keep
    weights as [in, out]. digest: of all that is in the files.
    """

    path: Path
    naming: Literal["hf", "gguf"]
    pairs: Mapping[str, FactorPair]
    digest: str
    is_turned: bool = False
    architecture: str = ""  # of a GGUF file: the model's

    @property
    def max_rank(self) -> int:
        return max((pair.rank for pair in self.pairs.values()), default=0)


@dataclass(slots=True)
class HalfPairs:
    """Factors as they are found, one tensor at a time."""

    path: Path
    found: dict[str, dict[str, Tensor]] = field(default_factory=dict)

    def put(self, weight: str, which: Literal["A", "B"], name: str, tensor: Tensor) -> None:
        """Raises UnsupportedFormat, ShapeMismatch and BadFile, each with the tensor's name."""
        if tensor.dtype not in FLOATS:
            kind = str(tensor.dtype).removeprefix("torch.")
            raise UnsupportedFormat(
                f"{self.path}: tensor {name!r} is {kind}; adapters are float32, bfloat16 or float16"
            )
        if tensor.ndim not in (2, 3) or 0 in tensor.shape:
            raise ShapeMismatch(
                f"{self.path}: tensor {name!r} is {list(tensor.shape)}; a factor is a matrix, or one for "
                "each expert"
            )
        if not bool(torch.isfinite(tensor).all()):
            raise BadFile(f"{self.path}: tensor {name!r} has numbers that are not finite; train it anew")
        self.found.setdefault(weight, {})[which] = tensor

    def __iter__(self) -> Iterator[tuple[str, Tensor, Tensor]]:
        """(weight, A, B) of each. Raises BadFile for one without the other, and ShapeMismatch."""
        if not self.found:
            raise BadFile(f"{self.path}: it has no lora_A and lora_B tensors, so it is no LoRA adapter")
        for weight, both in self.found.items():
            if len(both) < 2:
                missing = "lora_B" if "A" in both else "lora_A"
                raise BadFile(f"{self.path}: {weight} has no {missing}; the file is not whole")
            down, up = both["A"], both["B"]
            if down.shape[-2] != up.shape[-1] or down.shape[:-2] != up.shape[:-2]:
                raise ShapeMismatch(
                    f"{self.path}: {weight}: lora_A is {list(down.shape)} and lora_B {list(up.shape)}; "
                    "their ranks differ"
                )
            yield weight, down, up


def digest_pairs(pairs: Mapping[str, FactorPair]) -> str:
    """A hash of all numbers: two adapters with one digest are the same."""
    found = hashlib.blake2b(digest_size=16)
    for name in sorted(pairs):
        pair = pairs[name]
        found.update(f"{name}\0{pair.scale!r}\0{tuple(pair.down.shape)}{tuple(pair.up.shape)}".encode())
        for tensor in (pair.down, pair.up):
            found.update(tensor.contiguous().view(torch.uint8).numpy().data)
    return found.hexdigest()
