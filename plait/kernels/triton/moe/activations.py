"""Activations inside Triton kernels: every kind of `ops.activation`, on numbers in registers, in float32."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def sigmoid(x):
    """1 / (1 + e^-x), of |x| so that nothing overflows."""
    e = tl.exp2(-1.4426950408889634 * tl.abs(x))
    return tl.where(x < 0, e, 1.0) / (1.0 + e)


@triton.jit
def tanh(x):
    """By exp2 alone: CUDA's library of functions is not there in the interpreter."""
    e = tl.exp2(-2.885390081777927 * tl.abs(x))
    y = (1.0 - e) / (1.0 + e)
    return tl.where(x < 0, -y, y)


@triton.jit
def apply_activation(x, KIND: tl.constexpr):
    """Activation KIND, a name of `ops.activation.ACTIVATIONS`, of float32 numbers."""
    if KIND == "silu":
        y = x * sigmoid(x)
    elif KIND == "gelu":
        y = 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
    elif KIND == "gelu_pytorch_tanh":
        y = 0.5 * x * (1.0 + tanh(0.7978845608028654 * (x + 0.044715 * x * x * x)))
    elif KIND == "relu":
        y = tl.where(x < 0, 0.0, x)
    elif KIND == "relu2":
        y = tl.where(x < 0, 0.0, x * x)
    else:
        tl.static_assert(KIND == "sigmoid", "an activation without a kernel")
        y = sigmoid(x)
    return y


@triton.jit
def apply_gated(gate, up, KIND: tl.constexpr):
    """activation(gate) · up, or a pair of `ops.activation.PAIRS`; float32."""
    if KIND == "swiglu_oai":
        low = tl.where(gate > 7.0, 7.0, gate)
        near = tl.where(up > 7.0, 7.0, tl.where(up < -7.0, -7.0, up))
        y = (near + 1.0) * low * sigmoid(1.702 * low)
    else:
        y = apply_activation(gate, KIND) * up
    return y
