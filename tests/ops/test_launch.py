"""Launches of kernels: on the device where their memory is, with options that no version of Triton sets."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from plait.errors import KernelFailed
from plait.ops.launch import LAUNCH_OPTIONS, launch, permit_dependent


class Kernel:
    """Notes what it is launched with."""

    def __init__(self) -> None:
        self.fn = SimpleNamespace(__name__="kernel")
        self.seen: list[dict[str, Any]] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        return lambda *args, **constants: self.seen.append(constants)


def test_options_are_those_of_plait_unless_a_kernel_has_its_own() -> None:
    kernel = Kernel()
    launch(kernel, (1,), torch.zeros(2), SIZE=2)
    launch(kernel, (1,), torch.zeros(2), enable_fp_fusion=False)
    launch(kernel, (0,), torch.zeros(2))
    assert kernel.seen == [{**LAUNCH_OPTIONS, "SIZE": 2}, {"enable_fp_fusion": False}]


def test_a_kernel_runs_on_the_device_of_its_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """As ranks and `cuda:1` need it: Triton launches on the device that the thread has selected."""
    selected: list[Any] = []

    def select(device: torch.device) -> Any:
        selected.append(device)
        return nullcontext()

    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "device", select)
    with FakeTensorMode():
        first, second = (torch.empty(2, device=f"cuda:{n}") for n in (0, 1))
    for tensor in (first, second):
        launch(Kernel(), (1,), 3, tensor)
    assert selected == [torch.device("cuda", 1)]


WAITING = "def kernel(x):\n    await_previous()\n    tl.store(x, 1)\n"


@pytest.mark.parametrize(
    ("source", "number", "is_early"),
    [
        (WAITING, 1, True),
        (WAITING, 0, False),
        (WAITING.replace("    await", "    if x:\n        await"), 1, False),
        (WAITING.replace("    await", "    # await"), 1, False),
        (None, 1, False),
    ],
    ids=["waits", "another GPU", "in a branch", "a comment", "interpreted"],
)
def test_what_waits_for_the_kernels_before_it_may_begin_early(
    monkeypatch: pytest.MonkeyPatch, source: str | None, number: int, is_early: bool
) -> None:
    monkeypatch.setattr(torch.cuda, "current_device", lambda: number)
    gpu, kernel = torch.device("cuda", 1), Kernel()
    if source is not None:
        kernel.src = source  # type: ignore[attr-defined]
    with FakeTensorMode():
        tensor = torch.empty(2, device=f"cuda:{number}")
    assert not permit_dependent(gpu, True)
    try:
        launch(kernel, (1,), tensor)
    finally:
        assert permit_dependent(gpu, False)
    launch(kernel, (1,), tensor)
    assert ["launch_pdl" in constants for constants in kernel.seen] == [is_early, False]


def test_a_kernel_that_does_not_fit_the_gpu_is_named_in_one_line() -> None:
    class OutOfResources(Exception):
        pass

    class Tight(Kernel):
        error: type[Exception] = OutOfResources

        def __getitem__(self, grid: tuple[int, ...]) -> Any:
            def run(*args: Any, **constants: Any) -> None:
                raise self.error("out of resource: shared memory,\n Required: 131072")

            return run

    OutOfResources.__module__ = "triton.runtime.errors"
    with pytest.raises(KernelFailed) as caught:
        launch(Tight(), (1,), torch.zeros(2))
    assert str(caught.value) == (
        "the kernel kernel cannot run at this model's sizes on this GPU (out of resource: shared memory, "
        "Required: 131072); `--ops reference` computes with torch alone"
    )
    Tight.error = ValueError
    with pytest.raises(ValueError, match="out of resource"):
        launch(Tight(), (1,), torch.zeros(2))
