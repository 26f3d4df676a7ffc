"""Linear layers over weights in any storage: y = x Wᵀ + b.

The reference decodes the weight each time it is used, a piece at a time. The `dense` variant keeps plain
numbers in the dtype of the model, and is for weights that are plain numbers: what is quantized stays so.
Kernels that read packed weights register as further variants.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import groupby
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from plait.ops.blocks import is_storage, random_weight
from plait.ops.case import Case
from plait.ops.low_rank import AddedAdapters
from plait.ops.registry import Arguments, Bind, Bound, Op, OpFacts, bind_reference, op
from plait.quant.codebook import Codebook
from plait.quant.fp8 import Fp8
from plait.quant.gguf import BLOCK_TYPES
from plait.quant.weight import CachedWeight, Dense, Weight, piece_of, stack_key

Activations = Literal["float32", "bfloat16", "int8", "int8x2"]
KINDS = tuple(kind.name for kind in BLOCK_TYPES.values() if kind.name not in ("Q8_1", "Q8_K"))
STORED = (  # further formats, not GGUF's: as `blocks.random_weight` names them
    "int4_g128", "int4_g64+zeros+order", "int4_g32+bfloat16", "int3_g128+zeros", "int8", "mxfp4", "nvfp4",
)  # fmt: skip
FLOATS = ("fp8", "fp8_b128", "bnb_nf4")  # their products are of floats: activations are not rounded
SMALLEST = 3.8e-37  # largest number of a block that is not taken for zero
BASE = 1.5 * 2**23  # what kernels multiply a scale by
BLOCK = 32  # activations that share a scale
ROWS = 128  # of a weight, which storage may keep together
TOGETHER = 4  # pieces that a device multiplies at a time: few rows do not fill it


def _parse_kind(kind: str) -> Case:
    """A case's words for a storage: its format and the additions that `random_weight` reads."""
    name, plus, more = kind.partition("+")
    return {"kind": name, "more": plus + more}


CASES: list[Case] = [
    dict(rows=1, n_in=64, n_out=32, bias=False),
    dict(rows=7, n_in=256, n_out=130),
    dict(rows=33, n_in=512, n_out=96),
    dict(rows=9, n_in=2051, n_out=70),  # an odd input, several chunks, an unfinished tile
    *(
        Case(rows=rows, n_in=n_in, n_out=50, kind=kind, bias=rows > 1)
        for kind in ("bfloat16", "float16")
        for rows, n_in in ((1, 64), (14, 1031))
    ),
    *(
        Case(rows=rows, n_in=n_in, n_out=50, kind="bfloat16", activations="bfloat16", bias=rows > 1)
        for rows, n_in in ((1, 64), (14, 1031))
    ),
    *(
        Case(rows=rows, n_in=512, n_out=80, activations=activations, bias=rows > 1) | _parse_kind(kind)
        for kind in (*KINDS, *STORED)
        for rows, activations in ((1, "int8"), (13, "int8"), (2, "int8x2"))
    ),
    *(
        Case(rows=rows, n_in=512, n_out=80, bias=rows > 1) | _parse_kind(kind)
        for kind in (*KINDS, *STORED)
        for rows in (1, 13, 33)
    ),
    *(
        Case(rows=rows, n_in=n_in, n_out=50, kind=kind, bias=rows > 1)
        for kind in FLOATS
        for rows, n_in in ((1, 320), (14, 1088))
    ),
    dict(rows=5, n_in=96, n_out=48, kind="Q8_0", activations="int8"),
    dict(
        rows=5, n_in=160, n_out=24, kind="int4_g128", more="+zeros", activations="int8"
    ),  # an unfinished group
    dict(rows=5, n_in=96, n_out=24, kind="mxfp4", activations="int8x2"),
    dict(rows=70, n_in=288, n_out=40, kind="Q4_1", activations="int8"),
]


@op(
    cases=CASES,
    tolerance={torch.float32: 5e-5, torch.bfloat16: 2e-2, torch.float16: 4e-3},
    is_product=True,
)
def linear(x: Tensor, weight: Weight, bias: Tensor | None, activations: Activations = "float32") -> Tensor:
    """x: [..., in], weight: (out, in) in any format, bias: [out] -> [..., out], in x's dtype.

    `activations`: what x is rounded to first. "bfloat16": to the nearest, for bfloat16 weights. "int8": 32
    neighbours share a scale, largest / 127 (of which the last two bits are 0, so that kernels may multiply it
    exactly), as llama.cpp does for block formats; "int8x2": a second int8 takes what is left over, 16 bits in
    all. Numbers from 3e33 on are NaN then. Neighbours are those of the weight's columns, where it keeps these
    in an order of its own.
    """
    order = getattr(weight, "order", None)
    if activations != "float32" and order is not None:
        kept = torch.empty_like(x)
        kept[..., order.long()] = round_activations(x[..., order.long()], activations)
        x = kept
    elif activations != "float32":
        x = round_activations(x, activations)
    if isinstance(weight, Dense):
        return F.linear(x, weight.dequantize(x.dtype), bias)
    return _multiply_decoded(x, weight, bias)


def _multiply_decoded(x: Tensor, weight: Weight, bias: Tensor | None) -> Tensor:
    """The product with a quantized weight, of which never more than a piece is plain numbers."""
    n_out, n_in = weight.shape
    out = torch.empty(*x.shape[:-1], n_out, dtype=x.dtype, device=x.device)
    piece = piece_of(x.device) * (1 if x.device.type == "cpu" else TOGETHER)
    step = max(1, piece // max(1, n_in) // ROWS) * ROWS
    for start in range(0, n_out, step):
        stop = min(start + step, n_out)
        added = bias[start:stop] if bias is not None else None
        out[..., start:stop] = F.linear(x, weight.rows(start, stop).dequantize(x.dtype), added)
    return out


def round_activations(x: Tensor, activations: Activations) -> Tensor:
    """x: [..., n] -> what its rounded numbers stand for, in x's dtype; for int8, n is a multiple of 32."""
    if activations == "bfloat16":
        return x.bfloat16().to(x.dtype)
    blocks = x.float().unflatten(-1, (-1, BLOCK))
    largest = blocks.abs().amax(-1, keepdim=True)
    # Below this, 127 / largest is infinite: such numbers are zeros here.
    scale, per_unit = _shorter(largest / 127), torch.where(largest >= SMALLEST, 127 / largest, 0.0)
    first = (blocks * per_unit).round()
    kept = first * scale
    if activations == "int8x2":
        kept = kept + ((blocks - kept) * (per_unit * 254)).round() * _shorter(scale / 254)
    based = scale * BASE
    kept = kept + (based - based)  # 0, or NaN
    result: Tensor = kept.flatten(-2).to(x.dtype)
    return result


def _shorter(scale: Tensor) -> Tensor:
    """float32 without their last two bits."""
    return (scale.view(torch.int32) & -4).view(torch.float32)


@linear.inputs
def _inputs(case: Case, dtype: torch.dtype, device: str) -> Arguments:
    rows, n_in, n_out = case["rows"], case["n_in"], case["n_out"]
    x = torch.randn(rows, n_in, dtype=dtype, device=device)
    bias = torch.randn(n_out, dtype=dtype, device=device) if case.get("bias", True) else None
    if case.get("kind") in ("bfloat16", "float16"):
        numbers = torch.randn(n_out, n_in, device=device) / n_in**0.5
        weight: Weight = Dense(numbers.to(getattr(torch, case["kind"])))
    elif "kind" in case:
        weight = random_weight(case["kind"] + case.get("more", ""), n_out, n_in).to(torch.device(device))
    else:
        weight = Dense(torch.randn(n_out, n_in, dtype=dtype, device=device) / n_in**0.5)
    return (x, weight, bias, case.get("activations", "float32")), {}


@dataclass(frozen=True, slots=True)
class Packing:
    """A variant of `linear` that prepares its weight once: `pack` at construction, `apply` at every step.

    A native one takes the executor first in each. With `empty`, parts of several formats write their columns
    into one result, which is `apply`'s `out`. `widens`: that may be float32, whatever x is.
    """

    pack: Callable[..., Any]  # (weight, dtype) -> packed, with .nbytes
    apply: Callable[..., Tensor]  # (x, packed, bias, activations) -> y
    empty: Callable[[Tensor, int], Tensor] | None = None  # (x, columns) -> memory for a result
    widens: bool = False

    def __call__(
        self, x: Tensor, weight: Weight, bias: Tensor | None, activations: Activations = "float32"
    ) -> Tensor:
        return self.apply(x, self.pack(weight, x.dtype), bias, activations)

    def on(self, executor: Any) -> Packing:
        def empty(x: Tensor, columns: int) -> Tensor:
            found: Tensor = executor.empty(*x.shape[:-1], columns)
            return found

        return Packing(partial(self.pack, executor), partial(self.apply, executor), empty)


def _dense(x: Tensor, weight: Tensor, bias: Tensor | None, activations: Activations = "float32") -> Tensor:
    return F.linear(x if activations == "float32" else round_activations(x, activations), weight, bias)


def _plain(facts: OpFacts) -> str | None:
    """The `when` of keeping plain numbers: only of what is stored as plain numbers."""
    kind = facts.sizes.get("kind")
    if kind is None or getattr(getattr(torch, kind, None), "is_floating_point", False):
        return None
    return f"{kind} weights stay as they are: the reference decodes them at each use, piece by piece"


dense = Packing(pack=lambda weight, dtype: weight.dequantize(dtype).contiguous(), apply=_dense)
for _device in ("cpu", "cuda"):
    linear.variant("dense", on=_device, when=_plain)(dense)


LinearPart = tuple[Callable[..., Tensor], tuple[Any, Tensor | None, Activations]]


class Linear:
    """One or more weights fused row-wise, ready to be called: [..., in] -> [..., out].

    Neighbours of one format are stacked; parts of several (Q4_K, Q6_K) are computed one after the other.
    A `CachedWeight` is what its variant made of it at an earlier start.
    `bind` is `Weights.bind`; `activations`: what the input is rounded to for weights in blocks; `_rounding`
    says what follows for others.
    """

    def __init__(
        self,
        weights: Sequence[Weight | CachedWeight],
        biases: Sequence[Tensor | None],
        bind: Bind,
        dtype: torch.dtype,
        activations: Activations = "float32",
    ) -> None:
        self.n_in = weights[0].shape[1]
        self.n_out = sum(w.shape[0] for w in weights)
        self._parts: list[LinearPart] = []
        self._widths: list[int] = []
        self._widens: list[bool] = []
        makers: list[Callable[[Tensor, int], Tensor] | None] = []
        self._formats: list[str] = []
        pairs: Iterable[tuple[Any, Tensor | None]] = zip(weights, biases, strict=True)
        for _, same in groupby(pairs, key=lambda pair: (stack_key(pair[0]), pair[1] is None)):
            weight, bias = _stack(list(same))
            rounding = _rounding(weight, activations)
            self._formats.append(weight.format)
            sizes = {"n_in": weight.shape[1], "n_out": weight.shape[0], "kind": weight.format}
            fn = bind(linear, **sizes, activations=rounding)
            self._widths.append(weight.shape[0])
            makers.append(fn.empty if isinstance(fn, Packing) else None)
            if isinstance(fn, Packing):
                self._parts.append((fn.apply, (fn.pack(weight, dtype), bias, rounding)))
            else:
                self._parts.append((fn, (weight, bias, rounding)))
            self._widens.append(isinstance(fn, Packing) and fn.widens)
        self._ahead: list[LinearPart] | None = None  # for rows that are a step's tokens in their order
        self._empty = makers[0] if all(makers) else None
        self.added: AddedAdapters | None = None  # what adapters add to its result, if it may have some

    def add(self, adapters: AddedAdapters) -> None:
        """Add adapters to the result from now on."""
        self.added, self._ahead = adapters, list(self._parts)
        widest = max(range(len(self._parts)), key=self._widths.__getitem__)
        apply, (weight, *rest) = self._parts[widest]
        if hasattr(weight, "before"):  # packed: its kernel may fetch their factors meanwhile
            self._ahead[widest] = apply, (weight.before(adapters), *rest)

    @property
    def is_changed(self) -> bool:
        """Whether adapters add to its result in the step that this thread computes."""
        return self.added is not None and self.added.step.current is not None

    @property
    def storages(self) -> tuple[str, ...]:
        """The formats of its weights that are no plain numbers, as `stored` of ops that take a layer."""
        return tuple(sorted({name for name in self._formats if is_storage(name)}))

    @property
    def nbytes(self) -> int:
        """Bytes of its weights as they are kept: packed, if the bound variant packs. Biases not counted."""
        return sum(int(weight.nbytes) for _, (weight, *_) in self._parts)

    @property
    def parts(self) -> list[tuple[Any, Tensor | None, Activations]]:
        """Of each part: (weight as its variant keeps it, bias, rounding of the input)."""
        return [rest for _, rest in self._parts]

    @property
    def only_part(self) -> tuple[Any, Tensor | None, Activations] | None:
        """(weight as its variant keeps it, bias, rounding of the input), or None if there are several parts.

        For ops that take many weights through one kernel.
        """
        return self._parts[0][1] if len(self._parts) == 1 else None

    def __call__(self, x: Tensor, tokens: Tensor | None = None) -> Tensor:
        """x: [..., in] -> [..., out]. tokens: of which token each row is, where row i is not token i."""
        y = self._multiply(x, self._ahead if tokens is None and self._ahead else self._parts)
        return y if self.added is None else self.added(y, x, tokens)

    def _multiply(self, x: Tensor, parts: Sequence[LinearPart]) -> Tensor:
        if len(parts) == 1:
            apply, rest = parts[0]
            return apply(x, *rest)
        if self._empty is None:
            return torch.cat([apply(x, *rest) for apply, rest in parts], -1)
        return self._write(x, self._empty(x, self.n_out), parts)

    def in_float32(self, x: Tensor) -> Tensor:
        """The result in float32, without a rounding to the dtype of x where the variants write that."""
        if x.dtype == torch.float32 or not all(self._widens) or self.added is not None:
            return self(x).float()
        wide = torch.empty(*x.shape[:-1], self.n_out, dtype=torch.float32, device=x.device)
        return self._write(x, wide, self._parts)

    def _write(self, x: Tensor, out: Tensor, parts: Sequence[LinearPart]) -> Tensor:
        start = 0
        for (apply, rest), width in zip(parts, self._widths, strict=True):
            apply(x, *rest, out=out[..., start : start + width])
            start += width
        return out


def _rounding(weight: Weight | CachedWeight, activations: Activations) -> Activations:
    """What the input is rounded to: "float32" for float weights, or where blocks of inputs are not whole.

    Of bfloat16 weights it is bfloat16 where other weights have inputs of 8 bits.
    """
    if isinstance(weight, CachedWeight):
        return weight.rounding  # type: ignore[no-any-return]
    if activations == "int8" and isinstance(weight, Dense) and weight.format == "bfloat16":
        return "bfloat16"
    exact = isinstance(weight, Dense | Fp8 | Codebook) or weight.shape[1] % BLOCK
    return "float32" if exact else activations


def _stack(pairs: list[tuple[Any, Tensor | None]]) -> tuple[Any, Tensor | None]:
    weights = [w for w, _ in pairs]
    biases = [b for _, b in pairs if b is not None]
    if len(weights) == 1:
        return pairs[0]
    return type(weights[0]).cat(weights), torch.cat(biases) if biases else None


def random_layer(case: Case, n_in: int, n_out: int, dtype: torch.dtype, device: str) -> Linear:
    """A layer for cases of ops that take one, of the format `stored`, with a bias if the case has one."""
    if "stored" in case:
        weight: Weight = random_weight(case["stored"], n_out, n_in).to(torch.device(device))
    else:
        weight = Dense(torch.randn(n_out, n_in, dtype=dtype, device=device) / n_in**0.5)
    bias = torch.randn(n_out, dtype=dtype, device=device) if case.get("bias") else None
    return Linear([weight], [bias], bind_reference, dtype)


def bind_layers(args: Sequence[object], facts: OpFacts) -> tuple[object, ...]:
    """The arguments of a case with linear layers as a model has them: kernels read their packed weights.

    facts: of the device, its dtype, its executor or its chip.
    """

    def bind(op: Op, **sizes: object) -> Bound:
        return op.bind(replace(facts, sizes=sizes))[0]

    def rebind(layer: Linear) -> Linear:
        weights, biases, roundings = zip(*layer.parts, strict=True)
        return Linear(weights, biases, bind, facts.dtype, roundings[0])

    return tuple(rebind(value) if isinstance(value, Linear) else value for value in args)
