"""What is between layers with several residual streams: they are weighed, mixed and matched; sparse gates."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from plait.ops.activation import CURVES, activate, combine, gate, rescale
from plait.ops.case import Case
from plait.ops.norm import rms_norm
from plait.ops.registry import Arguments, TensorFn, op
from plait.ops.wkv import mix_shift

CASES: list[Case] = [
    dict(tokens=1, streams=4, out=4, size=64),
    dict(tokens=33, streams=1, out=3, size=100),
    dict(tokens=5, streams=2, out=4, size=23),
]


@op(cases=CASES)
def mix_streams(x: Tensor, by: Tensor) -> Tensor:
    """Sums of a token's streams: y[k] = Σ_j by[k, j] x[j] (Baykal et al. 2023).

    x: [T, J, n], by: [T, K * J] or one such row for all -> [T, K, n], dense.
    """
    factors = by.float().unflatten(-1, (-1, x.shape[1]))
    return torch.einsum("tkj,tjn->tkn", factors.expand(len(x), -1, -1), x.float()).to(x.dtype)


@mix_streams.inputs
def _mix_inputs(case: Case, dtype: torch.dtype, device: str) -> Arguments:
    wide = torch.randn(case["tokens"], case["streams"], 2 * case["size"], dtype=dtype, device=device)
    rows = case["tokens"] if case["out"] == 4 else 1
    return (wide.chunk(2, -1)[0], torch.randn(rows, case["out"] * case["streams"], device=device)), {}


@op(cases=[case for case in CASES if case["out"] == 4])
def read_streams(x: Tensor, by: Tensor, weight: Tensor, eps: float) -> Tensor:
    """The RMS norm of a sum of a token's streams, Σ_j by[j] x[j]: what a branch over streams reads.

    x: [T, J, n], by: [T, J], rows of both may lie apart, weight: [n] float32 -> [T, n], dense.
    """
    found: Tensor = rms_norm.reference(mix_streams.reference(x, by)[:, 0], weight, eps)
    return found


@read_streams.replaces(mix_streams, rms_norm, is_default=True)
def _mix_then_norm(
    mix: TensorFn, norm: TensorFn, x: Tensor, by: Tensor, weight: Tensor, eps: float
) -> Tensor:
    return norm(mix(x, by)[:, 0], weight, eps)


@read_streams.inputs
def _read_inputs(case: Case, dtype: torch.dtype, device: str) -> Arguments:
    (x, by), _ = _mix_inputs(case, dtype, device)
    return (x, by[:, : case["streams"]], torch.randn(case["size"], device=device), 1e-5), {}


@op(cases=CASES)
def write_streams(x: Tensor, y: Tensor, written: Tensor, mixed: Tensor) -> Tensor:
    """What mixes a token's streams and adds y, if added to them: Σ_j mixed[k, j] x[j] - x[k] + written[k] y.

    x: [T, K, n], y: [T, n], written: [T, K], mixed: [T, K * K] (Xie et al. 2026); rows of all may lie apart
    -> [T, K, n], dense.
    """
    wide = x.float()
    moved = torch.einsum("tkj,tjn->tkn", mixed.float().unflatten(-1, (-1, x.shape[1])), wide) - wide
    return (written.float()[..., None] * y.float()[:, None] + moved).to(x.dtype)


@write_streams.replaces(mix_streams, combine, is_default=True)
def _mix_then_add(
    mix: TensorFn, combine: TensorFn, x: Tensor, y: Tensor, written: Tensor, mixed: Tensor
) -> Tensor:
    # What leaves the streams as they are: its sums are the streams themselves, bit for bit.
    moved = combine(mix(x, mixed).flatten(1), x.flatten(1), -1.0)
    return combine(mix(y[:, None], written).flatten(1), moved, 1.0).view(x.shape)


@write_streams.inputs
def _write_inputs(case: Case, dtype: torch.dtype, device: str) -> Arguments:
    tokens, streams, size = case["tokens"], case["streams"], case["size"]
    wide = torch.randn(tokens, (streams + 2) * size, dtype=dtype, device=device)
    weights = torch.randn(tokens, 2 * streams + streams**2, device=device) / 2
    _, written, mixed = weights.split([streams, streams, streams**2], -1)
    x = wide[:, : streams * size].unflatten(-1, (streams, size))
    return (x, wide[:, -size:], written, mixed), {}


@op(cases=[*CASES, dict(tokens=4, size=40, out=0)])
def write_scaled(
    x: Tensor, scale: Tensor, shift: Tensor, y: Tensor | None, y_scale: Tensor, y_shift: Tensor
) -> Tensor:
    """What makes a x + b + c y + d of x, once added to it (ZAYA): learned vectors are a, b, c, d.

    x, y: [T, n], rows may lie apart, y None: nothing is added; the vectors: [n] -> [T, n] in their dtype.
    """
    total = shift + x * scale
    return (total if y is None else total + (y_shift + y * y_scale)) - x


@write_scaled.replaces(mix_shift, combine, is_default=True)
def _shift_then_add(
    mix: TensorFn,
    combine: TensorFn,
    x: Tensor,
    scale: Tensor,
    shift: Tensor,
    y: Tensor | None,
    y_scale: Tensor,
    y_shift: Tensor,
) -> Tensor:
    total = mix(shift.expand(x.shape), x, scale.expand(x.shape))
    if y is not None:
        total = combine(total, mix(y_shift.expand(x.shape), y, y_scale.expand(x.shape)), 1.0)
    return combine(total, x, -1.0)


@write_scaled.inputs
def _blend_inputs(case: Case, dtype: torch.dtype, device: str) -> Arguments:
    size = case["size"]
    wide = torch.randn(case["tokens"], 4 * size, dtype=dtype, device=device)
    x, y = wide.split(size, -1)[::2]
    scale, shift, y_scale, y_shift = torch.randn(4, size, device=device).unbind()
    return (x, scale, shift, y if case["out"] else None, y_scale, y_shift), {}


WEIGHED: list[dict[str, int]] = [
    dict(tokens=1, streams=4, size=4, rounds=0),
    dict(tokens=33, streams=3, size=6, rounds=0),
    dict(tokens=19, streams=4, size=24, rounds=20),
    dict(tokens=5, streams=3, size=15, rounds=1),
]


@op(cases=WEIGHED)
def weigh_streams(
    logits: Tensor, streams: int, eps: float, magnitude: float, added: float, rounds: int
) -> Tensor:
    """By which weights a branch reads, writes and mixes a token's streams (Zhu et al. 2024; Xie et al. 2026).

    Of the logits, the first `streams` become sigmoid + eps, the next magnitude · sigmoid + added, if there
    are some. The rest, if any, is a matrix [from, to]: the softmax of each row + eps, then columns, rows,
    columns … are divided by their sums + eps, columns `rounds` times. It is given as [to, from].
    logits: [T, n] with n = streams, 2 streams, or 2 streams + streams² -> [T, n] float32.
    """
    read, written, mixed = logits.float().split(_part_sizes(logits.shape[-1], streams), -1)
    found = [read.sigmoid() + eps, magnitude * written.sigmoid() + added]
    if mixed.shape[-1]:
        matrix = mixed.unflatten(-1, (streams, streams)).softmax(-1) + eps
        for i in range(rounds):
            matrix = matrix / (matrix.sum(-1, keepdim=True) + eps) if i else matrix
            matrix = matrix / (matrix.sum(-2, keepdim=True) + eps)
        found.append(matrix.mT.flatten(1))
    return torch.cat(found, -1)


def _part_sizes(size: int, streams: int) -> list[int]:
    written = streams if size > streams else 0
    return [streams, written, size - streams - written]


@weigh_streams.inputs
def _weigh_inputs(case: Case, dtype: torch.dtype, device: str) -> Arguments:
    logits = 3 * torch.randn(case["tokens"], case["size"], dtype=dtype, device=device)
    return (logits, case["streams"], 1e-6, 1.7, 0.01, case["rounds"]), {}


@op(cases=CASES)
def match_size(x: Tensor, like: Tensor, least: float) -> Tensor:
    """x with the root mean square of `like`, row by row; x's own counts as √least at least.

    x, like: [T, n], rows may lie apart -> [T, n].
    """
    wanted, own = (t.float().square().mean(-1, keepdim=True) for t in (like, x))
    return (x.float() * wanted.sqrt() / own.clamp(min=least).sqrt()).to(x.dtype)


@match_size.inputs
def _match_inputs(case: Case, dtype: torch.dtype, device: str) -> Arguments:
    wide = torch.randn(case["tokens"], 4 * case["size"], dtype=dtype, device=device)
    return (*wide.split(case["size"], -1)[::2], 1e-5), {}


@op(cases=CASES)
def keep_largest(x: Tensor, times: float) -> Tensor:
    """How far each number lies above mean + times · deviation of its row, and 0 below.

    So a known share of a row is left if its numbers are normally distributed (Gemma 3n). x: [T, n], rows may
    lie apart -> [T, n].
    """
    wide = x.float()
    deviation, mean = torch.std_mean(wide, -1, correction=0, keepdim=True)
    return F.relu(wide - (mean + deviation * times)).to(x.dtype)


@keep_largest.inputs
def _keep_inputs(case: Case, dtype: torch.dtype, device: str) -> Arguments:
    wide = 1 + torch.randn(case["tokens"], 2 * case["size"], dtype=dtype, device=device)
    return (wide.chunk(2, -1)[0], 0.8), {}


SOURCES: list[Case] = [
    dict(tokens=1, streams=1, size=64),
    dict(tokens=33, streams=4, size=100),
    dict(tokens=5, streams=9, size=23),
    dict(tokens=2, streams=3, size=700),
    dict(tokens=3, streams=2, size=300, out=3),
    dict(tokens=7, streams=5, size=23, out=2),
    dict(tokens=5, streams=3, size=23, normed=True),
    dict(tokens=4, streams=3, size=40, out=3, normed=True),
]


@op(cases=SOURCES)
def mix_sources(queries: Tensor, eps: float, of_normed: bool, *sources: Tensor) -> Tensor:
    """Attention over the depth: Σ_k softmax_k(query · (source_k / rms(source_k))) source_k (Kimi-K3).

    of_normed: the sum is of source_k / rms(source_k), too (Inkling 2). queries: [R, n] float32, sources: as
    many as there are, [T, n] each, rows may lie apart -> [T, R · n], dense: the sum of each query.
    """
    values = torch.stack(sources, 1).float()
    normed = values * torch.rsqrt(values.square().mean(-1, keepdim=True) + eps)
    shares = torch.einsum("tkn,rn->trk", normed, queries).softmax(-1)
    mixed = torch.einsum("trk,tkn->trn", shares, normed if of_normed else values)
    return mixed.flatten(1).to(sources[0].dtype)


@mix_sources.inputs
def _sources_inputs(case: Case, dtype: torch.dtype, device: str) -> Arguments:
    wide = torch.randn(case["tokens"], case["streams"], 2 * case["size"], dtype=dtype, device=device)
    sources = wide.chunk(2, -1)[0].unbind(1)
    reads, size = case.get("out", 1), case["size"]
    return (
        torch.randn(reads, size, device=device) / size**0.5,
        1e-5,
        case.get("normed", False),
        *sources,
    ), {}


GATED: list[Case] = [
    dict(tokens=1, size=64, kind="sigmoid", scale=0.25, out=2),
    dict(tokens=9, size=100, kind="silu", scale=0.5, out=1),
    dict(tokens=5, size=40, kind="softplus", scale=0.7, out=2),
]


@op(cases=GATED)
def activate_scaled(x: Tensor, scale: float, kind: str, magnitude: float) -> Tensor:
    """magnitude · activation(scale · x), a name of CURVES. x: [T, n], rows may lie apart -> [T, n]."""
    return CURVES[kind](x * scale) * magnitude


@activate_scaled.replaces(rescale, activate, is_default=True)
def _rescale_then_activate(
    rescale: TensorFn, activate: TensorFn, x: Tensor, scale: float, kind: str, magnitude: float
) -> Tensor:
    found = activate(rescale(x, scale, None), kind, False)
    return found if magnitude == 1.0 else rescale(found, magnitude, None)


@activate_scaled.inputs
def _activate_inputs(case: Case, dtype: torch.dtype, device: str) -> Arguments:
    x = 3 * torch.randn(case["tokens"], 2 * case["size"], dtype=dtype, device=device)
    return (x.chunk(2, -1)[1], case["scale"], case["kind"], float(case["out"])), {}


@op(cases=CASES)
def mix_gated(x: Tensor, by: Tensor, factors: Tensor) -> Tensor:
    """A sum of gated streams: Σ_j factors[j] x[j] · sigmoid(by[j]), number by number (Qwen4-Exp).

    x, by: [T, J · n], factors: [1, J] -> [T, n], dense.
    """
    gated = (x.float() * by.float().sigmoid()).unflatten(-1, (factors.shape[1], -1))
    return torch.einsum("j,tjn->tn", factors[0], gated).to(x.dtype)


@mix_gated.replaces(gate, mix_streams, is_default=True)
def _gate_then_mix(gate: TensorFn, mix: TensorFn, x: Tensor, by: Tensor, factors: Tensor) -> Tensor:
    return mix(gate(x, by).unflatten(-1, (factors.shape[1], -1)), factors)[:, 0]


@mix_gated.inputs
def _mix_gated_inputs(case: Case, dtype: torch.dtype, device: str) -> Arguments:
    streams = case["streams"]
    x, by = torch.randn(case["tokens"], 2 * streams * case["size"], dtype=dtype, device=device).chunk(2, -1)
    return (x, by, torch.full((1, streams), 1.0 / streams, device=device)), {}
