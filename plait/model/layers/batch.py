"""One forward pass, as tensors: every scheduled token of every sequence, flattened. Runner -> model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class PagedIndex:
    """Where one block group's tokens live. Token t of sequence s is at row t % block_size of block
    `block_table[s, t // block_size]`; `slot_mapping` is that address, flat, for each new token."""

    block_table: Tensor  # [S, M] int64, padded with 0 (the garbage block)
    slot_mapping: Tensor  # [T] int64


@dataclass(frozen=True, slots=True)
class Batch:
    """A ragged batch: decodes first (one token each), then chunks of prompts.

    The same object in eager runs and in replays of a captured step; passed as an argument, never looked up.
    """

    token_ids: Tensor  # [T] int64
    positions: Tensor  # [T] int64
    query_start: Tensor  # [S+1] int64: sequence s owns rows query_start[s]..query_start[s+1]
    seq_lens: Tensor  # [S] int64: tokens in the sequence after this pass
    num_decodes: int
    max_query_len: int
    max_seq_len: int
    paged: Mapping[str, PagedIndex]  # by block group name
    state_slots: Tensor  # [S] int64
    has_history: Tensor  # [S] bool: False where this pass holds the sequence's first token
    logit_rows: Tensor  # [L] int64: the rows of which logits are needed
