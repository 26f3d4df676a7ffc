"""Forms of plain linear layers of few rows, with and without bias, and with every activation of gate and up.

Forms of other sizes are where tiles are chosen. Here the kernel's flags differ, at one size.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from plait.kernels.triton.forms import FLOAT32, KernelForm, with_float16
from plait.kernels.triton.linear.few_rows import ACTIVATIONS, few_dense
from plait.kernels.triton.linear.linear import dense_constants

NUMBERS = ("x", "weight", "bias", "out")
TYPES = {
    "parts": "fp32*",
    "counters": "i32*",
    **dict.fromkeys(("n", "n_in", "x_row", "out_row", "weight_row"), "i32!"),
}
WIDE_LOADS = ("LDG.128", "LDGSTS.128")
PRODUCTS = ("HMMA", "HGMMA")
BIASED = ("", "silu", "gelu_pytorch_tanh")  # activations of models with biases


@with_float16
def forms() -> Iterator[KernelForm]:
    """4,096 inputs and outputs, of 8 rows."""
    for act in ("", *ACTIVATIONS):
        for has_bias in (False, True) if act in BIASED else (False,):
            yield _dense_form(act, has_bias, torch.bfloat16)
            yield _dense_form(act, has_bias, torch.float32)


def _dense_form(act: str, has_bias: bool, dtype: torch.dtype) -> KernelForm:
    """Float32 has no matrix units, so its products take more instructions."""
    constants = dense_constants(4096, 4096, 8, act, dtype) | {"BIAS": has_bias}
    options = {key: constants.pop(key) for key in ("num_warps", "num_stages")}
    more = {key: constants.pop(key) for key in ("maxnreg",) if key in constants}
    is_wide = dtype == torch.float32
    named = f"few rows, plain, {act or 'no activation'}, {'bias' if has_bias else 'no bias'}"
    each = constants["BN"] * constants["UNITS"] * constants["UNIT"]
    return KernelForm(
        named + (FLOAT32 if is_wide else ""), few_dense,
        TYPES | dict.fromkeys(NUMBERS, "fp32*" if is_wide else "bf16*"), constants, **options,
        demands=(WIDE_LOADS,) if is_wide else (WIDE_LOADS, PRODUCTS), weights=each,
        max_per_weight=12.0 if is_wide else 2.0,
        options=more,
    )  # fmt: skip
