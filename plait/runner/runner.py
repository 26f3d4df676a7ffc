"""The model runner: runs a plan on a device, from inputs through decoder and sampler to tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any, Protocol

import torch
from torch import Tensor

from plait.errors import EngineError
from plait.memory import block_groups, has_slots
from plait.model.decoder import Decoder
from plait.runner.graphs import Capacity, StepProgram, record_step
from plait.runner.inputs import build_batch
from plait.runner.pooling import add_pooled
from plait.runner.sampler import Sampler, is_greedy
from plait.schedule.plan import (
    Chunk,
    CopyBlock,
    CopySlot,
    Drop,
    Load,
    Move,
    Sampled,
    SamplingBatch,
    Save,
    StepPlan,
)
from plait.state.store import StateStore


class NativeExecutor(Protocol):
    """Threads that run native kernels, now or recorded (`kernels.cpu.runtime.executor`)."""

    def recording(self, tokens: int, logits: int) -> Any: ...
    def run(
        self, program: Any, *, tokens: int, logits: int, seqs: int, steps: int = 1, between: Any = None
    ) -> None: ...
    def following(self, tokens: int, logits: int, *args: Any) -> Any: ...
    def close(self) -> None: ...


class ModelRunner:
    """Executes plans on one device. `store` holds the state of every running sequence.

    With an `executor` of native kernels and the `capacity` of the largest step, a step is recorded once and
    replayed. `step_kind` describes the recording, or why steps run op by op.
    """

    def __init__(
        self,
        decoder: Decoder,
        store: StateStore,
        sampler: Sampler,
        device: torch.device,
        *,
        executor: NativeExecutor | None = None,
        capacity: Capacity | None = None,
    ) -> None:
        self.decoder, self.store, self.sampler, self.device = decoder, store, sampler, device
        self.groups, self.executor = block_groups(decoder.states), executor
        self._replay, self._static, self.step_kind = None, None, "op by op: nobody asked for a recording"
        if capacity:
            made = record_step(decoder, store, executor, self.groups, capacity, sampler.plain_largest)
            self._replay, self._static, self.step_kind = made

    def execute(self, plan: StepPlan, sampling: SamplingBatch) -> list[Sampled]:
        """Run the steps of a plan: the answer to every chunk that has one, in the plan's order."""
        if plan.moves or plan.fresh:
            self._arrange(plan)
        if not plan.chunks:
            return []
        fits = self._replay and self._static and self._static.fits(plan)
        if plan.num_steps > 1:
            if self._replay is None or not fits:
                raise EngineError(f"{plan.num_steps} steps at once, and the first does not fit a recording")
            return self._several(self._replay, plan, sampling)
        # What torch need not do is most of what a replay saves: behind the model's weights its code is cold.
        if self._replay and fits:
            logits, hidden, largest = self._replay(plan), self._replay.hidden, self._replay.largest
        else:
            (hidden, logits), largest = self._computed(plan), None
        return add_pooled(plan, hidden, self.sampler.sample(logits, sampling, largest))

    def _several(self, replay: StepProgram, plan: StepPlan, sampling: SamplingBatch) -> list[Sampled]:
        """Run several decode steps of one plan, each of which computes what the last one sampled."""
        if replay.largest is not None and is_greedy(sampling):
            return self.sampler.likeliest(*replay.several(plan))
        tokens = [a.token_ids[0] for a in self.sampler.sample(replay(plan), sampling, replay.largest)]
        steps = [tokens]
        for i in range(1, plan.num_steps):
            tokens = self.sampler.follow(replay.follow(tokens), sampling, i, replay.largest)
            steps.append(tokens)
        return [Sampled(ids) for ids in zip(*steps, strict=True)]

    @torch.inference_mode()
    def _arrange(self, plan: StepPlan) -> None:
        """Move and zero memory as the plan requires before the pass."""
        self._move(plan.moves)
        self.store.zero_slots(plan.fresh)

    def _move(self, moves: Sequence[Move]) -> None:
        """Make the moves in their order; neighbours that copy the same kind of memory are made together."""
        for target, some in groupby(moves, _group_of):
            match target:
                case None:
                    for move in some:
                        self._swap(move)
                case -1:
                    self.store.copy_slots((m.source, m.target) for m in some if isinstance(m, CopySlot))
                case group:
                    pairs = ((m.source, m.target) for m in some if isinstance(m, CopyBlock))
                    self.store.copy_blocks(group, pairs)

    def _swap(self, move: Move) -> None:
        match move:
            case Save(handle, blocks, slot):
                self.store.save(handle, blocks, slot)
            case Load(handle, blocks, slot):
                self.store.load(handle, blocks, slot)
            case Drop(handle):
                self.store.drop(handle)

    @property
    def is_recorded(self) -> bool:
        return self._replay is not None

    def close(self) -> None:
        """Let the executor's threads go. Nothing can run afterwards."""
        if self.executor:
            self.executor.close()

    @torch.inference_mode()
    def _computed(self, plan: StepPlan) -> tuple[Tensor, Tensor]:
        """Hidden states, [the plan's tokens, hidden], and logits of the requested rows, op by op."""
        batch = build_batch(plan, self.groups, self.store.block_size, self.device)
        hidden = self.decoder.hidden(batch, self.store)
        return hidden, self.decoder.logits(hidden, batch)

    @torch.inference_mode()
    def logits(self, token_ids: Sequence[int], chunk_size: int) -> Tensor:
        """Logits after every token of one prompt, [tokens, vocab] float32 on the CPU.

        Runs in memory of its own, so it does not disturb the engine. A model that is not causal sees the
        whole prompt at once, others chunks of `chunk_size` tokens.
        """
        ids = tuple(token_ids)
        step = chunk_size if self.decoder.spec.causal else len(ids)
        size = self.store.block_size
        table = tuple(range(1, -(-len(ids) // size) + 1))
        store = self._private_store(len(table) + 1)
        parts = []
        for start in range(0, len(ids), step):
            piece = ids[start : start + step]
            chunk = Chunk(0, start, piece, tuple(table for _ in self.groups), 1, len(piece))
            plan = StepPlan(0, (chunk,), fresh=(1,) if start == 0 else ())
            store.zero_slots(plan.fresh)
            parts.append(self.decoder(build_batch(plan, self.groups, size, self.device), store).cpu())
        return torch.cat(parts)

    def _private_store(self, num_blocks: int) -> StateStore:
        states = self.decoder.states
        blocks: Mapping[str, int] = {group.name: num_blocks for group in self.groups}
        slots = 2 if has_slots(states) else 0
        dtype = self.decoder.embed.dtype
        return StateStore(states, blocks, slots, self.store.block_size, self.device, dtype)


def _group_of(move: Move) -> int | None:
    """What a move copies: a block group, -1 for slots, None if it goes to or from host memory."""
    match move:
        case CopyBlock(group=group):
            return group
        case CopySlot():
            return -1
    return None
