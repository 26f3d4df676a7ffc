"""What is requested of a model that drafts, and of a runner that takes speculative turns by itself."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from msgspec import Struct

from plait.request import SamplingParams

MOST_DRAFTED = 16  # tokens of a head's draft: a step over more rows costs what they bring
FEW_TURNS = 8  # while costs are compared, in windows of about as many tokens
MOST_STOPS = 64  # stop tokens that native code looks for
MOST_TURNS = 32  # of one plan: Python between two plans costs a small model as much as two passes


class PlanTurns(Struct, frozen=True, gc=False):
    """The step with a sequence's draft, and further ones that the runner drafts itself.

    There are at most `most`. None begins behind one of the tokens `stops`, or with rows that would be behind
    the first `num_rows` of the plan: there is memory for these, and the sequence does not end before them.
    """

    most: int
    num_rows: int
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


class DraftRequest(Struct, frozen=True):
    """Requests up to `limit` draft tokens after `token_ids` (read only), drawn by `params` and `seed`.

    `salt`: what other sequences wrote may be read where it is the same.
    """

    seq_id: int
    token_ids: Sequence[int]
    limit: int
    params: SamplingParams
    seed: int
    salt: str = ""


def count_decodes(num_steps: int, stops: Collection[int], found: Sequence[Sequence[int]]) -> int:
    """The decode steps of a plan that its runner took: all, or those up to one of `stops`.

    `found`: the tokens of each sequence.
    """
    count = len(found[0]) if stops and found else 0
    ended = 0 < count < num_steps and any({*ids[-1:]} & {*stops} for ids in found)
    return count if ended else num_steps
