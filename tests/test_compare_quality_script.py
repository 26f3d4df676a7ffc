"""The quality table measures what it says: float32 is exact, more rounding is further from it."""

from __future__ import annotations

import importlib.util
import math
import sys
from argparse import Namespace
from pathlib import Path
from types import ModuleType

import pytest
import torch

from plait.config import EngineConfig
from plait.kernels.load import load_kernels
from plait.loading.open_model import open_model

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="module")
def quality() -> ModuleType:
    spec = importlib.util.spec_from_file_location("quality", ROOT / "benchmarks" / "quality.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["quality"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def test_a_score_is_perplexity_and_divergence(quality: ModuleType) -> None:
    ids, uniform = [1, 2, 0], torch.zeros(3, 4)
    other = torch.tensor([[0.0, 0.0, 9.0, 0.0]] * 3)
    score = quality.Score()
    score.add(ids, other, uniform.log_softmax(-1))
    row = score.row()
    found = other.log_softmax(-1)[0]
    assert row["perplexity"] == pytest.approx(math.exp(-(found[2] + found[0]) / 2), rel=1e-4)
    assert row["kl_mean"] == pytest.approx(float(-math.log(4) - found.mean()), rel=1e-2)
    assert quality.Score().add(ids, other, None).exp().sum(-1).tolist() == pytest.approx([1, 1, 1])


@pytest.mark.slow
def test_rounding_more_is_further_from_float32(quality: ModuleType, nano_hybrid: Path) -> None:
    load_kernels()
    given = Namespace(text=quality.TEXT, tokens=130, threads=1, dither=False, llama_cpp=None, only=[])
    given.quantize = ["q8_0", "q4_0"]
    results = quality.compare(open_model(str(nano_hybrid), EngineConfig(device="cpu")), given)
    assert results["float32, fastest ops"]["kl_mean"] < 1e-6
    assert results["--precise: 16-bit activations, float32 KV"]["top1_agreement"] == 1.0
    eight, four = (results[f"--quantize {name}"] for name in ("q8_0", "q4_0"))
    assert 1e-5 < 5 * eight["kl_mean"] < four["kl_mean"] < 0.2
    assert four["weights_mib"] < eight["weights_mib"] < results["float32, fastest ops"]["weights_mib"]
    assert quality.table(results).count("\n") == len(results) + 1
