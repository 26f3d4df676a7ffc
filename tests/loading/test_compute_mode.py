"""A GPU that one process alone may have open: kernels are tried before the engine opens it.

The driver is made up.
"""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from plait.checkpoint.weights import Target
from plait.config import EngineConfig
from plait.engine import device as engine_device
from plait.engine.device import is_exclusive, open_device, read_compute_mode, why_unavailable
from plait.errors import ConfigError
from plait.loading import build as build_module
from plait.loading import draft_model
from plait.loading.build import build
from plait.loading.kernel_trials import attempts, child, trials
from plait.loading.kernel_trials.attempts import Attempt, KernelTrial, TrialCase, TrialChildren, TrialRun
from plait.loading.kernel_trials.child import answer, find_obstacle
from plait.loading.kernel_trials.trials import prove_kernels
from plait.loading.kernel_trials.verdicts import read_verdicts
from plait.loading.target import take_verdicts
from plait.ops.chip import EXAMPLES
from plait.runner.device.graph_backends import CudaGraphs

CHIP, GPU = EXAMPLES[90], torch.device("cuda", 1)
TRIALS = [
    KernelTrial(f"rms_norm/triton/{n}/float32", "rms_norm", "triton", "float32", (TrialCase(0),))
    for n in range(5)
]
BUSY = RuntimeError(
    "CUDA error: CUDA-capable device(s) is/are busy or unavailable\nCUDA kernel errors might be "
    "asynchronously reported at some other API call"
)


class FakeDriver:
    """CUDA's driver, with all GPUs in one mode. `fails`: the function that returns an error."""

    def __init__(self, mode: int, fails: str = "") -> None:
        self.mode, self.fails, self.asked = mode, fails, list[tuple[int, int]]()

    def cuInit(self, flags: int) -> int:
        return int(self.fails == "cuInit")

    def cuDeviceGet(self, found: Any, ordinal: int) -> int:
        found._obj.value = 70 + ordinal
        return int(self.fails == "cuDeviceGet")

    def cuDeviceGetAttribute(self, found: Any, attribute: int, handle: ctypes.c_int) -> int:
        self.asked.append((attribute, handle.value))
        found._obj.value = self.mode
        return int(self.fails == "cuDeviceGetAttribute")


@pytest.fixture
def set_mode(monkeypatch: pytest.MonkeyPatch) -> Callable[..., FakeDriver]:
    def set_mode(mode: int, fails: str = "") -> FakeDriver:
        driver = FakeDriver(mode, fails)
        monkeypatch.setattr(engine_device, "_load_driver", lambda: driver)
        return driver

    return set_mode


def refuse(*_: object, **__: object) -> None:
    raise BUSY


def test_the_mode_is_the_drivers_for_the_device_of_that_number(
    set_mode: Callable[..., FakeDriver], monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = set_mode(3)
    assert read_compute_mode(GPU) == 3
    assert is_exclusive(GPU)
    assert driver.asked[0] == (20, 71)
    set_mode(0)
    assert read_compute_mode(GPU) == 0
    assert not is_exclusive(GPU)
    assert read_compute_mode(torch.device("cpu")) is None
    for function in ("cuInit", "cuDeviceGet", "cuDeviceGetAttribute"):
        set_mode(3, fails=function)
        assert read_compute_mode(GPU) is None, function
    monkeypatch.setattr(engine_device, "_load_driver", lambda: None)
    assert read_compute_mode(GPU) is None


@pytest.mark.parametrize(
    ("mode", "said"),
    [
        (
            3,
            "cuda:1 is in exclusive-process compute mode, and a process has it open already; end that",
        ),
        (2, "cuda:1 is in prohibited compute mode, so no process may compute on it; `nvidia-smi -c 0`"),
        (0, "cuda:1 is busy or unavailable; `nvidia-smi` shows which processes have it open"),
    ],
)
def test_a_device_that_cannot_be_opened_is_refused_with_its_mode_and_what_to_do(
    mode: int, said: str, set_mode: Callable[..., FakeDriver], monkeypatch: pytest.MonkeyPatch
) -> None:
    set_mode(mode)
    monkeypatch.setattr(torch, "empty", refuse)
    with pytest.raises(ConfigError) as caught:
        open_device(GPU)
    assert said in str(caught.value)
    assert why_unavailable(RuntimeError("CUDA error: an illegal memory access"), GPU) is None
    open_device(torch.device("cpu"))


def test_another_error_of_the_device_is_not_explained_away(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object, **__: object) -> None:
        raise RuntimeError("CUDA error: no kernel image is available")

    monkeypatch.setattr(torch, "empty", fails)
    with pytest.raises(RuntimeError, match="no kernel image"):
        open_device(GPU)


def test_in_exclusive_mode_one_child_at_a_time_tries_kernels(
    set_mode: Callable[..., FakeDriver], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    seen: list[TrialRun] = []

    def prove(chip: object, run: TrialRun, *_: object) -> object:
        seen.append(run)
        return chip

    monkeypatch.setattr(trials, "prove_kernels", prove)
    target = Target(GPU, torch.bfloat16, 64, 32)
    target.chip = CHIP
    with caplog.at_level(logging.INFO, "plait"):
        for mode in (0, 3):
            set_mode(mode)
            assert trials.try_kernels(target, (), None, lambda *_: None) is CHIP
    assert seen[0].workers == trials.count_workers(CHIP) > 1
    assert seen[1].workers == 1
    assert caplog.text.count("cuda:1 is in exclusive-process compute mode: kernels are tried one by one") == 1


def test_a_device_that_others_have_open_is_no_verdict_on_any_kernel(
    set_mode: Callable[..., FakeDriver],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    set_mode(3)
    monkeypatch.setattr(torch, "empty", refuse)
    why = find_obstacle(str(GPU))
    assert why.startswith("cuda:1 is in exclusive-process compute mode, and a process has it open already")
    assert "`nvidia-smi -c 0`" in why
    assert "that process may be the engine itself" in why
    children: list[TrialRun] = []

    def start(begun: TrialChildren) -> tuple[None, Attempt]:
        children.append(begun.run)
        return None, Attempt(False, f"it could not be tried: {why}")

    monkeypatch.setattr(attempts, "start_child", start)
    run = TrialRun(str(GPU), workers=1)
    chip = prove_kernels(CHIP, run, TRIALS, tmp_path, lambda done, total: None)
    assert len(children) == 1, "what the first child finds holds for all"
    assert set(chip.trials) == {trial.key for trial in TRIALS}
    assert all("exclusive-process" in text for text in chip.trials.values())
    assert caplog.text.count("exclusive-process") == 1, "one line for all of them"
    assert not read_verdicts(tmp_path, trials.find_site(CHIP))
    again = prove_kernels(chip, run, TRIALS, tmp_path, lambda done, total: None)
    assert again.trials == chip.trials
    assert len(children) == 1, "in one startup nothing is tried twice"


def test_nor_is_one_that_is_taken_while_a_kernel_is_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(child, "try_variant", refuse)
    found = answer({"op": "rms_norm", "variant": "triton", "cases": [[0, []]], "dtype": "float32"}, str(GPU))
    assert [*found] == ["failed"]


def test_kernels_are_tried_before_the_engine_opens_the_device(
    nano_hybrid: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The draft model's, too; and what the graphs of a device bind is chosen by these verdicts."""
    events: list[str] = []
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: events.append("a stream"))
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: (0, 1))
    make = build_module.make_target
    made: list[Target] = []

    def on_gpu(opened: Any, device: torch.device, *_: object, **__: object) -> Target:
        target = make(opened, torch.device("cpu"))
        target.device, target.chip, target.graphs = GPU, CHIP, CudaGraphs(GPU, CHIP)
        made.append(target)
        return target

    def prove(chip: Any, run: TrialRun, asked: Any, *_: object) -> Any:
        events.append("trials")
        return replace(chip, trials={**chip.trials, f"trial {len(events)}": ""})

    def open_it(device: torch.device) -> None:
        events.append("the device is opened")
        raise ConfigError("enough")

    monkeypatch.setattr(build_module, "choose_device", lambda requested, *_: (GPU, "made up"))
    monkeypatch.setattr(build_module, "make_target", on_gpu)
    monkeypatch.setattr(build_module, "open_device", open_it)
    monkeypatch.setattr(trials, "prove_kernels", prove)
    assert draft_model.try_kernels is trials.try_kernels
    config = EngineConfig(ops="auto", speculate=str(nano_hybrid))
    with pytest.raises(ConfigError, match="enough"):
        build(str(nano_hybrid), config, lambda *_: None, lambda opened: None)
    assert events == ["trials", "trials", "the device is opened"]
    assert made[0].chip is not None
    assert set(made[0].chip.trials) == {"trial 1", "trial 2"}
    assert made[0].graphs.chip is made[0].chip
    assert made[0].graphs._side is None, "the first capture makes the stream"
    assert events[-1] == "a stream"


def test_a_model_without_graphs_takes_verdicts_too() -> None:
    target: Any = SimpleNamespace(chip=None, graphs=None)
    take_verdicts(target, CHIP)
    assert target.chip is CHIP


def test_what_no_gpu_does_is_refused_before_kernels_are_tried(
    nano_hybrid: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With `--device auto` it was refused once all kernels were tried, the disk cache once all was loaded."""
    monkeypatch.setattr(build_module, "choose_device", lambda *_: (GPU, "a GPU"))
    monkeypatch.setattr(build_module, "find_cuts", lambda *_: pytest.fail("it goes on"))
    with pytest.raises(ConfigError, match="cache_disk: state on a GPU is not kept on the disk"):
        build(str(nano_hybrid), EngineConfig(cache_disk="states"), lambda *_: None, lambda opened: None)
