"""Engines over tiny models with a GPU's kernels on CPU tensors: op by op, and with torch's graphs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from plait.checkpoint.adapter_slots import AdapterSlots
from plait.checkpoint.adapters.match import AdapterMatch
from plait.checkpoint.adapters.peft import open_peft
from plait.checkpoint.weights import Target, Weights
from plait.engine.adapters import AdapterTable
from plait.engine.core import Engine
from plait.kernels.load import load_for_gpu
from plait.memory import block_groups, has_slots
from plait.model.decoder import Decoder
from plait.ops.chip import EXAMPLES, Chip
from plait.ops.low_rank import AdapterLimits
from plait.request import Request, SamplingParams
from plait.runner.device.graph_backends import TorchGraphs
from plait.runner.device.replay import DeviceReplay
from plait.runner.host.static_batch import Capacity
from plait.runner.runner import ModelRunner
from plait.runner.sampling.sampler import Sampler
from plait.schedule.allocation import Allocation
from plait.schedule.costs import SchedulerLimits
from plait.schedule.pools import CacheOptions
from plait.schedule.scheduler import Scheduler
from plait.spec.canvas import CanvasSpec
from plait.state.store import StateStore
from tests.engine.hash_model import Reader
from tests.families import tiny
from tests.families.every import read_model
from tests.families.parity import Memory, resolved
from tests.runner.opaque_ops import OpaqueWeights

BLOCK, LONGEST, CPU = 8, 64, torch.device("cpu")
CHIP = EXAMPLES[90]


def gpu_decoder(name: str, folder: Path, kept: str = "model", **changes: int) -> Decoder:
    """A family's tiny model with what a GPU binds. `kept`: what keys, values and latents are kept in."""
    load_for_gpu()
    return _build(name, folder, changes, Weights, CHIP, kept)


def adapted_decoder(name: str, folder: Path, adapters: Sequence[Path], **changes: int) -> Decoder:
    """`gpu_decoder` with these adapters, in slots from 1 on, and a slot more."""
    load_for_gpu()
    config, checkpoint = _read_tiny(name, folder, changes)
    found = resolved(checkpoint, config)
    target = Target(CPU, torch.float32, LONGEST, found.spec.hidden_size, chip=CHIP, block_size=BLOCK)
    matches = [AdapterMatch(open_peft(path, 64), found.hf_names or found.names) for path in adapters]
    limits = AdapterLimits(len(matches) + 1, 64, torch.float32, stacked_on=CPU)
    target.adapters = AdapterSlots(limits, matches)
    decoder = Decoder(found.spec, Weights(checkpoint, found.names, target))
    for slot, match in enumerate(matches, 1):
        target.adapters.load(slot, match)
    return decoder


def plain_decoder(name: str, folder: Path, chip: Chip | None = None, **changes: int) -> Decoder:
    """A family's tiny model with these changes of its config, without a chip of torch's ops alone."""
    return _build(name, folder, changes, Weights, chip)


def opaque_decoder(name: str, folder: Path, **changes: int) -> Decoder:
    """A family's tiny model of references, each call of which is a launch (`opaque_ops`)."""
    return _build(name, folder, changes, OpaqueWeights)


def _build(
    name: str,
    folder: Path,
    changes: dict[str, int],
    kind: type[Weights],
    chip: Chip | None = None,
    kept: str = "model",
) -> Decoder:
    config, checkpoint = _read_tiny(name, folder, changes) if changes else read_model(name, folder)
    found = resolved(checkpoint, config)
    ops = "reference" if kind is OpaqueWeights else "auto"
    target = Target(
        CPU, torch.float32, LONGEST, found.spec.hidden_size, ops, chip=chip, block_size=BLOCK, kv_dtype=kept
    )
    return Decoder(found.spec, kind(checkpoint, found.names, target))


def _read_tiny(name: str, folder: Path, changes: dict[str, int]) -> tuple[dict[str, Any], Memory]:
    if not (folder / "model.safetensors").exists():
        variant = tiny.VARIANTS[name]
        tiny.write(name, folder, replace(variant, changes={**variant.changes, **changes}))
    config, tensors, _ = tiny.read(folder)
    return config, Memory(tensors)


@dataclass
class Side:
    """One engine over a model. `has_graphs`: decodes are captured, steps are launched ahead."""

    decoder: Decoder
    has_graphs: bool
    num_seqs: int = 3
    budget: int = 24
    blocks: int = 12
    cache: CacheOptions | None = None
    num_steps: int = 1
    chip: Chip | None = CHIP

    def __post_init__(self) -> None:
        model = self.decoder
        groups, vocab = block_groups(model.states), model.spec.vocab_size
        num_slots = 2 * self.num_seqs + 2 if has_slots(model.states) else 0
        counts = {group.name: self.blocks for group in groups}
        store = StateStore(model.states, counts, num_slots, BLOCK, CPU, torch.float32)
        for tensor in store.tensors:
            tensor.zero_()
        canvas = model.spec.canvas
        has_masks = isinstance(canvas, CanvasSpec)
        sampler = Sampler(vocab, chip=self.chip, banned=[canvas.mask_token] if has_masks else ())
        tried = {"canvas": canvas.size} if has_masks else {"num_draft_tokens": 4}
        capacity = Capacity.of(self.budget, self.num_seqs, LONGEST, BLOCK, **tried)
        graphs = TorchGraphs(self.chip) if self.has_graphs else None
        self.runner = ModelRunner(
            model, store, sampler, CPU, executor=graphs, capacity=capacity if graphs else None
        )
        limits = SchedulerLimits(
            max_num_seqs=self.num_seqs,
            max_num_batched_tokens=self.budget,
            max_waiting=100,
            max_model_len=LONGEST,
            num_steps=self.num_steps,
            canvas=canvas,
        )
        memory = Allocation(
            groups,
            [self.blocks] * len(groups),
            BLOCK,
            num_slots=num_slots,
            max_step_len=self.budget,
            cache=self.cache,
        )
        self.engine = Engine(self.runner, Scheduler(limits, memory), vocab_size=vocab, max_model_len=LONGEST)
        num_slots = model.adapters.limits.num_slots if model.adapters else 0
        self.engine.adapters = AdapterTable(num_slots, lambda slot, path: path, lambda slot: None)
        for slot in range(1, num_slots):
            self.engine.adapters.load(f"a{slot}", f"digest {slot}", ())
        self.reader = Reader()

    @property
    def replay(self) -> DeviceReplay:
        assert isinstance(self.runner.replay, DeviceReplay)
        return self.runner.replay

    def submit(
        self, name: str, prompt: Sequence[int], more: dict[str, Any] | None = None, **params: Any
    ) -> None:
        settings = dict(max_tokens=6, temperature=0.0, top_p=1.0, top_k=0, min_p=0.0, repetition_penalty=1.0)
        fields = {"stop_token_ids": frozenset(), **(more or {})}
        given = SamplingParams(**{"seed": 7, **settings, **params})
        self.engine.submit(Request(name, tuple(prompt), given, **fields), self.reader)

    def finish(self) -> dict[str, list[int]]:
        """Run to the end: every reply. Raises the error of the first that failed."""
        while self.engine.step():
            self.engine.scheduler.check()
        for events in self.reader.events.values():
            if events[-1].error is not None:
                raise events[-1].error
        return {name: self.reader.tokens(name) for name, _ in self.reader.events}
