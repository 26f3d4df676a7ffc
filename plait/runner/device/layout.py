"""Where the numbers of a captured step lie: arrays in one static tensor, which one copy writes."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise
from math import prod

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from plait.runner.steps.inputs import ALIGNED


@dataclass(frozen=True, slots=True)
class StepLayout:
    """Arrays of these shapes one behind the other, each where kernels want a pointer to begin.

    `begins`: where each begins, and the end of the last.
    """

    shapes: tuple[tuple[int, ...], ...]
    begins: tuple[int, ...]

    @classmethod
    def of(cls, shapes: Iterable[tuple[int, ...]]) -> StepLayout:
        given, begins = tuple(shapes), [0]
        for shape in given:
            begins.append(begins[-1] + -(-prod(shape) // ALIGNED) * ALIGNED)
        return cls(given, tuple(begins))

    @property
    def size(self) -> int:
        """The numbers of all arrays."""
        return self.begins[-1]

    def view(self, memory: Tensor) -> list[Tensor]:
        """memory: int64, `size` numbers or more -> its arrays."""
        places = zip(self.shapes, pairwise(self.begins), strict=True)
        return [memory[begin : begin + prod(shape)].view(shape) for shape, (begin, _) in places]

    def make_host_copy(self, memory: Tensor) -> tuple[Tensor, list[npt.NDArray[np.int64]]]:
        """Zeros to be copied to `memory`, and the arrays in them."""
        whole = torch.zeros(self.size, dtype=torch.int64, pin_memory=memory.is_cuda)
        return whole, [view.numpy() for view in self.view(whole)]
