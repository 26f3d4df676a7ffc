"""Learned tokens before each text (Hymba). They are the same for all, so they are computed once, at startup.

What they leave is kept by the mixers: keys and values that every query sees, and states that every sequence
begins with. So they are in no sequence, and neither scheduler nor store knows of them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from plait.checkpoint.weights import Target, Weights
from plait.errors import UnsupportedModel
from plait.memory import State, block_groups
from plait.model.layers.layers import Batch, PagedIndex
from plait.spec.model import ModelSpec
from plait.state.store import StateStore

Run = Callable[[Tensor, Tensor, Batch, StateStore], object]  # x and embeddings through all branches


@runtime_checkable
class FrontKeeper(Protocol):
    """A mixer that begins each sequence with what the tokens of the front left."""

    def keep_front(self, store: StateStore) -> None:
        """store: of one sequence, the front, in blocks 1, 2, … and slot 1."""


def read_front(
    s: ModelSpec, mixers: Sequence[object], states: Mapping[str, State], run: Run, w: Weights
) -> None:
    """Run the branches over the front, and have mixers keep what it leaves. Raises CheckpointError.

    Of weights without numbers nothing is kept.
    """
    target, count = w.target, s.front or 0
    front = w.tensor("front", (count, s.hidden_size))
    if target.adapters:
        raise UnsupportedModel("adapters would change what lies before each text, which is not implemented")
    if target.device.type == "meta":
        return
    with torch.inference_mode():
        store = _make_store(states, target, count)
        run(front, front, _front_batch(states, target, count), store)
        for mixer in mixers:
            if isinstance(mixer, FrontKeeper):
                mixer.keep_front(store)


def _blocks(target: Target, count: int) -> int:
    return -(-count // target.block_size)


def _make_store(states: Mapping[str, State], target: Target, count: int) -> StateStore:
    blocks = {group.name: 1 + _blocks(target, count) for group in block_groups(states)}
    store = StateStore(states, blocks, 2, target.block_size, target.device, target.dtype)
    store.zero_slots((1,))
    return store


def _front_batch(states: Mapping[str, State], target: Target, count: int) -> Batch:
    """One prompt of so many tokens; those of the front have no ids."""
    device = target.device
    table = 1 + torch.arange(_blocks(target, count), device=device)[None]
    at = torch.arange(count, device=device)
    index = PagedIndex(table, target.block_size + at)
    one = torch.ones(1, dtype=torch.int64, device=device)
    return Batch(
        token_ids=torch.zeros_like(at),
        positions=at,
        query_start=torch.tensor([0, count], device=device),
        seq_lens=count * one,
        num_decodes=0,
        paged={group.name: index for group in block_groups(states)},
        state_slots=one,
        has_history=torch.zeros(1, dtype=torch.bool, device=device),
        logit_rows=at[:0],
    )
