"""What runs between the passes of speculative turns, so that several turns are one native call.

A turn of one sequence with k draft tokens; what is here, in brackets:

    verification, k + 1 rows -> [accept] -> head, rows of right tokens -> [take] -> head, 1 row -> [take] …

`accept` compares the draft with what the model made, and writes the inputs of the head's first pass and of
the next verification; `take` puts a draft token where the next pass and the next verification read it. One
thread does it. How many rows a pass has is in the frame, so nothing else changes.

Words of the *journal*, int64: the number of the turn, how many there are at most, the position of the head's
next row, how many stop tokens there are, the first position of `numbers` (the random numbers of the draws by
position), and the last position of the head at which a turn may begin. The rest is memory of both
`StaticBatch`es. `moving`: positions, lengths, and of each group where entries go.
"""

from __future__ import annotations

import numpy as np

from plait.kernels.cpu.codegen.kernel import inline, kernel
from plait.kernels.cpu.codegen.kinds import Int
from plait.kernels.cpu.codegen.vec import get_f32, get_f64, get_i64, put_f32, put_f64, put_i64, words
from plait.kernels.cpu.runtime.frame_words import LOGITS, TOKENS


@inline
def _place_rows(moving: Int, first: Int, count: Int) -> None:
    """Let `count` rows of one sequence begin at position `first`. moving: the address of five numbers:

    the array, its row stride, groups, their tables (address and row stride of each), tokens in a block.
    """
    rows, stride, groups, tables, size = words(moving, 0, 5)
    put_i64(rows + stride, first + count)
    for i in range(count):
        at = first + i
        put_i64(rows + 8 * i, at)
        for g in range(groups):
            block = get_i64(get_i64(tables + 16 * g) + 8 * (at // size))
            put_i64(rows + (2 + g) * stride + 8 * i, block * size + at % size)


@inline
def _set_rows(frame: Int, tokens: Int, logits: Int) -> None:
    put_i64(frame + 8 * TOKENS, tokens)
    put_i64(frame + 8 * LOGITS, logits)


@inline
def _is_stop(token: Int, stops: Int, count: Int) -> bool:
    found = False
    for i in range(count):
        found |= get_i64(stops + 8 * i) == token
    return found


@kernel
def accept_draft(frame: int, args: int, thread: int, threads: int) -> None:
    """draft tokens, journal, steps (0 behind a stop token), found ids and values of each row; what is kept
    for each turn: ids, values, the draft (int64, float32, int64, rows of 1 + draft tokens), how many were
    right; stop tokens; of the model's batch: ids, moving, slots, row_slots; hidden states, their row stride;
    of the head's batch: ids, moving, starts, logit_rows, hidden states (dense), their size; random numbers
    (float64) by position, those of the model's rows, and of the head's one row.
    """
    if thread > 0:
        return
    count, journal, steps, found, values, kept_ids, kept_values, drafts, rights, stops = words(args, 2, 12)
    ids, moving, slots, row_slots, hidden, hidden_bytes = words(args, 12, 18)
    head_ids, head_moving, starts, logit_rows, before, size = words(args, 18, 24)
    numbers, row_numbers, head_number = words(args, 24, 27)
    right: Int = np.int64(0)
    while right < count and get_i64(found + 8 * right) == get_i64(ids + 8 * (right + 1)):
        right += 1
    turn, most, head_at = get_i64(journal), get_i64(journal + 8), get_i64(journal + 16)
    stride = 8 * (count + 1)
    for i in range(count + 1):
        put_i64(kept_ids + turn * stride + 8 * i, get_i64(found + 8 * i))
        put_f32(kept_values + turn * (stride // 2) + 4 * i, get_f32(values + 4 * i))
        put_i64(drafts + turn * stride + 8 * i, get_i64(ids + 8 * i))
    put_i64(rights + 8 * turn, right)
    is_last = turn + 1 >= most or head_at + right + 1 > get_i64(journal + 40)
    for i in range(right + 1):
        token = get_i64(found + 8 * i)
        put_i64(head_ids + 8 * i, token)
        for j in range(size):
            put_f32(before + 4 * (size * i + j), get_f32(hidden + i * hidden_bytes + 4 * j))
        if _is_stop(token, stops, get_i64(journal + 24)):
            is_last = True
    put_i64(journal, turn + 1)
    put_i64(journal + 16, head_at + right + 1)
    _place_rows(head_moving, head_at, right + 1)
    put_i64(starts + 8, right + 1)
    put_i64(logit_rows, right)
    _set_rows(frame, right + 1, 1)
    at = get_i64(get_i64(moving)) + right + 1
    for i in range(count + 1):
        put_f64(row_numbers + 8 * i, get_f64(numbers + 8 * (at + i - get_i64(journal + 32))))
    put_f64(head_number, get_f64(row_numbers))
    if is_last:  # the state stays as this turn left it, for the one who chooses among its rows
        put_i64(steps, 0)
        return
    if right < count:
        slot = get_i64(slots)
        put_i64(slots, get_i64(row_slots + 8 * right))
        put_i64(row_slots + 8 * right, slot)
    put_i64(ids, get_i64(found + 8 * right))
    _place_rows(moving, at, count + 1)


@kernel
def take_draft(frame: int, args: int, thread: int, threads: int) -> None:
    """Which draft token from 1, draft tokens, found id; the model's ids; of the head's batch: ids, moving,
    starts, logit_rows; random numbers of the model's rows, and of the head's one row.
    """
    if thread > 0:
        return
    number, count, found, ids, head_ids, moving, starts, logit_rows = words(args, 2, 10)
    row_numbers, head_number = words(args, 10, 12)
    token = get_i64(found)
    put_i64(ids + 8 * number, token)
    if number == count:
        _set_rows(frame, count + 1, count + 1)
        return
    put_i64(head_ids, token)
    put_f64(head_number, get_f64(row_numbers + 8 * number))
    _place_rows(moving, get_i64(get_i64(moving) + get_i64(moving + 8)), 1)
    put_i64(starts + 8, np.int64(1))
    put_i64(logit_rows, np.int64(0))
    _set_rows(frame, 1, 1)


@kernel
def do_nothing(frame: int, args: int, thread: int, threads: int) -> None:
    """Nothing: it makes the number of launches even, because launches take two counters in turns."""


GLUE = {"accept": accept_draft, "take": take_draft, "nothing": do_nothing}
