"""The two loops of all embedding kernels: over blocks of a GGUF format, and over pieces of a row.

A format's function says how one block or piece becomes numbers; a decorator makes the kernel around it.
The words of a launch are, from the second on: token ids, table, bytes between the table's rows, blocks (or
pieces) that a token has, scale of the embedding, out (dense float32), n. Behind these come a format's own
words.

    table   row 0 [block][block] ... [block]        out   id 0: n numbers, times the scale
            row 1 [block][block] ... [block]              id 1: n numbers

A token has one id, or several, and a row has as many blocks as make n numbers. Block i of a launch is block
i % blocks of the row that id i // blocks names. A thread takes one run of blocks: one long row is shared out
as many short ones are. No two threads write the same number.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from plait.kernels.cpu.codegen.kernel import Body, Kernel, inline
from plait.kernels.cpu.codegen.kinds import Float, Floats, Int
from plait.kernels.cpu.codegen.vec import get_f32, get_i64, get_u8, mul, spread, store_f32
from plait.kernels.cpu.runtime.frame import rows_of, word
from plait.quant.gguf import block_type

PIECE = 256  # numbers of a row that a thread takes at a time, where a format has no blocks of its own
KERNELS: dict[str, Kernel] = {}
"""The name of a block format, or of plain numbers -> the kernel that reads it. `gguf` fills it."""


@inline
def get_byte(address: Int) -> np.int64:
    return np.int64(get_u8(address))


@inline
def put(to: Int, x: Floats, scale: Float) -> None:
    """Store sixteen numbers, times the scale of the embedding."""
    store_f32(to, mul(x, spread(scale)))


@inline
def share(frame: Int, args: Int, thread: Int, threads: Int) -> tuple[Int, Int]:
    """The blocks of this thread: every token has as many as word 5 says."""
    blocks = rows_of(frame, args) * word(args, 5)
    return blocks * thread // threads, blocks * (thread + 1) // threads


def _set_name(decode: Callable[..., None], name: str) -> str:
    """The name of its kernel: its own, or the one that it is given."""
    decode.__name__ = decode.__qualname__ = name or decode.__name__
    return decode.__name__


def by_block(decode: Callable[[int, int, float, int], None], name: str = "") -> Kernel:
    """Decorator: the function of a GGUF format, of that name in lower case -> Kernel.

    It is given the addresses of a block and of where its numbers go, the scale, and the address of the
    format's grid: word 9, which is 0 for formats without one.
    """
    kind = block_type(_set_name(decode, name).upper())
    nbytes, numbers = kind.nbytes, kind.elements

    def loop(one: Callable[[int, int, float, int], None]) -> Body:
        def run(frame: int, args: int, thread: int, threads: int) -> None:
            ids, table, row_bytes = word(args, 2), word(args, 3), word(args, 4)
            blocks = word(args, 8) // numbers
            scale, out, grid = get_f32(args + 48), word(args, 7), word(args, 9)
            first, last = share(frame, args, thread, threads)
            for i in range(first, last):
                row = table + get_i64(ids + 8 * (i // blocks)) * row_bytes
                one(row + i % blocks * nbytes, out + 4 * numbers * i, scale, grid)

        return run

    KERNELS[kind.name] = Kernel(decode, loop)
    return KERNELS[kind.name]


def by_piece(decode: Callable[[int, int, int, int, int, int, float], None], name: str = "") -> Kernel:
    """Decorator: the function of a storage without blocks -> Kernel.

    It is given the address of the words, and of one piece: the row of the table, the address of that row's
    codes, the piece's first column and the one behind its last, where the whole row goes, and the scale.
    """
    _set_name(decode, name)

    def loop(one: Callable[[int, int, int, int, int, int, float], None]) -> Body:
        def run(frame: int, args: int, thread: int, threads: int) -> None:
            n, scale = word(args, 8), get_f32(args + 48)
            pieces = (n + PIECE - 1) // PIECE
            first, last = share(frame, args, thread, threads)
            for i in range(first, last):
                row, start = i // pieces, i % pieces * PIECE
                token = get_i64(word(args, 2) + 8 * row)
                codes, to = word(args, 3) + token * word(args, 4), word(args, 7) + 4 * n * row
                one(args, token, codes, start, min(start + PIECE, n), to, scale)

        return run

    return Kernel(decode, loop)
