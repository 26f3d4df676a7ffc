"""Several decode steps in one plan, or speculative turns of one sequence: how many, and what they bring.

A turn is a draft and the step that checks it. The last turn of a plan is settled as a step with a draft is.
Those before it brought tokens that all count, because the runner ends the turns behind a stop token.
"""

from __future__ import annotations

from collections.abc import Sequence

from msgspec.structs import replace

from plait.schedule.allocation import Allocation
from plait.schedule.costs import LATE_S, LONGEST_S, SchedulerLimits, StepCosts, most_steps
from plait.schedule.drafts.slots import DraftSlots
from plait.schedule.drafts.turns import FEW_TURNS, MOST_STOPS, PlanTurns
from plait.schedule.plan import Chunk, Sampled, Table
from plait.schedule.sequence import TokenSequence, Update

HEAD_SHARE = 0.5  # what a turn's drafts may take of the time of the step that checks them, where it is known


def plan_turns(
    seq: TokenSequence, limits: SchedulerLimits, costs: StepCosts, memory: Allocation, *, is_compared: bool
) -> PlanTurns | None:
    """The turns of a plan with this sequence alone, if it has a draft; None: there are no further ones.

    is_compared: they are few, because what they cost is compared.

    Blocks for all of them are reserved. The last one ends where a snapshot is needed, or the sequence does.
    """
    rows, slots = 1 + len(seq.draft), seq.draft_slots
    is_copied = slots.is_copy if slots else memory.has_slots
    if limits.num_turns == 1 or rows == 1 or is_copied or seq.num_left != 1 or not is_plain(seq):
        return None
    num_rows = min(seq.max_len - seq.num_tokens, memory.until_mark(seq))  # the last token is never computed
    allowed = min(limits.num_turns, FEW_TURNS) if is_compared else limits.num_turns
    most = min(allowed, num_rows - rows + 1)  # each brings a token at least
    if most < 2 or (seconds := costs.step_s(rows)) is None:
        return None
    late_s = min(LATE_S if seq.is_watched else LONGEST_S, limits.max_step_s or LONGEST_S)
    most = min(most, int(late_s / (seconds * (1 + HEAD_SHARE))))
    num_rows = min(num_rows, most * rows)
    if most < 2 or not memory.reserve(seq, seq.num_computed_tokens + num_rows):
        return None
    return PlanTurns(most, num_rows, tuple(sorted(seq.stop_token_ids)))


def plan_steps(
    running: Sequence[TokenSequence], limits: SchedulerLimits, costs: StepCosts, memory: Allocation
) -> tuple[int, Table]:
    """(decode steps of a plan of these sequences, tokens behind which they end). Blocks are reserved for all.

    Behind a sequence's end recurrent state would be that of tokens that do not count. Where the runner ends
    the steps behind a stop token there is none; elsewhere slots are copied before.
    """
    stops: Table = ()
    is_copied = memory.has_slots
    if memory.ends_steps and memory.has_slots:
        found = frozenset[int]().union(*(seq.stop_token_ids for seq in running))
        if len(found) <= MOST_STOPS:
            stops, is_copied = tuple(found), False
    most = most_steps(limits, costs, running, memory.options.slot_nbytes if is_copied else 0)
    most = memory.limit_ahead(running, most, is_copied=is_copied)
    if most > 1 and is_copied and not all(map(memory.branch, running)):
        return 1, ()
    return most, stops if most > 1 else ()


def is_plain(seq: TokenSequence) -> bool:
    """Whether tokens follow from the model's logits and random numbers, and nothing reads them in between."""
    is_begun = seq.num_output_tokens >= max(seq.params.min_tokens, 1)
    return is_begun and seq.is_unobserved and not seq.params.logit_bias and seq.gang is None


def settle_earlier(
    seq: TokenSequence, chunk: Chunk, answer: Sampled | None, memory: Allocation
) -> tuple[Chunk, Sampled | None, tuple[int, ...]]:
    """(chunk and answer of the last turn, tokens before it). The sequence is as before that turn's step."""
    ended = answer.turns if answer else None
    if answer is None or ended is None:
        return chunk, answer, ()
    earlier, last = answer.token_ids[: ended.num_earlier], answer.token_ids[ended.num_earlier :]
    seq.token_ids += earlier
    seq.draft = ended.draft
    if seq.draft_slots:
        seq.slot, seq.draft_slots = ended.slot, DraftSlots(seq.num_tokens, ended.row_slots, False)
    if earlier:
        memory.advance(seq, seq.num_tokens - 1)
    tokens = (seq.token_ids[-1], *ended.draft)
    chunk = Chunk(seq.id, seq.num_tokens - 1, tokens, chunk.blocks, seq.slot, chunk.num_logits)
    return chunk, Sampled(last, turns=ended), earlier


def add_earlier(update: Update, answer: Sampled | None, earlier: tuple[int, ...]) -> Update:
    """The update of a plan, from that of its last turn."""
    if answer is None or answer.turns is None:
        return update
    event = replace(update.event, token_ids=(*earlier, *update.event.token_ids))
    accepted = update.num_accepted + len(earlier) - (answer.turns.num_turns - 1)
    return Update(update.seq_id, event, update.num_drafted * answer.turns.num_turns, accepted)
