"""A decode step of a recurrent family launches two kernels a layer: the convolution's and the scan's."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed here")

from plait.kernels.triton.ssm.mamba3 import norm_then_bias
from plait.memory import block_groups
from plait.ops.launch import watch_launches
from plait.runner.device.capture import capture_step, decode_batch
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


class Grids:
    """Sees launches, and runs none."""

    def __init__(self) -> None:
        self.seen: list[tuple[int, ...]] = []

    def record_launch(self, name: str, run: object, tensors: object, rest: tuple[object, ...]) -> None:
        grid = rest[0]
        assert isinstance(grid, tuple)
        self.seen.append(grid)


def test_a_step_of_many_tokens_fits_the_grid_of_a_gpu() -> None:
    """Its second and third dimension have 65,535 programs at most."""
    x, one = torch.empty(70_000, 2, 16, device="meta"), torch.empty(16, device="meta")
    with watch_launches(grids := Grids()):
        norm_then_bias(x, one, torch.empty(4, 16, device="meta"), 1e-6)
    assert grids.seen == [(70_000, 4)]
