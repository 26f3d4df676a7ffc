"""From our tensors to those of another layout: which of ours make up each of theirs, and how they change.

A target's name map says how *its* tensors become ours; `Back` of each recipe is the way back. What comes
out are `Made`s: tensors to be written, with the rows of their parts, one part after the other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod

import torch
from torch import Tensor

from plait.checkpoint.names import Back, Derived, NameMap, UnknownName
from plait.convert.plan.source import NeededTensor, Numbers
from plait.errors import ShapeMismatch, UnsupportedFormat
from plait.quant.weight import Dense, Weight, as_tensor, pick_rows

PIECE = 1 << 22  # numbers that are held decoded at a time


@dataclass(frozen=True, slots=True)
class TensorPart:
    """One of our tensors, as it goes into another: rows in another order, then `scale`, then `fn`.

    `fn` needs the whole tensor in float32; everything else goes some rows at a time.
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
    """One tensor to be written.

    `roles`: what it is to the model, as our names; () if no mixer reads it. `order`: its rows as rows of all
    parts one after another, None if they are so. `join`: what makes one of every `joined` parts instead.
    `turned`: the other way round to write a stack, if its matrices lie otherwise when packed than when
    plain. `is_packed`: which of the two this is. `is_odd`: it is not known how it would lie packed.
    """

    name: str
    shape: tuple[int, ...]
    parts: tuple[TensorPart, ...]
    roles: tuple[str, ...]
    order: Tensor | None = None
    join: Callable[..., Tensor] | None = None
    joined: int = 1
    turned: Made | None = None
    is_packed: bool = False
    is_odd: bool = False

    @property
    def plain(self) -> Made:
        """As it is written in plain numbers."""
        return self.turned if self.is_packed and self.turned else self

    @property
    def packed(self) -> Made | None:
        """As it is written in blocks along its rows, if it can be."""
        if self.is_odd:
            return None
        return self if self.is_packed or not self.turned else self.turned

    @property
    def rows(self) -> int:
        return prod(self.shape[:-1])

    @property
    def cols(self) -> int:
        return self.shape[-1]


def plan_tensors(wanted: Mapping[str, NeededTensor], names: NameMap, form: str) -> list[Made]:
    """What a target with these names has to hold. Raises UnsupportedFormat where no recipe has a way back.

    form: what the target is called in errors.
    """
    found: dict[str, list[TensorPlace]] = {}
    for ours in wanted:
        for theirs, place in _places(ours, names, form):
            found.setdefault(theirs, []).append(place)
    return [_plan_tensor(theirs, places, wanted, form) for theirs, places in found.items()]


@dataclass(frozen=True, slots=True)
class TensorPlace:
    """Where one of our tensors goes in one of theirs: by its `Back`, else by the rows its recipe takes."""

    ours: str
    recipe: Derived | None
    back: Back | None
    expert: int


def _places(ours: str, names: NameMap, form: str) -> Iterator[tuple[str, TensorPlace]]:
    try:
        source, fields = names.resolve(ours)
    except UnknownName:
        raise UnsupportedFormat(f"{ours}: {form} has no tensor for it") from None
    if isinstance(source, str):
        yield source, TensorPlace(ours, None, Back(), 0)
    elif source.back or not source.sources:  # a constant is in no file
        for theirs, back in zip(source.sources, source.back, strict=True):
            if back is not None:
                expert = int(fields["e"]) if back.stack is not None else 0
                yield theirs, TensorPlace(ours, source, back, expert)
    elif len(source.sources) == 1 and "e" not in fields:
        yield source.sources[0], TensorPlace(ours, source, None, 0)
    else:
        raise UnsupportedFormat(_unknown(ours, source.sources, form))


def _unknown(ours: str, theirs: Sequence[str], form: str) -> str:
    return f"{ours}: the way back to {', '.join(theirs)} in {form} is not implemented"


def _plan_tensor(
    theirs: str, places: list[TensorPlace], wanted: Mapping[str, NeededTensor], form: str
) -> Made:
    if any(place.back is None for place in places):
        return _by_rows(theirs, places, wanted, form)
    found = sorted(((p.expert, p.back.at), p.ours, p.back) for p in places if p.back)
    first = found[0][2]
    stack = len(found) if first.stack == 0 else first.stack
    count = first.of * (stack or 1)
    if len({at for at, *_ in found}) != count or len(found) != count:
        raise UnsupportedFormat(
            f"{theirs} of {form} is made of {count} tensor(s), the model has {len(found)} "
            f"({', '.join(ours for _, ours, _ in found[:4])})"
        )
    parts = tuple(TensorPart(ours, back.fn) for _, ours, back in found)
    shapes = [shape_of(part, wanted[part.ours].shape) for part in parts]
    if first.join:
        groups = [shapes[at : at + first.of] for at in range(0, count, first.of)]
        shapes = [tuple(first.join(*(torch.empty(s, device="meta") for s in g)).shape) for g in groups]
    rows = sum(shape[0] for shape in shapes)
    if stack:
        shape = (stack, rows // stack, *shapes[0][1:])
    else:
        shape = shapes[0] if len(shapes) == 1 else (rows, *shapes[0][1:])
    roles = tuple(part.ours for part in parts)
    return Made(theirs, shape, parts, roles, join=first.join, joined=first.of if first.join else 1)


def _by_rows(theirs: str, places: list[TensorPlace], wanted: Mapping[str, NeededTensor], form: str) -> Made:
    """A tensor with our rows in another order: running the recipes shows which rows they take.

    They run on a tensor in which every number is that of its row. If each row is taken once, and nothing else
    is done, the rows can be put back. Raises UnsupportedFormat.
    """
    shapes = [wanted[p.ours].shape for p in places]
    rows = sum(shape[0] for shape in shapes)
    shown = torch.arange(rows, dtype=torch.float64)
    taken = []
    for place, shape in zip(places, shapes, strict=True):
        if place.recipe is None:
            raise UnsupportedFormat(_unknown(place.ours, [theirs], form))
        ones = [1] * (len(shape) - 1)
        try:
            found = place.recipe.fn(shown.view(-1, *ones).expand(-1, *shape[1:]))
            numbers = found.reshape(shape[0], -1)[:, 0]
            is_rows = torch.equal(found, numbers.view(-1, *ones).expand(shape))
        except (RuntimeError, IndexError, ShapeMismatch) as error:
            raise UnsupportedFormat(_unknown(place.ours, [theirs], form)) from error
        if not is_rows:
            raise UnsupportedFormat(_unknown(place.ours, [theirs], form))
        taken.append(numbers)
    order = torch.cat(taken).long()
    if not torch.equal(order.sort().values, torch.arange(rows)):
        raise UnsupportedFormat(_unknown(places[0].ours, [theirs], form))
    parts = tuple(TensorPart(place.ours) for place in places)
    back = order.argsort()
    kept = None if torch.equal(back, torch.arange(rows)) else back
    return Made(theirs, (rows, *shapes[0][1:]), parts, tuple(p.ours for p in parts), kept)


def shape_of(part: TensorPart, shape: tuple[int, ...]) -> tuple[int, ...]:
    """What a part's shape becomes; nothing is computed."""
    return shape if part.fn is None else tuple(part.fn(torch.empty(shape, device="meta")).shape)


def value_of(model: Numbers, part: TensorPart) -> Tensor | Weight:
    """A part's whole value, rows ordered; decoded, and scaled, only where `fn` wants numbers."""
    value = model.read(part.ours)
    if part.rows is not None:
        value = pick_rows(value, part.rows)
    if part.fn is None:
        return value
    numbers = part.fn(as_tensor(value).float() * part.scale)
    return numbers.contiguous()


def numbers_of(model: Numbers, part: TensorPart) -> Tensor:
    """A part's whole value in float32, everything done to it."""
    numbers = as_tensor(value_of(model, part)).float()
    return numbers if part.fn else numbers * part.scale


def matrix_of(model: Numbers, part: TensorPart) -> Weight:
    """`value_of` as a matrix of rows; a vector is one row."""
    value = value_of(model, part)
    if isinstance(value, Tensor):
        is_matrix = value.ndim > 1 and value.numel()
        return Dense(value.reshape(-1, value.shape[-1]) if is_matrix else value.reshape(1, -1))
    return value


def matrices(model: Numbers, made: Made) -> Iterator[tuple[Weight, float]]:
    """(rows, what they are multiplied by) of a tensor to be written, in its order.

    Where rows of several parts alternate, all of them are taken together, in their storage if it is one.
    """
    if made.join:
        for at in range(0, len(made.parts), made.joined):
            numbers = [numbers_of(model, part) for part in made.parts[at : at + made.joined]]
            yield Dense(made.join(*numbers).reshape(-1, made.cols)), 1.0
        return
    parts = [(matrix_of(model, part), 1.0 if part.fn else part.scale) for part in made.parts]
    if made.order is None:
        yield from parts
        return
    first = parts[0][0]
    is_vector = len(made.shape) == 1
    if not is_vector and all(
        type(m) is type(first) and m.format == first.format and scale == 1.0 for m, scale in parts
    ):
        together: Weight = type(first).cat([m for m, _ in parts])
    else:
        decoded = [m.dequantize(torch.float32) * scale for m, scale in parts]
        together = Dense(torch.cat([n.reshape(-1, 1) if is_vector else n for n in decoded]))
    yield together.pick(made.order), 1.0


def row_pieces(weight: Weight) -> Iterator[Weight]:
    """The same in its own storage, some rows at a time."""
    rows, cols = weight.shape
    step = max(1, PIECE // max(1, cols))
    for start in range(0, rows, step):
        yield weight.rows(start, min(rows, start + step))


def pieces(weight: Weight, scale: float, dtype: torch.dtype = torch.float32) -> Iterator[Tensor]:
    """Its numbers, some rows at a time: [n, cols]."""
    for piece in row_pieces(weight):
        numbers = piece.dequantize(dtype)
        yield numbers if scale == 1.0 else numbers * scale


def with_part(
    made: Made,
    ours: str,
    rows: Tensor | None = None,
    scale: float = 1.0,
    fn: Callable[[Tensor], Tensor] | None = None,
) -> Made:
    """The same tensor with one part reordered, multiplied or changed, before what changes it already."""

    def changed(part: TensorPart) -> TensorPart:
        then = part.fn
        both = fn if then is None else then if fn is None else lambda w: then(fn(w))
        return replace(part, rows=part.rows if rows is None else rows, scale=part.scale * scale, fn=both)

    parts = tuple(changed(part) if part.ours == ours else part for part in made.parts)
    return replace(made, parts=parts)
