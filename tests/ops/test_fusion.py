"""Every fused op against the composition that it replaces, on references and on native kernels.

An op is tested here by naming its composition.
"""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch

from plait.errors import ConfigError
from plait.kernels.load import load_kernels
from plait.model.mixers.registry import list_mixers
from plait.ops.linear import Linear
from plait.ops.registry import REGISTRY, Op, OpFacts, check_fused

list_mixers()  # registers every op that a model can use
load_kernels()
FUSED = {name: op for name, op in REGISTRY.items() if op.composition}
CASES = [
    pytest.param(op, case, dtype, id=f"{name}-{i}-{str(dtype).removeprefix('torch.')}")
    for name, op in FUSED.items()
    for i, case in enumerate(op.cases)
    for dtype in op.tolerance
]


def on(cpu: Any, value: Any) -> Any:
    """An argument with its linear layers bound to native kernels."""
    if isinstance(value, list):
        return [on(cpu, item) for item in value]
    if not isinstance(value, Linear):
        return value
    weight, bias, rounding = value.parts[0]

    def bind(op: Op, **sizes: Any) -> Any:
        return op.bind(OpFacts("cpu", torch.float32, sizes, cpu))[0]

    return Linear([weight], [bias], bind, torch.float32, rounding)


def arguments(op: Op, case: Any, dtype: torch.dtype, cpu: Any = None) -> dict[str, Any]:
    """The op's own arguments for a case, by name."""
    assert op.make
    torch.manual_seed(0)
    args, kwargs = op.make(case, dtype, "cpu")
    given = args if cpu is None else on(cpu, list(args))
    return inspect.signature(op.reference).bind(*given, **kwargs).arguments


def results(fn: Any, given: dict[str, Any]) -> list[torch.Tensor]:
    """What `fn` returns, and what it leaves in its arguments."""
    out = fn(*given.values())
    found = [out] if isinstance(out, torch.Tensor) else list(out)
    return [t for t in (*found, *given.values()) if isinstance(t, torch.Tensor)]


@pytest.mark.parametrize(("op", "case", "dtype"), CASES)
def test_composition_of_references_agrees_with_the_fused_reference(
    op: Op, case: Any, dtype: torch.dtype
) -> None:
    fn, rows = op.bind_parts(OpFacts("cpu", dtype, case), choice="reference", no_fuse=[op.name])
    assert [row.variant for row in rows] == ["composition", *["reference"] * (len(rows) - 1)]
    got, want = (results(f, arguments(op, case, dtype)) for f in (fn, op.reference))
    torch.testing.assert_close(got, want, rtol=op.tolerance[dtype], atol=op.tolerance[dtype])


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("op", "case"), [p.values[:2] for p in CASES if p.values[2] == torch.float32])
def test_native_composition_agrees_with_the_fused_kernel(op: Op, case: Any, cpu: Any) -> None:
    assert op.composition
    facts = OpFacts("cpu", torch.float32, {**arguments(op, case, torch.float32, cpu), **case}, cpu)
    apart, rows = op.bind_parts(facts, no_fuse=[op.name])
    assert all(row.variant == "native" for row in rows[1:]), rows
    fused, row = op.bind(facts)
    near = 0.0 if op.composition.exact and row.variant == "native" else op.tolerance[torch.float32]
    got, want = (results(f, arguments(op, case, torch.float32, cpu)) for f in (apart, fused))
    torch.testing.assert_close(got, want, rtol=near, atol=near)


def test_check_fused_lists_the_fused_ops_when_a_name_is_none() -> None:
    check_fused(list(FUSED))
    with pytest.raises(ConfigError, match="'gluu' is no op; fused ops are activate_largest, activate_scaled"):
        check_fused(["glu", "gluu"])
    with pytest.raises(ConfigError, match="'linear' is an op, but not a fused one"):
        check_fused(["linear"])


def test_rows_say_what_a_fused_op_replaces_and_what_runs_without_it() -> None:
    facts, glu = OpFacts("cpu", torch.float32, {"kind": "silu"}), FUSED["glu"]
    _, (row,) = glu.bind_parts(facts, "layers.0.mlp", no_fuse=["gate"])
    assert row.replaces == ("linear", "activate", "multiply")
    _, rows = glu.bind_parts(facts, "layers.0.mlp", no_fuse=["glu"])
    assert [(row.op, row.variant) for row in rows] == [
        ("glu", "composition"), ("activate", "reference"), ("multiply", "reference")
    ]  # fmt: skip
    assert ("native", "--no-fuse names it") in rows[0].skipped
