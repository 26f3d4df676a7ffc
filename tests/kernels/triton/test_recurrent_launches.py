"""A decode step of a recurrent family launches two kernels a layer: the convolution's and the scan's."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="Triton is not installed here")

from plait.memory import block_groups
from plait.runner.capture import capture_step, decode_batch
from tests.runner.test_capture import BLOCKS, on_gpu

LEFT = {"softplus", "exp", "addcmul", "repeat_interleave", "clamp"}  # the references, by torch


@pytest.mark.parametrize(
    ("name", "scan", "layers", "convolutions"),
    [
        ("mamba2", "scan_heads", 3, 3),
        ("falcon_h1", "scan_heads", 3, 3),
        ("minimax", "scan_heads", 2, 0),
        ("qwen3_next", "walk_delta_rule", 2, 2),
        ("kimi_linear", "walk_delta_rule", 2, 2),
        ("lfm2", "", 0, 2),
    ],
)
def test_layer_has_one_launch_of_each(
    name: str, scan: str, layers: int, convolutions: int, tmp_path: Path
) -> None:
    model, store = on_gpu(name, tmp_path)
    batch = decode_batch(block_groups(model.states), 2, BLOCKS, store)
    capture, _ = capture_step(model, store, batch, strict=False, is_dry=True)
    launches = Counter(capture.launches)
    assert launches["convolve"] == convolutions
    assert launches[scan] == layers
    assert not LEFT & launches.keys()
