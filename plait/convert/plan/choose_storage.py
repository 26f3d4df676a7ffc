"""Which storage each tensor is written in: what was requested, what must stay plain, what does not fit."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

import torch
from torch import Tensor

from plait.convert.plan.block_kinds import BLOCK, block_kind, factors
from plait.convert.plan.source import Numbers
from plait.convert.plan.storage import BlockStorage, Factors, Fp8Blocks, Int4Groups, Plain, StorageForm
from plait.convert.plan.tensor_plan import Made
from plait.errors import ConfigError
from plait.quant.encode import ENCODERS, find_encoder
from plait.quant.gguf import BlockType, Gguf

DTYPES: Mapping[str, torch.dtype] = MappingProxyType(
    {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}
)
PACKED = ("int4", "fp8")
# Weights that choose, gate or set step sizes: small, and everything downstream depends on them.
KEPT = {
    *("conv", "router", "shared_gate", "dt"),
    *("beta", "decay", "decay_a", "decay_b", "gate_a", "gate_b"),
}
ENDS = {"embed.weight", "head.weight"}
ENDS_BITS = 6.5  # of a number: below that, the two ends of a model get Q6_K
GATE_UP, DOWN = ".experts.gate_up_proj", ".experts.down_proj"  # stacks, as transformers 5 calls them
INT4_GROUPS = (128, 64, 32)
_FLOATS = (torch.float32, torch.float16, torch.bfloat16)
_SMALL = (*_FLOATS, torch.int32, torch.int64)  # tables of experts are whole numbers


@dataclass(slots=True)
class StorageChoice:
    """What the user wants (None: the storage that is there), and what came of it."""

    quantize: str | None
    form: str  # "gguf" or "safetensors"
    threads: int
    is_own: bool = False  # GGUF that only Plait reads: small tensors keep their dtypes
    counts: Counter[str] = field(default_factory=Counter)
    recoded: int = 0  # tensors that were in blocks and are encoded anew

    def __call__(self, model: Numbers, made: Made) -> StorageForm:
        """The form of one tensor."""
        stored = self._matrix(model, made) if is_map(made) else self._small(model, made)
        kind = stored.entries[0].kind
        name = kind.name if not isinstance(kind, torch.dtype) else str(kind).removeprefix("torch.")
        if is_map(made):
            self.counts["int4" if isinstance(stored, Int4Groups) else name] += 1
        return stored

    def _small(self, model: Numbers, made: Made) -> StorageForm:
        """The form of a tensor that is no weight matrix.

        llama.cpp needs float32. In safetensors, or unread, the tensor stays as it is.
        """
        if not made.roles:
            there = _blocks_of(model, made) if self.form == "gguf" else None
            if there is not None:
                return BlockStorage(made, there, None, self.threads)
            value = model.read(made.parts[0].ours)
            return Plain(made, value.dtype if isinstance(value, Tensor) else torch.float16)
        if self.form == "gguf" and not self.is_own:
            return Plain(made, torch.float32)
        return Plain(made, _dtype_of(model, made))

    def _matrix(self, model: Numbers, made: Made) -> StorageForm:
        wanted = self.quantize
        if wanted is None:
            return self._as_it_is(model, made)
        if wanted in DTYPES:
            return Plain(made.plain, DTYPES[wanted])
        if wanted in PACKED:
            return self._pack(model, made, wanted) or Plain(made.plain, _float_of(model, made))
        return self._blocks(model, made, wanted)

    def _blocks(self, model: Numbers, made: Made, wanted: str) -> StorageForm:
        kind = ENCODERS[wanted].kind
        if _is_end(made) and kind.nbytes * 8 / kind.elements < ENDS_BITS:
            wanted = "q6_k"
        packed = made.packed
        how = find_encoder(wanted, packed.cols) if packed else None
        if packed is None or how is None:
            return self._as_it_is(model, made)
        there = _blocks_of(model, made)
        if there is not None and there.name == how.kind.name:
            return BlockStorage(made, there, None, self.threads)  # encoded already: its bytes are kept
        self.recoded += _is_quantized(model, made)
        return BlockStorage(packed, how.kind, how, self.threads)

    def _pack(self, model: Numbers, made: Made, wanted: str) -> StorageForm | None:
        """fp8 or int4, for a weight matrix of two dimensions inside the layers."""
        if _is_end(made) or len(made.shape) != 2 or not made.name.endswith(".weight"):
            return None
        if wanted == "fp8":
            self.recoded += _is_quantized(model, made)
            return Fp8Blocks(made)
        there = _blocks_of(model, made)
        if there is not None and there.name == "Q4_0":
            return Int4Groups(made, BLOCK, torch.float16, is_copied=True)
        group = next((g for g in INT4_GROUPS if made.cols % g == 0), None)
        dtype = _float_of(model, made)
        scale = torch.float16 if dtype is torch.float32 else dtype
        self.recoded += group is not None and _is_quantized(model, made)
        return Int4Groups(made, group, scale) if group else None

    def _as_it_is(self, model: Numbers, made: Made) -> StorageForm:
        if self.form == "gguf":
            there = _blocks_of(model, made)
            if there is not None:
                return BlockStorage(made, there, None, self.threads)
        return Plain(made.plain, _float_of(model, made))


def find_storage(quantize: str | None, form: str) -> str | None:
    """The requested storage, if files of this form hold it. Raises ConfigError."""
    if quantize is None:
        return None
    name = quantize.lower()
    known = [*ENCODERS, *DTYPES] if form == "gguf" else [*PACKED, *DTYPES]
    if name not in known:
        held = f"--to {form} holds {', '.join(known)}"
        if name in ENCODERS:
            raise ConfigError(f"--quantize {name}: only GGUF has this storage (OUT.gguf); {held}")
        if name in PACKED:
            raise ConfigError(f"--quantize {name}: only safetensors have this storage; {held}")
        raise ConfigError(f"--quantize {name} is not known; {held}")
    return name


def is_map(made: Made) -> bool:
    """Whether this is a weight matrix or a table of vectors, which is what quantization is for."""
    return bool(made.roles) and all(map(is_map_name, made.roles)) and len(made.shape) > 1


def is_map_name(ours: str) -> bool:
    """Whether our tensor of this name is a weight matrix that may be quantized."""
    *_, name, kind = ("", *ours.split("."))
    return kind == "weight" and name not in KEPT and "norm" not in name


def _is_end(made: Made) -> bool:
    return any(role in ENDS for role in made.roles)


def _is_quantized(model: Numbers, made: Made) -> bool:
    """Whether a part of it is quantized already."""
    sources = (source for part in made.parts for source in model.wanted[part.ours].sources)
    return any(not isinstance(model.checkpoint.read(source), Tensor) for source in sources)


def _blocks_of(model: Numbers, made: Made) -> BlockType | None:
    """The block format of GGUF that all its parts are in, or one that holds the same numbers."""
    if made.join or (made.turned and not made.is_packed):
        return None
    found: dict[str, BlockType] = {}
    for part in made.parts:
        value = model.read(part.ours) if part.is_plain else None
        kind = None if value is None else block_kind(value)
        if value is None or kind is None or value.shape[1] != made.cols:
            return None
        found[kind.name] = kind
    has_factor = "NVFP4" in found and not all(isinstance(model.read(p.ours), Gguf) for p in made.parts)
    if len(found) > 1 or (has_factor and nvfp4_factors(model, made) is None):
        return None
    return found.popitem()[1]


def nvfp4_factors(model: Numbers, made: Made) -> Factors | None:
    """The tensor of factors that GGUF has next to a matrix in NVFP4, if it can be one."""
    by = factors([model.read(part.ours) for part in made.parts], made.shape[0] if len(made.shape) == 3 else 1)
    if by is None or not made.name.endswith(".weight"):
        return None
    name = made.name.removesuffix("weight") + "scale"
    return Factors(Made(name, tuple(by.shape), (), ()), by)


def _dtype_of(model: Numbers, made: Made) -> torch.dtype:
    """The dtype of a small tensor: its own, unless arithmetic made it another."""
    part = made.parts[0]
    value = model.read(part.ours)
    if part.is_plain and isinstance(value, Tensor) and value.dtype in _SMALL:
        return value.dtype
    source = model.wanted[part.ours].sources[0]
    stored = model.checkpoint.read(source)
    return stored.dtype if isinstance(stored, Tensor) and stored.dtype in _FLOATS else torch.float32


def _float_of(model: Numbers, made: Made) -> torch.dtype:
    """The dtype of a matrix's numbers; float16 for those decoded from blocks, because scales are float16."""
    found = {dtype for part in made.parts for dtype in _stored_dtypes(model, part.ours)}
    return found.pop() if len(found) == 1 else torch.float32


def _stored_dtypes(model: Numbers, ours: str) -> Sequence[torch.dtype]:
    values = [model.checkpoint.read(source) for source in model.wanted[ours].sources]
    return [
        (v.dtype if v.dtype in _FLOATS else torch.float32) if isinstance(v, Tensor) else torch.float16
        for v in values
    ]
