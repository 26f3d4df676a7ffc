"""Tensors of addresses: what they point to is remembered, because a startup image has to find it again."""

from __future__ import annotations

import weakref
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

_targets: dict[int, tuple[Tensor, ...]] = {}  # by the address of a table


def keep_addresses(words: npt.NDArray[np.int64], targets: Sequence[Tensor]) -> Tensor:
    """A tensor of numbers of which some are addresses inside `targets`, over the same memory."""
    table = torch.from_numpy(words)
    _targets[table.data_ptr()] = tuple(targets)
    weakref.finalize(table, _targets.pop, table.data_ptr(), None)
    return table


def find_targets(table: Tensor) -> tuple[Tensor, ...]:
    """What the numbers of a tensor may point into; nothing if it holds no addresses."""
    return _targets.get(table.data_ptr(), ())
