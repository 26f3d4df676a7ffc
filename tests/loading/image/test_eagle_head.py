"""Startups from an image of a model with a head of its own files: the bits of the run that kept it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from plait.config import EngineConfig
from plait.loading.image import write
from plait.loading.image.key import key_of
from plait.loading.image.start import find_image, start_image
from plait.loading.open_model import find_model
from plait.request import SamplingParams
from plait.runner.host.mtp import MtpDrafter
from plait.runner.host.mtp_passes import HiddenRows
from plait.schedule.plan import Chunk, SamplingBatch, SamplingRow, StepPlan
from tests.families.dflash_oracle import DFlashOracle
from tests.families.eagle_oracle import EagleOracle
from tests.loading.image.test_drafts import compare_heads
from tests.runner.recordings import loaded

SIZES: dict[str, Any] = {
    "max_num_batched_tokens": 24, "max_num_seqs": 3, "max_model_len": 48, "threads": 2, "device": "cpu",
    "num_draft_tokens": 3,
}  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        (EagleOracle, "first"),
        (EagleOracle, "parallel"),
        (DFlashOracle, "windows"),
        pytest.param(EagleOracle, "speculators", marks=pytest.mark.slow),
        pytest.param(DFlashOracle, "speculators", marks=pytest.mark.slow),
    ],
)
def test_an_image_has_the_bits_of_the_head_that_was_kept(
    kind: type[EagleOracle | DFlashOracle], name: str, tmp_path: Path, kernel_folder: Path
) -> None:
    oracle = kind(name, tmp_path / "oracle")
    head, model = oracle.write(tmp_path / "head"), str(oracle.trunk_folder)
    (tmp_path / "kernels").symlink_to(kernel_folder)
    options = SIZES | ({"memory_limit": 695_000} if name == "parallel" else {})
    config = EngineConfig(speculate=str(head), cache_dir=str(tmp_path), **options)
    with loaded(model, **options, speculate=str(head), cache_dir=str(tmp_path)) as first:
        assert "written to" in write.keep_image(first, 1 << 40)
        assert len(list((tmp_path / "packed").iterdir())) == 2, "of the model, and of the head"
        made = start_image(model, config)
        assert made is not None
        try:
            assert made.engine.speculation is not None
            second = made.engine.speculation.proposer
            assert first.drafter is not None
            compare_heads(first.drafter, second)
            assert second.memory == first.drafter.memory
            assert (second.memory.num_places < 3) == (name == "parallel"), "logits of masks take one"
            assert isinstance(second, MtpDrafter)
            whole = compare_shown(oracle, made.runner, second)
            assert whole.shape[1] == second.passes.before.shape[1]  # type: ignore[attr-defined]
        finally:
            made.close()

    weights = head / "model.safetensors"
    os.utime(weights, ns=(1, 1))  # another head may have come in its place
    assert find_image(model, config) is None
    files = find_model(model)
    assert key_of(files, config) != key_of(files, EngineConfig(cache_dir=str(tmp_path), **SIZES))


def compare_shown(oracle: EagleOracle | DFlashOracle, runner: Any, drafter: MtpDrafter) -> np.ndarray:
    """What a step from the image shows is the reference's, and so is what the whole model shows later."""
    shown: list[np.ndarray] = []

    def keep(plan: StepPlan, rows: HiddenRows) -> None:
        shown.append(torch.as_tensor(rows)[: plan.num_tokens].clone().numpy())

    runner.show(keep)
    ids = (3, 11, 7, 90, 5)
    chunk = Chunk(1, 0, ids, tuple((1, 2) for _ in runner.replay.program.static.tables), 0, 1)
    sampling = SamplingBatch((SamplingRow(SamplingParams(temperature=0.0), 1, 1, len(ids), 0),))
    for launch in (runner.launch, runner.full.launch):
        launch(StepPlan(1, (chunk,)), sampling).wait()
    wanted = oracle.observe(torch.tensor(ids)).numpy()
    for rows in shown:  # of weights and inputs in blocks of eight and five bits
        assert rows.shape == wanted.shape
        assert np.corrcoef(rows.ravel(), wanted.ravel())[0, 1] > 0.98
    np.testing.assert_allclose(shown[0], shown[1], rtol=1e-5, atol=1e-5)
    return wanted


def test_a_head_that_is_not_there_is_reported_by_loading(tmp_path: Path) -> None:
    oracle = EagleOracle("first", tmp_path / "oracle")
    (tmp_path / "images").mkdir()
    config = EngineConfig(speculate=str(tmp_path / "none"), cache_dir=str(tmp_path), **SIZES)
    assert find_image(str(oracle.trunk_folder), config) is None
