"""Multi-head latent attention, absorbed: every head reads the same latent, as its key and as its value.

The cache is [block][token][column], as values need it. Keys need tokens in lanes, so the latents of a split
are turned once, and decoded if they are int8, for all heads and rows of a unit of work. The rest is
`attention.py` with one kv head.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from plait.errors import ShapeMismatch
from plait.kernels.cpu.attention.attention import APART, CODES, check_cache, check_index, why_unstorable
from plait.kernels.cpu.attention.codes import SCRATCH, store_latent_codes, store_latent_nibbles
from plait.kernels.cpu.attention.paged_rows import store_plain
from plait.kernels.cpu.attention.seven_bits import store_latent_sevens
from plait.kernels.cpu.attention.source import SEVENS, TILES, Form, module, record_bytes
from plait.kernels.cpu.codegen.kernel import Kernel
from plait.kernels.cpu.runtime.executor import Executor
from plait.kernels.cpu.runtime.row_checks import TensorRows, dense
from plait.ops.attention import paged_latent_attention
from plait.ops.entry import (
    LATENT_ALIGN,
    LATENT_GROUP,
    NIBBLE_GROUP,
    SCALE_NBYTES,
    Nibbles,
    Sevens,
    latent_form,
)
from plait.ops.registry import OpFacts

SPAN = 128  # tokens; their latents, turned, have to stay in L2


def _turn(size: int) -> str:
    """The text of `unfold`: copies of a split's latents as [group of sixteen][column][token]."""
    groups = SPAN // 16
    if size == 0:
        text = (
            _NIBBLES
            + _square("turn", 2, _LOAD[2])
            + _square("turn_codes", 0, _LOAD[0])
            + _NIBBLE_BYTES.format(align=LATENT_ALIGN)
        )
        turn, stride = _TURN_CODES, "token_bytes(args)"
        copied = "((rank + 15) // 16 + (width - rank + 15) // 16) * 1024"
    elif size == SEVENS:
        text = (
            _SEVENS
            + _square("turn", 1, _LOAD_REST)
            + _square("turn_codes", SEVENS, _LOAD[SEVENS].format(group=LATENT_GROUP))
        )
        text += _SEVEN_BYTES.format(group=LATENT_GROUP, scale=SCALE_NBYTES, align=LATENT_ALIGN)
        turn, stride = _TURN_CODES, "token_bytes(args)"
        copied = "((rank + 15) // 16 + (width - rank + 15) // 16) * 1024"
    elif size > 1:
        text, turn = _square("turn", size, _LOAD[size]), "turn(source, stride, width, copy)"
        stride, copied = f"width * {size}", "(width + 15) // 16 * 1024"
    else:
        text = _square("turn", 2, _LOAD[2]) + _square("turn_codes", 1, _LOAD[1].format(group=LATENT_GROUP))
        text += _CODES.format(group=LATENT_GROUP, scale=SCALE_NBYTES, align=LATENT_ALIGN)
        turn, stride = _TURN_CODES, "token_bytes(args)"
        copied = "((rank + 15) // 16 + (width - rank + 15) // 16) * 1024"
    return text + _UNFOLD.format(stride=stride, copy_bytes=copied, turn=turn, groups=groups)


_LOAD = {
    4: "load_some(row + 4 * c, left)",
    2: "widened(load_some(row + 2 * c, left // np.int32(2)))",
    0: "nibbles(row + c // 32 * 16, c, row + columns // 2 + c // 32 * 4)",
    SEVENS: "mul(sevens(row, columns, c), spread(get_bf16(row + columns // 8 * 7 + c // {group} * 2)))",
    1: "mul(to_f32(load_i8(row + c)), spread(get_bf16(row + columns + c // {group} * 2)))",
}


def _square(name: str, size: int, load: str) -> str:
    """The text of a function that turns sixteen rows, squares of sixteen by sixteen at a time, each by four
    rounds of interleaving rows i and i + 8."""
    text = ["    for c in range(0, columns, 16):", "        left = np.int32(min(columns - c, 16))"]
    text += [f"        a0_{i} = {load.replace('row', f'at + {i} * stride')}" for i in range(16)]
    for turn in range(4):
        for i in range(8):
            pair = f"(a{turn}_{i}, a{turn}_{i + 8})"
            text += [f"        a{turn + 1}_{2 * i} = interleave_low{pair}"]
            text += [f"        a{turn + 1}_{2 * i + 1} = interleave_high{pair}"]
    text += [f"        store_f32(to + 64 * (c + {i}), a4_{i})" for i in range(16)]
    return _TURN.format(name=name, body="\n".join(text))


_TURN = '''
@inline
def {name}(at, stride, columns, to):
    """Sixteen rows, `stride` bytes apart, as [column][row], columns rounded up to sixteen."""
{body}

'''
_UNFOLD = '''
@inline
def unfold(args, s, span, first, end, to, copies):
    """Where the groups of a span lie: turned copies as keys, the latents themselves as values."""
    size, width, rank = word(args, BLOCK), word(args, K_DIM), word(args, V_DIM)
    stride, copy_bytes = {stride}, {copy_bytes}
    table = word(args, TABLE) + s * word(args, TABLE_ROW)
    for g in range(first, end):
        position = span + 16 * g
        place = get_i64(table + 8 * (position // size)) * size + position % size
        source, copy = word(args, KEYS) + place * stride, copies + g * copy_bytes
        {turn}
        put_i64(to + 8 * g, copy)
        put_i64(to + 8 * ({groups} + g), source)
'''
_CODES = '''
@inline
def rest_at(args):
    """The byte of a latent at which what is not in codes begins."""
    return word(args, V_DIM) + (word(args, V_DIM) + {group} - 1) // {group} * {scale}


@inline
def token_bytes(args):
    return (rest_at(args) + 2 * (word(args, K_DIM) - word(args, V_DIM)) + {align} - 1) // {align} * {align}

'''
_NIBBLES = '''
@inline
def nibbles(at, c, scale):
    """Sixteen numbers of a row, of column c on: half a byte each of those at `at`."""
    codes = and_i32(right(load_u8(at), np.int32((c & 16) // 4)), spread_int(np.int32(15)))
    return fma(to_f32(codes), spread(get_bf16(scale)), spread(get_bf16(scale + 2)))

'''
_LOAD_REST = "mul(to_f32(load_i8(row + c)), spread(get_bf16(row + (columns + 15) // 16 * 16)))"
_SEVENS = '''
from plait.kernels.cpu.attention.seven_bits import UPPER, join_upper


@inline
def sevens(row, columns, c):
    """Sixteen codes of seven bits of a row, of column c on."""
    low = and_i32(right(load_u8(row + c // 32 * 16), np.int32((c & 16) // 4)), spread_int(np.int32(15)))
    return to_f32(join_upper(low, row + columns // 2 + c // 16 * UPPER))

'''
_SEVEN_BYTES = '''
@inline
def rest_at(args):
    """The byte of a latent at which what is not in codes of seven bits begins."""
    return word(args, V_DIM) // 8 * 7 + (word(args, V_DIM) + {group} - 1) // {group} * {scale}


@inline
def token_bytes(args):
    rest = word(args, K_DIM) - word(args, V_DIM)
    end = rest_at(args) + ((rest + 15) // 16 * 16 + {scale} if rest > 0 else 0)
    return (end + {align} - 1) // {align} * {align}

'''
_NIBBLE_BYTES = '''
@inline
def rest_at(args):
    """The byte of a latent at which what is not in codes begins."""
    return word(args, V_DIM) // 8 * 5


@inline
def token_bytes(args):
    return (rest_at(args) + 2 * (word(args, K_DIM) - word(args, V_DIM)) + {align} - 1) // {align} * {align}

'''
_TURN_CODES = """turn_codes(source, stride, rank, copy)
        turn(source + rest_at(args), stride, width - rank, copy + 64 * rank)"""


def form_of(dtype: torch.dtype) -> Form:
    size = {torch.uint8: 0, torch.int16: SEVENS}.get(dtype, dtype.itemsize)
    return Form(
        name=f"latent_{CODES.get(dtype, str(dtype).removeprefix('torch.'))}",
        span=SPAN,
        key_size=4,
        value_size=size,
        stride="token_bytes(args)" if dtype in CODES else f"word(args, K_DIM) * {size}",
        locate="unfold(args, s, at, first, end, to, copies)",
        least=TILES,
        prelude=_turn(size),
        value_group=LATENT_GROUP if size in (1, SEVENS) else 0,
    )


@cache
def attend_of(dtype: torch.dtype) -> Kernel:
    """The kernel for caches of this dtype."""
    made: Kernel = module(form_of(dtype)).attend
    return made


def why_unserved(facts: OpFacts) -> str | None:
    """Why the native kernels cannot serve these facts, if so."""
    for name in ("kv_rank", "rope_dim"):
        if facts.sizes.get(name, 2) % 2:
            return f"it wants an even {name}, not {facts[name]}"
    kept = facts.sizes.get("kv_dtype")
    if kept in ("int4", "int7") and facts.sizes.get("kv_rank", 32) % NIBBLE_GROUP:
        return f"it keeps {kept} for a kv_rank of a multiple of {NIBBLE_GROUP}, not of {facts['kv_rank']}"
    return why_unstorable(facts)


@paged_latent_attention.variant("native", on="cpu", when=why_unserved, native=True)
def _paged_latent_attention(
    cpu: Executor,
    q: Tensor,
    latent: Tensor,
    cache: Tensor,
    block_table: Tensor,
    slot_mapping: Tensor,
    query_start: Tensor,
    seq_lens: Tensor,
    scale: float,
    kv_rank: int,
    step: object = None,
    window: int | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    rows, new = TensorRows.of(q), TensorRows.of(latent)
    size, width, rest = cache.shape[1], rows.width, rows.width - kv_rank
    form = latent_form(kv_rank, rest, cache.dtype)
    check_cache("cache", cache, (size, form.width if form else width), cache.dtype)
    check_index(block_table, slot_mapping, query_start, seq_lens)
    same = new.count == rows.count and new.width == width and q.dim() == 3
    if not same or latent.dim() != 2 or not 0 < kv_rank <= width or kv_rank % 2 or width % 2:
        raise ShapeMismatch(
            f"q {list(q.shape)} and latent {list(latent.shape)} do not fit each other with a kv_rank of "
            f"{kv_rank}: both have to end in the cache's width, and both numbers are even"
        )
    if sinks is not None:
        dense("sinks", sinks, rows.heads)
    given = (latent, new.row_bytes, cache, slot_mapping)
    if isinstance(form, Nibbles):
        cpu.launch(store_latent_nibbles, *given, kv_rank, rest, form.width, rows=new.count, scratch=SCRATCH)
    elif isinstance(form, Sevens):
        sizes = (kv_rank, form.group, form.rest_at, rest, form.rest_scale_at, 2 * form.width)
        cpu.launch(store_latent_sevens, *given, *sizes, rows=new.count, scratch=SCRATCH)
    elif form:
        parts = (kv_rank, form.group, form.rest_at, rest, form.width)
        cpu.launch(store_latent_codes, *given, *parts, rows=new.count, scratch=SCRATCH)
    else:
        store_plain(cpu, latent, cache, slot_mapping)
    out = cpu.empty(rows.count, rows.heads, kv_rank)
    spans = -(-block_table.shape[1] * size // SPAN)
    apart = min(APART, rows.count * rows.heads * spans * record_bytes(kv_rank))
    copies = SPAN // 16 * (-(-kv_rank // 16) + -(-rest // 16)) * 1024
    cpu.launch(
        attend_of(cache.dtype), q, *rows.strides, out, cache, cache, block_table, block_table.stride(0) * 8,
        query_start, seq_lens, rows.heads, 1, width, kv_rank, size, window or 0, float(scale), 0.0, apart,
        sinks, 0, 0, 0, 0, 0, 0,
        rows=rows.count, seqs=seq_lens.shape[0], shared=apart,
        scratch=form_of(cache.dtype).scratch(width, kv_rank) + copies,
    )  # fmt: skip
    return out
