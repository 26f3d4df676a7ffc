"""Whether this process may use AMX: by its settings, the processor, the system, and a check of results.

Kernels on tiles are tested on tiles in memory, with the arithmetic that Intel documents. So before the first
of them is bound, the processor's own tiles must give the same bits as those in memory, for products of all
kinds. Otherwise nothing is bound to them, and the reason is reported.
"""

from __future__ import annotations

import ctypes
import logging
from functools import cache
from typing import Any

import numpy as np

from plait.kernels.cpu.codegen.amx_tiles import MEMORY, Kind, Tiles
from plait.kernels.cpu.codegen.kernel import load_generated
from plait.kernels.cpu.codegen.llvm_writer import Word, Writer, block, digest
from plait.kernels.cpu.codegen.target import no_amx

log = logging.getLogger("plait")

SHAPES = {
    "bf16": (((16, 64), (16, 64), (16, 64)), 64),
    "s8u8": (((16, 64), (16, 32), (8, 64)), 32),
    "s8s8": (((16, 64), (16, 32), (8, 64)), 32),
}  # of c, a and b, and bytes between rows of a

_TEXT = '''"""One product on tiles of each kind: made by plait, from {digest}."""
from plait.kernels.cpu.amx import check as amx_check
from plait.kernels.cpu.codegen.kernel import kernel
from plait.kernels.cpu.codegen.vec import word

bf16, s8u8, s8s8 = [amx_check.product(name, "{kind}") for name in ("bf16", "s8u8", "s8s8")]


@kernel
def products(frame, args, thread, threads):
    """scratch, then the tiles a, b and c of each product, of which c is changed."""
    bf16(word(args, 2), word(args, 3), word(args, 4), word(args, 5))
    s8u8(word(args, 2), word(args, 6), word(args, 7), word(args, 8))
    s8s8(word(args, 2), word(args, 9), word(args, 10), word(args, 11))
'''


@block()
def product(what: str, kind: Kind, w: Writer, scratch: Word, a: Word, b: Word, c: Word) -> None:
    """Block (scratch, a, b, c): c += a · b, all of them in memory, on tiles of their own."""
    shapes, stride = SHAPES[what]
    tiles = Tiles(w, kind, scratch, shapes)
    tiles.configure()
    for tile, (at, apart) in enumerate(((c, 64), (a, stride), (b, 64))):
        tiles.load(tile, at, apart)
    getattr(tiles, what)(0, 1, 2)
    tiles.store(0, c, 64)
    tiles.release()


def products(kind: Kind) -> Any:
    """The kernel that `differs` compares."""
    return load_generated(
        f"amx_check_{kind}", _TEXT.format(digest=digest("codegen/amx_tiles.py", "amx/check.py"), kind=kind)
    ).products


def differs(kind: Kind) -> str | None:
    """How tiles of that kind differ from those in memory, or None."""
    numbers = np.random.default_rng(0)
    a = (numbers.standard_normal((16, 32)) * 2.0 ** numbers.integers(-9, 9, (16, 32))).astype(np.float32)
    b = numbers.standard_normal((16, 32)).astype(np.float32)
    given: list[np.ndarray[Any, np.dtype[Any]]] = [
        *((t.view(np.uint32) >> 16).astype(np.uint16) for t in (a, b)),
        numbers.standard_normal((16, 16)).astype(np.float32),
        numbers.integers(-128, 128, (16, 32)).astype(np.int8),
        numbers.integers(0, 256, (8, 64)).astype(np.uint8),
        numbers.integers(-(1 << 20), 1 << 20, (16, 16)).astype(np.int32),
    ]
    given += given[3:]
    found = []
    for one in (kind, "software"):
        arrays = [np.zeros(MEMORY, np.uint8), *(t.copy() for t in given)]
        words = np.array([0, 0, *(t.ctypes.data for t in arrays)], np.int64)
        call = ctypes.CFUNCTYPE(None, *[ctypes.c_int64] * 4)(products(one).address)
        call(0, words.ctypes.data, 0, 1)
        found.append([arrays[3].view(np.int32), arrays[6], arrays[9]])
    names = ("bfloat16", "bytes", "signed bytes")
    wrong = [n for n, x, y in zip(names, *found, strict=True) if not np.array_equal(x, y)]
    return f"its products of {' and of '.join(wrong)} are not what is documented" if wrong else None


@cache
def refusal() -> str | None:
    """Why this process uses no AMX, or None. Computed once: it compiles and runs a small kernel."""
    if reason := no_amx():
        return reason
    if reason := differs("amx"):
        log.warning("AMX is not used: %s", reason)
        return reason
    return None
