"""Torch's operators on tensors without memory, from their shapes.

Torch itself computes most of these by way of its compiler, which takes a second or two to import. Models are
built of shapes alone at a startup, to find their states, their ops and the order of their tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

# Operators with a result of the shape of what they take, together.
_EACH = frozenset(
    {
        *("add", "sub", "mul", "div", "neg", "pow", "exp", "expm1", "log", "log1p", "sqrt", "rsqrt", "abs"),
        *("square", "reciprocal", "sign", "clamp", "where", "softplus", "sigmoid", "tanh", "sin", "cos"),
        *("floor", "minimum", "maximum", "__rsub__", "__rdiv__", "__rpow__"),
    }
)
_JOINS: Mapping[str, Callable[[list[Tensor], int], Tensor]] = {"cat": torch.cat, "stack": torch.stack}


class ShapesOnly(TorchFunctionMode):
    """While it is active, elementwise operators and joins of meta tensors import nothing.

    Dtypes are those that torch gives: the operator runs on one number of each tensor.
    """

    def __torch_function__(
        self,
        func: Callable[..., object],
        types: Sequence[type],
        args: tuple[object, ...] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        """As torch describes it: the operator, the types of its tensors, and what it is called with."""
        kwargs, name = kwargs or {}, getattr(func, "__name__", "")
        parts = args[0] if args else None
        if name in _EACH and any(isinstance(x, Tensor) and x.is_meta for x in args):
            shape = np.broadcast_shapes(*(tuple(x.shape) for x in args if isinstance(x, Tensor)))
            result = func(*(_one_number(x) if isinstance(x, Tensor) else x for x in args), **kwargs)
            return torch.empty(shape, dtype=getattr(result, "dtype", None), device="meta")
        if name in _JOINS and isinstance(parts, (list, tuple)) and all(part.is_meta for part in parts):
            dim = kwargs.get("dim", args[1] if len(args) > 1 else 0)
            return _join(name, parts, dim if isinstance(dim, int) else 0)
        return func(*args, **kwargs)


def _one_number(x: Tensor) -> Tensor:
    """A tensor of as many dimensions: by these, too, torch decides which dtype wins."""
    return torch.ones((1,) * x.ndim, dtype=x.dtype)


def _join(name: str, parts: Sequence[Tensor], dim: int) -> Tensor:
    """What torch's cat or stack gives. Raises ValueError for shapes that do not fit together."""
    shapes = [list(part.shape) for part in parts]
    if name == "stack":
        for shape in shapes:
            shape.insert(dim % (len(shape) + 1), 1)
    place = dim % len(shapes[0])
    length = sum(shape.pop(place) for shape in shapes)
    if any(shape != shapes[0] for shape in shapes):
        raise ValueError(f"cannot join tensors of shapes {[tuple(part.shape) for part in parts]} along {dim}")
    dtype = _JOINS[name]([_one_number(part) for part in parts], dim).dtype
    return torch.empty([*shapes[0][:place], length, *shapes[0][place:]], dtype=dtype, device="meta")
