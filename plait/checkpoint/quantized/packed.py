"""A checkpoint with quantized tensors that look like plain weights.

What an exporter stored as several tensors, `X.qweight` with `X.scales` and more, is one here: `X.weight`, in
its true shape. So no family knows how a checkpoint is packed. The layout follows from which tensors there
are and from their dtypes. Sizes are checked from the headers, numbers when the weight is read.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType

from torch import Tensor

from plait.checkpoint.quantized.codebooks import codebook
from plait.checkpoint.quantized.floats import (
    BYTES,
    block_mxfp4,
    fp8,
    nvfp4,
    nvfp4_stack,
    packed_mxfp4,
    unscaled_fp8,
)
from plait.checkpoint.quantized.integers import awq, bnb_int8, gptq, packed_integers, plain_int8
from plait.checkpoint.quantized.parts import Files, StoredWeight, WeightParts
from plait.checkpoint.quantized.scheme import Options, Scheme
from plait.errors import BadFile, MissingTensor
from plait.quant.weight import Weight

log = logging.getLogger("plait")

# The end of a tensor's name -> (what replaces it in the weight's own name, which part of the weight it is).
_ENDS: Mapping[str, tuple[str, str]] = MappingProxyType(
    {
        **{f".{part}": (".weight", part) for part in ("qweight", "qzeros", "scales", "g_idx")},
        ".weight_packed": (".weight", "packed"),
        ".weight_shape": (".weight", "shape"),
        ".weight_scale": (".weight", "scale"),
        ".weight_scale_2": (".weight", "scale_2"),
        ".weight_scale_inv": (".weight", "scale_inv"),
        ".weight_global_scale": (".weight", "global_scale"),
        ".weight_zero_point": (".weight", "zero_point"),
        ".weight_g_idx": (".weight", "weight_g_idx"),
        ".qscale_weight": (".weight", "qscale"),
        ".scale": (".weight", "own_scale"),  # DeepSeek-V4: of blocks in FP8, and of nibbles
        ".weight_format": (".weight", "weight_format"),
        ".SCB": (".weight", "scb"),
        ".absmax": ("", "absmax"),
        ".quant_map": ("", "quant_map"),
        ".nested_absmax": ("", "nested_absmax"),
        ".nested_quant_map": ("", "nested_quant_map"),
        ".quant_state.bitsandbytes__nf4": ("", "quant_state"),
        ".quant_state.bitsandbytes__fp4": ("", "quant_state_fp4"),
        "_scale_inv": ("", "scale_inv"),
        "_weight_scale": ("_weight", "scale_inv"),  # Inkling 2's stacks of experts
        "_weight_amax": ("_weight", "amax"),
        "_weight_outer_scale_denominator": ("_weight", "amax_divisor"),
        "_blocks": ("", "blocks"),
        "_scales": ("", "block_scales"),
    }
)
_END = re.compile("(?:" + "|".join(re.escape(end) for end in sorted(_ENDS, key=len, reverse=True)) + ")$")
# A weight has one of these; the other parts alone are no sign that anything is packed.
_LEADS = {
    *("qweight", "packed", "scale", "scale_inv", "qscale", "scb", "absmax", "blocks", "quant_state"),
    *("quant_state_fp4", "weight_format"),
}
_ACTIVATIONS = re.compile(
    r"\.((in|out)put_(scale(_inv|_ub)?|global_scale|zero_point)|([a-z_]+_)?activation_scale|qscale_act"
    r"|kv_scale|[qkv]_(scale|zero_point)|prob_scale|attn_scale)$"
)
_WORDS = {"biases": "MLX", "pre_quant_scale": "AWQ of modelopt, which scales activations"}


class QuantizedCheckpoint:
    """Quantized safetensors as a checkpoint of weights; plain tensors go through as they are.

    Raises at once, naming the tensor: BadFile or ShapeMismatch for parts that are missing or do not fit each
    other, UnsupportedFormat for a layout that is not read.
    """

    def __init__(self, files: Files, scheme: Scheme | None = None) -> None:
        self._files, self._scheme = files, scheme
        self._weights: dict[str, tuple[WeightParts, StoredWeight]] = {}
        self._checked: set[str] = set()
        found, taken = _group_parts(files), set[str]()
        for name, names in found.items():
            parts = WeightParts(name, MappingProxyType(names), files, self._options(name))
            self._weights[name] = (parts, _layout(parts)(parts))
            taken.update(names.values())
        left = [name for name in files.names() if name not in taken]
        self._note_unscaled(left)
        taken.update(parts.name for parts, _ in self._weights.values())
        skipped = [name for name in left if _ACTIVATIONS.search(name)] if found or scheme else []
        if skipped:
            log.info(
                "%d scales of activations or of caches are not used, weights alone are quantized here: %s",
                len(skipped),
                skipped[0],
            )
        hidden = taken.union(skipped)
        self._plain = {name: None for name in left if name not in hidden}
        self._check_left()

    @property
    def files(self) -> Files:
        """The tensors as they are stored."""
        return self._files

    def _options(self, name: str) -> Options:
        if self._scheme is None:
            return Options()
        return self._scheme.of(name.removesuffix(".weight")) or self._scheme.options

    def _note_unscaled(self, left: Iterable[str]) -> None:
        """Matrices in FP8 that have no scale: numbers as they are, unless they are said to be quantized."""
        for name in left:
            if self._files.format_of(name) != "float8_e4m3fn" or len(self._files.shape(name)) != 2:
                continue
            if self._scheme and self._scheme.of(name.removesuffix(".weight")) is not None:
                raise BadFile(f"{name}: is FP8 and has no scale, and the config says it is quantized")
            parts = WeightParts(name, MappingProxyType({"plain": name}), self._files, Options())
            self._weights[name] = (parts, unscaled_fp8(parts))

    def _check_left(self) -> None:
        for name in self._plain:
            module, _, last = name.rpartition(".")
            if last in _WORDS and (f"{module}.weight" in self or f"{module}.scales" in self):
                names = {part: f"{module}.{part}" for part in ("weight", "scales", last)}
                there = {part: full for part, full in names.items() if full in self._files}
                raise WeightParts(module, there, self._files, Options()).unread(f"{_WORDS[last]} is not read")

    def __contains__(self, name: object) -> bool:
        return name in self._weights or name in self._plain

    def names(self) -> Iterable[str]:
        return (*self._weights, *self._plain)

    def shape(self, name: str) -> tuple[int, ...]:
        """As a plain checkpoint has it, rows first; three dimensions for stacked experts."""
        if name in self._weights:
            return self._weights[name][1].shape
        return self._files.shape(self._there(name))

    def format_of(self, name: str) -> str:
        """A storage like 'int4_g128' or 'fp8_b128', or a dtype like 'bfloat16'."""
        if name in self._weights:
            return self._weights[name][1].format
        return self._files.format_of(self._there(name))

    def nbytes(self, name: str) -> int:
        """Bytes in the files, of all the tensors that are this one."""
        if name in self._weights:
            return sum(map(self._files.nbytes, self._weights[name][0].names.values()))
        return self._files.nbytes(self._there(name))

    def read(self, name: str) -> Weight | Tensor:
        """A weight in its storage (of a stack: all its rows), or a plain tensor, a view of the file."""
        if name in self._weights:
            stored = self._weights[name][1]
            if name not in self._checked:
                stored.check()
                self._checked.add(name)
            return stored.read()
        return self._files.read(self._there(name))

    def release(self) -> None:
        """Let go of what was read: memory that only the mappings held is given back."""
        self._files.release()

    def close(self) -> None:
        """Forget the tensors."""
        self._weights, self._plain = {}, {}
        self._files.close()

    def _there(self, name: str) -> str:
        if name not in self._plain:
            raise MissingTensor(f"no tensor {name!r} in the checkpoint")
        return name


def _group_parts(files: Files) -> dict[str, dict[str, str]]:
    """The weight's own name -> its parts: what it is -> the tensor's name."""
    found: dict[str, dict[str, str]] = {}
    for name in files.names():
        if match := _END.search(name):
            end, part = _ENDS[match[0]]
            found.setdefault(name[: match.start()] + end, {})[part] = name
    packed = {name: parts for name, parts in found.items() if _is_packed(name, parts, files)}
    for name, parts in packed.items():
        if name in files:
            parts["plain"] = name
    return packed


def _is_packed(name: str, parts: Mapping[str, str], files: Files) -> bool:
    """Whether these are parts of one weight; `X_scales` alone is a tensor of the model's own, for example."""
    if "blocks" in parts:
        return files.format_of(parts["blocks"]) == "uint8"
    if parts.keys() == {"scale_inv"} or parts.keys() == {"absmax"}:
        return name in files
    if "own_scale" in parts and not _LEADS & parts.keys():  # norms have a scale, too
        return name in files and files.format_of(name) in ("float8_e4m3fn", "int8", "uint8")
    return bool(_LEADS & parts.keys())


def _layout(parts: WeightParts) -> Callable[[WeightParts], StoredWeight]:
    """How a weight is stored, by the parts it has and their dtypes."""
    if "qweight" in parts:
        return _qweight(parts)
    if "packed" in parts:
        if parts.dtype("packed") == "int32":
            return packed_integers
        return nvfp4 if "global_scale" in parts else packed_mxfp4
    if "blocks" in parts:
        return block_mxfp4
    if "plain" not in parts:
        raise BadFile(f"{parts.name}: is not there, only {', '.join(sorted(parts.names.values()))}")
    dtype = parts.dtype("plain")
    if dtype == "float8_e4m3fn" and parts.names.keys() & {"scale", "scale_inv", "qscale", "own_scale"}:
        return fp8
    if dtype in ("int8", "uint8") and "own_scale" in parts:
        return packed_mxfp4
    if dtype == "int8" and parts.names.keys() & {"scale", "scb"}:
        return bnb_int8 if "scb" in parts else plain_int8
    if dtype == "uint8" and (found := _plain_bytes(parts)):
        return found
    raise parts.unread("this way of packing is not read")


def _plain_bytes(parts: WeightParts) -> Callable[[WeightParts], StoredWeight] | None:
    """How bytes under a weight's own name are read, by what lies next to them."""
    if "scale" in parts and "scale_2" in parts:
        return nvfp4
    if "scale" in parts and parts.dtype("scale") in BYTES:
        return packed_mxfp4
    if "scale_inv" in parts and "amax" in parts:
        return nvfp4_stack
    return codebook if "absmax" in parts else None


def _qweight(parts: WeightParts) -> Callable[[WeightParts], StoredWeight]:
    """GPTQ packs inputs into words, AWQ outputs: the scales show which of the two got fewer columns."""
    if "scales" not in parts:
        raise BadFile(f"{parts.name}: has {parts.names['qweight']}, but its scales are missing")
    _, columns = parts.need("qweight", "int32")
    _, rows = parts.need("scales", "float16", "bfloat16", "float32")
    if rows == columns:
        return gptq
    if rows == columns * 8 and "g_idx" not in parts:
        return awq
    raise parts.unread("neither GPTQ nor AWQ (gemm)")
