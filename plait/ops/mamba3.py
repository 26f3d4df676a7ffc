"""oxidizr's Mamba3: what heads share, and a scan with a trapezoidal input term and a running angle."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from plait.ops.activation import activate, combine, step_sizes
from plait.ops.case import RecurrentCase
from plait.ops.conv import ragged_case
from plait.ops.linear import Linear
from plait.ops.norm import rms_norm
from plait.ops.registry import Arguments, TensorFn, bind_reference, op
from plait.ops.ssm import CASES, SSD_CHUNK, begin, pieces, ssd
from plait.ops.state_rounding import walk_tokens
from plait.quant.weight import Dense


def rotate_pairs(m: Tensor, angle: Tensor) -> Tensor:
    """Turn the pairs (2i, 2i+1) of m [..., N] by angle [..., N/2]."""
    cos, sin = angle.cos(), angle.sin()
    a, b = m[..., 0::2], m[..., 1::2]
    return torch.stack((a * cos - b * sin, a * sin + b * cos), -1).flatten(-2)


def _first(state: Tensor, slots: Tensor, has_history: Tensor) -> Tensor:
    """What each sequence starts from: its slot's, or zeros."""
    shape = (-1, *[1] * (state.ndim - 1))
    return torch.where(has_history.view(shape), state[slots], torch.zeros_like(state[:1]))


def _previous(
    value: Tensor, state: Tensor, slots: Tensor, query_start: Tensor, has_history: Tensor
) -> Tensor:
    """The value one token earlier, [T, …]; a sequence's first comes from its slot, its last goes there."""
    before = torch.cat([value[:1], value[:-1]])
    before[query_start[:-1]] = _first(state, slots, has_history)
    state[slots] = value[query_start[1:] - 1]
    return before


def _running_angle(
    turn: Tensor, state: Tensor, slots: Tensor, query_start: Tensor, has_history: Tensor
) -> Tensor:
    """The sum of a sequence's turns up to each token, [T, H, N/2]; the slot keeps it modulo a full turn."""
    total = torch.cat([torch.zeros_like(turn[:1]), turn]).double().cumsum(0)
    offset = _first(state, slots, has_history).double() - total[query_start[:-1]]
    angle = total[1:] + offset.repeat_interleave(query_start.diff(), 0, output_size=len(turn))
    state[slots] = angle[query_start[1:] - 1].remainder(2 * math.pi).to(state.dtype)
    return angle.float()


@op(cases=[case for case in CASES if case["state"] % 2 == 0])
def mamba3_scan(
    x: Tensor,
    dt: Tensor,
    blend: Tensor,
    theta: Tensor | None,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor,
    state: Tensor,
    angle: Tensor | None,
    prev_b: Tensor,
    prev_x: Tensor,
    slots: Tensor,
    query_start: Tensor,
    has_history: Tensor,
    num_decodes: int,
    chunk_size: int = 256,
    positions: Tensor | None = None,
) -> Tensor:
    """h ← α h + β x' ⊗ B' + γ x ⊗ B; y = h C + D x, with x', B' of the token before.

    α = exp(dt A), β = (1 - blend) dt α, γ = blend dt; B and C are turned by the running sum of theta · dt.
    x: [T, H, P], dt, blend: [T, H], theta: [T, H, N/2] or None, A, D: [H], B, C: [T, H, N]; slots' tensors,
    in place, float32, state also bfloat16, rounded by positions [T]: state [num_slots, H, P, N],
    angle [num_slots, H, N/2], prev_b [num_slots, H, N], prev_x
    [num_slots, H, P] -> y [T, H, P] in x's dtype.
    """
    u, dt, B, C, blend = x.float(), dt.float(), B.float(), C.float(), blend.float()
    where = (slots, query_start, has_history)
    if theta is not None and angle is not None:
        turned = _running_angle(theta.float() * dt[..., None], angle, *where)
        B, C = rotate_pairs(B, turned), rotate_pairs(C, turned)
    before_b, before_x = _previous(B, prev_b, *where), _previous(u, prev_x, *where)
    log_decay = dt * A.float()
    v, before_v = (blend * dt)[..., None] * u, ((1 - blend) * dt * log_decay.exp())[..., None] * before_x
    y = torch.empty_like(u)

    def move(h: Tensor, rows: slice | int) -> Tensor:
        h = h * log_decay[rows].exp()[..., None, None] + v[rows][..., None] * B[rows][..., None, :]
        h = h + before_v[rows][..., None] * before_b[rows][..., None, :]
        y[rows] = (h @ C[rows][..., None])[..., 0]
        return h

    if state.dtype != torch.float32:
        walk_tokens(move, state, (*where, num_decodes), positions)
        return (y + D.float()[:, None] * u).to(x.dtype)
    if n := num_decodes:
        state[slots[:n]] = move(state[slots[:n]], slice(n))
    size = min(chunk_size, SSD_CHUNK)
    for rows, slot, past in pieces(*where, num_decodes):
        h = begin(state, slot, past)
        now, h = ssd(v[rows], log_decay[rows], B[rows], C[rows], h, size)
        then, g = ssd(before_v[rows], log_decay[rows], before_b[rows], C[rows], torch.zeros_like(h), size)
        y[rows], state[slot] = now + then, h + g
    return (y + D.float()[:, None] * u).to(x.dtype)


@mamba3_scan.inputs
def _inputs(case: RecurrentCase, dtype: torch.dtype, device: str) -> Arguments:
    slots, query_start, has_history, num_slots = ragged_case(case["seqs"], device)
    total, heads, dim, size = int(query_start[-1]), case["heads"], case["dim"], case["state"]

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, device=device)

    x = normal(total, heads, dim).to(dtype)
    B, C = (normal(total, heads, size).to(dtype) / size**0.5 for _ in "BC")
    dt, blend = torch.rand(total, heads, device=device), torch.rand(total, heads, device=device)
    A, D = -4 * torch.rand(heads, device=device), normal(heads)
    theta, angle = normal(total, heads, size // 2), normal(num_slots, heads, size // 2)
    state = normal(num_slots, heads, dim, size)
    slot_tensors = (state, angle, normal(num_slots, heads, size), normal(num_slots, heads, dim))
    where = (slots, query_start, has_history, case["decodes"])
    return (x, dt, blend, theta, A, B, C, D, *slot_tensors, *where), {}


@op(
    cases=[
        dict(tokens=1, groups=2, heads=2, state=16),
        dict(tokens=33, groups=2, heads=8, state=128),
        dict(tokens=5, groups=6, heads=12, state=5),
    ]
)
def norm_for_heads(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """The RMS norm of every group, given to each of its heads, which adds a bias of its own.

    x: [T, G, N], weight: [N], bias: [H, N], group h // (H/G) serving head h -> [T, H, N] in x's dtype.
    """
    normed: Tensor = rms_norm.reference(x, weight, eps)
    return normed.repeat_interleave(len(bias) // x.shape[1], 1) + bias


@norm_for_heads.replaces(rms_norm, combine)
def _norm_then_add(
    norm: TensorFn, add: TensorFn, x: Tensor, weight: Tensor, bias: Tensor, eps: float
) -> Tensor:
    normed, heads = norm(x, weight, eps), len(bias)
    normed = normed[:, :, None].expand(-1, -1, heads // x.shape[1], -1).flatten(1, 2)
    return add(normed, bias.expand_as(normed), 1.0)


@norm_for_heads.inputs
def _norm_for_heads_inputs(case: RecurrentCase, dtype: torch.dtype, device: str) -> Arguments:
    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, dtype=dtype, device=device)

    size = case["state"]
    return (normal(case["tokens"], case["groups"], size), normal(size), normal(case["heads"], size), 1e-6), {}


@op(cases=[case for case in CASES if case["state"] % 2 == 0])
def raw_mamba3_scan(
    x: Tensor,
    dt: Tensor,
    blend: Tensor,
    theta: Tensor | None,
    bc: Tensor,
    A: Tensor,
    D: Tensor,
    dt_bias: Tensor,
    weight: Tensor,
    bias: Tensor,
    state: Tensor,
    angle: Tensor | None,
    prev_b: Tensor,
    prev_x: Tensor,
    slots: Tensor,
    query_start: Tensor,
    has_history: Tensor,
    num_decodes: int,
    eps: float,
    dt_limit: tuple[float, float],
    activation: str | None,
    chunk_size: int = 256,
    positions: Tensor | None = None,
) -> Tensor:
    """`mamba3_scan` of what its linear layers give: steps, shares, norms and biases of B and C included.

    dt, blend: [T, H], of which the step is softplus(dt + dt_bias) within dt_limit, the share sigmoid(blend);
    bc: [T, 2 G, N], groups of B, then of C, through `norm_for_heads` with weight [N] and bias [2 H, N];
    activation: of x, "silu" or None; the rest as for `mamba3_scan`.
    """
    parts = step_sizes.reference, activate.reference, norm_for_heads.reference, mamba3_scan.reference
    return _prepare_then_scan(
        *parts, x, dt, blend, theta, bc, A, D, dt_bias, weight, bias, state, angle, prev_b, prev_x, slots,
        query_start, has_history, num_decodes, eps, dt_limit, activation, chunk_size, positions,
    )  # fmt: skip


@raw_mamba3_scan.replaces(step_sizes, activate, norm_for_heads, mamba3_scan, is_default=True)
def _prepare_then_scan(
    steps: TensorFn,
    act: TensorFn,
    norm: TensorFn,
    scan: TensorFn,
    x: Tensor,
    dt: Tensor,
    blend: Tensor,
    theta: Tensor | None,
    bc: Tensor,
    A: Tensor,
    D: Tensor,
    dt_bias: Tensor,
    weight: Tensor,
    bias: Tensor,
    state: Tensor,
    angle: Tensor | None,
    prev_b: Tensor,
    prev_x: Tensor,
    slots: Tensor,
    query_start: Tensor,
    has_history: Tensor,
    num_decodes: int,
    eps: float,
    dt_limit: tuple[float, float],
    activation: str | None,
    chunk_size: int = 256,
    positions: Tensor | None = None,
) -> Tensor:
    if activation:
        x = act(x.flatten(1), activation, False).unflatten(-1, x.shape[1:])
    B, C = norm(bc, weight, bias, eps).chunk(2, 1)
    dt, blend = steps(dt, dt_bias, *dt_limit), act(blend, "sigmoid", False)
    memory, where = (state, angle, prev_b, prev_x), (slots, query_start, has_history, num_decodes)
    return scan(x, dt, blend, theta, A, B, C, D, *memory, *where, chunk_size, positions)


@raw_mamba3_scan.inputs
def _raw_inputs(case: RecurrentCase, dtype: torch.dtype, device: str) -> Arguments:
    (x, _, _, theta, A, _, _, D, *rest), _ = _inputs(case, dtype, device)
    tokens, heads, groups, size = len(x), case["heads"], case["groups"], case["state"]

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, dtype=dtype, device=device)

    dt, blend = 2 * normal(tokens, heads) - 2, normal(tokens, heads)
    weight, bias = torch.rand(size, device=device).to(dtype) / size**0.5, normal(2 * heads, size) / size**0.5
    dt_bias, limits = torch.randn(heads, device=device), (0.001, 2.0)
    bc, activation = normal(tokens, 2 * groups, size), "silu" if groups > 1 else None
    operands = (x, dt, blend, theta, bc, A, D, dt_bias, weight, bias)
    return (*operands, *rest, 1e-5, limits, activation), {}


@op(
    cases=[
        dict(tokens=1, heads=4, n_in=16, n_out=64),
        dict(tokens=33, heads=3, n_in=64, n_out=50),
        dict(tokens=70, heads=4, n_in=7, n_out=24, bias=False),
    ]
)
def map_each_head(x: Tensor, linear: Linear) -> Tensor:
    """Every head through the same linear layer, in any storage. x: [T, H, n] -> [T, H, m] in x's dtype."""
    return linear(x)


@map_each_head.inputs
def _map_each_head_inputs(case: RecurrentCase, dtype: torch.dtype, device: str) -> Arguments:
    n, m = case["n_in"], case["n_out"]
    x = torch.randn(case["tokens"], case["heads"], n + 3, dtype=dtype, device=device)[..., 1:-2]
    weight = Dense(torch.randn(m, n, dtype=dtype, device=device) / n**0.5)
    bias = torch.randn(m, dtype=dtype, device=device) if case.get("bias", True) else None
    return (x, Linear([weight], [bias], bind_reference, dtype)), {}
