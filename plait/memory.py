"""The memory that a mixer needs between steps. Two shapes of memory cover every mixer.

Plain data: the scheduler and the memory tables are computed from it without torch.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from msgspec import Struct

Shape = tuple[int, ...]
# int4: of the bytes that an entry of codes takes, int7: of the words (`ops.entry`).
DTYPE_BYTES = {
    "float32": 4,
    "bfloat16": 2,
    "float16": 2,
    "float8_e4m3fn": 1,
    "int8": 1,
    "int7": 2,
    "int4": 1,
}


class PagedState(Struct, frozen=True):
    """One entry per token, kept in blocks: keys and values, MLA latents.

    `entry` maps a tensor's name to its shape per token; `window`: only that many last tokens are ever read.
    `dtype` "model" is the dtype the model computes in.
    """

    entry: Mapping[str, Shape]
    window: int | None = None
    dtype: str = "model"

    def __post_init__(self) -> None:
        _check_dtype("PagedState", self.dtype)

    @property
    def tensors(self) -> Mapping[str, tuple[Shape, str]]:
        """name -> (shape per token, dtype), as a `SlotState` has it per slot."""
        return {name: (shape, self.dtype) for name, shape in self.entry.items()}

    def nbytes_per_token(self, model_dtype: str) -> int:
        return _nbytes(self.tensors, model_dtype)


class SlotState(Struct, frozen=True):
    """A constant amount per sequence: conv tails, SSM states. `tensors`: name -> (shape, dtype)."""

    tensors: Mapping[str, tuple[Shape, str]]

    def __post_init__(self) -> None:
        for name, (_, dtype) in self.tensors.items():
            _check_dtype(f"SlotState: {name}", dtype)

    def nbytes_per_slot(self, model_dtype: str) -> int:
        return _nbytes(self.tensors, model_dtype)


def _check_dtype(what: str, dtype: str) -> None:
    if dtype != "model" and dtype not in DTYPE_BYTES:
        raise ValueError(f"{what}: dtype {dtype!r} is none of model, {', '.join(DTYPE_BYTES)}")


def _nbytes(tensors: Mapping[str, tuple[Shape, str]], model: str) -> int:
    found = tensors.values()
    return sum(DTYPE_BYTES[model if dtype == "model" else dtype] * math.prod(shape) for shape, dtype in found)


State = PagedState | SlotState


class BlockGroup(Struct, frozen=True):
    """Paged states with equal windows: they share one block table."""

    name: str  # "full" or "window:512"
    window: int | None
    members: tuple[str, ...]  # mixer names


def group_name(window: int | None) -> str:
    return "full" if window is None else f"window:{window}"


def block_groups(states: Mapping[str, State]) -> tuple[BlockGroup, ...]:
    """The block groups of a model, full attention first, then windows by size."""
    members: dict[int | None, list[str]] = {}
    for name, state in states.items():
        if isinstance(state, PagedState):
            members.setdefault(state.window, []).append(name)
    windows = sorted(members, key=lambda w: -1 if w is None else w)
    return tuple(BlockGroup(group_name(w), w, tuple(members[w])) for w in windows)


def has_slots(states: Mapping[str, State]) -> bool:
    return any(isinstance(state, SlotState) for state in states.values())
