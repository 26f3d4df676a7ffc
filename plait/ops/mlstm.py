"""The matrix memory of xLSTM (Beck et al. 2024) over a ragged batch; exponential gates cannot overflow."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from plait.ops.case import RecurrentCase
from plait.ops.conv import ragged_case
from plait.ops.registry import Arguments, op
from plait.ops.ssm import SHORT_SEQS, States, walk_states

CASES: list[RecurrentCase] = [
    dict(seqs=[(1, True)], decodes=1, heads=2, key_dim=16, dim=16),
    dict(seqs=SHORT_SEQS, decodes=2, heads=3, key_dim=7, dim=37),
    dict(seqs=SHORT_SEQS, decodes=2, heads=2, key_dim=24, dim=48),
]


@op(cases=CASES)
def mlstm_scan(
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
    """C ← f C + i k ⊗ v, n ← f n + i k; y = q C / max(|q n|, e^-m), q being divided by √K.

    The gates are i = e^(enter - m) and f = sigmoid(forget) e^(last m - m), with m the larger exponent, so
    that neither overflows. q, k: [T, H, K], v: [T, H, V], enter, forget: [T, H]; in place and float32: memory
    C [num_slots, H, K, V], norms n [num_slots, H, K], largest m [num_slots, H] -> y [T, H, V] in v's dtype.
    `eps` is added to the divisor. The rest as in `gated_delta_scan`.
    """
    q, k, value = q.float() * q.shape[-1] ** -0.5, k.float(), v.float()
    enter, log_forget, out = enter.float(), F.logsigmoid(forget.float()), torch.empty_like(value)

    def move(rows: slice | int, held: States) -> States:
        """One token of one or several sequences; their states after it."""
        C, n, m = held
        top = torch.maximum(log_forget[rows] + m, enter[rows])
        f, i = (log_forget[rows] + m - top).exp()[..., None], (enter[rows] - top).exp()[..., None]
        key = i * k[rows]
        C, n = f[..., None] * C + key[..., None] * value[rows][..., None, :], f * n + key
        divisor = torch.maximum((q[rows] * n).sum(-1).abs(), (-top).exp()) + eps
        out[rows] = (q[rows][..., None, :] @ C)[..., 0, :] / divisor[..., None]
        return C, n, top

    walk_states(move, (memory, norms, largest), (slots, query_start, has_history, num_decodes))
    return out.to(v.dtype)


@mlstm_scan.inputs
def _inputs(case: RecurrentCase, dtype: torch.dtype, device: str) -> Arguments:
    slots, query_start, has_history, num_slots = ragged_case(case["seqs"], device)
    total, heads, size, dim = int(query_start[-1]), *(case[n] for n in ("heads", "key_dim", "dim"))
    # Views into rows of a wider tensor, as those of a projection are.
    wide = torch.randn(total, heads * (2 * size + dim), dtype=dtype, device=device)
    q, k, v = wide.split([heads * size, heads * size, heads * dim], -1)
    gates = torch.randn(total, 2 * heads, device=device)  # larger ones make divisors that cancel
    memory, norms = (torch.randn(num_slots, heads, size, *more, device=device) for more in ((dim,), ()))
    largest = torch.randn(num_slots, heads, device=device)
    qk = (part.unflatten(-1, (heads, size)) for part in (q, k))
    where = (slots, query_start, has_history, case["decodes"])
    return (*qk, v.unflatten(-1, (heads, dim)), *gates.chunk(2, -1), memory, norms, largest, *where, 1e-6), {}
