"""State-space scans over a ragged batch: Mamba1, Mamba2 (SSD) and Mamba3.

A batch is decodes first (one token each, history present), then chunks of prompts. Every sequence's state is
in a slot and is moved on in place. A sequence without history starts from zeros, whatever its slot holds.
States are float32, or rounded after every token (`state_rounding`); all arithmetic is in float32. A prompt
may be cut anywhere.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from plait.ops.activation import step_sizes
from plait.ops.case import RecurrentCase
from plait.ops.conv import ragged_case
from plait.ops.norm import gated_rms_norm, rms_norm
from plait.ops.registry import Arguments, TensorFn, op
from plait.ops.state_rounding import walk_tokens

States = tuple[Tensor, ...]
MoveStates = Callable[[slice | int, States], States]
SSD_CHUNK = 64  # tokens in one matrix form: more costs quadratic work, fewer costs more small products
SEQS = [(1, True), (1, True), (1, False), (130, False), (3, True), (65, True)]
SHORT_SEQS = [(1, True), (1, True), (1, False), (40, False), (3, True), (17, True)]
CASES: list[RecurrentCase] = [
    dict(seqs=[(1, True)], decodes=1, heads=4, dim=8, state=16, groups=1),
    dict(seqs=SEQS, decodes=2, heads=4, dim=8, state=16, groups=2),
    dict(seqs=SEQS, decodes=2, heads=3, dim=5, state=7, groups=1),
    dict(seqs=[(1, True)] * 6, decodes=6, heads=8, dim=16, state=32, groups=4),
]


def pieces(
    slots: Tensor, query_start: Tensor, has_history: Tensor, num_decodes: int
) -> Iterator[tuple[slice, int, bool]]:
    """(rows, slot, whether it has history) of every sequence behind the decodes."""
    if num_decodes == len(slots):
        return  # a batch of decodes asks nothing of the device
    starts, owners, history = query_start.tolist(), slots.tolist(), has_history.tolist()
    for s in range(num_decodes, len(owners)):
        yield slice(starts[s], starts[s + 1]), owners[s], history[s]


def begin(state: Tensor, slot: int, has_history: bool) -> Tensor:
    """The state that a sequence comes in with: its slot's, or zeros."""
    return state[slot] if has_history else torch.zeros_like(state[slot])


def walk_states(
    move: MoveStates, states: States, where: tuple[Tensor, Tensor, Tensor, int], first: Sequence[float] = ()
) -> None:
    """Move float32 states, in their slots, past the tokens of every sequence one by one.

    where: slots, query_start, has_history, num_decodes; move: rows and their states to the states after them.
    first: what fills each state of a sequence without history, zeros if it is empty.
    """
    slots, query_start, has_history, num_decodes = where
    if num_decodes:
        own = slots[:num_decodes]
        for state, new in zip(states, move(slice(num_decodes), tuple(s[own] for s in states)), strict=True):
            state[own] = new
    for rows, slot, past in pieces(slots, query_start, has_history, num_decodes):
        held = tuple(begin(state, slot, past) for state in states)
        if first and not past:
            held = tuple(torch.full_like(s, x) for s, x in zip(held, first, strict=True))
        for t in range(rows.start, rows.stop):
            held = move(t, held)
        for state, new in zip(states, held, strict=True):
            state[slot] = new


def ssd(v: Tensor, log_decay: Tensor, B: Tensor, C: Tensor, h: Tensor, chunk: int) -> tuple[Tensor, Tensor]:
    """h ← exp(log_decay) h + v ⊗ B; y = h C, for one sequence, by matrix products over chunks.

    v: [n, H, P], log_decay: [n, H] (≤ 0), B, C: [n, G, N], h: [H, P, N] -> y [n, H, P], the last h. Only
    differences of running sums that are ≤ 0 are exponentiated. Dao & Gu 2024, section 6.
    """
    groups, ys = B.shape[1], []
    h = h.unflatten(0, (groups, -1))  # [G, R, P, N]
    causal = torch.ones(chunk, chunk, dtype=torch.bool, device=v.device).tril()
    for start in range(0, len(v), chunk):
        rows = slice(start, min(start + chunk, len(v)))
        size = rows.stop - start
        total = log_decay[rows].cumsum(0).T.unflatten(0, (groups, -1))  # [G, R, L]
        keys, queries = B[rows].transpose(0, 1)[:, None], C[rows].transpose(0, 1)[:, None]  # [G, 1, L, N]
        values = v[rows].transpose(0, 1).unflatten(0, (groups, -1))  # [G, R, L, P]
        gap = (total[..., :, None] - total[..., None, :]).masked_fill(~causal[:size, :size], -torch.inf)
        within = (gap.exp() * (queries @ keys.mT)) @ values
        carried = total.exp()[..., None] * (queries @ h.mT)
        ys.append((within + carried).flatten(0, 1).transpose(0, 1))
        left = (total[..., -1:] - total).exp()[..., None]
        h = total[..., -1, None, None].exp() * h + (values * left).mT @ keys
    return torch.cat(ys), h.flatten(0, 1)


@op(cases=CASES)
def mamba2_scan(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None,
    state: Tensor,
    slots: Tensor,
    query_start: Tensor,
    has_history: Tensor,
    num_decodes: int,
    chunk_size: int = 256,
    positions: Tensor | None = None,
) -> Tensor:
    """h ← exp(dt A) h + dt x ⊗ B; y = h C + D x. Dao & Gu 2024.

    x: [T, H, P], dt: [T, H] (after softplus and clamp), A: [H] (negative), B, C: [T, G, N] (group h // (H/G)
    serves head h), D: [H], state: [num_slots, H, P, N] float32 or bfloat16, or rows of int8
    (`state_rounding`), in place -> y [T, H, P] in x's dtype. `chunk_size` bounds the matrix form and does not
    change the result. positions: [T], of the rows in their sequences, by which a state is rounded; a kernel
    may cut its chunks at multiples of them, so that a cut of a prompt changes no bit.
    """
    u, dt, A, B, C = x.float(), dt.float(), A.float(), B.float(), C.float()
    v, log_decay, y = u * dt[..., None], dt * A, torch.empty_like(u)
    ratio = x.shape[1] // B.shape[1]
    if state.dtype != torch.float32:
        b, c = (m.repeat_interleave(ratio, 1) for m in (B, C))  # [T, H, N]

        def move(h: Tensor, rows: slice | int) -> Tensor:
            h = h * log_decay[rows].exp()[..., None, None] + v[rows][..., None] * b[rows][..., None, :]
            y[rows] = (h @ c[rows][..., None])[..., 0]
            return h

        walk_tokens(move, state, (slots, query_start, has_history, num_decodes), positions)
        return (y if D is None else y + D.float()[:, None] * u).to(x.dtype)
    if num_decodes:
        b, c = (m[:num_decodes].repeat_interleave(ratio, 1) for m in (B, C))  # [S, H, N]
        h = state[slots[:num_decodes]] * log_decay[:num_decodes].exp()[..., None, None]
        h = h + v[:num_decodes, :, :, None] * b[:, :, None]
        state[slots[:num_decodes]] = h
        y[:num_decodes] = (h @ c[..., None])[..., 0]
    for rows, slot, past in pieces(slots, query_start, has_history, num_decodes):
        h = begin(state, slot, past)
        y[rows], state[slot] = ssd(v[rows], log_decay[rows], B[rows], C[rows], h, min(chunk_size, SSD_CHUNK))
    return (y if D is None else y + D.float()[:, None] * u).to(x.dtype)


@mamba2_scan.inputs
def _mamba2_inputs(case: RecurrentCase, dtype: torch.dtype, device: str) -> Arguments:
    slots, query_start, has_history, num_slots = ragged_case(case["seqs"], device)
    total, heads, dim, size = int(query_start[-1]), case["heads"], case["dim"], case["state"]
    x = torch.randn(total, heads, dim, dtype=dtype, device=device)
    B, C = (torch.randn(total, case["groups"], size, dtype=dtype, device=device) / size**0.5 for _ in "BC")
    dt, A = torch.rand(total, heads, device=device), -4 * torch.rand(heads, device=device)
    D, state = torch.randn(heads, device=device), torch.randn(num_slots, heads, dim, size, device=device)
    return (x, dt, A, B, C, D, state, slots, query_start, has_history, case["decodes"]), {}


@op(cases=[{**case, "limit": (0.001, 0.5) if case["groups"] > 1 else (0.0, math.inf)} for case in CASES])
def mamba2_scan_from_dt(
    x: Tensor,
    dt: Tensor,
    dt_bias: Tensor | None,
    dt_limit: tuple[float, float],
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None,
    state: Tensor,
    slots: Tensor,
    query_start: Tensor,
    has_history: Tensor,
    num_decodes: int,
    chunk_size: int = 256,
    positions: Tensor | None = None,
) -> Tensor:
    """`mamba2_scan` of the steps softplus(dt + dt_bias) within dt_limit.

    dt: [T, H] in any dtype, with rows that may lie apart in memory, dt_bias: [H] float32; the rest as there.
    """
    operands = (x, dt, dt_bias, dt_limit, A, B, C, D, state)
    where = (slots, query_start, has_history, num_decodes)
    made: Tensor = _steps_then_scan(
        step_sizes.reference, mamba2_scan.reference, *operands, *where, chunk_size, positions
    )
    return made


@mamba2_scan_from_dt.replaces(step_sizes, mamba2_scan, is_default=True)
def _steps_then_scan(
    steps: TensorFn,
    scan: TensorFn,
    x: Tensor,
    dt: Tensor,
    dt_bias: Tensor | None,
    dt_limit: tuple[float, float],
    *rest: object,
) -> Tensor:
    return scan(x, steps(dt, dt_bias, *dt_limit), *rest)


@mamba2_scan_from_dt.inputs
def _mamba2_dt_inputs(case: RecurrentCase, dtype: torch.dtype, device: str) -> Arguments:
    (x, _, *rest), _ = _mamba2_inputs(case, dtype, device)
    heads = case["heads"]
    wide = 2 * torch.randn(len(x), 2 * heads, dtype=dtype, device=device) - 2  # as rows of a projection
    bias = torch.randn(heads, device=device) if len(x) > 1 else None
    return (x, wide[:, heads:], bias, case["limit"], *rest), {}


@op(cases=CASES)
def mamba1_scan(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None,
    state: Tensor,
    slots: Tensor,
    query_start: Tensor,
    has_history: Tensor,
    num_decodes: int,
    state_limit: float | None = None,
    positions: Tensor | None = None,
) -> Tensor:
    """h ← clamp(exp(dt A) h + dt x ⊗ B, ±state_limit); y = h C + D x. Gu & Dao 2023.

    x, dt: [T, I], A: [I, N], B, C: [T, N], D: [I], state: [num_slots, I, N] float32 or bfloat16, in place ->
    y [T, I] in x's dtype. The clamp (oxidizr's) is between steps, so time is walked token by token.
    positions: [T], of the rows in their sequences, by which a bfloat16 state is rounded.
    """
    u, dt, A, B, C = x.float(), dt.float(), A.float(), B.float(), C.float()
    limit, y = torch.inf if state_limit is None else state_limit, torch.empty_like(u)

    def terms(rows: slice | int) -> tuple[Tensor, Tensor]:
        return torch.exp(dt[rows][..., None] * A), (dt[rows] * u[rows])[..., None] * B[rows][..., None, :]

    def move(h: Tensor, rows: slice | int) -> Tensor:
        decay, add = terms(rows)
        h = torch.addcmul(add, decay, h).clamp_(-limit, limit)
        y[rows] = (h @ C[rows][..., None])[..., 0]
        return h

    if state.dtype != torch.float32:
        walk_tokens(move, state, (slots, query_start, has_history, num_decodes), positions)
        return (y if D is None else y + D.float() * u).to(x.dtype)
    if num_decodes:
        state[slots[:num_decodes]] = move(state[slots[:num_decodes]], slice(num_decodes))
    for rows, slot, past in pieces(slots, query_start, has_history, num_decodes):
        h = begin(state, slot, past)
        for start in range(rows.start, rows.stop, SSD_CHUNK):
            part = slice(start, min(start + SSD_CHUNK, rows.stop))
            decay, hs = terms(part)  # hs starts as what each token adds and becomes the state after it
            for t in range(part.stop - start):
                h = hs[t].addcmul_(decay[t], h).clamp_(-limit, limit)
            y[part] = (hs @ C[part, :, None])[..., 0]
        state[slot] = h
    return (y if D is None else y + D.float() * u).to(x.dtype)


@mamba1_scan.inputs
def _mamba1_inputs(case: RecurrentCase, dtype: torch.dtype, device: str) -> Arguments:
    slots, query_start, has_history, num_slots = ragged_case(case["seqs"], device)
    total, inner, size = int(query_start[-1]), case["heads"] * case["dim"], case["state"]
    x = torch.randn(total, inner, dtype=dtype, device=device)
    B, C = (torch.randn(total, size, dtype=dtype, device=device) / size**0.5 for _ in "BC")
    dt, A = torch.rand(total, inner, device=device), -4 * torch.rand(inner, size, device=device)
    D, state = torch.randn(inner, device=device), torch.randn(num_slots, inner, size, device=device)
    limit = 0.5 if case["groups"] > 1 else None
    return (x, dt, A, B, C, D, state, slots, query_start, has_history, case["decodes"], limit), {}


@op(cases=[{**case, "normed": case["groups"] != 1} for case in CASES])
def gated_mamba1_scan(
    x: Tensor,
    dt: Tensor,
    gate: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None,
    b_norm: Tensor | None,
    c_norm: Tensor | None,
    state: Tensor,
    slots: Tensor,
    query_start: Tensor,
    has_history: Tensor,
    num_decodes: int,
    state_limit: float | None = None,
    eps: float = 1e-6,
    positions: Tensor | None = None,
) -> Tensor:
    """`mamba1_scan` of steps softplus(dt) and RMS norms of B and C, times silu(gate).

    dt, gate: [T, I], b_norm, c_norm: [N], the norms' weights, or None without norms; the rest as there.
    """
    parts = step_sizes.reference, mamba1_scan.reference, gated_rms_norm.reference, rms_norm.reference
    where = (slots, query_start, has_history, num_decodes)
    how = (state_limit, eps, positions)
    return _scan_then_gate(*parts, x, dt, gate, A, B, C, D, b_norm, c_norm, state, *where, *how)


@gated_mamba1_scan.replaces(step_sizes, mamba1_scan, gated_rms_norm, rms_norm, is_default=True)
def _scan_then_gate(
    steps: TensorFn,
    scan: TensorFn,
    close: TensorFn,
    norm: TensorFn,
    x: Tensor,
    dt: Tensor,
    gate: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None,
    b_norm: Tensor | None,
    c_norm: Tensor | None,
    state: Tensor,
    slots: Tensor,
    query_start: Tensor,
    has_history: Tensor,
    num_decodes: int,
    state_limit: float | None = None,
    eps: float = 1e-6,
    positions: Tensor | None = None,
) -> Tensor:
    B = B if b_norm is None else norm(B, b_norm, eps)
    C = C if c_norm is None else norm(C, c_norm, eps)
    dt = steps(dt, None, 0.0, math.inf)
    where = (slots, query_start, has_history, num_decodes)
    return close(scan(x, dt, A, B, C, D, state, *where, state_limit, positions), gate, None)


@gated_mamba1_scan.inputs
def _gated_mamba1_inputs(case: RecurrentCase, dtype: torch.dtype, device: str) -> Arguments:
    (x, _, A, B, C, D, *rest), _ = _mamba1_inputs(case, dtype, device)
    dt, gate = (torch.randn(x.shape, dtype=dtype, device=device) for _ in range(2))
    norms = [torch.rand(case["state"], device=device) if case["normed"] else None for _ in range(2)]
    return (x, 2 * dt - 2, gate, A, B, C, D, *norms, *rest), {}
