"""The model runner: runs a plan on a device, from inputs through decoder and sampler to tokens."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import accumulate, groupby

import torch
from msgspec.structs import replace
from torch import Tensor

from plait.errors import EngineError
from plait.memory import BlockGroup, block_groups, has_slots
from plait.model.decoder import Decoder
from plait.model.layers.layers import Batch, PagedIndex
from plait.runner.device_loss import check_lost
from plait.runner.graphs import Capacity, NativeExecutor, StepProgram, record_step
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


def build_batch(plan: StepPlan, groups: Sequence[BlockGroup], block_size: int, device: torch.device) -> Batch:
    """The tensors of one step on `device`. A table entry a sequence does not have is 0, the garbage block."""
    chunks, ints = plan.chunks, partial(torch.tensor, dtype=torch.int64, device=device)
    starts = [0, *accumulate(len(c.token_ids) for c in chunks)]
    ends = zip(chunks, starts[1:], strict=True)
    logit_rows = [row for c, end in ends for row in range(end - c.num_logits, end)]
    positions = [p for c in chunks for p in range(c.start, c.end)]
    decodes = [len(c.token_ids) == 1 and c.start > 0 for c in chunks]
    num_decodes = decodes.index(False) if False in decodes else len(decodes)
    return Batch(
        token_ids=ints([t for c in chunks for t in c.token_ids]),
        positions=ints(positions),
        query_start=ints(starts),
        seq_lens=ints([c.end for c in chunks]),
        num_decodes=num_decodes,
        max_query_len=max(len(c.token_ids) for c in chunks),
        max_seq_len=max(c.end for c in chunks),
        paged={
            group.name: _paged_index([c.blocks[g] for c in chunks], chunks, block_size, device)
            for g, group in enumerate(groups)
        },
        state_slots=ints([c.slot for c in chunks]),
        has_history=torch.tensor([c.start > 0 for c in chunks], device=device),
        logit_rows=ints(logit_rows),
    )


def _paged_index(
    tables: Sequence[tuple[int, ...]], chunks: Sequence[Chunk], block_size: int, device: torch.device
) -> PagedIndex:
    width = max(map(len, tables))
    padded = torch.tensor([[*t, *[0] * (width - len(t))] for t in tables], dtype=torch.int64, device=device)
    mapping = [
        table[p // block_size] * block_size + p % block_size
        for table, c in zip(tables, chunks, strict=True)
        for p in range(c.start, c.end)
    ]
    return PagedIndex(padded, torch.tensor(mapping, dtype=torch.int64, device=device))


def add_pooled(plan: StepPlan, hidden: Tensor, answers: Sequence[Sampled]) -> list[Sampled]:
    """The answers to a plan's chunks, in order, with the sums of hidden states that they requested.

    hidden: [at least the plan's tokens, hidden]. A sum is computed in float64, so that only its last bits
    depend on how a prompt was cut into chunks. Raises EngineError for a sum that is not finite.
    """
    if not any(chunk.num_pooled for chunk in plan.chunks):
        return list(answers)
    found, given, end = [], iter(answers), 0
    for chunk in plan.chunks:
        end += len(chunk.token_ids)
        if not chunk.has_answer:
            continue
        answer = next(given)
        if chunk.num_pooled:
            total = hidden[end - chunk.num_pooled : end].double().sum(0)
            if not total.isfinite().all():
                raise EngineError("the hidden states are no numbers; a weight or a state is broken")
            answer = replace(answer, pooled=tuple(total.tolist()))
        found.append(answer)
    return found


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
        self._replay, self._static, self.step_kind = None, None, "op by op: no recording was requested"
        if capacity:
            made = record_step(decoder, store, executor, self.groups, capacity, sampler.plain_largest)
            self._replay, self._static, self.step_kind = made

    def execute(self, plan: StepPlan, sampling: SamplingBatch) -> list[Sampled]:
        """Run the steps of a plan: the answer to every chunk that has one, in the plan's order.

        Raises DeviceLost if the device fails and answers no more.
        """
        try:
            return self._execute(plan, sampling)
        except RuntimeError as error:
            check_lost(error, self.device)
            raise

    def _execute(self, plan: StepPlan, sampling: SamplingBatch) -> list[Sampled]:
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
        """Make the moves in their order, neighbours that copy the same kind together; then zero slots."""
        for group, moves in groupby(plan.moves, _group_of):
            if group is not None:
                copies = (move for move in moves if isinstance(move, CopySlot | CopyBlock))
                self.store.copy_rows(group, ((copy.source, copy.target) for copy in copies))
                continue
            for move in moves:
                match move:
                    case Save(handle, blocks, slot):
                        self.store.save(handle, blocks, slot)
                    case Load(handle, blocks, slot):
                        self.store.load(handle, blocks, slot)
                    case Drop(handle):
                        self.store.drop(handle)
        self.store.zero_slots(plan.fresh)

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
        blocks = {group.name: len(table) + 1 for group in self.groups}
        states, dtype = self.decoder.states, self.decoder.embed.dtype
        store = StateStore(states, blocks, 2 if has_slots(states) else 0, size, self.device, dtype)
        parts = []
        for start in range(0, len(ids), step):
            piece = ids[start : start + step]
            chunk = Chunk(0, start, piece, tuple(table for _ in self.groups), 1, len(piece))
            plan = StepPlan(0, (chunk,), fresh=(1,) if start == 0 else ())
            store.zero_slots(plan.fresh)
            parts.append(self.decoder(build_batch(plan, self.groups, size, self.device), store).cpu())
        return torch.cat(parts)


def _group_of(move: Move) -> int | None:
    """What a move copies: a block group, -1 for slots, None if it goes to or from host memory."""
    if isinstance(move, CopyBlock):
        return move.group
    return -1 if isinstance(move, CopySlot) else None
