"""docs/add-a-kernel.md, followed literally: what it writes is imported, checked, timed and tested."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from plait.bench.ops.run import Ground, Roofs, bench_case
from plait.kernels.load import load_kernels
from plait.ops.registry import REGISTRY, Op
from tests.ops import test_fusion, test_variants

PAGE = Path(__file__).parents[1] / "docs" / "add-a-kernel.md"
SOFTSIGN, OP, KERNEL, TESTS, _, FUSED = re.findall(
    r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.S
)


@pytest.fixture
def write(tmp_path: Path) -> Iterator[Any]:
    """Import a text as a module of that name; modules and ops are forgotten afterwards."""
    load_kernels()
    ops, written = dict(REGISTRY), list[str]()

    def imported(name: str, source: str) -> ModuleType:
        path = tmp_path / f"{name}.py"
        path.write_text(source, encoding="utf-8")
        spec = spec_from_file_location(name, path)
        assert spec
        assert spec.loader
        module = sys.modules[name] = module_from_spec(spec)
        written.append(name)
        spec.loader.exec_module(module)
        return module

    yield imported
    for name in written:
        del sys.modules[name]
    for name in REGISTRY.keys() - ops.keys():
        del REGISTRY[name]


def check_and_time(op: Op, cpu: Any) -> None:
    """As test_variants does, then as `plait bench op` does."""
    ground = Ground("cpu", torch.float32, cpu, Roofs(10.0, 10.0, 1.0))
    for case in op.cases:
        test_variants.check_agreement(op, op.variants[0], case, torch.float32, cpu)
        rows = bench_case(op, case, ground)
        assert [row["variant"] for row in rows][:2] == ["reference", "native"]
        assert all(row["seconds"] and not row["refusal"] for row in rows)


def test_elementwise_op_is_one_file_under_forty_lines(write: Any, cpu: Any) -> None:
    assert len(SOFTSIGN.splitlines()) < 40
    made = write("softsign", SOFTSIGN).softsign
    assert REGISTRY["softsign"] is made
    check_and_time(made, cpu)


def test_op_kernel_and_tests_of_the_page_run(write: Any, cpu: Any) -> None:
    op = write("plait.ops.l2_norm", OP).l2_norm
    write("plait.kernels.cpu.pointwise.l2_norm", KERNEL)
    check_and_time(op, cpu)
    module = write("test_l2_norm", TESTS)
    found = [value for name, value in vars(module).items() if name.startswith("test_")]
    assert len(found) == 2
    for test in found:
        test(cpu)


def test_fused_op_of_the_page_agrees_with_its_composition(write: Any, cpu: Any) -> None:
    write("plait.ops.l2_norm", OP)
    write("plait.kernels.cpu.pointwise.l2_norm", KERNEL)
    op = write("scaled_l2_norm", FUSED).scaled_l2_norm
    for case in op.cases:
        for dtype in op.tolerance:
            test_fusion.test_composition_of_references_agrees_with_the_fused_reference(op, case, dtype)
        test_fusion.test_native_composition_agrees_with_the_fused_kernel(op, case, cpu)
