"""What a family knows about its checkpoints without a whole config: a part of `@family`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from plait.families.common.tensors import Tensors

Test = Callable[[Tensors], bool]
# Tensors of a layer that many architectures have.
Q, SECOND_NORM = "self_attn.q_proj.weight", "post_attention_layernorm.weight"


@dataclass(frozen=True, slots=True)
class Marker:
    """Tensors that give a family away: all of `has` and none of `lacks` in some layer.

    `test` checks what names alone do not show. `note`: architectures with the same tensors. `order`: the
    marker with the lowest is tried first; of two that fit one file, it is the one that demands more.
    `architecture`: which of the family's, if it is not the first.
    """

    has: tuple[str, ...]
    lacks: tuple[str, ...] = ()
    test: Test | None = None
    note: str = ""
    order: int = 0
    architecture: str = ""


def has_dims(rest: str, count: int) -> Test:
    """A test: whether the tensor of that name has so many dimensions."""

    def check(t: Tensors) -> bool:
        found = t.first(rest)
        return found is not None and len(found[1]) == count

    return check


def has_vocabulary(*sizes: int) -> Test:
    """A test: whether the vocabulary has one of these sizes."""
    return lambda t: t.get("vocab_size") in sizes


def has_rope(t: Tensors) -> bool:
    """Whether the config says how positions are scaled."""
    return any(t.known.get(key) for key in ("rope_parameters", "rope_scaling"))


def _nothing(t: Tensors) -> None:
    """The default: nothing to add to the shapes that all families have in common."""


@dataclass(frozen=True, slots=True)
class Detection:
    """markers: how the family is recognised.

    kinds: what a layer with a tensor is, as a word of `layer_types`. words: the same where a family has
    words of its own. sizes: concludes from the shapes of tensors that no other family has. usual: values
    that no shape shows. fill: the same, where they depend on something. top_k: the usual experts per token.
    twins: architectures with the same tensors, which only a trial can distinguish.
    """

    markers: tuple[Marker, ...] = ()
    kinds: Mapping[str, str] = field(default_factory=dict)
    words: Mapping[str, str] = field(default_factory=dict)
    sizes: Callable[[Tensors], None] = _nothing
    usual: Mapping[str, Any] = field(default_factory=dict)
    fill: Callable[[Tensors], None] = _nothing
    top_k: int | None = None
    twins: tuple[str, ...] = ()


UNDETECTED = Detection()
