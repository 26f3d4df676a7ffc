"""Programmatic dependent launch (PDL): a kernel begins while the one before it ends, from sm_90 on.

Between two kernels of a step a GPU is idle for about a microsecond: the last programs of the first one end,
then the second one's are started. Launched with `launch_pdl`, those are started as soon as there is place for
them, and wait in their first line until all that ran before is written. Meanwhile they may ask for weights,
which no kernel of a step writes. CUDA's programming guide: programmatic dependent launch.

The rules, which `tools/compile_kernels.py` finds kept in the machine code of every form:

* `await_previous()` is a kernel's own statement, in no branch. Before it no memory is read or written.
* Each program waits, so that the end of a kernel implies that of all before it.
* `ops.launch` launches nothing so that does not wait.

In Triton's interpreter, on older GPUs and with `--no-pdl`, all of this is nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import triton
import triton.language as tl
from triton.language import core

LINE: tl.constexpr = tl.constexpr(32)  # bytes that one request for weights brings at least: a sector
Fn = TypeVar("Fn", bound=Callable[..., object])


def _offer_to_kernels(fn: Fn) -> Fn:
    """Have Triton call a function while it compiles a kernel; its interpreter calls it as it is."""
    fn.__triton_builtin__ = True  # type: ignore[attr-defined]
    return fn


@_offer_to_kernels
def await_previous(_semantic: object = None) -> None:
    """Wait until all kernels before this one have ended, and let the next one's programs start.

    The next kernel's programs come after all of this one's, and find what is left of the device.
    """
    if _is_dependent(_semantic):
        _emit("griddepcontrol.wait; griddepcontrol.launch_dependents; // $0", "=r", [], _semantic)


@_offer_to_kernels
def is_dependent(_semantic: object = None) -> core.constexpr:
    """Whether the kernel is compiled to be launched so, a constant."""
    return core.constexpr(_is_dependent(_semantic))


@_offer_to_kernels
def prefetch(pointers: object, _semantic: object = None) -> None:
    """Ask for the sectors of these addresses, which have to exist, to come into the L2 cache."""
    if _is_dependent(_semantic):
        _emit("prefetch.global.L2 [$1]; // $0", "=r,l", [pointers], _semantic)


def _is_dependent(semantic: object) -> bool:
    """semantic: Triton's, while it compiles; None in its interpreter."""
    options = getattr(getattr(semantic, "builder", None), "options", None)
    return bool(getattr(options, "launch_pdl", False))


def _emit(text: str, constraints: str, arguments: list[object], semantic: object) -> None:
    core.inline_asm_elementwise(
        text, constraints, arguments, dtype=core.int32, is_pure=False, pack=1, _semantic=semantic
    )


@triton.jit
def prefetch_rows(weight, rows, begin, end, row, COUNT: tl.constexpr):
    """Ask for numbers begin .. begin + COUNT of rows of a weight, as far as they come before `end`.

    rows: [N] row numbers; row: numbers from one to the next.
    """
    EACH: tl.constexpr = LINE * 8 // weight.dtype.element_ty.primitive_bitwidth
    # 32 bits hold columns of a weight
    column = tl.minimum(begin + tl.arange(0, COUNT // EACH) * EACH, end - 1)
    prefetch(weight + rows.to(tl.int64)[:, None] * row + column[None, :])
