"""What is requested of a model that drafts, and of a runner that takes speculative turns by itself."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from msgspec import Struct

from plait.request import SamplingParams


class PlanTurns(Struct, frozen=True, gc=False):
    """The step with a sequence's draft, and further ones that the runner drafts itself.

    There are `most`, fewer behind one of the tokens `stops`.
    """

    most: int
    stops: tuple[int, ...]


class TurnsEnd(Struct, frozen=True, gc=False):
    """What the last of `num_turns` leaves: the draft that it checked, and the slots of its step.

    `num_earlier`: tokens of the turns before it. `slot`: the sequence's; `row_slots`: those behind the rows
    before the last.
    """

    num_turns: int
    num_earlier: int
    draft: tuple[int, ...]
    slot: int
    row_slots: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class DraftRequest:
    """Requests up to `limit` draft tokens after `token_ids` (read only), drawn by `params` and `seed`."""

    seq_id: int
    token_ids: Sequence[int]
    limit: int
    params: SamplingParams
    seed: int
