"""What type checkers see of a kernel's values: nothing of it is there when a kernel is compiled.

Numba derives the real types, from those of the intrinsics in `vec`, which `Kind` describes.
"""

from __future__ import annotations

from typing import Any, Generic, TypeAlias, TypeVar

import numpy as np

Int: TypeAlias = int | np.integer[Any]
"""A size, an address (both int64) or an int32: what a kernel's function takes for one."""
Float: TypeAlias = float | np.floating[Any]
Array: TypeAlias = np.ndarray[Any, np.dtype[Any]]
"""A table of constants that is compiled into a kernel."""
In = TypeVar("In")
Out = TypeVar("Out", covariant=True)
T1 = TypeVar("T1")
T2 = TypeVar("T2")
T3 = TypeVar("T3")
T4 = TypeVar("T4")
T5 = TypeVar("T5")


class Floats:
    """Sixteen float32."""


class Ints:
    """Sixteen int32, or 64 bytes."""


class Kind(Generic[In, Out]):
    """A Numba type: what may be given for it, and what it is as a result."""


Of: TypeAlias = Kind[T1, object]
