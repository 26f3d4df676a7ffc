"""What a family knows about its checkpoints without a whole config: a part of `@family`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from plait.families.common.tensors import Tensors

Test = Callable[[Tensors], bool]


@dataclass(frozen=True, slots=True)
class ArchitectureMarker:
    """An architecture, and the tensors that give it away: all of `has` and none of `lacks` in some layer.

    `test` checks what names alone do not show. `note`: architectures with the same tensors.
    """

    architecture: str
    has: tuple[str, ...]
    lacks: tuple[str, ...] = ()
    test: Test | None = None
    note: str = ""


def _nothing(t: Tensors) -> None:
    """The default: nothing to add to the shapes that all families have in common."""


@dataclass(frozen=True, slots=True)
class Detection:
    """markers: how the family is recognised, before those of `detect.markers`.

    kinds: what a layer with a tensor is, as a word of `layer_types`. words: the same where a family has
    words of its own. sizes: concludes from the shapes of tensors that no other family has. usual: values
    that no shape shows. fill: the same, where they depend on something. top_k: the usual experts per token.
    twins: architectures with the same tensors, which only a trial can distinguish.
    """

    markers: tuple[ArchitectureMarker, ...] = ()
    kinds: Mapping[str, str] = field(default_factory=dict)
    words: Mapping[str, str] = field(default_factory=dict)
    sizes: Callable[[Tensors], None] = _nothing
    usual: Mapping[str, Any] = field(default_factory=dict)
    fill: Callable[[Tensors], None] = _nothing
    top_k: int | None = None
    twins: tuple[str, ...] = ()


UNDETECTED = Detection()
