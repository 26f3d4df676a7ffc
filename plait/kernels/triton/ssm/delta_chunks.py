"""The gated delta rule over prompts by products of matrices, chunk after chunk (the WY form of DeltaNet).

    positions of a sequence   |0 ... 31|32 ... 63|64 ...     chunks of 32 positions (16: decays per channel)
    rows of this step               [-----------------)        a row's place in its chunk is position % 32

With a_t, the sum of the logarithms of decay within the chunk up to token t, of a head or of each row of its
state, and with h, the state in front of the chunk, what the tokens of a chunk add solves a triangular system:

    M_ts = Σ_i k_ti k_si exp(a_ti - a_si)  for s < t                   T = (I + diag(β) M)^-1 diag(β)
    e    = T v - (T (k exp(a))) h
    y_t  = (q_t exp(a_t)) h + Σ_{s ≤ t} (Σ_i q_ti k_si exp(a_ti - a_si)) e_s
    h'   = exp(a_last) h + Σ_s (k_s exp(a_last - a_s)) ⊗ e_s

`prepare_chunks` makes all that needs no state, every chunk and head by a program of its own. T comes row by
row, by forward substitution in float32. `carry_chunks` takes the chunks of a sequence in order, with BV
columns of one head's state in registers. Between them lies scratch memory, one entry for each chunk:

    chunks of      | sequence 0 | - | sequence 1       | - | ...
    entry          f_0 / L          f_1 / L + 2                  f_s: rows in front of sequence s

A sequence of n rows has at most n / L + 2 chunks, so entries do not meet, and no prefix sum is needed.

Only differences ≤ 0 are exponentiated: decays per channel are taken pair by pair, because no common factor
of a chunk is safe. Products have operands of the model's dtype and float32 sums.

A sequence with up to WALKED rows in a step, so every decode and every draft, is left to `walk_delta_rule`,
which walks tokens. So a row's bits depend on no other sequence and on no grid. They depend on a cut of a
prompt only where it is at no multiple of a chunk, or leaves WALKED rows or fewer to a step. They are not
those of decodes: `deterministic` leaves all to `walk_delta_rule`. Yang et al. 2024 (Parallelizing linear
transformers with the delta rule; Gated delta networks), Kimi Team 2025.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from plait.kernels.triton.dependent_launch import await_previous
from plait.kernels.triton.forms import KernelForm, with_float16
from plait.kernels.triton.maths import sigmoid, softplus
from plait.kernels.triton.ssm.delta import (
    GIVEN,
    SHAPES,
    DeltaLaunch,
    delta_constants,
    prepare_delta,
    shape_types,
)
from plait.ops.chip import PRODUCTS
from plait.ops.delta import delta_scan_from_gates, gated_delta_scan
from plait.ops.launch import launch
from plait.ops.registry import OpFacts

NAME = "triton chunks"
WALKED = 16  # rows of a sequence in a step up to which tokens are walked
COLUMNS = 32  # of a state in a program
WIDEST = 128  # rows of a state
SEARCHES = (4, 10, 16)  # steps of the search for a chunk's sequence: a form each


@triton.jit
def _find_sequence(query_start, chunk, decodes, seqs, L: tl.constexpr, STEPS: tl.constexpr):
    """The sequence that an entry belongs to, counted from the decodes on: the last that begins by then."""
    low, high = chunk * 0, chunk * 0 + seqs
    for _ in tl.static_range(STEPS):
        middle = (low + high) // 2
        at = tl.load(query_start + decodes + middle).to(tl.int32)
        behind = (at - decodes) // L + 2 * middle > chunk
        low, high = tl.where(behind, low, middle), tl.where(behind, middle, high)
    return low


@triton.jit
def _place_chunks(query_start, positions, s, decodes, L: tl.constexpr, PLACED: tl.constexpr):
    """(first row, rows, place of the first row in its chunk, first entry) of the sequence s."""
    first = tl.load(query_start + decodes + s).to(tl.int64)
    count = (tl.load(query_start + decodes + s + 1).to(tl.int64) - first).to(tl.int32)
    begin = count * 0
    if PLACED:
        begin = (tl.load(positions + first, mask=count > 0, other=0) % L).to(tl.int32)
    return first, count, begin, (first.to(tl.int32) - decodes) // L + 2 * s


@triton.jit(do_not_specialize=["decodes", "seqs"])
def prepare_chunks(
    q, k, step, dt_bias, A, beta, query_start, positions, queries, inner, outer, within, solve, last,
    q_row, q_head, k_row, k_head, step_row, step_head, beta_row, scale, eps, decodes, seqs,
    H: tl.constexpr, G: tl.constexpr, K: tl.constexpr, KP: tl.constexpr, L: tl.constexpr,
    STEPS: tl.constexpr, WALKED: tl.constexpr, CHANNELS: tl.constexpr, TILED: tl.constexpr,
    GATES: tl.constexpr, HAS_BIAS: tl.constexpr, PLACED: tl.constexpr,
):  # fmt: skip
    """Arguments as of `walk_delta_rule`, and positions: [T], if PLACED -> of each entry and head queries
    (q exp(a)), inner (T (k exp(a))), outer (k exp(a_last - a)): [L, KP], within, solve (T): [L, L], and
    last (a_last, to base 2): [KP], or one number. Grid: (entries, H).
    """
    await_previous()
    entry, head = tl.program_id(0), tl.program_id(1)
    s = _find_sequence(query_start, entry, decodes, seqs, L, STEPS)
    first, count, begin, own = _place_chunks(query_start, positions, s, decodes, L, PLACED)
    start = (entry - own) * L
    if (count > WALKED) & (start < begin + count):
        t, i = tl.arange(0, L), tl.arange(0, KP)
        ok, oki = (t >= begin - start) & (t < begin - start + count), i < K
        here = ok[:, None] & oki[None, :]
        row = (first + start - begin) + t  # of places in front of the sequence: some other one's, not read
        key_head = head % G if TILED else head // (H // G)
        query = tl.load(q + row[:, None] * q_row + key_head * q_head + i[None, :], mask=here, other=0.0)
        key = tl.load(k + row[:, None] * k_row + key_head * k_head + i[None, :], mask=here, other=0.0)
        dtype = query.dtype
        query, key = query.to(tl.float32), key.to(tl.float32)
        query = query * (tl.rsqrt(tl.sum(query * query, 1) + eps) * K**-0.5)[:, None]
        key = key * tl.rsqrt(tl.sum(key * key, 1) + eps)[:, None]
        strength = tl.load(beta + row * beta_row + head, mask=ok, other=0.0).to(tl.float32)
        if CHANNELS:
            move = tl.load(
                step + row[:, None] * step_row + head * step_head + i[None, :], mask=here, other=0.0
            )
            move = move.to(tl.float32)
            if HAS_BIAS:
                move += tl.load(dt_bias + head * K + i, mask=oki, other=0.0)[None, :]
        else:
            move = tl.load(step + row * step_row + head, mask=ok, other=0.0).to(tl.float32)
            if HAS_BIAS:
                move += tl.load(dt_bias + head)
        if GATES:
            move, strength = softplus(move), sigmoid(strength)
        move = tl.where(here if CHANNELS else ok, move, 0.0) * (tl.load(A + head) * 1.4426950408889634)
        strength = tl.where(ok, strength * scale, 0.0)
        total, end = tl.cumsum(move, 0), tl.sum(move, 0)
        if CHANNELS:
            near = tl.zeros([L, L], tl.float32)
            seen = tl.zeros([L, L], tl.float32)
            for other in range(L):
                mine = (t == other)[:, None]
                key_there = tl.sum(tl.where(mine, key, 0.0), 0)
                total_there = tl.sum(tl.where(mine, total, 0.0), 0)
                gap = tl.where((t >= other)[:, None], total - total_there[None, :], -float("inf"))
                moved = tl.exp2(gap) * key_there[None, :]
                column = (t == other)[None, :]
                near = tl.where(column, tl.sum(key * moved, 1)[:, None], near)
                seen = tl.where(column, tl.sum(query * moved, 1)[:, None], seen)
            since, left = tl.exp2(total), tl.exp2(end[None, :] - total)
        else:
            gap = tl.where(t[:, None] >= t[None, :], total[:, None] - total[None, :], -float("inf"))
            decay = tl.exp2(gap)
            turned = tl.trans(key.to(dtype))
            near = tl.dot(key.to(dtype), turned, input_precision="ieee") * decay
            seen = tl.dot(query.to(dtype), turned, input_precision="ieee") * decay
            since, left = tl.exp2(total)[:, None], tl.exp2(end - total)[:, None]
        # Rows of the inverse of I + N, N = diag(β) M: row r is -Σ_s N_rs (row s), and 1 in its own place.
        lower = tl.trans(tl.where(t[:, None] > t[None, :], near * strength[:, None], 0.0))
        found = tl.where(t[:, None] == t[None, :], 1.0, 0.0)
        for r in range(1, L):
            weights = tl.sum(tl.where((t == r)[None, :], lower, 0.0), 1)
            made = tl.sum(weights[:, None] * found, 0)
            found = tl.where((t == r)[:, None] & (t < r)[None, :], -made[None, :], found)
        found = (found * strength[None, :]).to(dtype)
        grown = tl.dot(found, (key * since).to(dtype), input_precision="ieee")
        at = entry.to(tl.int64) * H + head
        tile = at * (L * KP) + (t[:, None] * KP + i[None, :])
        tl.store(queries + tile, (query * since).to(dtype))
        tl.store(inner + tile, grown.to(dtype))
        tl.store(outer + tile, (key * left).to(dtype))
        square = at * (L * L) + (t[:, None] * L + t[None, :])
        tl.store(within + square, seen.to(dtype))
        tl.store(solve + square, found)
        if CHANNELS:
            tl.store(last + at * KP + i, end)
        else:
            tl.store(last + at, end)


@triton.jit(do_not_specialize=["decodes"])
def carry_chunks(
    v, state, slots, query_start, has_history, positions, queries, inner, outer, within, solve, last, y,
    v_row, v_head, decodes,
    H: tl.constexpr, K: tl.constexpr, KP: tl.constexpr, V: tl.constexpr, BV: tl.constexpr, L: tl.constexpr,
    WALKED: tl.constexpr, CHANNELS: tl.constexpr, PLACED: tl.constexpr,
):  # fmt: skip
    """What `prepare_chunks` made, and v, state as of `walk_delta_rule` -> y. Grid: (V / BV, H, S)."""
    await_previous()
    block, head, s = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    first, count, begin, entry = _place_chunks(query_start, positions, s, decodes, L, PLACED)
    if count > WALKED:
        i, j, t = tl.arange(0, KP), block * BV + tl.arange(0, BV), tl.arange(0, L)
        oki, okj = i < K, j < V
        slot = tl.load(slots + decodes + s).to(tl.int64)
        past = tl.load(has_history + decodes + s).to(tl.int32) != 0
        rows = tl.where(past, K, 0)
        here = state + (slot * H + head) * (K * V) + (i[:, None] * V + j[None, :])
        h = tl.load(here, mask=(i < rows)[:, None] & okj[None, :], other=0.0).to(tl.float32)
        for start in range(0, begin + count, L):
            at = (entry + start // L).to(tl.int64) * H + head
            ok = ((t >= begin - start) & (t < begin - start + count))[:, None] & okj[None, :]
            chunk = first + start - begin  # the row of its first place: in front of the sequence's, maybe
            value = tl.load(
                v + chunk * v_row + head * v_head + (t[:, None] * v_row + j[None, :]), mask=ok, other=0.0
            )
            tile, square = at * (L * KP) + (t[:, None] * KP + i[None, :]), t[:, None] * L + t[None, :]
            dtype = value.dtype
            now = h.to(dtype)
            added = tl.dot(tl.load(solve + at * (L * L) + square), value, input_precision="ieee")
            added -= tl.dot(tl.load(inner + tile), now, input_precision="ieee")
            added = added.to(dtype)
            out = tl.dot(tl.load(queries + tile), now, input_precision="ieee")
            out = tl.dot(tl.load(within + at * (L * L) + square), added, out, input_precision="ieee")
            to = y + (chunk * H + head) * V + (t[:, None] * (H * V) + j[None, :])
            tl.store(to, out.to(y.dtype.element_ty), mask=ok)
            if CHANNELS:
                h = h * tl.exp2(tl.load(last + at * KP + i))[:, None]
            else:
                h = h * tl.exp2(tl.load(last + at))
            h = tl.dot(tl.trans(tl.load(outer + tile)), added, h, input_precision="ieee")
        tl.store(here, h.to(state.dtype.element_ty), mask=oki[:, None] & okj[None, :])


def chunk_constants(constants: dict[str, Any], seqs: int, placed: bool) -> tuple[dict[str, Any], ...]:
    """Those of `prepare_chunks` and of `carry_chunks`, from those of the walk."""
    shared = {name: constants[name] for name in ("H", "K", "CHANNELS")} | {
        "KP": max(constants["KP"], 16),
        "L": 16 if constants["CHANNELS"] else 32,
        "WALKED": WALKED,
        "PLACED": placed,
        "num_warps": 4,
        "num_stages": 2,  # the next chunk's tiles are under way while one is computed
    }
    steps = next(n for n in SEARCHES if seqs <= 1 << n)
    first = (
        shared | {name: constants[name] for name in ("G", "TILED", "GATES", "HAS_BIAS")} | {"STEPS": steps}
    )
    dim = constants["V"]
    return first, shared | {"V": dim, "BV": min(max(triton.next_power_of_2(dim), 16), COLUMNS)}


def scan_prompts(made: DeltaLaunch, num_decodes: int, positions: Tensor | None) -> Tensor:
    """Walk the short sequences of a step and take the long ones in chunks, each if shapes allow for any."""
    q, k, v, step, bias, A, beta, state, slots, query_start, has_history, y = made.tensors
    tokens, seqs = len(v) - num_decodes, len(slots) - num_decodes
    longest = tokens - seqs + 1
    if len(v) and (num_decodes or seqs > 1 or longest <= WALKED):
        made.walk(WALKED)
    if longest <= WALKED:
        return y
    first, second = chunk_constants(made.constants, seqs, positions is not None)
    heads, size, wide = v.shape[1], first["L"], first["KP"]
    entries = tokens // size + 2 * seqs
    tiles = [v.new_empty(entries, heads, size, wide) for _ in range(3)]
    squares = [v.new_empty(entries, heads, size, size) for _ in range(2)]
    last = A.new_empty(entries, heads, wide if first["CHANNELS"] else 1)
    scratch, placed = (*tiles, *squares, last), slots if positions is None else positions
    strides = made.numbers
    inputs = (q, k, step, bias, A, beta, query_start, placed)
    launch(
        prepare_chunks, (entries, heads), *inputs, *scratch,
        *strides[:4], *strides[6:], num_decodes, seqs, **first,
    )  # fmt: skip
    grid = (triton.cdiv(v.shape[2], second["BV"]), heads, seqs)
    where = (slots, query_start, has_history, placed)
    launch(carry_chunks, grid, v, state, *where, *scratch, y, *strides[4:6], num_decodes, **second)
    return y


def why_walked(facts: OpFacts) -> str | None:
    """Why prompts are walked token by token."""
    if facts.sizes.get("deterministic"):
        return "prompts would have other last bits than decodes: deterministic was asked for"
    if facts.dtype is torch.float32:
        return "its products are of 16-bit numbers"
    if facts["key_dim"] > WIDEST:
        return f"keys have more than {WIDEST} columns"
    if facts.chip is not None and facts.chip.capability < PRODUCTS:
        return f"Triton uses no matrix units of {facts.chip.name}, but from sm_{PRODUCTS} on"
    return None


@gated_delta_scan.variant(NAME, on="cuda", when=why_walked)
def scan_chunks_given_gates(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    step: Tensor,
    A: Tensor,
    beta: Tensor,
    state: Tensor,
    slots: Tensor,
    query_start: Tensor,
    has_history: Tensor,
    num_decodes: int,
    beta_scale: float = 1.0,
    tiled: bool = False,
    positions: Tensor | None = None,
) -> Tensor:
    """`gated_delta_scan`: the same arguments and result."""
    where = (slots, query_start, has_history)
    made = prepare_delta((q, k, v, step, beta), None, A, state, where, beta_scale, tiled, False)
    return scan_prompts(made, num_decodes, positions)


@delta_scan_from_gates.variant(NAME, on="cuda", when=why_walked)
def scan_chunks_from_gates(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    decay: Tensor,
    dt_bias: Tensor | None,
    A: Tensor,
    beta: Tensor,
    state: Tensor,
    slots: Tensor,
    query_start: Tensor,
    has_history: Tensor,
    num_decodes: int,
    beta_scale: float = 1.0,
    tiled: bool = False,
    positions: Tensor | None = None,
) -> Tensor:
    """`delta_scan_from_gates`: the same arguments and result."""
    where = (slots, query_start, has_history)
    made = prepare_delta((q, k, v, decay, beta), dt_bias, A, state, where, beta_scale, tiled, True)
    return scan_prompts(made, num_decodes, positions)


SCRATCH = {
    **dict.fromkeys(("queries", "inner", "outer", "within", "solve"), "bf16*"),
    "last": "fp32*",
    "positions": "i64*",
    "decodes": "i32",
    "seqs": "i32",
}


@with_float16
def forms() -> Iterator[KernelForm]:
    """What models of published sizes launch in steps with prompts."""
    for name, (heads, key_heads, key_dim, dim, channels, tiled, bias) in SHAPES.items():
        constants = delta_constants(heads, key_heads, key_dim, dim, channels, tiled)
        constants |= {"GATES": name not in GIVEN, "HAS_BIAS": bias}
        both = chunk_constants(constants, 1, placed=True)
        for kernel, given, demands in (
            (prepare_chunks, both[0], (("LDG.128",), ("STG.128",), ("HMMA", "HGMMA"))),
            (carry_chunks, both[1], (("LDG.128",), ("HMMA", "HGMMA"))),
        ):
            warps, stages = given.pop("num_warps"), given.pop("num_stages")
            yield KernelForm(
                f"{kernel.fn.__name__}, {name}", kernel, shape_types(name) | SCRATCH, given, warps, stages,
                demands=demands,
            )  # fmt: skip
