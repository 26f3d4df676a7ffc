"""Tensors of addresses: what they point to is remembered, because a startup image has to find it again."""

from __future__ import annotations

import weakref
from collections.abc import Collection, Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

_targets: dict[int, tuple[Tensor, ...]] = {}  # by the address of a table
_places: dict[int, frozenset[int]] = {}  # likewise


def keep_addresses(
    words: npt.NDArray[np.int64], targets: Sequence[Tensor], places: Collection[int] | None = None
) -> Tensor:
    """A tensor of numbers of which some are addresses inside `targets`, over the same memory.

    `places`: which of its numbers, counted over all of them; None: all that are not 0.
    """
    table = torch.from_numpy(words)
    _targets[table.data_ptr()] = tuple(targets)
    _places[table.data_ptr()] = frozenset(np.flatnonzero(words).tolist() if places is None else places)
    weakref.finalize(table, _forget, table.data_ptr())
    return table


def _forget(address: int) -> None:
    _targets.pop(address, None)
    _places.pop(address, None)


def find_targets(table: Tensor) -> tuple[Tensor, ...]:
    """What the numbers of a tensor may point into; nothing if it holds no addresses."""
    return _targets.get(table.data_ptr(), ())


def find_places(address: int) -> frozenset[int]:
    """Which numbers of the tensor at an address, counted over all of them, are addresses themselves."""
    return _places.get(address, frozenset())
