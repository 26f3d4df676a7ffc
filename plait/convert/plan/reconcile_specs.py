"""Whether what was written describes the same model, and which differences are undone in the numbers.

A format may not know a multiplier that another has, and has its own order of the rows of q and k. Both are
made up for in the tensors. Anything else that the target's own reader understands differently is refused.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass, replace
from typing import Any

import torch
from torch import Tensor

from plait.convert.plan.source import NeededTensor
from plait.convert.plan.tensor_plan import Made, with_part
from plait.errors import UnsupportedFormat
from plait.families.common.row_orders import order_of_heads, pairs_order, value_order
from plait.ops.rope import frequencies
from plait.spec.model import AttentionSpec, ModelSpec
from plait.spec.positions import RopeSpec
from plait.spec.recurrent import DeltaNetSpec, Mamba2Spec

# How a model is called, how its scans are cut into chunks, and what sizes its rotary tables.
FREE = {"family", "chunk_size", "max_len"}
NEAR = 1e-5  # relative: metadata is float32
Made_ = Sequence[Made]
Change = Callable[[Tensor], Tensor]


def reconcile(
    made: Made_, ours: ModelSpec, theirs: ModelSpec, wanted: Mapping[str, NeededTensor], form: str
) -> list[Made]:
    """The tensors as the target's reader must find them to be our model.

    Raises UnsupportedFormat, naming what `form` cannot say.
    """
    tensors = {part.ours: position for position, m in enumerate(made) for part in m.parts}
    result = list(made)

    def change(name: str, rows: Tensor | None = None, scale: float = 1.0, fn: Change | None = None) -> None:
        if name in tensors:
            result[tensors[name]] = with_part(result[tensors[name]], name, rows, scale, fn)

    ours, theirs = replace(ours, mtp=None), replace(theirs, mtp=None)  # a head for drafts may be left out
    theirs = _fold_multipliers(ours, theirs, wanted, change)
    others = dict(theirs.mixers())
    for name, mixer in ours.mixers():
        other = others.get(name)
        if (
            isinstance(mixer, AttentionSpec)
            and isinstance(other, AttentionSpec)
            and mixer.rope
            and other.rope
        ):
            for row_name, order in _reorder_heads(name, mixer, other, wanted):
                change(row_name, order)
        if isinstance(mixer, DeltaNetSpec) and isinstance(other, DeltaNetSpec) and mixer.tiled != other.tiled:
            for row_name, order in _tile_heads(name, mixer, to_tiles=other.tiled):
                change(row_name, order)
            columns = value_order(mixer, mixer.value_dim, to_tiles=other.tiled)
            change(f"{name}.o.weight", fn=_columns(columns))
    if found := list(differences(_drop_order(ours), _drop_order(theirs))):
        raise UnsupportedFormat(
            f"{form} cannot say {'; '.join(found[:2])}"
            + (f" and {len(found) - 2} more differences" if len(found) > 2 else "")
        )
    return result


def _fold_multipliers(
    ours: ModelSpec, theirs: ModelSpec, wanted: Mapping[str, NeededTensor], change: Any
) -> ModelSpec:
    """Their spec, with the multipliers that go into our numbers instead."""
    if not _near(ours.embed_scale, theirs.embed_scale) and not ours.tied:
        change("embed.weight", scale=ours.embed_scale / theirs.embed_scale)
        theirs = replace(theirs, embed_scale=ours.embed_scale)
    if not _near(ours.logit_scale, theirs.logit_scale) and not ours.tied:
        for kind in ("weight", "bias"):
            change(f"head.{kind}", scale=ours.logit_scale / theirs.logit_scale)
        theirs = replace(theirs, logit_scale=ours.logit_scale)
    scales = {name: m.scale for name, m in ours.mixers() if isinstance(m, AttentionSpec)}
    others = {name: m.scale for name, m in theirs.mixers() if isinstance(m, AttentionSpec)}
    for name, scale in scales.items():
        if name not in others or _near(scale, others[name]):
            continue
        if f"{name}.k_norm.weight" in wanted:
            change(f"{name}.k_norm.weight", scale=scale / others[name])
        else:
            for kind in ("weight", "bias"):
                change(f"{name}.k.{kind}", scale=scale / others[name])
    layers = [
        tuple(replace(b, mixer=_set_scale(b.mixer, f"layers.{i}.{b.name}", scales)) for b in layer)
        for i, layer in enumerate(theirs.layers)
    ]
    return replace(theirs, layers=tuple(layers))


def _set_scale(mixer: Any, name: str, scales: Mapping[str, float]) -> Any:
    if isinstance(mixer, AttentionSpec) and name in scales:
        return replace(mixer, scale=scales[name])
    if hasattr(mixer, "parts"):
        parts = {part: _set_scale(m, f"{name}.{part}", scales) for part, m in mixer.parts.items()}
        return replace(mixer, parts=parts)
    return mixer


def _reorder_heads(
    name: str, mixer: AttentionSpec, other: AttentionSpec, wanted: Mapping[str, NeededTensor]
) -> Iterator[tuple[str, Tensor]]:
    """(our tensor, its rows' new order) where pairs that rotate together stand elsewhere."""
    assert mixer.rope
    assert other.rope
    if mixer.rope.interleaved == other.rope.interleaved:
        return
    head = pairs_order(mixer.head_dim, mixer.rope.dim, to_pairs=other.rope.interleaved)
    for x, heads in (("q", mixer.num_heads), ("k", mixer.num_kv_heads)):
        rows = order_of_heads(head, heads)
        for kind in ("weight", "bias"):
            if f"{name}.{x}.{kind}" in wanted:
                yield f"{name}.{x}.{kind}", rows
            norm = f"{name}.{x}_norm.{kind}"
            if norm in wanted:
                yield norm, head if wanted[norm].shape[0] == mixer.head_dim else rows


def _tile_heads(name: str, mixer: DeltaNetSpec, *, to_tiles: bool) -> Iterator[tuple[str, Tensor]]:
    """(our tensor, its rows' new order) where value heads of one key head stand elsewhere."""
    heads, values = (value_order(mixer, width, to_tiles=to_tiles) for width in (1, mixer.value_dim))
    keys = torch.arange(2 * mixer.num_key_heads * mixer.key_dim)
    yield from ((f"{name}.{x}.weight", values) for x in ("v", "gate"))
    yield from ((f"{name}.{x}", heads) for x in ("beta.weight", "decay.weight", "A", "dt_bias"))
    channels = torch.cat((keys, len(keys) + values))
    yield from ((f"{name}.conv.{kind}", channels) for kind in ("weight", "bias"))


def _columns(order: Tensor) -> Change:
    return lambda w: w[:, order]


def _drop_order(spec: ModelSpec) -> ModelSpec:
    """The spec without the order of rows, which is in the tensors."""

    def plain(value: object) -> Any:
        if isinstance(value, RopeSpec):
            inv_freq, mscale = frequencies(value, spec.max_len)
            numbers = {"divisors": tuple(inv_freq.tolist()), "mscale": mscale}
            return RopeSpec(value.dim, 0.0, numbers)
        if isinstance(value, DeltaNetSpec):
            return replace(value, tiled=False)
        if isinstance(value, Mamba2Spec) and value.gated_norm is None:
            return replace(value, norm_before_gate=False, norm_groups=1)
        if isinstance(value, Mapping):
            return {key: plain(v) for key, v in value.items()}
        if isinstance(value, tuple):
            return tuple(plain(v) for v in value)
        if is_dataclass(value) and not isinstance(value, type):
            return replace(value, **{f.name: plain(getattr(value, f.name)) for f in fields(value)})
        return value

    found: ModelSpec = plain(spec)
    return found


def differences(ours: object, theirs: object, where: str = "") -> Iterator[str]:
    """What two specs do not agree on, `layers.0.attn.window: 8, there None`."""
    if is_dataclass(ours) and type(ours) is type(theirs):
        names = [f.name for f in fields(ours) if f.name not in FREE]
        inside = [(name, getattr(ours, name), getattr(theirs, name)) for name in names]
    elif isinstance(ours, Mapping) and isinstance(theirs, Mapping) and ours.keys() == theirs.keys():
        inside = [(key, ours[key], theirs[key]) for key in ours]
    elif isinstance(ours, tuple) and isinstance(theirs, tuple) and len(ours) == len(theirs):
        inside = [(str(i), a, b) for i, (a, b) in enumerate(zip(ours, theirs, strict=True))]
    else:
        if not _equal(ours, theirs):
            yield f"{where} = {ours!r}, there {theirs!r}"
        return
    for name, a, b in inside:
        yield from differences(a, b, f"{where}.{name}".lstrip("."))


def _equal(a: Any, b: Any) -> bool:
    numbers = isinstance(a, (int, float)) and isinstance(b, (int, float))
    return _near(float(a), float(b)) if numbers else bool(a == b)


def _near(a: float, b: float) -> bool:
    return a == b or math.isclose(a, b, rel_tol=NEAR)
