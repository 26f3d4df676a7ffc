"""What the scheduler decides for one step: plain integers, the same for every rank."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Chunk:
    """One sequence's share of a step: `token_ids` are computed at positions start, start+1, …

    `blocks`: one block table per block group, in the groups' order; `slot`: its place for fixed-size state.
    `num_logits`: the last that many tokens' logits are wanted (0: a piece in the middle of a prompt).
    """

    seq_id: int
    start: int
    token_ids: tuple[int, ...]
    blocks: tuple[tuple[int, ...], ...]
    slot: int
    num_logits: int

    @property
    def end(self) -> int:
        return self.start + len(self.token_ids)


@dataclass(frozen=True, slots=True)
class Plan:
    """Decodes first, then prefill chunks. `copies`: slot -> slot before the pass; `fresh`: slots to zero."""

    step: int
    chunks: tuple[Chunk, ...]
    copies: tuple[tuple[int, int], ...] = ()
    fresh: tuple[int, ...] = ()

    @property
    def num_tokens(self) -> int:
        return sum(len(chunk.token_ids) for chunk in self.chunks)
