"""Shapes and dtypes of operators on tensors without memory are torch's own, and import no compiler."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import softplus

from plait.loading.meta.shapes_only import ShapesOnly
from tests.families import tiny

FLOAT, HALF, WHOLE = torch.float32, torch.bfloat16, torch.int64
EACH: dict[str, Callable[[Tensor], Any]] = {
    "a sum with a number": lambda x: x + 1.0,
    "what is subtracted": lambda x: 1 - x,
    "a divisor": lambda x: 2 / x,
    "a quotient": lambda x: x / 3,
    "a power": lambda x: 2.0**x,
    "a sign": lambda x: -x,
    "an exponential": lambda x: x.exp(),
    "a logarithm": torch.log,
    "a limit": lambda x: x.clamp(min=0),
    "a curve": lambda x: softplus(x.float()),
    "a row for all": lambda x: x * x[:1],
    "a dtype that wins": lambda x: x * torch.ones(4, dtype=FLOAT, device="meta"),
    "a number that does not win": lambda x: x * torch.ones((), dtype=torch.float64, device="meta"),
    "a choice": lambda x: torch.where(x > 0, x, x[:1]),
    "rows behind rows": lambda x: torch.cat([x, x[:1], x]),
    "columns next to columns": lambda x: torch.cat((x, x.float()), dim=-1),
    "a pile": lambda x: torch.stack([x, x]),
    "a pile behind": lambda x: torch.stack([x, x, x], -1),
    "an operator that is torch's": lambda x: x.sum(0),
}


@pytest.mark.parametrize("dtype", [FLOAT, HALF, WHOLE], ids=str)
@pytest.mark.parametrize("name", EACH)
def test_a_result_has_torchs_shape_and_dtype(name: str, dtype: torch.dtype) -> None:
    x = torch.empty(3, 4, dtype=dtype, device="meta")
    want = EACH[name](x)
    with ShapesOnly():
        found = EACH[name](x)
    assert (found.shape, found.dtype, found.device) == (want.shape, want.dtype, want.device)


def test_tensors_with_numbers_are_torchs() -> None:
    x = torch.tensor([[1.0, 2.0]])
    with ShapesOnly():
        assert torch.equal(torch.cat([x + 1, -x]), torch.tensor([[2.0, 3.0], [-1.0, -2.0]]))


def test_what_does_not_fit_together_is_refused() -> None:
    x = torch.empty(3, 4, device="meta")
    with ShapesOnly(), pytest.raises(ValueError, match=r"cannot join .*\(3, 4\), \(4, 3\)"):
        torch.cat([x, x.T])
    with ShapesOnly(), pytest.raises(ValueError, match="shape mismatch"):
        x + x.T


def test_a_description_imports_no_compiler(tmp_path: Path) -> None:
    """Of models with numbers that are computed from those of their files, in three ways."""
    names = ("mamba2", "gemma3", "qwen3_next")
    for name in names:
        tiny.write(name, tmp_path / name)
    code = (
        "import sys; from plait.config import EngineConfig\n"
        "from plait.loading.meta.meta_model import model_states\n"
        "from plait.loading.open_model import open_model\n"
        f"for name in {names}:\n"
        f"    opened = open_model({str(tmp_path)!r} + '/' + name, EngineConfig())\n"
        "    assert model_states(opened.resolved, opened.checkpoint)\n"
        "    assert 'torch._dynamo' not in sys.modules, name"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
