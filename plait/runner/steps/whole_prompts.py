"""Logits after every token of one prompt, in memory of its own."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from plait.memory import block_groups, has_slots
from plait.model.decoder import Decoder
from plait.runner.steps.inputs import build_batch
from plait.schedule.plan import Chunk, StepPlan
from plait.spec.canvas import CanvasSpec
from plait.state.store import StateStore


@torch.inference_mode()
def score_prompt(
    decoder: Decoder, block_size: int, device: torch.device, token_ids: Sequence[int], chunk_size: int
) -> Tensor:
    """[tokens, vocab] float32 on the CPU. A model that is not causal sees all, others `chunk_size` tokens or
    more, up to the end of a canvas."""
    ids, canvas, states = tuple(token_ids), decoder.spec.canvas, decoder.states
    least = canvas.size if isinstance(canvas, CanvasSpec) else 1
    step = -(-chunk_size // least) * least if decoder.spec.causal else len(ids)
    table, groups = tuple(range(1, -(-len(ids) // block_size) + 1)), block_groups(states)
    blocks = {group.name: len(table) + 1 for group in groups}
    slots, dtype = 2 if has_slots(states) else 0, decoder.embed.dtype
    store = StateStore(states, blocks, slots, block_size, device, dtype)
    parts = []
    for start in range(0, len(ids), step):
        some = ids[start : start + step]
        chunk = Chunk(0, start, some, tuple(table for _ in groups), 1, len(some))
        plan = StepPlan(0, (chunk,), fresh=(1,) if start == 0 else ())
        store.zero_slots(plan.fresh)
        parts.append(decoder(build_batch(plan, groups, block_size, device), store).cpu())
    return torch.cat(parts)
