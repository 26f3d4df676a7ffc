"""From our tensors to those of another layout: which of ours make up each of theirs, and how they change.

A target's name map says how *its* tensors become ours; `Back` of each recipe says the way back. What comes
out are `Made`s: tensors to be written, whose rows are those of their parts, one part after the other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from math import prod

import torch
from torch import Tensor

from plait.checkpoint.names import Back, Derived, NameMap, UnknownName
from plait.convert.reading import Numbers, Wanted
from plait.errors import UnsupportedFormat
from plait.quant.weight import Dense, Weight, as_tensor, pick_rows

PIECE = 1 << 22  # numbers that are held decoded at a time


@dataclass(frozen=True, slots=True)
class Part:
    """One of our tensors, as it goes into another: rows in another order, then `scale`, then `fn`.

    `fn` wants the whole tensor in float32; everything else goes a piece of rows at a time.
    """

    ours: str
    fn: Callable[[Tensor], Tensor] | None = None
    rows: Tensor | None = None  # [rows] int64: which row of ours each is
    scale: float = 1.0

    @property
    def is_plain(self) -> bool:
        """Whether its numbers stay as they are, so that its storage may."""
        return self.fn is None and self.scale == 1.0


@dataclass(frozen=True, slots=True)
class Made:
    """One tensor to be written. `roles`: what it is to the model, as our names; () if nobody reads it."""

    name: str
    shape: tuple[int, ...]
    parts: tuple[Part, ...]
    roles: tuple[str, ...]

    @property
    def rows(self) -> int:
        return prod(self.shape[:-1])

    @property
    def cols(self) -> int:
        return self.shape[-1]


def made_tensors(wanted: Mapping[str, Wanted], names: NameMap, form: str) -> list[Made]:
    """What a target with these names has to hold. Raises UnsupportedFormat where nobody knows the way back.

    form: what the target is called in errors.
    """
    found: dict[str, list[tuple[tuple[int, int], str, Back]]] = {}
    for ours in wanted:
        for theirs, at, back in _targets(ours, names, form):
            found.setdefault(theirs, []).append((at, ours, back))
    return [_made(theirs, parts, wanted, form) for theirs, parts in found.items()]


def _targets(ours: str, names: NameMap, form: str) -> Iterator[tuple[str, tuple[int, int], Back]]:
    """(their name, place, way back) of each of their tensors that holds ours."""
    try:
        source, fields = names.resolve(ours)
    except UnknownName:
        raise UnsupportedFormat(f"{ours}: {form} has no tensor for it") from None
    if isinstance(source, str):
        yield source, (0, 0), Back()
        return
    if len(source.back) != len(source.sources):
        raise UnsupportedFormat(
            f"{ours}: the way back to {', '.join(source.sources)} in {form} is not implemented"
        )
    yield from _places(source, fields)


def _places(source: Derived, fields: Mapping[str, str]) -> Iterator[tuple[str, tuple[int, int], Back]]:
    for theirs, back in zip(source.sources, source.back, strict=True):
        yield theirs, (int(fields["e"]) if back.stack is not None else 0, back.at), back


def _made(
    theirs: str, found: list[tuple[tuple[int, int], str, Back]], wanted: Mapping[str, Wanted], form: str
) -> Made:
    found = sorted(found, key=lambda part: part[0])
    first = found[0][2]
    count = first.of * (first.stack or 1)
    if len({at for at, *_ in found}) != count or len(found) != count:
        raise UnsupportedFormat(
            f"{theirs} of {form} is made of {count} tensor(s), the model has {len(found)} "
            f"({', '.join(ours for _, ours, _ in found[:4])})"
        )
    parts = tuple(Part(ours, back.fn) for _, ours, back in found)
    shapes = [shape_of(part, wanted[part.ours].shape) for part in parts]
    rows = sum(shape[0] for shape in shapes)
    if count == 1:
        shape = shapes[0]
    elif first.stack:
        shape = (first.stack, rows // first.stack, *shapes[0][1:])
    else:
        shape = (rows, *shapes[0][1:])
    return Made(theirs, shape, parts, tuple(part.ours for part in parts))


def shape_of(part: Part, shape: tuple[int, ...]) -> tuple[int, ...]:
    """What a part's shape becomes; nothing is computed."""
    return shape if part.fn is None else tuple(part.fn(torch.empty(shape, device="meta")).shape)


def value_of(model: Numbers, part: Part) -> Tensor | Weight:
    """A part's whole value, rows ordered; decoded, and scaled, only where `fn` wants numbers."""
    value = model.read(part.ours)
    if part.rows is not None:
        value = pick_rows(value, part.rows)
    if part.fn is None:
        return value
    numbers = part.fn(as_tensor(value).float() * part.scale)
    return numbers.contiguous()


def matrix_of(model: Numbers, part: Part) -> Weight:
    """`value_of` as a matrix of rows; a vector is one row."""
    value = value_of(model, part)
    if isinstance(value, Tensor):
        return Dense(value.reshape(-1, value.shape[-1]) if value.ndim > 1 else value.reshape(1, -1))
    return value


def pieces(weight: Weight, scale: float, dtype: torch.dtype = torch.float32) -> Iterator[Tensor]:
    """Its numbers, some rows at a time: [n, cols]."""
    rows, cols = weight.shape
    step = max(1, PIECE // max(1, cols))
    for start in range(0, rows, step):
        numbers = weight.rows(start, min(rows, start + step)).dequantize(dtype)
        yield numbers if scale == 1.0 else numbers * scale


def with_part(made: Made, ours: str, rows: Tensor | None = None, scale: float = 1.0) -> Made:
    """The same tensor with one of its parts reordered or multiplied."""
    parts = tuple(
        replace(p, rows=rows if rows is not None else p.rows, scale=p.scale * scale) if p.ours == ours else p
        for p in made.parts
    )
    return replace(made, parts=parts)
