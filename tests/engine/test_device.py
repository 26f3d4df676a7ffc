"""Which device and dtype a model gets: with chips that are made up, because no test needs a GPU."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from plait.config import EngineConfig
from plait.engine.device import choose_device, choose_dtype
from plait.errors import ConfigError
from plait.ops.chip import EXAMPLES, example_chip, read_chip

CHIPS = {capability: chip for capability, chip in EXAMPLES.items() if capability in (75, 80, 90)}


def pretend(monkeypatch: pytest.MonkeyPatch, *capabilities: tuple[int, int]) -> None:
    """Make torch find GPUs of these compute capabilities."""

    def properties(device: torch.device) -> SimpleNamespace:
        major, minor = capabilities[device.index or 0]
        return SimpleNamespace(
            name=f"GPU {major}.{minor}", major=major, minor=minor, multi_processor_count=132,
            shared_memory_per_block_optin=227 << 10, total_memory=141 << 30,
        )  # fmt: skip

    monkeypatch.setattr(torch.cuda, "is_available", lambda: bool(capabilities))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(capabilities))
    monkeypatch.setattr(torch.cuda, "get_device_properties", properties)


def test_auto_takes_the_first_gpu_and_a_number_takes_that_one(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, (8, 0), (9, 0))
    assert choose_device("auto") == (torch.device("cuda", 0), "CUDA device 0, GPU 8.0")
    assert choose_device("cuda")[0] == torch.device("cuda", 0)
    assert choose_device("cuda:1") == (torch.device("cuda", 1), "CUDA device 1, GPU 9.0")
    assert choose_device("cpu")[0] == torch.device("cpu")
    with pytest.raises(ConfigError, match="cuda:2 was requested, but there are 2 CUDA devices"):
        choose_device("cuda:2")
    for requested in ("auto", "cuda"):  # before rank 0 waits for one that cannot begin
        with pytest.raises(ConfigError, match="3 ranks need a GPU each, but there are 2 CUDA devices"):
            choose_device(requested, 0, 3)


def test_a_gpu_that_is_too_old_is_refused_by_name_and_auto_takes_the_cpu(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pretend(monkeypatch, (7, 0))
    device, why = choose_device("auto")
    assert device == torch.device("cpu")
    assert why == "GPU 7.0 has compute capability 7.0, the least that kernels are made for is 7.5"
    with pytest.raises(ConfigError, match=r"GPU 7\.0 has compute capability 7\.0.*use --cpu"):
        choose_device("cuda")


def test_a_torch_for_other_makers_gpus_finds_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """ROCm calls them CUDA devices: gfx942 has "capability" 9.4, and was taken for a Hopper."""
    pretend(monkeypatch, (9, 4))
    monkeypatch.setattr(torch.version, "hip", "6.4.43482")
    why = "this torch was built for ROCm, and kernels for GPUs are NVIDIA's alone"
    assert choose_device("auto") == (torch.device("cpu"), why)
    with pytest.raises(ConfigError, match=f"cuda was requested, but {why}; use --cpu"):
        choose_device("cuda")


def test_without_a_gpu_the_reason_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: False)
    assert choose_device("auto") == (torch.device("cpu"), "this torch was built without CUDA")
    monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: True)

    def init() -> None:
        raise RuntimeError("The NVIDIA driver on your system is too old\n(found version 11040).")

    monkeypatch.setattr(torch.cuda, "init", init)
    with pytest.raises(ConfigError, match=r"driver on your system is too old \(found version 11040\)"):
        choose_device("cuda")


@pytest.mark.parametrize("text", ["gpu", "cuda:", "cuda:x", "cuda:-1", "cpu:0", ""])
def test_a_device_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="is not one of auto, cpu, cuda, cuda:N"):
        EngineConfig(device=text)


@pytest.mark.parametrize(
    ("capability", "stored", "dtype"),
    [
        (None, ["bfloat16"] * 3, torch.float32),
        (90, ["bfloat16"] * 3, torch.bfloat16),
        (90, ["Q4_K", "Q6_K"], torch.bfloat16),
        (75, ["Q4_K", "Q6_K"], torch.float16),
        (75, ["bfloat16"], torch.float16),
        (80, ["float32"] * 3 + ["bfloat16"], torch.float32),
        (80, ["float32", "Q4_1", "Q4_1"], torch.bfloat16),
        (80, [], torch.bfloat16),
    ],
)
def test_auto_computes_in_what_the_gpu_and_the_linear_weights_say(
    capability: int | None, stored: list[str], dtype: torch.dtype
) -> None:
    chip = CHIPS[capability] if capability else None
    assert choose_dtype("auto", chip, stored) is dtype
    assert choose_dtype("float16", chip, stored) is torch.float16


def test_bfloat16_is_refused_on_a_gpu_without_it() -> None:
    with pytest.raises(ConfigError, match="T4 has no bfloat16; use float16 or float32"):
        choose_dtype("bfloat16", CHIPS[75], [])
    assert choose_dtype("bfloat16", None, []) is torch.bfloat16


def test_a_chip_is_read_from_the_driver_or_made_up_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, (9, 0))
    found = read_chip(torch.device("cuda", 0))
    assert found is not None
    assert (found.name, found.capability, found.processors) == ("GPU 9.0", 90, 132)
    assert read_chip(torch.device("cpu")) is None
    assert example_chip("cuda:sm_90a") == example_chip("cuda:sm_90") == EXAMPLES[90]
    assert example_chip("cuda:sm_61") is None
    assert example_chip("cuda:1") is None
