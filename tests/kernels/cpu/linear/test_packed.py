"""Weights that were packed before become what packing makes of them."""

from __future__ import annotations

import json
from dataclasses import astuple
from typing import Any

import pytest
import torch

from plait.ops.blocks import random_weight
from plait.ops.linear import FLOATS, KINDS, STORED, linear
from plait.ops.registry import OpFacts
from plait.quant.weight import CachedWeight, Dense
from tests.common_storages import mark_rare

PLAIN = ("float32", "bfloat16", "float16")


@pytest.mark.parametrize("kind", [*PLAIN, *mark_rare([*KINDS, *STORED, *FLOATS])])
def test_a_kept_weight_is_the_packed_one(cpu: Any, kind: str) -> None:
    if kind in PLAIN:
        weight: Any = Dense(torch.randn(50, 512).to(getattr(torch, kind)))
    else:
        weight = random_weight(kind, 50, 512)
    rounding = "float32" if kind in (*PLAIN, *FLOATS) else "int8"
    sizes = {"n_in": 512, "n_out": 50, "kind": weight.format, "activations": rounding}
    fn, binding = linear.bind(OpFacts("cpu", torch.float32, sizes, cpu), "", "auto")
    assert binding.variant.startswith("native")
    packed = fn.pack(weight, torch.float32)
    layout = json.loads(json.dumps(astuple(packed.layout) if packed.layout else ()))
    again = fn.pack(
        CachedWeight(weight.format, weight.shape, rounding, tuple(layout), packed.data, packed.order),
        torch.float32,
    )
    for name in ("kind", "n_out", "n_in", "kernel", "shared_per_row", "few", "scratch", "layout", "nbytes"):
        assert getattr(again, name) == getattr(packed, name), name
    assert again.data.data_ptr() == packed.data.data_ptr()
    assert again.order is packed.order
