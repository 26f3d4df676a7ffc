"""The gated delta rule over a ragged batch: linear attention that corrects its state."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from plait.ops.activation import activate, step_sizes
from plait.ops.case import RecurrentCase
from plait.ops.conv import ragged_case
from plait.ops.registry import Arguments, TensorFn, op
from plait.ops.state_rounding import walk_tokens

EPS = 1e-6  # under the root of a key's and a query's length
SEQS = [(1, True), (1, True), (1, False), (70, False), (3, True), (35, True)]
CASES: list[RecurrentCase] = [
    dict(seqs=[(1, True)], decodes=1, heads=4, keys=2, key_dim=16, dim=16),
    dict(seqs=SEQS, decodes=2, heads=4, keys=2, key_dim=16, dim=32),
    dict(seqs=SEQS, decodes=2, heads=4, keys=2, key_dim=16, dim=32, tiled=True),
    dict(seqs=SEQS, decodes=2, heads=3, keys=3, key_dim=7, dim=37, channel=True, beta=2.0),
    dict(seqs=[(1, True)] * 5, decodes=5, heads=6, keys=2, key_dim=24, dim=48, channel=True),
]


@op(cases=CASES)
def gated_delta_scan(
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
    """h ← exp(step A) h; h ← h + k ⊗ β (v - hᵀ k); y = hᵀ q / √K. Yang et al. 2024; per channel: KDA.

    q, k: [T, G, K], which get length 1 here; v: [T, H, V]; step: [T, H], or [T, H, K] for decays per channel
    (after softplus); A: [H] (negative); beta: [T, H], β = beta_scale · beta; state: [num_slots, H, K, V]
    float32 or bfloat16, in place -> y [T, H, V] in v's dtype. Key head h // (H/G) serves head h, or h % G if
    `tiled`.
    positions: [T], of the rows in their sequences, by which a bfloat16 state is rounded; a kernel may cut its
    chunks at multiples of them, so that a cut of a prompt changes no bit.
    """
    ratio, out = v.shape[1] // q.shape[1], torch.empty(v.shape, device=v.device)
    q, k = (_unit(m.float()) for m in (q, k))
    q = q / q.shape[-1] ** 0.5
    q, k = (m.repeat(1, ratio, 1) if tiled else m.repeat_interleave(ratio, 1) for m in (q, k))  # [T, H, K]
    step = step.float() if step.dim() == 3 else step.float()[..., None]
    decay, beta, value = (step * A.float()[:, None]).exp()[..., None], beta.float() * beta_scale, v.float()

    def move(h: Tensor, rows: slice | int) -> Tensor:
        """One token of one or several sequences; their states after it."""
        h = h * decay[rows]
        error = value[rows] - (k[rows][..., None, :] @ h)[..., 0, :]
        h = h + k[rows][..., None] * (beta[rows][..., None] * error)[..., None, :]
        out[rows] = (q[rows][..., None, :] @ h)[..., 0, :]
        return h

    walk_tokens(move, state, (slots, query_start, has_history, num_decodes), positions)
    return out.to(v.dtype)


def _unit(x: Tensor) -> Tensor:
    """Vectors [..., K] of length 1."""
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + EPS)


@gated_delta_scan.inputs
def _inputs(case: RecurrentCase, dtype: torch.dtype, device: str) -> Arguments:
    slots, query_start, has_history, num_slots = ragged_case(case["seqs"], device)
    total, heads, keys, size, dim = (
        int(query_start[-1]),
        *(case[n] for n in ("heads", "keys", "key_dim", "dim")),
    )
    # Views into rows of a wider tensor, as those of a convolution are.
    mixed = torch.randn(total, 2 * keys * size + heads * dim, dtype=dtype, device=device)
    q, k, v = mixed.split([keys * size, keys * size, heads * dim], -1)
    shape = (total, heads, size) if case.get("channel") else (total, heads)
    step, A = torch.rand(shape, device=device), -2 * torch.rand(heads, device=device)
    beta = torch.rand(total, heads, dtype=dtype, device=device)
    state = torch.randn(num_slots, heads, size, dim, device=device)
    data = (q.unflatten(-1, (keys, size)), k.unflatten(-1, (keys, size)), v.unflatten(-1, (heads, dim)))
    where = (slots, query_start, has_history, case["decodes"])
    scale, tiled = case.get("beta", 1.0), case.get("tiled", False)
    return (*data, step, A, beta, state, *where, scale, tiled), {}


@op(cases=CASES)
def delta_scan_from_gates(
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
    """`gated_delta_scan` of the steps softplus(decay + dt_bias) and of sigmoid(beta).

    decay: [T, H], or [T, H · K] for decays per channel, dt_bias: as a row of decay, float32, beta: [T, H],
    all in any dtype and with rows that may lie apart in memory; the rest as there.
    """
    parts = step_sizes.reference, activate.reference, gated_delta_scan.reference
    where = (slots, query_start, has_history, num_decodes)
    made: Tensor = _gates_then_scan(
        *parts, q, k, v, decay, dt_bias, A, beta, state, *where, beta_scale, tiled, positions
    )
    return made


@delta_scan_from_gates.replaces(step_sizes, activate, gated_delta_scan, is_default=True)
def _gates_then_scan(
    steps: TensorFn,
    activate: TensorFn,
    scan: TensorFn,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    decay: Tensor,
    dt_bias: Tensor | None,
    A: Tensor,
    beta: Tensor,
    *rest: object,
) -> Tensor:
    step, heads = steps(decay, dt_bias, 0.0, math.inf), v.shape[1]
    step = step if step.shape[1] == heads else step.unflatten(-1, (heads, -1))
    return scan(q, k, v, step, A, activate(beta, "sigmoid", False), *rest)


@delta_scan_from_gates.inputs
def _gates_inputs(case: RecurrentCase, dtype: torch.dtype, device: str) -> Arguments:
    (q, k, v, step, A, _, *rest), _ = _inputs(case, dtype, device)
    total, heads, size = len(step), case["heads"], step.flatten(1).shape[1]
    wide = 2 * torch.randn(total, size + heads, dtype=dtype, device=device)  # as rows of a projection
    bias = torch.randn(size, device=device) if total > 1 else None
    return (q, k, v, wide[:, :size] - 2, bias, A, wide[:, size:], *rest), {}
