"""Where the state of drafts lies: a place for each sequence, in memory apart from that of sequences."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from plait.memory import BlockGroup
from plait.request import SamplingParams
from plait.schedule.plan import Table


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftMemory:
    """Blocks and slots of a draft model: `num_places` places of `max_len` tokens, one for each sequence.

    A windowed group's blocks are used in turns, enough of them for the window and a step of `max_step_len`
    tokens, with `num_masks` behind these. A place has two slots: one moves on, the other keeps the state
    before the draft.
    """

    groups: tuple[BlockGroup, ...]
    has_slots: bool
    block_size: int
    num_places: int
    max_len: int
    max_step_len: int
    num_masks: int = 0

    @property
    def num_blocks(self) -> Mapping[str, int]:
        """Blocks by group name, the garbage block included, as the state store wants them."""
        return {group.name: 1 + self.num_places * self.per_place(group) for group in self.groups}

    @property
    def num_slots(self) -> int:
        return 1 + 2 * self.num_places if self.has_slots else 0

    def per_place(self, group: BlockGroup) -> int:
        """Blocks of one place."""
        longest = -(-self.max_len // self.block_size)
        if group.window is None:
            return longest
        return min(longest, -(-(group.window + self.max_step_len + self.num_masks) // self.block_size) + 1)

    def slots(self, place: int) -> tuple[int, int]:
        """Both slots of a place; zeros if the model has no recurrent state."""
        return (2 * place + 1, 2 * place + 2) if self.has_slots else (0, 0)

    def tables(self, place: int, start: int, end: int) -> tuple[Table, ...]:
        """The block tables with which a place computes the tokens start..end."""
        return tuple(self._table(group, place, start, end) for group in self.groups)

    def _table(self, group: BlockGroup, place: int, start: int, end: int) -> Table:
        count, needed = self.per_place(group), -(-end // self.block_size)
        first = 1 + place * count
        if group.window is None:
            return tuple(range(first, first + needed))
        behind = min(max(start - group.window + 1, 0) // self.block_size, needed)
        return (0,) * behind + tuple(first + i % count for i in range(behind, needed))


def without_logprobs(params: SamplingParams) -> SamplingParams:
    """Parameters without log-probabilities, which drafts do not need."""
    is_plain = params.logprobs is None and params.prompt_logprobs is None
    return params if is_plain else replace(params, logprobs=None, prompt_logprobs=None)
