"""Every Triton variant on the cases of its op, in Triton's interpreter, against the op's reference.

A kernel is tested by being registered. In float32 and float16: the interpreter's bfloat16 is wrong.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed here")

from plait.kernels.load import load_for_gpu
from plait.model.mixers.registry import list_mixers
from plait.ops.chip import EXAMPLES
from plait.ops.linear import bind_layers
from plait.ops.registry import REGISTRY, Op, OpFacts, Variant
from tests.ops.test_variants import STANDARD, copied, shared_state, tensors

load_for_gpu()
list_mixers()
FEW = 2  # cases of an op that are no slow ones, one in a sample: the interpreter takes a second for each
# Ops of which the second case takes up to ten. Tests of their own have other sizes.
ONE = {
    *("experts", "add_experts", "raw_mamba3_scan", "mamba3_scan", "mamba2_scan", "mamba2_scan_from_dt"),
    *("mamba1_scan", "gated_mamba1_scan", "gated_delta_scan", "delta_scan_from_gates"),
    *("choose_entries", "entry_attention", "front_attention", "choose_entry_blocks", "choose_among_blocks"),
}


def runnable() -> Iterator[Any]:
    for op in REGISTRY.values():
        for variant in op.variants:
            if variant.on != "cuda" or ".triton." not in variant.module:
                continue
            served = 0
            for i, case in enumerate(op.cases):
                for dtype in (torch.float32, torch.float16):
                    facts = OpFacts("cuda", dtype, {**STANDARD, **case}, chip=EXAMPLES[90])
                    if variant.refusal(facts) is not None or dtype not in op.tolerance:
                        continue
                    served += dtype is torch.float32
                    few = 1 if op.name in ONE else FEW
                    is_quick = served <= few and dtype is torch.float32
                    one = pytest.mark.sampled(FEW, across=f"{op.name} by {variant.name} in Triton")
                    marks = one if is_quick else pytest.mark.slow
                    name = f"{op.name}-{variant.name}-{i}-{str(dtype).removeprefix('torch.')}"
                    yield pytest.param(op, variant, case, dtype, id=name, marks=marks)


@pytest.mark.sampled(2, each="variant")
@pytest.mark.parametrize(("op", "variant", "case", "dtype"), list(runnable()))
def test_variant_agrees_with_reference(op: Op, variant: Variant, case: Any, dtype: torch.dtype) -> None:
    assert op.make, f"{op.name} has cases but no @{op.name}.inputs"
    args, kwargs = op.make(case, dtype, "cpu")
    wanted, given = copied(args), copied(args)
    want = [*tensors(op.reference(*wanted, **kwargs)), *tensors(shared_state(op, wanted))]
    given = bind_layers(given, OpFacts("cuda", dtype, chip=EXAMPLES[90]))
    got = [*tensors(variant.fn(*given, **kwargs)), *tensors(shared_state(op, given))]
    near = op.find_tolerance(variant, dtype)
    assert len(got) == len(want)
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a.float(), b.float(), rtol=near, atol=near)
