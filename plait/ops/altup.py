"""What is between the parts of a layer over several streams (AltUp; Baykal et al. 2023): Gemma 3n's.

Each replaces a few pointwise ops. Where no kernel has them in one, these run one after the other.
"""

from __future__ import annotations

import torch
from torch import Tensor

from plait.ops.activation import ACTIVATIONS, activate, combine, multiply, rescale
from plait.ops.case import Case
from plait.ops.elementwise import elementwise_op
from plait.ops.registry import Arguments, TensorFn, op
from plait.ops.streams import keep_largest, mix_streams

CASES: list[Case] = [dict(tokens=1, streams=4, size=64), dict(tokens=5, streams=3, size=600)]


@op(cases=CASES)
def predict_streams(x: Tensor, by: Tensor) -> tuple[Tensor, Tensor]:
    """By how much each stream moves, y[k] = Σ_j by[k, j] x[j], and where the first one is then, x[0] + y[0].

    x: [T, K, n], by: [T, K · K] -> [T, K, n], [T, n], dense.
    """
    moved = mix_streams.reference(x, by)
    return moved, x[:, 0] + moved[:, 0]


@predict_streams.replaces(mix_streams, combine, is_default=True)
def _mix_then_first(mix: TensorFn, combine: TensorFn, x: Tensor, by: Tensor) -> tuple[Tensor, Tensor]:
    moved = mix(x, by)
    return moved, combine(x[:, 0], moved[:, 0], 1.0)


@predict_streams.inputs
def _predict_inputs(case: Case, dtype: torch.dtype, device: str) -> Arguments:
    tokens, streams = case["tokens"], case["streams"]
    x = torch.randn(tokens, 2 * streams, case["size"], dtype=dtype, device=device)[:, streams:]
    return (x, torch.randn(tokens, streams**2, dtype=dtype, device=device) / 2), {}


@op(cases=CASES)
def correct_streams(active: Tensor, found: Tensor, by: Tensor) -> tuple[Tensor, Tensor]:
    """What each stream takes of the news, y[k] = by[k] (found - active), and the first one, active + y[0].

    active, found: [T, n], by: [T, K] -> [T, K, n], [T, n], dense.
    """
    spread = by[..., None] * (found - active)[:, None]
    return spread, active + spread[:, 0]


@correct_streams.replaces(mix_streams, combine, is_default=True)
def _spread_then_first(
    mix: TensorFn, combine: TensorFn, active: Tensor, found: Tensor, by: Tensor
) -> tuple[Tensor, Tensor]:
    spread = mix(combine(found, active, -1.0)[:, None], by)
    return spread, combine(active, spread[:, 0], 1.0)


@correct_streams.inputs
def _correct_inputs(case: Case, dtype: torch.dtype, device: str) -> Arguments:
    tokens, size = case["tokens"], case["size"]
    active, found = torch.randn(tokens, 2 * size, dtype=dtype, device=device).chunk(2, -1)
    return (active, found, torch.randn(tokens, case["streams"], dtype=dtype, device=device) / 2), {}


@op(cases=CASES)
def add_streams(moved: Tensor, spread: Tensor, own: Tensor, by: Tensor) -> Tensor:
    """moved[k] + spread[k] + by[k] own. moved, spread: [T, K, n], own: [T, n], by: [1, K] -> [T, K, n]."""
    return moved + spread + (by[..., None] * own[:, None]).to(moved.dtype)


@add_streams.replaces(mix_streams, combine, is_default=True)
def _add_one_by_one(
    mix: TensorFn, combine: TensorFn, moved: Tensor, spread: Tensor, own: Tensor, by: Tensor
) -> Tensor:
    added = mix(own[:, None], by)
    total = combine(moved.flatten(1), spread.flatten(1), 1.0)
    return combine(total, added.flatten(1), 1.0).view(moved.shape)


@add_streams.inputs
def _add_inputs(case: Case, dtype: torch.dtype, device: str) -> Arguments:
    shape = case["tokens"], case["streams"], case["size"]
    moved, spread = torch.randn(2, *shape, dtype=dtype, device=device).unbind()
    by = torch.tensor([[0.0] + [1.0] * (case["streams"] - 1)], device=device)
    return (moved, spread, torch.randn(shape[0], shape[2], dtype=dtype, device=device), by), {}


@elementwise_op(scale=(0.5**0.5,))
def add_three(x: Tensor, y: Tensor, z: Tensor, scale: float) -> Tensor:
    """(x + y + z) · scale. x, y, z: [T, n], rows may lie apart -> [T, n]."""
    return (x + y + z) * scale


@add_three.replaces(combine, rescale, is_default=True)
def _add_then_rescale(
    combine: TensorFn, rescale: TensorFn, x: Tensor, y: Tensor, z: Tensor, scale: float
) -> Tensor:
    return rescale(combine(combine(x, y, 1.0), z, 1.0), scale, None)


@op(cases=[dict(tokens=1, size=64, kind="gelu_pytorch_tanh"), dict(tokens=3, size=300, kind="silu")])
def activate_largest(x: Tensor, times: float, kind: str) -> Tensor:
    """activation(what `keep_largest` leaves of the gate) · up. x: [T, 2n], [gate, up] -> [T, n]."""
    gate, up = x.chunk(2, -1)
    return ACTIVATIONS[kind](keep_largest.reference(gate, times)) * up


@activate_largest.replaces(keep_largest, activate, multiply, is_default=True)
def _keep_then_activate(
    keep: TensorFn, activate: TensorFn, multiply: TensorFn, x: Tensor, times: float, kind: str
) -> Tensor:
    gate, up = x.chunk(2, -1)
    return multiply(activate(keep(gate, times), kind, False), up)


@activate_largest.inputs
def _activate_inputs(case: Case, dtype: torch.dtype, device: str) -> Arguments:
    x = 1 + torch.randn(case["tokens"], 2 * case["size"], dtype=dtype, device=device)
    return (x, 0.8, case["kind"]), {}
