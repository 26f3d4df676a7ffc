"""What a GPU's graph refuses is refused on a CPU, and every family's decode step keeps to these rules."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="Triton is not installed here")

from plait.errors import CannotRecord, UnsupportedModel
from plait.families.common.registry import families, find
from plait.kernels.load import load_for_gpu
from plait.memory import block_groups
from plait.model.decoder import Decoder
from plait.model.mixers.registry import Entry, list_mixers
from plait.ops.chip import EXAMPLES
from plait.runner.device.capture import StepCapture, capture_step, decode_batch, decoder_tensors
from plait.spec.model import Recurrent
from plait.state.store import StateStore
from tests.families import tiny_plain
from tests.families.every import NAMES, family_of, read_model
from tests.families.newer_oracles import DESCRIBED
from tests.families.oracles import ORACLES
from tests.families.parity import decoder, resolved

ELSEWHERE = torch.randn(3)
BLOCKS = 4  # of a sequence
MOST_LAUNCHES = 45  # for each layer of a decode step: a kernel and its gap are some two microseconds
# Of every kind of paged memory: heads with a window and a softcap, latents with experts, hybrids.
NO_CODES = ("hymba",)  # keys behind learned tokens: refused by name
HALF = ("llama", "mamba2", "deepseek_v3")
KEPT = ("llama", "gemma2", "deepseek_v3", "falcon_h1", "sambay")


def test_a_replay_computes_what_the_buffers_hold_now() -> None:
    x, w, cache, row = torch.randn(4, 8), torch.randn(8, 8), torch.zeros(6, 8), torch.tensor([1, 2, 3, 0])

    def step() -> Tensor:
        y = torch.relu(x @ w)
        cache[row] = y
        return (y + cache.sum(0)).softmax(-1)

    with torch.inference_mode(), StepCapture([x, w, cache, row]) as capture:
        out = step()
    x.copy_(torch.randn(4, 8))
    row.copy_(torch.tensor([5, 4, 0, 0]))
    cache.zero_()
    capture.replay()
    found, held = out.clone(), cache.clone()
    cache.zero_()
    assert torch.equal(found, step())
    assert torch.equal(held, cache)


@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        (lambda x: x.sum().item(), "asks for a value"),
        (lambda x: x.tolist(), "asks for a value"),
        (lambda x: bool(x.any()), "asks for a value"),
        (lambda x: x.nonzero(), "depends on data"),
        (lambda x: x[x > 0], "by a mask"),
        (lambda x: x.unique(), "depends on data"),
        (lambda x: x.repeat_interleave(torch.ones_like(x, dtype=torch.int64)), "depends on data"),
        (lambda x: x + torch.tensor([1.0]), "a copy from the host"),
        (lambda x: x.cpu(), "asks for a value"),
        (lambda x: x @ ELSEWHERE, "neither static nor of the step"),
    ],
)
def test_what_a_device_cannot_capture_is_refused(wrong: Callable[[Tensor], object], why: str) -> None:
    x = torch.randn(3)
    with pytest.raises(CannotRecord, match=why), torch.inference_mode(), StepCapture([x]):
        wrong(x)


def test_a_length_that_was_baked_in_shows() -> None:
    lens = torch.tensor([3, 5])

    def stream(most: int) -> object:
        with torch.inference_mode(), StepCapture([lens]) as capture:
            _ = torch.arange(most) < lens[:, None]
        return capture.stream

    assert stream(8) == stream(8)
    assert stream(8) != stream(6)


def on_gpu(
    name: str, folder: Path, kept: str = "model", dtype: torch.dtype = torch.float32
) -> tuple[Decoder, StateStore]:
    """A family's tiny model with what a GPU binds, its tensors being on the CPU."""
    load_for_gpu()
    config, checkpoint = read_model(name, folder)
    assert find(config).name == family_of(name)
    model = decoder(resolved(checkpoint, config), checkpoint, chip=EXAMPLES[90], dtype=dtype, kept=kept)
    blocks = {group.name: 8 for group in block_groups(model.states)}
    store = StateStore(model.states, blocks, 4, 16, torch.device("cpu"), dtype)
    for tensor in store.tensors:
        tensor.zero_()
    return model, store


def quick() -> list[Any]:
    """Most of the families that came last are left to `make test-all`."""
    late = {name for name, variant in tiny_plain.VARIANTS.items() if variant.slow}
    late |= {name for name in (*ORACLES, *DESCRIBED) if name not in ("sambay", "arctic")}
    return [pytest.param(name, marks=[pytest.mark.slow] if name in late else []) for name in NAMES]


def test_tensors_of_a_plug_in_s_mixer_are_static(monkeypatch: pytest.MonkeyPatch) -> None:
    class Own:  # defined outside of Plait, as a plug-in's is
        def __init__(self) -> None:
            self.weight = torch.ones(3)

    model: Any = [Own()]
    assert decoder_tensors(model) == []
    entry = Entry(lambda s, w: Own(), repr, None)  # type: ignore[arg-type, return-value]
    monkeypatch.setitem(list_mixers(), Recurrent, entry)
    assert decoder_tensors(model) == [model[0].weight]


def test_no_family_is_without_a_model_below() -> None:
    ours = {entry.name for entry in families() if entry.build.__module__.startswith("plait.families.")}
    assert not ours - {family_of(name) for name in NAMES}
    assert len(ours) > 190


@pytest.mark.sampled(8)
@pytest.mark.parametrize("name", quick())
def test_a_decode_step_of_every_family_can_be_captured(name: str, tmp_path: Path) -> None:
    model, store = on_gpu(name, tmp_path)
    capture = check_capture(model, store)
    launches = [name for name in capture.launches if name != "fill_"]  # of memory, by these tests
    assert len(launches) <= MOST_LAUNCHES * len(model.spec.layers)


@pytest.mark.parametrize(
    "name", [name if name in HALF else pytest.param(name, marks=pytest.mark.slow) for name in NAMES]
)
def test_so_can_one_of_a_float16_model(name: str, tmp_path: Path) -> None:
    check_capture(*on_gpu(name, tmp_path, dtype=torch.float16))


@pytest.mark.parametrize("kept", ["int8", "bfloat16"])
@pytest.mark.parametrize(
    "name", [name if name in KEPT else pytest.param(name, marks=pytest.mark.slow) for name in NAMES]
)
def test_so_can_one_over_keys_and_values_of_another_dtype(name: str, kept: str, tmp_path: Path) -> None:
    if name in NO_CODES and kept == "int8":
        with pytest.raises(UnsupportedModel, match="not as int8"):
            on_gpu(name, tmp_path, kept)
        return
    model, store = on_gpu(name, tmp_path, kept)
    dtype = torch.int8 if kept == "int8" else torch.bfloat16
    # What has a layout of its own, as states and compressed keys, is kept as it is.
    assert name not in KEPT or any(tensor.dtype == dtype for tensor in store.tensors)
    check_capture(model, store)


def check_capture(model: Decoder, store: StateStore) -> StepCapture:
    """Two decode steps of different lengths are captured without faults, and are the same stream."""
    batch = decode_batch(block_groups(model.states), 2, BLOCKS, store)
    capture, logits = capture_step(model, store, batch, strict=False, is_dry=True)
    assert logits.shape[0] == 2
    assert not capture.faults
    other = replace(batch, token_ids=batch.token_ids + 3, positions=batch.positions + 40)
    again, _ = capture_step(model, store, other, strict=False, is_dry=True)
    for here, there in zip(capture.stream, again.stream, strict=True):
        # By their text, as the poison of these tests is written by a `fill_` with NaN, which equals nothing.
        assert repr(here) == repr(there), "a value of the batch was baked in"
    assert again.launches == capture.launches
    return capture
