"""xLSTM's matrix memory over a ragged batch, in two launches (Beck et al. 2024, 2025).

    walk_gates     m, n and what a token needs of them: f, i and the divisor    a program: a head
    walk_memory    C ← f C + i k ⊗ v        y ← q C / (divisor √K)             a program: a head's BV columns

A head's gates and norms are of all its columns, so one program walks them first: nothing that a program
writes is read by another one of its launch. Every token is computed in the same way, in a decode as in a
prompt, so the bits depend on no other sequence and on no cut of a prompt.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import triton
import triton.language as tl
from torch import Tensor

from plait.kernels.triton.dependent_launch import await_previous
from plait.kernels.triton.forms import KernelForm, with_float16, with_float32
from plait.kernels.triton.maths import softplus
from plait.ops.launch import launch
from plait.ops.mlstm import mlstm_scan

NUMBERS = 1024  # of a memory in a program: 32 registers of a lane


@triton.jit
def walk_gates(
    q, k, enter, forget, norms, largest, slots, query_start, has_history, gates,
    q_row, q_head, k_row, k_head, enter_row, forget_row, eps,
    H: tl.constexpr, K: tl.constexpr, KP: tl.constexpr,
):  # fmt: skip
    """q, k: [T, H, K], enter, forget: [T, H], norms: [slots, H, K], largest: [slots, H] -> gates [T, H, 3]:
    f, i and the divisor. Grid: (H, S)."""
    await_previous()
    head, s, i = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.arange(0, KP)
    ok = i < K
    first, end = tl.load(query_start + s).to(tl.int64), tl.load(query_start + s + 1).to(tl.int64)
    slot, past = tl.load(slots + s).to(tl.int64), tl.load(has_history + s).to(tl.int32)
    at = (slot * H + head) * K + i
    n = tl.load(norms + at, mask=i < K * past, other=0.0)
    m = tl.load(largest + slot * H + head, mask=past != 0, other=0.0)
    for token in range(first, end):
        row = token + tl.zeros([], tl.int64)
        query = tl.load(q + row * q_row + head * q_head + i, mask=ok, other=0.0).to(tl.float32) * (K**-0.5)
        key = tl.load(k + row * k_row + head * k_head + i, mask=ok, other=0.0).to(tl.float32)
        opens = tl.load(enter + row * enter_row + head).to(tl.float32)
        kept = -softplus(-tl.load(forget + row * forget_row + head).to(tl.float32)) + m
        m = tl.maximum(kept, opens)
        f, share = tl.exp(kept - m), tl.exp(opens - m)
        n = f * n + share * key
        divisor = tl.maximum(tl.abs(tl.sum(query * n, 0)), tl.exp(-m)) + eps
        to = gates + (row * H + head) * 3
        tl.store(to, f)
        tl.store(to + 1, share)
        tl.store(to + 2, divisor)
    tl.store(norms + at, n, mask=ok)
    tl.store(largest + slot * H + head, m)


@triton.jit
def walk_memory(
    q, k, v, gates, memory, slots, query_start, has_history, y, q_row, q_head, k_row, k_head, v_row, v_head,
    H: tl.constexpr, K: tl.constexpr, KP: tl.constexpr, V: tl.constexpr, BV: tl.constexpr,
):  # fmt: skip
    """q, k: [T, H, K], v: [T, H, V], gates: as above, memory: [slots, H, K, V] -> y [T, H, V].

    Grid: (V / BV, H, S).
    """
    await_previous()
    block, head, s = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    i, j = tl.arange(0, KP), block * BV + tl.arange(0, BV)
    oki, okj = i < K, j < V
    first, end = tl.load(query_start + s).to(tl.int64), tl.load(query_start + s + 1).to(tl.int64)
    slot, past = tl.load(slots + s).to(tl.int64), tl.load(has_history + s).to(tl.int32) != 0
    rows = tl.where(past, K, 0)  # of the memory that is there: a scalar joins no mask in the interpreter
    at = memory + ((slot * H + head) * K + i[:, None]) * V + j[None, :]
    c = tl.load(at, mask=(i < rows)[:, None] & okj[None, :], other=0.0)
    qs, ks, vs = q + head * q_head + i, k + head * k_head + i, v + head * v_head + j
    row = tl.maximum(tl.minimum(first, end - 1), 0)  # of a sequence without rows some other one's
    query = tl.load(qs + row * q_row, mask=oki, other=0.0)
    key = tl.load(ks + row * k_row, mask=oki, other=0.0)
    value = tl.load(vs + row * v_row, mask=okj, other=0.0)
    for token in range(first, end):
        row = token + tl.zeros([], tl.int64)
        then = tl.minimum(row + 1, end - 1)
        next_query = tl.load(qs + then * q_row, mask=oki, other=0.0)
        next_key = tl.load(ks + then * k_row, mask=oki, other=0.0)
        next_value = tl.load(vs + then * v_row, mask=okj, other=0.0)
        of = gates + (row * H + head) * 3
        f, share, divisor = tl.load(of), tl.load(of + 1), tl.load(of + 2)
        a, b = query.to(tl.float32) * (K**-0.5), share * key.to(tl.float32)
        c = c * f + b[:, None] * value.to(tl.float32)[None, :]
        out = tl.sum(c * a[:, None], 0) / divisor
        tl.store(y + (row * H + head) * V + j, out.to(y.dtype.element_ty), mask=okj)
        query, key, value = next_query, next_key, next_value
    tl.store(at, c, mask=oki[:, None] & okj[None, :])


def mlstm_constants(heads: int, key_dim: int, dim: int) -> dict[str, int]:
    rows = triton.next_power_of_2(key_dim)
    columns = min(triton.next_power_of_2(dim), max(NUMBERS // rows, 4))
    return {"H": heads, "K": key_dim, "KP": rows, "V": dim, "BV": columns}


@mlstm_scan.variant("triton", on="cuda")
def scan_memory(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    enter: Tensor,
    forget: Tensor,
    memory: Tensor,
    norms: Tensor,
    largest: Tensor,
    slots: Tensor,
    query_start: Tensor,
    has_history: Tensor,
    num_decodes: int,
    eps: float,
) -> Tensor:
    """`mlstm_scan`: the same arguments and result."""
    q, k, v, enter, forget = (m if m.stride(-1) == 1 else m.contiguous() for m in (q, k, v, enter, forget))
    (tokens, heads, dim), y = v.shape, v.new_empty(v.shape)
    constants, where = mlstm_constants(heads, q.shape[2], dim), (slots, query_start, has_history)
    gates = torch.empty(tokens, heads, 3, device=v.device)
    if tokens:
        of_head = {name: constants[name] for name in ("H", "K", "KP")}
        launch(
            walk_gates, (heads, len(slots)), q, k, enter, forget, norms, largest, *where, gates,
            *q.stride()[:2], *k.stride()[:2], enter.stride(0), forget.stride(0), eps, **of_head, num_warps=1,
        )  # fmt: skip
        launch(
            walk_memory, (triton.cdiv(dim, constants["BV"]), heads, len(slots)),
            q, k, v, gates, memory, *where, y, *q.stride()[:2], *k.stride()[:2], *v.stride()[:2],
            **constants, num_warps=1,
        )  # fmt: skip
    return y


TYPES = {
    **dict.fromkeys(("q", "k", "v", "enter", "forget", "y"), "bf16*"),
    **dict.fromkeys(("memory", "norms", "largest", "gates"), "fp32*"),
    **dict.fromkeys(("slots", "query_start"), "i64*"),
    "has_history": "i1*",
    "eps": "fp32",
    **dict.fromkeys(("q_row", "q_head", "k_row", "k_head", "v_row", "v_head"), "i32!"),
}


@with_float16
@with_float32
def forms() -> Iterator[KernelForm]:
    """xLSTM 7B, in every step."""
    constants = mlstm_constants(8, 256, 512)
    of_head = {name: constants[name] for name in ("H", "K", "KP")}
    yield KernelForm("walk_gates, xLSTM 7B", walk_gates, TYPES, of_head, 1)
    yield KernelForm("walk_memory, xLSTM 7B", walk_memory, TYPES, constants, 1, max_registers=128)
