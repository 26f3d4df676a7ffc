"""Dividing a GPU's memory by what is measured there: with a device that is made up."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from plait.checkpoint.adapter_slots import AdapterSlots
from plait.config import GIB, MIB, EngineConfig
from plait.engine.device import CudaMemory
from plait.engine.memory_plan import Sizing, size_state
from plait.errors import DeviceLost, OutOfMemory
from plait.loading import build as build_module
from plait.loading import measure_memory
from plait.loading.build import Built, build
from plait.loading.measure_memory import (
    check_weights_fit,
    largest_steps,
    leave_for_draft,
    measure_room,
    size_gpu,
    small_prompts,
)
from plait.loading.open_model import Opened, open_model
from plait.model.decoder import Decoder
from plait.model.layers.layers import Batch
from plait.ops.low_rank import AdapterLimits
from plait.runner.sampling.sampler import LEAST_ROWS
from plait.runner.sampling.tables import most_nbytes
from plait.state.store import StateStore


@dataclass
class FakeMemory:
    """A device with so many bytes free; a run is (bytes at most, bytes that it keeps)."""

    left: int
    now: int = 0
    most: int = 0
    log: list[str] = field(default_factory=list)

    def free(self) -> int:
        self.log.append("free")
        return self.left

    def peak_of(self, run: Callable[[], object]) -> int:
        self.now = self.most = 0
        run()
        return self.most

    def takes(self, most: int, kept: int = 0) -> Callable[[], None]:
        def run() -> None:
            if most > self.left:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
            self.most, self.left = most, self.left - kept
            self.log.append(f"run {most}")

        return run


def test_the_largest_peak_and_what_is_kept_are_not_for_state() -> None:
    memory = FakeMemory(10 * GIB)
    step, other = memory.takes(2 * GIB), memory.takes(GIB, kept=GIB)
    assert measure_room(memory, [("the largest step", step), ("another", other)]) == 7 * GIB
    assert memory.log == [f"run {2 * GIB}", f"run {GIB}", "free"], "measured before the driver is asked"
    assert measure_room(FakeMemory(GIB), []) == GIB


def test_the_pool_of_graphs_is_left_free_in_addition_to_the_largest_step() -> None:
    memory = FakeMemory(10 * GIB)
    step, decode = ("the largest step", memory.takes(2 * GIB)), ("the largest decode", memory.takes(GIB))
    small = ("a smaller decode", memory.takes(GIB // 2))
    assert measure_room(memory, [step], [small, decode]) == 7 * GIB


def test_a_draft_model_gets_its_weights_and_a_quarter_of_the_rest() -> None:
    assert leave_for_draft(9 * GIB, GIB) == 6 * GIB
    assert leave_for_draft(GIB, 2 * GIB) == 0


def test_a_step_that_does_not_fit_names_itself_and_what_to_do() -> None:
    memory = FakeMemory(GIB)
    with pytest.raises(
        OutOfMemory, match=r"not enough memory for the largest step \(64 tokens; lower --max-"
    ):
        measure_room(
            memory, [("the largest step (64 tokens; lower --max-num-batched-tokens)", memory.takes(2 * GIB))]
        )


def test_weights_that_do_not_fit_are_refused_in_one_line_with_both_numbers() -> None:
    check_weights_fit("m", GIB, GIB, "a GPU")
    with pytest.raises(OutOfMemory) as caught:
        check_weights_fit("Llama-3.1-8B", 15 * GIB, 7 * GIB + 512 * MIB, "an RTX 2080")
    assert str(caught.value) == (
        "the weights of Llama-3.1-8B take 15 GiB, and 7.5 GiB are free on an RTX 2080; end what else uses "
        "it, choose a smaller model or quantization, or --cpu"
    )


def test_the_memory_of_a_gpu_is_that_of_torch_and_of_the_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []
    held = {"now": 5, "most": 9}
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: seen.append("emptied"))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (seen.append("asked"), (70, 100))[1])
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: held["now"])
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: held["most"])
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda device: held.update(most=held["now"]))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: seen.append("waited"))
    memory = CudaMemory(torch.device("cuda", 0))
    assert memory.free() == 70
    assert seen == ["emptied", "asked"], "what torch only keeps is free"
    assert memory.peak_of(lambda: held.update(most=25)) == 20
    assert seen[2:] == ["waited"]


def test_a_gpu_that_a_measured_step_breaks_is_lost_with_the_name_of_the_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Kernels run there in the model's own sizes for the first time. The error of the driver names none."""
    for name in ("memory_allocated", "max_memory_allocated", "reset_peak_memory_stats"):
        monkeypatch.setattr(torch.cuda, name, lambda device: 0)
    faults = [RuntimeError("CUDA error: an illegal memory access was encountered")] * 2

    def synchronize(device: torch.device) -> None:
        if faults:
            raise faults.pop()

    monkeypatch.setattr(torch.cuda, "synchronize", synchronize)
    memory = CudaMemory(torch.device("cuda", 0))
    with pytest.raises(DeviceLost, match=r"cuda:0 was lost in a step: .* it was a prompt of 3 tokens\. `"):
        measure_room(memory, [("a prompt of 3 tokens", lambda: None)])

    def fail() -> None:
        raise RuntimeError("shapes cannot be multiplied")

    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        measure_room(memory, [("a prompt of 3 tokens", fail)])


def watch(decoder: Decoder) -> tuple[Decoder, list[tuple[Batch, StateStore]]]:
    """A decoder, and a list of what its steps will get."""
    seen: list[tuple[Batch, StateStore]] = []

    class Watched:
        states, spec = decoder.states, decoder.spec
        adapters, denoiser = decoder.adapters, decoder.denoiser

        def __call__(self, batch: Batch, store: StateStore) -> torch.Tensor:
            seen.append((batch, store))
            return decoder(batch, store)

    watched: Decoder = Watched()  # type: ignore[assignment]
    return watched, seen


@pytest.mark.parametrize(("tokens", "seqs", "lengths"), [(7, 3, [3, 2, 2]), (2, 1, [2]), (3, 3, [1, 1, 1])])
def test_the_largest_step_is_at_the_end_of_the_longest_context_and_all_in_garbage(
    nano_hybrid: Path, tokens: int, seqs: int, lengths: list[int]
) -> None:
    config = EngineConfig(
        device="cpu", ops="reference", max_num_batched_tokens=tokens, max_num_seqs=seqs, block_size=4
    )
    opened = open_model(str(nano_hybrid), config)
    target = build_module.make_target(opened, torch.device("cpu"))
    decoder = build_module.load_decoder(opened, target, lambda *_: None)
    watched, seen = watch(decoder)
    ((what, run),) = largest_steps(watched, config, 10, target.device, target.dtype)
    run()
    assert what.startswith(
        f"the largest step ({tokens} tokens, contexts of 10; lower --max-num-batched-tokens"
    )
    ((batch, store),) = seen
    assert batch.query_start.diff().tolist() == lengths
    assert batch.seq_lens.tolist() == [10] * seqs
    assert not batch.state_slots.any()
    assert all(not i.block_table.any() and i.block_table.shape[1] == 3 for i in batch.paged.values())
    assert all(len(t) == 1 for t in store.tensors), "no more memory than the garbage block and slot"
    decoder.adapters = watched.adapters = AdapterSlots(AdapterLimits(1, 8), [])
    for _, run in largest_steps(watched, config, 10, target.device, target.dtype):
        run()
    slots = [batch.adapters.slots.tolist() if batch.adapters else None for batch, _ in seen[1:]]
    assert slots == [None, [1] * tokens], "without adapters, and with one"


def test_prompts_of_every_form_of_kernels_run_before_the_model_is_ready(nano_hybrid: Path) -> None:
    config = EngineConfig(
        device="cpu", ops="reference", max_num_batched_tokens=40, max_num_seqs=18, block_size=4
    )
    opened = open_model(str(nano_hybrid), config)
    target = build_module.make_target(opened, torch.device("cpu"))
    decoder = build_module.load_decoder(opened, target, lambda *_: None)
    watched, seen = watch(decoder)
    runs = dict(small_prompts(watched, config, 25, target.device, target.dtype))
    assert list(runs) == [*(f"a prompt of {n} tokens" for n in (3, 12, 16, 24)), "17 prompts of 2 tokens"]
    for name in ("a prompt of 12 tokens", "17 prompts of 2 tokens"):
        runs[name]()
    prompt, several = (batch for batch, _ in seen)
    assert prompt.query_start.tolist() == [0, 12]
    assert several.query_start.diff().tolist() == [2] * 17
    for batch in (prompt, several):
        assert not batch.has_history.any(), "whole prompts"
        assert torch.equal(batch.seq_lens, batch.query_start.diff())


def test_a_gpu_gives_its_share_of_what_is_measured_and_swaps_into_the_host_s_memory(
    nano_hybrid: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The largest step really runs, on a CPU; the device's numbers are made up."""
    opened = open_model(
        str(nano_hybrid), EngineConfig(device="cpu", ops="reference", max_num_seqs=2, max_model_len=128)
    )
    target = build_module.make_target(opened, torch.device("cpu"))
    decoder = build_module.load_decoder(opened, target, lambda *_: None)
    facts = build_module.describe_for_sizing(decoder, target)
    monkeypatch.setattr(measure_memory, "free_memory", lambda device: {"cpu": 4 * MIB}[device.type])
    monkeypatch.setattr(measure_memory, "total_memory", lambda device: GIB)

    did_run = list[bool]()

    def size(left: int, peak: int, draft: int | None = None, **options: Any) -> Sizing:
        memory = FakeMemory(left)

        def peak_of(run: Callable[[], object]) -> int:
            memory.log.append("run")
            if len(did_run) < 4:  # what the other cases are about are the numbers
                run()
                did_run.append(True)
            return peak

        monkeypatch.setattr(memory, "peak_of", peak_of)
        config = replace(opened.config, max_num_batched_tokens=8, **options)
        found = size_gpu(facts, decoder, target, config, memory, draft)
        wanted = ["free", *["run"] * 4, "free"]
        assert memory.log == wanted, "the largest step, a small prompt, decodes, checks"
        return found

    with caplog.at_level(logging.INFO, "plait"):
        full = size(100 * MIB, MIB)
    assert full.host_nbytes <= MIB, "a quarter of the host's memory, not of the GPU's"
    assert "the largest step takes 1 MiB, graphs take 1 MiB; 98 MiB are left" in caplog.text
    assert "tables of penalties and biases may take" in caplog.text
    config = replace(opened.config, max_num_batched_tokens=8)
    vocab_size = decoder.spec.vocab_size
    tables = sum(most_nbytes(rows, vocab_size, 2) for rows in (2, 3, LEAST_ROWS))  # decodes, prompts, both
    tables += 2 * 4 * vocab_size  # logits that the host samples from
    for left, peak, draft, room in (
        (100 * MIB, MIB, None, 98 * MIB - tables),
        (7 * MIB, 2 * MIB, None, 3 * MIB - tables),
        (7 * MIB, MIB, MIB, leave_for_draft(5 * MIB - tables, MIB)),
        (7 * MIB, MIB, 0, leave_for_draft(5 * MIB - tables, 0)),
    ):
        wanted = size_state(facts, config, free_memory=room, free_host=4 * MIB, total_memory=GIB)
        assert size(left, peak, draft) == wanted
    with pytest.raises(OutOfMemory, match=r"may take .* and 1 KiB are left by the weights; lower"):
        size(1024, 0)
    with pytest.raises(OutOfMemory, match="and the limit is 0 bytes"):
        size(100 * MIB, 200 * MIB, max_model_len=64)


def test_a_gpu_that_cannot_hold_the_weights_is_refused_before_any_is_read(
    nano_hybrid: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu = torch.device("cuda", 0)
    make = build_module.make_target

    def on_gpu(opened: Opened, device: torch.device, *_: object, **__: object) -> object:
        target = make(opened, torch.device("cpu"))
        target.device = gpu
        return target

    monkeypatch.setattr(build_module, "choose_device", lambda requested, *_: (gpu, "made up"))
    monkeypatch.setattr(build_module, "make_target", on_gpu)
    monkeypatch.setattr(build_module, "try_kernels", lambda *_: None)
    monkeypatch.setattr(build_module, "open_device", lambda device: None)
    monkeypatch.setattr(build_module, "free_memory", lambda device: MIB)

    def start() -> Built:
        return build(str(nano_hybrid), EngineConfig(ops="reference"), lambda *_: None, lambda opened: None)

    with pytest.raises(
        OutOfMemory, match=r"the weights of nano-hybrid take .* MiB, and 1 MiB are free on it"
    ):
        start()
