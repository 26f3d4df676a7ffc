"""An error of the GPU ends the engine if the GPU answers no more, and is a request's fault otherwise."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from plait.errors import DeviceLost
from plait.runner.device.graph_backends import CaptureRefusals
from plait.runner.device.loss import check_lost
from plait.runner.runner import ModelRunner
from plait.schedule.plan import Chunk, SamplingBatch, StepPlan

CPU, GPU = torch.device("cpu"), torch.device("cuda", 1)
LOST = [
    torch.AcceleratorError("CUDA error: unspecified launch failure\n\nCompile with `TORCH_USE_CUDA_DSA`"),
    RuntimeError("CUDA error: an illegal memory access was encountered"),
    RuntimeError("Triton Error [CUDA]: misaligned address"),
    RuntimeError("CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasGemmEx`"),
]
OTHERS = [
    RuntimeError("shape '[2, 3]' is invalid for input of size 5"),
    torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"),
]


def synchronize_that(*, works: bool) -> Callable[[torch.device], None]:
    def synchronize(device: torch.device) -> None:
        if not works:
            raise RuntimeError("CUDA error: unspecified launch failure")

    return synchronize


@pytest.mark.parametrize("error", LOST, ids=lambda e: str(e)[:20])
def test_an_error_of_a_gpu_that_answers_no_more_is_its_loss(
    error: RuntimeError, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "synchronize", synchronize_that(works=False))
    with pytest.raises(DeviceLost, match=r"the GPU cuda:1 was lost in a step: ") as caught:
        check_lost(error, GPU)
    assert "\n" not in str(caught.value)
    assert "Compile with" not in str(caught.value)
    assert caught.value.__cause__ is error
    monkeypatch.setattr(torch.cuda, "synchronize", synchronize_that(works=True))
    check_lost(error, GPU)  # a launch with wrong arguments: the step fails, and the next one may run


@pytest.mark.parametrize("error", OTHERS, ids=lambda e: str(e)[:20])
def test_an_error_of_anything_else_is_no_loss(error: RuntimeError, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "synchronize", synchronize_that(works=False))
    check_lost(error, GPU)


def test_the_runner_raises_it_for_its_step() -> None:
    class Broken(ModelRunner):
        def __init__(self, error: Exception) -> None:
            self.device, self.error, self.lead = CPU, error, None

        def _launch(self, plan: StepPlan, sampling: SamplingBatch) -> Any:
            raise self.error

    plan = StepPlan(0, (Chunk(1, 0, (5,), (), 0, 1),))
    with pytest.raises(DeviceLost, match="unspecified launch failure"):
        Broken(LOST[0]).launch(plan, SamplingBatch(()))
    with pytest.raises(RuntimeError, match="is invalid for input"):
        Broken(OTHERS[0]).launch(plan, SamplingBatch(()))
    with pytest.raises(ValueError, match="another"):
        Broken(ValueError("another")).launch(plan, SamplingBatch(()))


def test_a_device_that_a_capture_breaks_is_lost_and_no_reason_to_go_on_op_by_op(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The engine reported steps that run op by op, and failed later, with an error that names nothing."""

    class Graphs:
        captures_at_start, refusals = True, CaptureRefusals()

    class Replay:
        error = LOST[0]

        def __init__(self, *_: object) -> None: ...
        def prepare(self) -> None:
            raise self.error

    class Bare(ModelRunner):
        def __init__(self) -> None:
            self.device, self.step_kind = GPU, ""
            self.decoder = self.store = self.sampler = self.groups = None  # type: ignore[assignment]

    monkeypatch.setattr("plait.runner.runner.DeviceReplay", Replay)
    graphs: Any = Graphs()
    for works in (False, True):
        monkeypatch.setattr(torch.cuda, "synchronize", synchronize_that(works=works))
        for error in LOST[:2]:
            Replay.error, runner = error, Bare()
            if works:
                runner._replay_on_device(graphs, graphs, None)
                assert runner.step_kind.startswith("op by op: CUDA error")
            else:
                with pytest.raises(DeviceLost, match="cuda:1 was lost in the capture of its steps: CUDA"):
                    runner._replay_on_device(graphs, graphs, None)
