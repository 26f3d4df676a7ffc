"""Whether this process may use AMX: by its settings, the processor, the system, and a check of results.

Kernels on tiles are tested on tiles in memory, with the arithmetic that Intel documents. So before the first
of them is bound, the processor's own tiles must give the same bits as those in memory, for products of all
kinds. Otherwise nothing is bound to them, and the reason is reported.
"""

from __future__ import annotations

import logging
from functools import cache
from typing import Any

import numpy as np

from plait.kernels.cpu.codegen.amx_tiles import MEMORY, Kind, Tiles
from plait.kernels.cpu.codegen.kernel import Kernel, load_generated
from plait.kernels.cpu.codegen.llvm_writer import Word, Writer, block, digest
from plait.kernels.cpu.codegen.target import no_amx
from plait.kernels.cpu.runtime.tile_check import Products, name_difference, run_products

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


def products(kind: Kind) -> Kernel:
    """The kernel that `differs` compares."""
    made: Kernel = load_generated(
        f"amx_check_{kind}", _TEXT.format(digest=digest("codegen/amx_tiles.py", "amx/check.py"), kind=kind)
    ).products
    return made


def inputs() -> tuple[bytes, ...]:
    """Scratch memory for `products`, and the tiles a, b and c of each of them."""
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
    return bytes(MEMORY), *(t.tobytes() for t in given)


def multiply_in_memory(given: tuple[bytes, ...]) -> Products:
    """The products of `inputs` as they are documented: on tiles in memory."""
    return run_products(products("software").address, given)


def differs(kind: Kind) -> str | None:
    """How tiles of that kind differ from those in memory, or None."""
    given = inputs()
    return name_difference(run_products(products(kind).address, given), multiply_in_memory(given))


@cache
def refusal() -> str | None:
    """Why this process uses no AMX, or None. Computed once: it compiles and runs a small kernel."""
    if reason := no_amx():
        return reason
    if reason := differs("amx"):
        log.warning("AMX is not used: %s", reason)
        return reason
    return None
