"""RWKV's recurrences over a ragged batch: of RWKV-4 (Peng et al. 2023), RWKV-6 (2024) and RWKV-7 (2025)."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from plait.ops.case import RecurrentCase
from plait.ops.conv import causal_conv, ragged_case
from plait.ops.elementwise import elementwise_op
from plait.ops.registry import Arguments, TensorFn, op
from plait.ops.ssm import SHORT_SEQS, States, walk_states

LEAST = -1e38  # the exponent of a sum of nothing
RATE = 0.6065306597126334  # e^-½, the fastest decay's logarithm (RWKV-7)
UNIT_EPS = 1e-12  # a key of less length is not made longer


@elementwise_op()
def mix_shift(x: Tensor, change: Tensor, share: Tensor) -> Tensor:
    """x + share · change: how much of the last token a channel takes. All [T, n], rows may lie apart."""
    return x + change * share


@op(
    cases=[
        dict(seqs=[(1, True)], channels=16, heads=6),
        dict(seqs=[(1, True), (1, False), (12, True), (2, False)], channels=300, heads=2),
    ]
)
def shift_rows(
    x: Tensor,
    taps: Tensor,
    shares: Tensor,
    tail: Tensor,
    slots: Tensor,
    query_start: Tensor,
    has_history: Tensor,
) -> tuple[Tensor, ...]:
    """x + shares[i] · change for each i, the change a short convolution: token shift (Peng et al. 2023).

    x: [T, n], taps: [n, 2], shares: [N, n], tail: [num_slots, 1, n] in place -> N of [T, n]. The rest as in
    `causal_conv`.
    """
    change = causal_conv.reference(x, taps, None, tail, slots, query_start, has_history, None)
    return tuple(mix_shift.reference(x, change, share.expand(len(x), -1)) for share in shares)


@shift_rows.replaces(causal_conv, mix_shift, is_default=True)
def _conv_then_shares(
    conv: TensorFn, mix: TensorFn, x: Tensor, taps: Tensor, shares: Tensor, *where: Tensor
) -> tuple[Tensor, ...]:
    change = conv(x, taps, None, *where, None)
    return tuple(mix(x, change, share.expand(len(x), -1)) for share in shares)


@shift_rows.inputs
def _shift_inputs(case: RecurrentCase, dtype: torch.dtype, device: str) -> Arguments:
    slots, query_start, has_history, num_slots = ragged_case(case["seqs"], device)
    n = case["channels"]
    x = torch.randn(int(query_start[-1]), 2 * n, dtype=dtype, device=device).chunk(2, -1)[1]
    taps = torch.tensor([1.0, -1.0], dtype=dtype, device=device).repeat(n, 1)
    shares, tail = torch.rand(case["heads"], n, device=device), torch.randn(num_slots, 1, n, device=device)
    return (x, taps, shares.to(dtype), tail.to(dtype), slots, query_start, has_history), {}


@op(cases=[dict(seqs=[(1, True)], decodes=1, size=16), dict(seqs=SHORT_SEQS, decodes=2, size=37)])
def wkv4_scan(
    k: Tensor,
    v: Tensor,
    decay: Tensor,
    first: Tensor,
    sums: Tensor,
    weights: Tensor,
    largest: Tensor,
    slots: Tensor,
    query_start: Tensor,
    has_history: Tensor,
    num_decodes: int,
) -> Tensor:
    """y = (a + e^(first + k) v) / (b + e^(first + k)); then a ← e^decay a + e^k v, b ← e^decay b + e^k.

    k, v: [T, n]; decay (negative), first: [n] float32; in place, float32 [num_slots, n]: sums a and weights b
    as multiples of e^largest, so that nothing overflows -> y [T, n] in v's dtype. The rest as in
    `mamba2_scan`.
    """
    key, value, out = k.float(), v.float(), torch.empty(v.shape, device=v.device)

    def move(rows: slice | int, held: States) -> States:
        a, b, m = held
        top = torch.maximum(m, key[rows] + first)
        old, new = (m - top).exp(), (key[rows] + first - top).exp()
        out[rows] = (old * a + new * value[rows]) / (old * b + new)
        top = torch.maximum(m + decay, key[rows])
        old, new = (m + decay - top).exp(), (key[rows] - top).exp()
        return old * a + new * value[rows], old * b + new, top

    where = (slots, query_start, has_history, num_decodes)
    walk_states(move, (sums, weights, largest), where, (0.0, 0.0, LEAST))
    return out.to(v.dtype)


@wkv4_scan.inputs
def _wkv4_inputs(case: RecurrentCase, dtype: torch.dtype, device: str) -> Arguments:
    slots, query_start, has_history, num_slots = ragged_case(case["seqs"], device)
    total, n = int(query_start[-1]), case["size"]
    k, v = (2 * torch.randn(total, 2 * n, dtype=dtype, device=device)).chunk(2, -1)
    decay, first = -torch.rand(n, device=device), torch.randn(n, device=device)
    sums, weights, largest = (torch.randn(num_slots, n, device=device) for _ in range(3))
    where = (slots, query_start, has_history, case["decodes"])
    return (k, v, decay, first, sums, weights.abs(), largest, *where), {}


WKV6 = [
    dict(seqs=[(1, True)], decodes=1, heads=2, keys=2, key_dim=16, dim=16),
    dict(seqs=SHORT_SEQS, decodes=2, heads=3, keys=3, key_dim=7, dim=37),
    dict(seqs=SHORT_SEQS, decodes=2, heads=4, keys=2, key_dim=40, dim=40, bonus=False),
]


@op(cases=WKV6)
def wkv6_scan(
    r: Tensor,
    decay: Tensor,
    k: Tensor,
    v: Tensor,
    bonus: Tensor | None,
    state: Tensor,
    slots: Tensor,
    query_start: Tensor,
    has_history: Tensor,
    num_decodes: int,
) -> Tensor:
    """y = Sᵀ r + (Σ r bonus k) v, by the last S; then S ← w · S + k ⊗ v, w = e^-(e^decay). RWKV-6.

    Without a bonus y = Sᵀ r / √K is of the new S, and keys are k (1 - w): gated linear attention (QRWKV6).
    r, decay: [T, H, K], k: [T, G, K], v: [T, G, V], rows may lie apart; key head h // (H/G) serves head h.
    bonus: [H, K] float32; state S: [num_slots, H, K, V] float32, in place -> y [T, H, V] in v's dtype. The
    rest as in `mamba2_scan`.
    """
    ratio = r.shape[1] // k.shape[1]
    r32, (key, value) = r.float(), (x.float().repeat_interleave(ratio, 1) for x in (k, v))
    speed, out = -decay.float().exp(), torch.empty_like(value)
    kept = speed.exp()[..., None]
    if bonus is None:
        key, r32 = key * -torch.expm1(speed), r32 * r.shape[2] ** -0.5
    own = None if bonus is None else (r32 * bonus * key).sum(-1, keepdim=True) * value

    def move(rows: slice | int, held: States) -> States:
        (last,) = held
        s = kept[rows] * last + key[rows][..., None] * value[rows][..., None, :]
        read = (r32[rows][..., None, :] @ (s if own is None else last))[..., 0, :]
        out[rows] = read if own is None else read + own[rows]
        return (s,)

    walk_states(move, (state,), (slots, query_start, has_history, num_decodes))
    return out.to(v.dtype)


@wkv6_scan.inputs
def _wkv6_inputs(case: RecurrentCase, dtype: torch.dtype, device: str) -> Arguments:
    slots, query_start, has_history, num_slots = ragged_case(case["seqs"], device)
    total, heads, dim, size = int(query_start[-1]), case["heads"], case["dim"], case["key_dim"]
    keys = case.get("keys", heads)
    counts = ((heads, size), (heads, size), (keys, size), (keys, dim))
    wide = torch.randn(total, sum(h * n for h, n in counts), dtype=dtype, device=device)
    parts = wide.split([h * n for h, n in counts], -1)
    made = [part.unflatten(-1, shape) for part, shape in zip(parts, counts, strict=True)]
    bonus = torch.randn(heads, size, device=device) if case.get("bonus", True) else None
    state = torch.randn(num_slots, heads, size, dim, device=device)
    return (*made, bonus, state, slots, query_start, has_history, case["decodes"]), {}


WKV7 = [
    dict(seqs=[(1, True)], decodes=1, heads=2, dim=16),
    dict(seqs=SHORT_SEQS, decodes=2, heads=3, dim=7),
    dict(seqs=SHORT_SEQS, decodes=2, heads=2, dim=40),
]


@op(cases=WKV7)
def wkv7_scan(
    r: Tensor,
    decay: Tensor,
    k: Tensor,
    v: Tensor,
    rate: Tensor,
    scales: Tensor,
    state: Tensor,
    slots: Tensor,
    query_start: Tensor,
    has_history: Tensor,
    num_decodes: int,
) -> tuple[Tensor, Tensor]:
    """S ← e^(-RATE σ(decay)) S - (a κ) ⊗ (Sᵀ κ) + k̃ ⊗ v, by the last S; y = Sᵀ r. A generalized delta rule.

    a = σ(rate), κ is k · scales[0] with length 1, k̃ = k (1 + (a - 1) scales[1]). r, decay, k, v, rate: [T, H,
    d], rows may lie apart; scales: [3, H, d] float32; state S: [num_slots, H, d, d] (keys, values) float32,
    in place -> y [T, H, d] in v's dtype, and [T, H] float32, how much of v each head adds: Σ r k̃ scales[2].
    """
    r32, k32, v32, a = (x.float() for x in (r, k, v, rate.float().sigmoid()))
    kept = (-RATE * decay.float().sigmoid()).exp()[..., None]
    unit = F.normalize(k32 * scales[0], dim=-1, eps=UNIT_EPS)
    key, gone, out = k32 * (1 + (a - 1) * scales[1]), a * unit, torch.empty_like(v32)

    def move(rows: slice | int, held: States) -> States:
        (s,) = held
        seen = (unit[rows][..., None, :] @ s)[..., 0, :]
        s = kept[rows] * s - gone[rows][..., None] * seen[..., None, :]
        s = s + key[rows][..., None] * v32[rows][..., None, :]
        out[rows] = (r32[rows][..., None, :] @ s)[..., 0, :]
        return (s,)

    walk_states(move, (state,), (slots, query_start, has_history, num_decodes))
    return out.to(v.dtype), (r32 * key * scales[2]).sum(-1)


@wkv7_scan.inputs
def _wkv7_inputs(case: RecurrentCase, dtype: torch.dtype, device: str) -> Arguments:
    slots, query_start, has_history, num_slots = ragged_case(case["seqs"], device)
    total, heads, dim = int(query_start[-1]), case["heads"], case["dim"]
    wide = torch.randn(total, 5 * heads * dim, dtype=dtype, device=device)
    parts = [part.unflatten(-1, (heads, dim)) for part in wide.chunk(5, -1)]
    scales = torch.randn(3, heads, dim, device=device)
    state = torch.randn(num_slots, heads, dim, dim, device=device)
    return (*parts, scales, state, slots, query_start, has_history, case["decodes"]), {}
