"""The inputs of a step that runs op by op: one host buffer, one copy to the device, and views of it."""

from __future__ import annotations

import math
from collections.abc import Container, Sequence
from itertools import accumulate

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from plait.memory import BlockGroup
from plait.model.layers.layers import Batch, CanvasRows, PagedIndex
from plait.ops.low_rank import AdapterRows
from plait.schedule.plan import Chunk, SamplingRow, StepPlan

Ints = npt.NDArray[np.int64]
Drawing = list[tuple[Chunk, SamplingRow]]  # the chunks of a plan that have answers
ALIGNED = 16  # numbers: where kernels want a pointer to begin


def build_batch(plan: StepPlan, groups: Sequence[BlockGroup], block_size: int, device: torch.device) -> Batch:
    """The tensors of one step on `device`. A table entry a sequence does not have is 0, the garbage block."""
    return batch_of(plan, groups, upload(parts_of(plan, len(groups), block_size), device))


def parts_of(plan: StepPlan, num_groups: int, block_size: int) -> list[Ints]:
    """The arrays of a step: ids, positions, starts, lengths, slots, history, rows of logits, adapters; then
    tables and addresses of each block group."""
    chunks = plan.chunks
    counts = np.fromiter((len(c.token_ids) for c in chunks), np.int64, len(chunks))
    begins = np.fromiter((c.start for c in chunks), np.int64, len(chunks))
    wanted = np.fromiter((c.num_logits for c in chunks), np.int64, len(chunks))
    starts = np.concatenate([np.zeros(1, np.int64), counts.cumsum()])
    positions = _ranges(begins, counts)
    parts = [
        np.fromiter((t for c in chunks for t in c.token_ids), np.int64, int(starts[-1])),
        positions,
        starts,
        begins + counts,
        np.fromiter((c.slot for c in chunks), np.int64, len(chunks)),
        (begins > 0).astype(np.int64),
        _ranges(starts[1:] - wanted, wanted),
        np.repeat(np.fromiter((c.adapter for c in chunks), np.int64, len(chunks)), counts),
    ]
    sequence = np.repeat(np.arange(len(chunks)), counts)
    for g in range(num_groups):
        table = _table([c.blocks[g] for c in chunks])
        parts += [table, table[sequence, positions // block_size] * block_size + positions % block_size]
    return parts


def upload(parts: Sequence[Ints], device: torch.device) -> list[Tensor]:
    """Arrays as tensors on the device: views of one tensor, which is copied at once.

    On a GPU the rows of a table are a multiple of `ALIGNED` numbers apart, whatever their width: kernels are
    compiled for strides that 16 divides and anew for others, which takes seconds in the middle of a step.
    """
    forms = [_lie_on(device, part.shape) for part in parts]
    offsets = np.cumsum([0, *(-(-math.prod(form) // ALIGNED) * ALIGNED for form in forms)]).tolist()
    whole = torch.zeros(max(offsets[-1], 1), dtype=torch.int64, pin_memory=device.type == "cuda")
    places = [slice(at, at + math.prod(form)) for at, form in zip(offsets, forms, strict=False)]
    flat = whole.numpy()
    for part, form, place in zip(parts, forms, places, strict=True):
        flat[place].reshape(form)[..., : part.shape[-1]] = part
    if device.type != "cpu":
        whole = whole.to(device, non_blocking=True)
    given = zip(parts, forms, places, strict=True)
    return [whole[place].view(form)[..., : part.shape[-1]] for part, form, place in given]


def _lie_on(device: torch.device, shape: tuple[int, ...]) -> tuple[int, ...]:
    """The shape of an array with what lies between its rows."""
    if len(shape) < 2 or device.type == "cpu":
        return shape
    return *shape[:-1], -(-shape[-1] // ALIGNED) * ALIGNED


def upload_pairs(numbers: tuple[list[int], list[int]], device: torch.device) -> tuple[Tensor, Tensor]:
    """Two lists of the same length as tensors on the device, by one copy."""
    first, second = upload([np.array(part, np.int64) for part in numbers], device)
    return first, second


def batch_of(plan: StepPlan, groups: Sequence[BlockGroup], tensors: Sequence[Tensor]) -> Batch:
    """The batch of a plan over what `parts_of` it is on the device."""
    chunks = plan.chunks
    ids, positions, starts, lens, slots, history, rows, adapters, *paged = tensors
    decodes = [is_decode(chunk) for chunk in chunks]
    pairs = zip(groups, paged[::2], paged[1::2], strict=True)
    return Batch(
        token_ids=ids,
        positions=positions,
        query_start=starts,
        seq_lens=lens,
        num_decodes=decodes.index(False) if False in decodes else len(decodes),
        paged={group.name: PagedIndex(table, mapping) for group, table, mapping in pairs},
        state_slots=slots,
        has_history=history.bool(),
        logit_rows=rows,
        adapters=AdapterRows.of(adapters) if any(c.adapter for c in chunks) else None,
        prompts=ids.new_tensor([c.prompt for c in chunks]) if any(c.prompt for c in chunks) else None,
        canvas=_find_canvases(chunks, positions, lens),
    )


def _find_canvases(chunks: Sequence[Chunk], positions: Tensor, lens: Tensor) -> CanvasRows | None:
    """The noisy canvases of some chunks: their last tokens, those with logits."""
    passes = [(c.num_logits, c.denoising) for c in chunks if c.denoising]
    if not passes:
        return None
    sizes = [c.num_logits if c.denoising else 0 for c in chunks]
    start = lens - lens.new_tensor(sizes)
    counts = lens.new_tensor([len(c.token_ids) for c in chunks])
    firsts = [one.is_first for size, one in passes for _ in range(size)]
    return CanvasRows(
        start=start,
        is_place=positions >= start.repeat_interleave(counts, output_size=len(positions)),
        is_fresh=torch.tensor(firsts, device=lens.device),
        sizes=tuple(size for size, _ in passes),
        temperatures=torch.tensor([one.temperature for _, one in passes], device=lens.device),
    )


def is_decode(chunk: Chunk) -> bool:
    """Whether a chunk is one token with history. A prompt of one token is a prompt."""
    return chunk.start > 0 and len(chunk.token_ids) == 1


def is_decoding(plan: StepPlan) -> bool:
    """Whether a plan is one token with history of each of its sequences, and nothing else is requested."""
    return all(is_decode(chunk) and chunk.num_logits == 1 and not chunk.num_pooled for chunk in plan.chunks)


def list_columns(rows: Sequence[SamplingRow]) -> list[range]:
    """Which of a step's draws are those of each row, in the rows' order."""
    ends = accumulate(row.num_samples for row in rows)
    return [range(end - row.num_samples, end) for row, end in zip(rows, ends, strict=True)]


def list_draws(drawing: Drawing) -> list[int]:
    """The rows of logits that are sampled from: of each chunk its last."""
    found, end = list[int](), 0
    for chunk, row in drawing:
        end += chunk.num_logits
        found += range(end - row.num_samples, end)
    return found


def list_places(drawing: Drawing, seq_ids: Container[int]) -> list[int]:
    """Which of the draws are those of these sequences, which have one each."""
    columns = list_columns([row for _, row in drawing])
    return [own.start for (chunk, _), own in zip(drawing, columns, strict=True) if chunk.seq_id in seq_ids]


def _ranges(begins: Ints, counts: Ints) -> Ints:
    """begin, begin + 1, … of so many numbers each, one after the other."""
    ends = counts.cumsum()
    total = int(ends[-1]) if ends.size else 0
    return np.arange(total) + np.repeat(begins - (ends - counts), counts)


def _table(tables: Sequence[tuple[int, ...]]) -> Ints:
    """Block tables as one array, padded with block 0."""
    found = np.zeros((len(tables), max(map(len, tables))), np.int64)
    for row, table in zip(found, tables, strict=True):
        row[: len(table)] = table
    return found
