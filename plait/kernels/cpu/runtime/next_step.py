"""Between two decode steps of one call: what the last one sampled becomes what the next one computes."""

from __future__ import annotations

from plait.kernels.cpu.codegen.kernel import kernel
from plait.kernels.cpu.codegen.vec import get_f32, get_i64, put_f32, put_i64
from plait.kernels.cpu.runtime.frame import rows_of, word


@kernel
def follow_rows(frame: int, args: int, thread: int, threads: int) -> None:
    """As `runner.graphs.StaticBatch.follow`, of as many rows as there are sequences; one thread does it all.

    ids (int64) and values (float32) of the largest logits, token_ids (int64), moving (int64 rows: positions,
    lengths, and of each group where entries go), its row stride, groups, their tables (int64: the address and
    the row stride of each), tokens in a block, what is kept of ids and values for each step, the row strides
    of these, the number of the step (int64), which is counted here.
    """
    if thread > 0:
        return
    ids, values, token_ids, moving, stride = (
        word(args, 2), word(args, 3), word(args, 4), word(args, 5), word(args, 6)
    )  # fmt: skip
    groups, tables, size = word(args, 7), word(args, 8), word(args, 9)
    step = get_i64(word(args, 14))
    kept_ids = word(args, 10) + step * word(args, 12)
    kept_values = word(args, 11) + step * word(args, 13)
    put_i64(word(args, 14), step + 1)
    for s in range(rows_of(frame, args)):
        token_id = get_i64(ids + 8 * s)
        put_i64(kept_ids + 8 * s, token_id)
        put_f32(kept_values + 4 * s, get_f32(values + 4 * s))
        put_i64(token_ids + 8 * s, token_id)
        at = get_i64(moving + 8 * s) + 1
        put_i64(moving + 8 * s, at)
        put_i64(moving + stride + 8 * s, get_i64(moving + stride + 8 * s) + 1)
        for g in range(groups):
            table = get_i64(tables + 16 * g) + s * get_i64(tables + 16 * g + 8)
            block = get_i64(table + 8 * (at // size))
            put_i64(moving + (2 + g) * stride + 8 * s, block * size + at % size)
