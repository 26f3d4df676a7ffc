"""The pointwise parts of a model: activations, gates, residuals, scales, caps."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from plait.ops.case import Case
from plait.ops.elementwise import elementwise_op
from plait.ops.registry import Arguments, TensorFn, op


def _swiglu_oai(gate: Tensor, up: Tensor) -> Tensor:
    """gpt-oss: gate · sigmoid(1.702 gate) · (up + 1), with gate at most 7 and up within ±7."""
    gate, up = gate.clamp(max=7.0), up.clamp(-7.0, 7.0)
    return (up + 1) * gate * torch.sigmoid(1.702 * gate)


def _swiglu_within(gate: Tensor, up: Tensor, limit: float) -> Tensor:
    """Step 3.5: silu(gate), at most the limit, times up, which is within ± it."""
    return F.silu(gate).clamp(max=limit) * up.clamp(-limit, limit)


def _swiglu_cut(gate: Tensor, up: Tensor, limit: float) -> Tensor:
    """DeepSeek-V4: silu of the gate, which is at most the limit, times up, which is within ± it."""
    return F.silu(gate.clamp(max=limit)) * up.clamp(-limit, limit)


def _situ(gate: Tensor, up: Tensor) -> Tensor:
    """Kimi-K3: 4 tanh(gate / 4) · sigmoid(gate) · 25 tanh(up / 25)."""
    return 4 * torch.tanh(gate / 4) * torch.sigmoid(gate) * (25 * torch.tanh(up / 25))


ACTIVATIONS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_pytorch_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "relu": F.relu,
    "relu2": lambda x: F.relu(x).square(),
    "sigmoid": torch.sigmoid,
}
CURVES = {**ACTIVATIONS, "softplus": F.softplus}
PAIRS: Mapping[str, Callable[[Tensor, Tensor], Tensor]] = {
    "swiglu_oai": _swiglu_oai,
    "swiglu_7": lambda gate, up: _swiglu_within(gate, up, 7.0),
    "swiglu_16": lambda gate, up: _swiglu_within(gate, up, 16.0),
    "swiglu_cut_7": lambda gate, up: _swiglu_cut(gate, up, 7.0),
    "swiglu_cut_10": lambda gate, up: _swiglu_cut(gate, up, 10.0),
    "situ": _situ,
}
CASES: list[Case] = [
    dict(tokens=tokens, size=size, kind=kind)
    for tokens, size, kind in (
        (1, 64, "silu"),
        (33, 100, "silu"),
        (5, 96, "gelu"),
        (7, 24, "gelu_pytorch_tanh"),
        (3, 48, "relu"),
        (1, 40, "relu2"),
        (9, 20, "sigmoid"),
        (1, 64, "swiglu_oai"),
        (35, 300, "swiglu_oai"),
        (35, 52, "swiglu_7"),
        (1, 64, "swiglu_16"),
        (33, 52, "swiglu_cut_7"),
        (5, 52, "swiglu_cut_10"),
        (6, 52, "situ"),
    )
]


@elementwise_op()
def multiply(x: Tensor, y: Tensor) -> Tensor:
    """x · y, number by number. x, y: [T, n], with rows that may lie apart in memory -> [T, n]."""
    return x * y


@op(cases=CASES)
def activate(x: Tensor, kind: str, gated: bool) -> Tensor:
    """Activation `kind` of x; if `gated`, x is [gate, up] side by side: activation(gate) · up (Shazeer 2020).

    A kind of PAIRS is a function of both, and always gated. x: [T, n], or [T, 2n] if gated -> [T, n] in x's
    dtype. Rows may lie apart in memory.
    """
    if not gated:
        return CURVES[kind](x)
    gate, up = x.chunk(2, -1)
    return PAIRS[kind](gate, up) if kind in PAIRS else CURVES[kind](gate) * up


@activate.inputs
def _activate_inputs(case: Case, dtype: torch.dtype, device: str) -> Arguments:
    gated = case["tokens"] not in (7, 9)
    x = torch.randn(case["tokens"], case["size"] * (1 + gated), dtype=dtype, device=device)
    return ((4 if case["kind"] in PAIRS else 2) * x, case["kind"], gated), {}


@elementwise_op(scale=(1.0, 0.22))
def combine(x: Tensor, y: Tensor, scale: float) -> Tensor:
    """x + scale · y: a residual that no norm follows. x, y: [T, n] -> [T, n]."""
    return x + (y if scale == 1.0 else y * scale)


@elementwise_op(scale=(0.5,), cap=(None, 2.0))
def rescale(x: Tensor, scale: float, cap: float | None) -> Tensor:
    """scale · x, then cap · tanh(· / cap) if there is a cap (Gemma 2). x: [T, n] -> [T, n]."""
    x = x if scale == 1.0 else x * scale
    return cap * torch.tanh(x / cap) if cap else x


@elementwise_op(limit=(0.5, 1.25))
def clip(x: Tensor, limit: float) -> Tensor:
    """x within ±limit (DBRX's queries, keys and values). x: [T, n], rows may lie apart -> [T, n]."""
    return x.clamp(-limit, limit)


@elementwise_op(scale=(1.0, 2.5))
def key_bias(x: Tensor, rate: Tensor, scale: float) -> Tensor:
    """scale · exp(rate · softplus(x)): what a score gains by its key, however far it is (Doge).

    x, rate: [T, n] -> [T, n] in x's dtype.
    """
    return (scale * torch.exp(rate.float() * F.softplus(x.float()))).to(x.dtype)


@key_bias.inputs
def _key_bias_inputs(case: Case, dtype: torch.dtype, device: str) -> Arguments:
    wide = torch.randn(case["tokens"], 4 * case["size"], dtype=dtype, device=device)
    x, rate = wide.split(case["size"], -1)[::2]
    return (2 * x, rate / 4, case["scale"]), {}  # no exponential is beyond what 16 bits hold


@op(cases=CASES[:3])
def gate_rows(x: Tensor, gate: Tensor) -> Tensor:
    """x · sigmoid(gate), one number for each row (Qwen2-MoE's shared expert). x: [T, n], gate: [T, 1]."""
    return x * gate.sigmoid()


@gate_rows.inputs
def _gate_rows_inputs(case: Case, dtype: torch.dtype, device: str) -> Arguments:
    x = torch.randn(case["tokens"], case["size"], dtype=dtype, device=device)
    return (x, torch.randn(case["tokens"], 1, dtype=dtype, device=device)), {}


@op(cases=[*CASES[:3], dict(tokens=5, heads=3, size=24), dict(tokens=4, heads=3, size=40, each=True)])
def scale_rows(x: Tensor, by: Tensor) -> Tensor:
    """x · by, one number for each row, or for each head of it. x: [T, n] or [T, heads, n], by: [T, 1] or
    [T, heads], float32 or as x -> x's shape, dense."""
    return (x * (by[..., None] if x.dim() == 3 else by)).to(x.dtype)


@scale_rows.inputs
def _scale_rows_inputs(case: Case, dtype: torch.dtype, device: str) -> Arguments:
    shape = (case["tokens"], *((case["heads"],) if "heads" in case else ()), 2 * case["size"])
    x = torch.randn(shape, dtype=dtype, device=device).chunk(2, -1)[0]
    return (x, torch.randn(case["tokens"], case["heads"] if "each" in case else 1, device=device)), {}


@op(cases=CASES[:4])
def xielu(x: Tensor, curve: Tensor) -> Tensor:
    """xIELU (Huang & Schlag 2024): a square above 0, an exponential below, a slope for both.

    curve: [4] float32, the factors of both sides, the slope, and where the lower side begins. x: [T, n].
    """
    above, below, slope, edge = curve.unbind()
    wide = x.float()
    bent = (torch.expm1(torch.minimum(wide, edge)) - wide) * below
    return (torch.where(wide > 0, above * wide * wide, bent) + slope * wide).to(x.dtype)


@xielu.inputs
def _xielu_inputs(case: Case, dtype: torch.dtype, device: str) -> Arguments:
    wide = 3 * torch.randn(case["tokens"], 2 * case["size"], dtype=dtype, device=device)
    return (wide.chunk(2, -1)[0], torch.tensor([0.8, 1.3, 0.5, -1e-6], device=device)), {}


@elementwise_op()
def gate(x: Tensor, by: Tensor) -> Tensor:
    """x · sigmoid(by), number by number: attention that closes its own output (Qiu et al. 2025).

    x, by: [T, n] -> [T, n]; the rows of both may lie apart in memory.
    """
    return x * by.sigmoid()


@gate.replaces(activate, multiply, exact=True)
def _sigmoid_then_product(activate: TensorFn, multiply: TensorFn, x: Tensor, by: Tensor) -> Tensor:
    return multiply(x, activate(by, "sigmoid", False))


@op(cases=CASES[:3])
def step_sizes(dt: Tensor, bias: Tensor | None, low: float, high: float) -> Tensor:
    """softplus(dt + bias) within low..high, float32: how far a state space moves at a token (Gu & Dao 2023).

    dt: [T, H], bias: [H] float32 or None -> [T, H] float32.
    """
    return F.softplus(dt.float() if bias is None else dt.float() + bias).clamp(low, high)


@step_sizes.inputs
def _step_sizes_inputs(case: Case, dtype: torch.dtype, device: str) -> Arguments:
    dt = 4 * torch.randn(case["tokens"], case["size"], dtype=dtype, device=device)
    bias = torch.randn(case["size"], device=device) if case["tokens"] > 1 else None
    return (dt, bias, 0.001, 5.0 if case["tokens"] > 1 else float("inf")), {}


@op(cases=CASES[:3])
def sigmoid_steps(dt: Tensor, bias: Tensor, rate: Tensor) -> Tensor:
    """sigmoid(rate · (dt + bias)), float32: how much of the largest step a state moves (Ling 3's KDA).

    dt: [T, n], rows may lie apart in memory, bias, rate: [n] float32 -> [T, n] float32.
    """
    return torch.sigmoid(rate * (dt.float() + bias))


@sigmoid_steps.inputs
def _sigmoid_steps_inputs(case: Case, dtype: torch.dtype, device: str) -> Arguments:
    wide = 4 * torch.randn(case["tokens"], 2 * case["size"], dtype=dtype, device=device)
    bias, rate = (torch.rand(case["size"], device=device) for _ in range(2))
    return (wide.chunk(2, -1)[0], bias, rate), {}
