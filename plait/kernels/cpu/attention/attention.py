"""Attention over paged keys and values, float32, bfloat16 or codes, with windows, softcaps and shared heads.

The caches keep their shape. Inside, keys lie as [block][kv head][sixteen tokens][column][token] (bfloat16:
[column pair][token][2]) and values as [block][kv head][token][column]. So lanes are tokens for the scores and
columns for the outputs, and nothing but the softmax is summed across lanes.

Int8 lies by groups of sixteen tokens with their scales behind them, rounded as `ops.entry` does: [block]
[kv head][sixteen tokens][codes (keys: [column][token], values: [token][column]), scales (keys: [group of
columns][token], values: [token])]. Int4 keys lie so, too: [codes [column pair][token], the even column in the
lower half; then of each group of columns steps [token] and offsets [token]]. A token's int4 values, and a
latent, lie as `ops.entry` says. Int7 has int8's keys, and values that lie as those do, each token's codes as
`ops.entry` says. Keys, and values of int8 and int7, are mixed before they become codes (`mix`): queries with
keys, and what is a sum of values is turned back.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
from torch import Tensor

from plait.errors import ShapeMismatch
from plait.kernels.cpu.attention.codes import SCRATCH, store_codes, store_nibbles
from plait.kernels.cpu.attention.mix import mix_heads, turn_back
from plait.kernels.cpu.attention.seven_bits import store_sevens
from plait.kernels.cpu.attention.source import SEVENS, Form, module, record_bytes
from plait.kernels.cpu.codegen.kernel import Kernel, kernel
from plait.kernels.cpu.codegen.vec import (
    get_f32,
    get_i32,
    get_i64,
    load_f32,
    put_bf16,
    put_f32,
    put_i32,
    store_bf16,
    words,
)
from plait.kernels.cpu.runtime.executor import Executor
from plait.kernels.cpu.runtime.frame import rows_of, scratch_of
from plait.kernels.cpu.runtime.row_checks import TensorRows, dense, float32_rows
from plait.ops.attention import paged_attention
from plait.ops.entry import (
    CODED,
    CODED_DTYPES,
    KEY_GROUP,
    NIBBLE_GROUP,
    SCALE_NBYTES,
    SEVEN_GROUP,
    count_mixed,
    head_widths,
)
from plait.ops.registry import OpFacts

SPAN = 256  # tokens of a split: their scores are in L1 together; threads share out a long sequence by splits
APART = 8 << 20  # bytes for parts of rows: beyond, one thread computes all splits of a row
LOCATE = "locate(args, s, kv_head, at, first, end, {k_bytes}, {v_bytes}, to, {groups})"
LEAN = "lean(args, scores + r * {line}, head, tail, at, position, kv_head, base + i + r, {unit})"
UNIT = "np.float32(1.0) / get_f32(args + 8 * SCALE)"
WEIGH = "weigh(scores + r * {line}, head, tail, values, 16 * stride)"
CODES = {dtype: name for name, dtype in CODED_DTYPES.items()}
COLUMNS = {"int8": 4, "int7": SEVEN_GROUP, "int4": NIBBLE_GROUP}  # that heads are a multiple of
MIXED_VALUES = ("int8", "int7")
KEPT = (torch.float32, torch.bfloat16, *CODES)


@kernel
def store_rows(frame: int, args: int, thread: int, threads: int) -> None:
    """k, its strides, v, its strides, k_cache, v_cache, slots, kv_heads, d, block_size, bytes of a number."""
    k, k_row, k_head, v, v_row, v_head, keys, values, slots, heads, d, block, size = words(args, 2, 15)
    items, pairs = rows_of(frame, args) * heads, scratch_of(frame, thread)
    for item in range(items * thread // threads, items * (thread + 1) // threads):
        token, head = item // heads, item % heads
        slot = get_i64(slots + 8 * token)
        place, offset = slot // block * heads + head, slot % block
        x, y = k + token * k_row + head * k_head, v + token * v_row + head * v_head
        group = keys + (place * block + offset // 16 * 16) * d * size
        row = values + (place * block + offset) * d * size
        if size == 4:
            at = group + 4 * (offset % 16)
            for i in range(d):
                put_f32(at + 64 * i, get_f32(x + 4 * i))
                put_f32(row + 4 * i, get_f32(y + 4 * i))
        else:
            at, whole = group + 4 * (offset % 16), d // 16 * 16
            for i in range(0, whole, 16):
                store_bf16(pairs + 2 * i, load_f32(x + 4 * i))
                store_bf16(row + 2 * i, load_f32(y + 4 * i))
            for i in range(whole, d):
                put_bf16(pairs + 2 * i, get_f32(x + 4 * i))
                put_bf16(row + 2 * i, get_f32(y + 4 * i))
            for i in range(d // 2):
                put_i32(at + 64 * i, get_i32(pairs + 4 * i))


def _nibble_form() -> Form:
    k_bytes, v_bytes = (f"word(args, {dim}) // 8 * 5" for dim in ("K_DIM", "V_DIM"))
    made = Form(
        name="int4",
        span=SPAN,
        key_size=0,
        value_size=0,
        stride=v_bytes,
        locate=LOCATE.format(k_bytes=k_bytes, v_bytes=v_bytes, groups=SPAN // 16),
        next_keys=f"word(args, BLOCK) * ({k_bytes})",
    )
    return replace(made, lean=LEAN.format(line=made.line, unit=UNIT))


def form_of(dtype: torch.dtype) -> Form:
    if dtype == torch.uint8:
        return _nibble_form()
    size, name = dtype.itemsize, str(dtype).removeprefix("torch.")
    k_bytes, stride = (f"word(args, {dim}) * {size}" for dim in ("K_DIM", "V_DIM"))
    v_bytes, key_size, value_size = stride, size, size
    coded = dtype in CODES
    if coded:
        name, key_size, value_size = CODES[dtype], 1, 1 if dtype == torch.int8 else SEVENS
        stride = "word(args, V_DIM)" if dtype == torch.int8 else "word(args, V_DIM) // 8 * 7"
        scales = f"(word(args, K_DIM) + {KEY_GROUP - 1}) // {KEY_GROUP} * {SCALE_NBYTES}"
        k_bytes, v_bytes = f"word(args, K_DIM) + {scales}", f"{stride} + {SCALE_NBYTES}"
    made = Form(
        name=name,
        span=SPAN,
        key_size=key_size,
        value_size=value_size,
        stride=stride,
        locate=LOCATE.format(k_bytes=k_bytes, v_bytes=v_bytes, groups=SPAN // 16),
        next_keys=f"word(args, BLOCK) * ({k_bytes})",
    )
    lean = LEAN.format(line=made.line, unit=UNIT)
    return replace(made, lean=lean, weigh=WEIGH.format(line=made.line) if coded else made.weigh)


@cache
def attend_of(dtype: torch.dtype) -> Kernel:
    """The kernel for caches of this dtype."""
    made: Kernel = module(form_of(dtype)).attend
    return made


def why_unstorable(facts: OpFacts) -> str | None:
    """Why caches like these cannot be kept here, if so."""
    if reason := float32_rows(facts):
        return reason
    if (kept := facts.sizes.get("kv_dtype", "model")) not in ("model", "float32", "bfloat16", *CODED):
        return f"it keeps float32, bfloat16, int8, int7 or int4, not {kept}"
    if facts.sizes.get("block_size", 16) % 16:
        return f"it wants blocks of 16, 32, ... tokens, not of {facts['block_size']}"
    return None


def why_unserved(facts: OpFacts) -> str | None:
    """Why the native kernels cannot serve these facts, if so."""
    if facts.sizes.get("dim", 2) % 2:
        return f"it wants heads of even size, not of {facts['dim']}"
    kept = str(facts.sizes.get("kv_dtype"))
    if kept in COLUMNS and facts.sizes.get("dim", COLUMNS[kept]) % COLUMNS[kept]:
        return f"it keeps {kept} for heads of a multiple of {COLUMNS[kept]}, not of {facts['dim']}"
    return why_unstorable(facts)


@dataclass(frozen=True, slots=True)
class Chosen:
    """What computes attention: a kernel, its form, and the one that it calls for few tokens, if it does."""

    kernel: Kernel
    form: Form
    few: Chosen | None = None

    def scratch(self, k_dim: int, v_dim: int) -> int:
        """Bytes per thread: for whichever kernel computes a step."""
        own = self.form.scratch(k_dim, v_dim)
        return max(own, self.few.scratch(k_dim, v_dim)) if self.few else own


def attend(
    cpu: Executor,
    chosen: Chosen | None,
    q: Tensor,
    k: Tensor | None,
    v: Tensor | None,
    k_cache: Tensor,
    v_cache: Tensor,
    block_table: Tensor,
    slot_mapping: Tensor,
    query_start: Tensor,
    seq_lens: Tensor,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    slopes: Tensor | None = None,
    chunk: int | None = None,
    canvas: int | None = None,
    canvas_start: Tensor | None = None,
) -> Tensor:
    """See `ops.attention.paged_attention`. `chosen`: another kernel than the usual one of these caches.

    Without k and v, another layer of the step has stored them.
    """
    rows = TensorRows.of(q)
    size, kv_heads = k_cache.shape[1:3]
    kept, d = CODES.get(k_cache.dtype, "model"), rows.width
    widths = head_widths(d, kept)
    for name, cached, width in zip(("k_cache", "v_cache"), (k_cache, v_cache), widths, strict=True):
        check_cache(name, cached, (size, kv_heads, width), k_cache.dtype)
    check_index(block_table, slot_mapping, query_start, seq_lens)
    _check_heads(q, k, v, (kv_heads, d), COLUMNS.get(kept, 2))
    if slopes is not None:
        dense("slopes", slopes, rows.heads)
    sink_row = check_sinks(sinks, rows)
    if kept in CODED:
        q, k, mixed_v = mix_heads(cpu, q, k, v if kept in MIXED_VALUES else None)
        v = v if mixed_v is None else mixed_v
        rows, scale = TensorRows.of(q), scale / count_mixed(d)
    if k is not None and v is not None:
        _store(cpu, k, v, k_cache, v_cache, slot_mapping)
    out = cpu.empty(*q.shape)
    spans = -(-block_table.shape[1] * size // SPAN)
    apart = min(APART, rows.count * rows.heads * spans * record_bytes(d))
    chosen = chosen or Chosen(attend_of(k_cache.dtype), form_of(k_cache.dtype))
    cpu.launch(
        chosen.kernel, q, *rows.strides, out, k_cache, v_cache, block_table,
        block_table.stride(0) * 8, query_start, seq_lens, rows.heads, kv_heads, d, d, size, window or 0,
        float(scale), float(softcap or 0), apart, sinks, chosen.few.kernel.address if chosen.few else 0,
        slopes, sink_row, chunk or 0, canvas or 0, canvas_start,
        rows=rows.count, seqs=seq_lens.shape[0], scratch=chosen.scratch(d, d), shared=apart,
    )  # fmt: skip
    if kept in MIXED_VALUES:
        turn_back(cpu, out)
    return out


def check_sinks(sinks: Tensor | None, rows: TensorRows) -> int:
    """Bytes from a token's sinks to the next ones'; 0: they are of heads. Raises ShapeMismatch."""
    if sinks is None or sinks.dim() < 2:
        if sinks is not None:
            dense("sinks", sinks, rows.heads)
        return 0
    if sinks.shape != (rows.count, rows.heads):
        raise ShapeMismatch(
            f"sinks {list(sinks.shape)} are not one for each of {rows.count} × {rows.heads} heads"
        )
    return TensorRows.of(sinks).row_bytes


def _store(cpu: Executor, k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slots: Tensor) -> None:
    k_rows, v_rows = TensorRows.of(k), TensorRows.of(v)
    size, kv_heads = k_cache.shape[1:3]
    new = (k, *k_rows.strides, v, *v_rows.strides, k_cache, v_cache, slots, kv_heads, k_rows.width, size)
    if k_cache.dtype == torch.int8:
        cpu.launch(store_codes, *new, KEY_GROUP, rows=k_rows.count, scratch=SCRATCH)
    elif k_cache.dtype == torch.int16:
        cpu.launch(store_sevens, *new, KEY_GROUP, rows=k_rows.count, scratch=SCRATCH)
    elif k_cache.dtype == torch.uint8:
        cpu.launch(store_nibbles, *new, rows=k_rows.count, scratch=SCRATCH)
    else:
        scratch = 2 * k_rows.width
        cpu.launch(store_rows, *new, k_cache.element_size(), rows=k_rows.count, scratch=scratch)


@paged_attention.variant("native", on="cpu", when=why_unserved, native=True)
def _paged_attention(cpu: Executor, *args: Any, **more: Any) -> Tensor:
    return attend(cpu, None, *args, **more)


def check_cache(name: str, cached: Tensor, entry: tuple[int, ...], dtype: torch.dtype) -> None:
    """Raises ShapeMismatch unless the cache is dense [blocks, *entry] of whole groups of sixteen tokens."""
    known = cached.dtype == dtype and dtype in KEPT and cached.is_contiguous()
    if not known or tuple(cached.shape[1:]) != entry or entry[0] % 16:
        raise ShapeMismatch(
            f"{name}: native attention wants contiguous float32, bfloat16 or codes [blocks, {entry}], the "
            "same for keys and values, blocks being of 16, 32, ... tokens, got "
            f"{cached.dtype} {list(cached.shape)} strides {cached.stride()}"
        )


def check_index(table: Tensor, slots: Tensor, starts: Tensor, lens: Tensor) -> None:
    """Raises ShapeMismatch unless these are the int64 tensors of a batch."""
    names = ("block_table", "slot_mapping", "query_start", "seq_lens")
    for name, x in zip(names, (table, slots, starts, lens), strict=True):
        if x.dtype != torch.int64 or (x.shape[-1] > 1 and x.stride(-1) != 1):
            raise ShapeMismatch(
                f"{name}: int64 with a dense last dimension is wanted, got {x.dtype} {x.stride()}"
            )
    if starts.shape[0] < lens.shape[0] + 1 or table.shape[0] < lens.shape[0]:
        raise ShapeMismatch(
            f"{lens.shape[0]} sequences want as many rows of block_table and one more query_start, got "
            f"{table.shape[0]} and {starts.shape[0]}"
        )


def _check_heads(q: Tensor, k: Tensor | None, v: Tensor | None, kept: tuple[int, int], step: int) -> None:
    kv_heads, d = kept
    shapes = [None if x is None else list(x.shape) for x in (k, v)]
    new_ones = shapes in ([[q.shape[0], kv_heads, d]] * 2, [None, None])
    if not new_ones or q.dim() != 3 or q.shape[2] != d or q.shape[1] % kv_heads or d % step:
        raise ShapeMismatch(
            f"q {list(q.shape)}, k {shapes[0]}, v {shapes[1]} do not fit caches of {kv_heads} kv "
            f"heads of {d}: heads must be a multiple of kv heads, all of one size, a multiple of {step}"
        )
