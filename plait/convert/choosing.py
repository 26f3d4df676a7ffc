"""Which storage each tensor is written in: what was asked for, what must stay plain, what does not fit."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

import torch
from torch import Tensor

from plait.convert.making import Made
from plait.convert.reading import Numbers
from plait.convert.storage import Blocks, Fp8Blocks, Int4Groups, Plain, Stored
from plait.errors import ConfigError
from plait.quant.encode import ENCODERS, fitting
from plait.quant.gguf import Gguf

DTYPES: Mapping[str, torch.dtype] = MappingProxyType(
    {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}
)
PACKED = ("int4", "fp8")
# Maps that choose, gate or set step sizes: small, and everything downstream hangs on them.
KEPT = {
    *("conv", "router", "shared_gate", "dt"),
    *("beta", "decay", "decay_a", "decay_b", "gate_a", "gate_b"),
}
ENDS = {"embed.weight", "head.weight"}
ENDS_BITS = 6.5  # of a number: below that, the two ends of a model get Q6_K
INT4_GROUPS = (128, 64, 32)
_FLOATS = (torch.float32, torch.float16, torch.bfloat16)


@dataclass(slots=True)
class Choice:
    """What the user wants (None: the storage that is there), and what came of it."""

    quantize: str | None
    form: str  # "gguf" or "safetensors"
    threads: int
    counts: Counter[str] = field(default_factory=Counter)
    recoded: int = 0  # tensors that were in blocks and are encoded anew

    def __post_init__(self) -> None:
        if self.quantize is None:
            return
        self.quantize = self.quantize.lower()
        known = [*ENCODERS, *DTYPES] if self.form == "gguf" else [*PACKED, *DTYPES]
        if self.quantize not in known:
            other = {*ENCODERS, *PACKED} if self.quantize in {*ENCODERS, *PACKED} else set()
            why = "is not a storage of" if other else "is not known for"
            raise ConfigError(f"--quantize {self.quantize} {why} --to {self.form}; there: {', '.join(known)}")

    def __call__(self, model: Numbers, made: Made) -> Stored:
        """The form of one tensor."""
        stored = self._matrix(model, made) if is_map(made) else self._small(model, made)
        kind = stored.entries[0].kind
        name = kind.name if not isinstance(kind, torch.dtype) else str(kind).removeprefix("torch.")
        if is_map(made):
            self.counts["int4" if isinstance(stored, Int4Groups) else name] += 1
        return stored

    def _small(self, model: Numbers, made: Made) -> Stored:
        """What is no linear map. GGUF's readers want float32; elsewhere, and unread, it stays as it is."""
        if not made.roles:
            blocks = _blocks_of(model, made) if self.form == "gguf" else None
            if blocks is not None:
                return Blocks(made, blocks.kind, None, self.threads)
            value = model.read(made.parts[0].ours)
            return Plain(made, value.dtype if isinstance(value, Tensor) else torch.float16)
        return Plain(made, torch.float32 if self.form == "gguf" else _dtype_of(model, made))

    def _matrix(self, model: Numbers, made: Made) -> Stored:
        wanted = self.quantize
        if wanted is None:
            return self._as_it_is(model, made)
        if wanted in DTYPES:
            return Plain(made, DTYPES[wanted])
        packed = self._packed(model, made, wanted) if wanted in PACKED else None
        if wanted in PACKED:
            return packed or Plain(made, _float_of(model, made))
        return self._blocks(model, made, wanted)

    def _blocks(self, model: Numbers, made: Made, wanted: str) -> Stored:
        kind = ENCODERS[wanted].kind
        if _is_end(made) and kind.nbytes * 8 / kind.elements < ENDS_BITS:
            wanted = "q6_k"
        how = fitting(wanted, made.cols)
        if how is None:
            return self._as_it_is(model, made)
        blocks = _blocks_of(model, made)
        if blocks is not None and blocks.kind.name == how.kind.name:
            return Blocks(made, blocks.kind, None, self.threads)  # encoded already: its bytes are kept
        self.recoded += blocks is not None
        return Blocks(made, how.kind, how, self.threads)

    def _packed(self, model: Numbers, made: Made, wanted: str) -> Stored | None:
        """fp8 or int4, for a map of two dimensions inside the layers."""
        if _is_end(made) or len(made.shape) != 2 or not made.name.endswith(".weight"):
            return None
        if wanted == "fp8":
            return Fp8Blocks(made)
        group = next((g for g in INT4_GROUPS if made.cols % g == 0), None)
        dtype = _float_of(model, made)
        scale = torch.float16 if dtype is torch.float32 else dtype
        return Int4Groups(made, group, scale) if group else None

    def _as_it_is(self, model: Numbers, made: Made) -> Stored:
        if self.form == "gguf":
            blocks = _blocks_of(model, made)
            if blocks is not None:
                return Blocks(made, blocks.kind, None, self.threads)
        return Plain(made, _float_of(model, made))


def is_map(made: Made) -> bool:
    """Whether this is a linear map or a table of vectors, which is what quantization is for."""
    return bool(made.roles) and all(map(is_map_name, made.roles)) and len(made.shape) > 1


def is_map_name(ours: str) -> bool:
    """Whether our tensor of this name is a linear map that may be quantized."""
    *_, name, kind = ("", *ours.split("."))
    return kind == "weight" and name not in KEPT and "norm" not in name


def _is_end(made: Made) -> bool:
    return any(role in ENDS for role in made.roles)


def _blocks_of(model: Numbers, made: Made) -> Gguf | None:
    """One of its parts, if all are in one block format and stay as they are."""
    if made.join:
        return None
    found: list[Gguf] = []
    for part in made.parts:
        value = model.read(part.ours) if part.is_plain else None
        if not isinstance(value, Gguf) or value.shape[1] != made.cols:
            return None
        found.append(value)
    return found[0] if len({value.kind.name for value in found}) == 1 else None


def _dtype_of(model: Numbers, made: Made) -> torch.dtype:
    """The dtype of a small tensor: its own, unless arithmetic made it another."""
    part = made.parts[0]
    value = model.read(part.ours)
    if part.is_plain and isinstance(value, Tensor) and value.dtype in _FLOATS:
        return value.dtype
    source = model.wanted[part.ours].sources[0]
    stored = model.checkpoint.read(source)
    return stored.dtype if isinstance(stored, Tensor) and stored.dtype in _FLOATS else torch.float32


def _float_of(model: Numbers, made: Made) -> torch.dtype:
    """The dtype of a map's numbers; float16 for what comes out of blocks, whose scales are float16."""
    found = {dtype for part in made.parts for dtype in _stored_dtypes(model, part.ours)}
    return found.pop() if len(found) == 1 else torch.float32


def _stored_dtypes(model: Numbers, ours: str) -> Sequence[torch.dtype]:
    values = [model.checkpoint.read(source) for source in model.wanted[ours].sources]
    return [
        (v.dtype if v.dtype in _FLOATS else torch.float32) if isinstance(v, Tensor) else torch.float16
        for v in values
    ]
