"""Functions of float32 numbers inside Triton kernels, which its interpreter has, too.

Each is as precise as torch's, small results included: softplus(-10) is 5e-5, which log(1 + exp(x)) has three
digits of.
"""

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
def silu(x):
    return x * sigmoid(x)


@triton.jit
def softplus(x):
    """log(1 + exp(x)), and x itself beyond 20, as torch has it. Kahan's form of log1p."""
    z = tl.exp(tl.minimum(x, 20.0))
    w = 1.0 + z
    near = w == 1.0
    y = tl.where(near, z, tl.log(w) * (z / tl.where(near, 1.0, w - 1.0)))
    return tl.where(x > 20.0, x, y)


@triton.jit
def one_minus_exp(x):
    """1 - exp(x) of x ≤ 0, without cancellation near 0: the series of exp up to x^7 above -0.35."""
    series = 1.0 + x * (1.0 / 6.0) * (1.0 + x * (1.0 / 7.0))
    series = 1.0 + x * (1.0 / 4.0) * (1.0 + x * (1.0 / 5.0) * series)
    series = -x * (1.0 + x * (1.0 / 2.0) * (1.0 + x * (1.0 / 3.0) * series))
    return tl.where(x > -0.35, series, 1.0 - tl.exp(x))


@triton.jit
def turn_by(angle, step):
    """The angle moved on by a step, in radians within [0, 2π], rounded to float32; and its cosine and sine.

    The sum and the reduction to an eighth of a turn are in float64; there polynomials of Cephes (Moshier
    1989) serve. CUDA's own sine would take memory of the stack for angles that do not occur here.
    """
    total = angle.to(tl.float64) + step.to(tl.float64)
    turns = (total * 0.15915494309189535).to(tl.int64).to(tl.float64)
    total -= turns * 6.283185307179586
    total = tl.where(total < 0, total + 6.283185307179586, total)
    angle = total.to(tl.float32)
    quarter = (angle.to(tl.float64) * 0.6366197723675814 + 0.5).to(tl.int32)
    r = (angle.to(tl.float64) - quarter.to(tl.float64) * 1.5707963267948966).to(tl.float32)
    z = r * r
    sin = r + r * z * (-1.6666654611e-1 + z * (8.3321608736e-3 - z * 1.9515295891e-4))
    cos = (
        1.0
        - 0.5 * z
        + z * z * (4.166664568298827e-2 + z * (-1.388731625493765e-3 + z * 2.443315711809948e-5))
    )
    odd = (quarter & 1) == 1
    a, b = tl.where(odd, sin, cos), tl.where(odd, cos, sin)
    a = tl.where(((quarter + 1) & 2) == 2, -a, a)
    b = tl.where((quarter & 2) == 2, -b, b)
    return angle, a, b


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
    elif KIND == "swiglu_7" or KIND == "swiglu_16":
        limit: tl.constexpr = 7.0 if KIND == "swiglu_7" else 16.0
        near = tl.where(up > limit, limit, tl.where(up < -limit, -limit, up))
        low = gate * sigmoid(gate)
        y = tl.where(low > limit, limit, low) * near
    elif KIND == "swiglu_cut_7" or KIND == "swiglu_cut_10":
        cut: tl.constexpr = 7.0 if KIND == "swiglu_cut_7" else 10.0
        near = tl.where(up > cut, cut, tl.where(up < -cut, -cut, up))
        low = tl.where(gate > cut, cut, gate)
        y = low * sigmoid(low) * near
    elif KIND == "situ":
        y = 4.0 * tanh(gate / 4.0) * sigmoid(gate) * (25.0 * tanh(up / 25.0))
    else:
        y = apply_activation(gate, KIND) * up
    return y
