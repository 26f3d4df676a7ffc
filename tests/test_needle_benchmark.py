"""The needle benchmark: prompts as they should be, and every mode of the nano hybrid near the exact one."""

from __future__ import annotations

import importlib
from pathlib import Path
from types import ModuleType

import pytest
import torch

from plait.config import EngineConfig
from plait.kernels.load import load_kernels
from plait.loading.open_model import open_model

BENCHMARKS = Path(__file__).resolve().parent.parent / "benchmarks"


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    monkeypatch.setattr("quality.WINDOW", 512)  # is put back: the benchmark sets it
    return importlib.import_module("needle")


def test_a_name_counts_as_found_where_it_is_farthest_above_its_mean(script: ModuleType) -> None:
    right = torch.eye(16)[None]
    assert script.summarize({"near": right}) == {
        "near": {"found": 1.0, "lift": 1.0},
        "all": {"found": 1.0, "lift": 1.0},
    }
    both = script.summarize({"near": right, "far": -right})
    assert both["far"] == {"found": 0.0, "lift": -1.0}
    assert both["all"] == {"found": 0.5, "lift": 0.0}


@pytest.mark.slow
def test_rounded_caches_find_what_exact_ones_do(script: ModuleType, nano_hybrid: Path) -> None:
    load_kernels()
    opened = open_model(str(nano_hybrid), EngineConfig(device="cpu", threads=2))
    text = script.TEXT.read_text(encoding="utf-8")
    results = script.measure(opened, text, 512, 1, 2)
    exact = results["exact: float32"]
    assert exact["near"]["lift"] > 0.1
    for mode, found in results.items():
        assert abs(found["all"]["lift"] - exact["all"]["lift"]) < 0.02, mode
        assert found["all"]["found"] > 0.15, mode  # chance is 0.0625
