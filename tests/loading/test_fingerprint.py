"""The fingerprint follows weights and arithmetic alone: while it stays, equal seeds mean equal replies."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from plait import LLM
from plait.loading import packed_cache as module
from plait.loading.packed_cache import fingerprint


@pytest.fixture
def model(nano_hybrid: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(nano_hybrid, tmp_path / "model"))


def made(model: Path, **options: Any) -> str:
    sizes = {"max_num_batched_tokens": 32, "max_num_seqs": 4, "threads": 1, "startup_image": "off"}
    with LLM(str(model), device="cpu", **(sizes | options)) as llm:
        return fingerprint(llm._loaded.opened, llm._loaded.target)


def test_a_copy_served_with_other_sizes_has_the_same_fingerprint(model: Path, tmp_path: Path) -> None:
    first = made(model)
    assert first.startswith("fp_")
    assert len(first) == 19
    copy = Path(shutil.copytree(model, tmp_path / "copy"))
    for file in copy.iterdir():
        os.utime(file, (1, 1))
    assert made(copy, max_num_seqs=2, max_model_len=64, prefix_cache=False) == first


def test_other_weights_arithmetic_and_versions_have_others(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = [made(model), made(model, precise=True), made(model, quantize="q8_0")]
    weights = model / "model.safetensors"
    data = bytearray(weights.read_bytes())
    data[-3] ^= 1
    weights.write_bytes(data)
    found.append(made(model))
    monkeypatch.setattr(module, "__version__", "9.9.9")
    found.append(made(model))
    assert len(set(found)) == len(found)
