"""What type checkers see of a kernel's values: nothing of it is there when a kernel is compiled.

Numba derives the real types, from those of the intrinsics in `vec`.
"""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np

Int: TypeAlias = int | np.integer[Any]
"""A size, an address (both int64) or an int32: what a kernel's function takes for one."""
Float: TypeAlias = float | np.floating[Any]
Array: TypeAlias = np.ndarray[Any, np.dtype[Any]]
"""A table of constants that is compiled into a kernel."""


class Floats:
    """Sixteen float32."""


class Ints:
    """Sixteen int32, or 64 bytes."""
