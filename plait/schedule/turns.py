"""Several decode steps in one plan, speculative turns of one sequence, or a canvas: what plans bring.

A turn is a draft and the step that checks it. The last turn of a plan is settled as a step with a draft is.
Those before it brought tokens that all count, because the runner ends the turns behind a stop token.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from msgspec import Struct
from msgspec.structs import replace

from plait.errors import EngineError
from plait.request import Event, TokenLogprobs
from plait.schedule.allocation import Allocation
from plait.schedule.costs import LATE_S, LONGEST_S, SchedulerLimits, StepCosts, most_steps
from plait.schedule.drafts.canvas import Canvas
from plait.schedule.drafts.slots import DraftSlots
from plait.schedule.drafts.turns import FEW_TURNS, MOST_STOPS, PlanTurns, count_decodes
from plait.schedule.plan import Chunk, Sampled, StepPlan, Table
from plait.schedule.sequence import TokenSequence

HEAD_SHARE = 0.5  # what a turn's drafts may take of the time of the step that checks them, where it is known


class Update(Struct, frozen=True, gc=False):
    """What one plan added to a sequence: its event, and what was accepted of the step's draft tokens."""

    seq_id: int
    event: Event
    num_drafted: int = 0
    num_accepted: int = 0


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


def add_drafts(
    running: Sequence[TokenSequence],
    shares: Mapping[int, int],
    drafts: Mapping[int, tuple[int, ...]],
    limits: SchedulerLimits,
    memory: Allocation,
) -> None:
    """Add draft tokens where the budget and memory allow it; no sequence is preempted for a draft."""
    budget = limits.max_num_batched_tokens - sum(shares.values())
    for seq in running:
        if seq.id not in drafts or shares.get(seq.id) != (share := seq.num_left) or not seq.can_draft:
            continue
        # The last sampled token is never computed, and a chunk ends where a snapshot is needed.
        most = min(budget, seq.max_len - seq.num_tokens - 1, memory.until_mark(seq) - share)
        draft = seq.cut_draft(drafts[seq.id][: max(most, 0)])
        length = seq.num_computed_tokens + share + len(draft)
        if draft and memory.reserve(seq, length) and memory.branch(seq, len(draft)):
            seq.draft = draft
            budget -= len(draft)


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


def answers_by_id(
    plan: StepPlan, sampled: Sequence[Sampled], sequences: Mapping[int, TokenSequence]
) -> dict[int, Sampled]:
    """What was sampled, by sequence id; every sequence that has caught up must have its tokens.

    Raises EngineError if there are more or fewer.
    """
    chunks, answers = [c for c in plan.chunks if c.has_answer], {}
    steps = count_decodes(plan.num_steps, plan.stops, [one.token_ids for one in sampled])
    if len(chunks) != len(sampled):
        raise EngineError(f"step {plan.step}: {len(sampled)} answers for {len(chunks)} chunks that have one")
    for chunk, answer in zip(chunks, sampled, strict=True):
        answers[chunk.seq_id] = answer
        seq = sequences.get(chunk.seq_id)
        if seq is None or not seq.is_in(plan.step):
            continue
        num_sampled = len(seq.draft) + (0 if seq.canvas else steps)
        wanted = num_sampled * seq.samples_after(chunk.end - len(seq.draft))
        wanted += answer.turns.num_earlier if answer.turns else 0
        if len(answer.token_ids) != wanted:
            raise EngineError(
                f"step {plan.step}: {len(answer.token_ids)} tokens were sampled for "
                f"{seq.request_id}[{seq.index}], not {wanted}"
            )
    return answers


def advance_canvas(
    seq: TokenSequence, chunk: Chunk, answer: Sampled | None, memory: Allocation
) -> Update | None:
    """What a pass adds to a sequence with a canvas: its tokens once it is done; None before.

    Only known tokens count as computed, and where places see each other those of whole canvases: the last
    one's are computed once more.
    """
    canvas, draft, seq.draft, seq.in_step = seq.canvas, seq.draft, (), 0
    assert canvas is not None
    end = min(chunk.end - len(draft), seq.num_tokens)
    memory.settle(seq, canvas.count_final(end), accepted=True)
    found: tuple[TokenLogprobs, ...] = ()
    if draft and answer is not None:
        if isinstance(canvas, Canvas):
            canvas.fill(answer.logprobs or ())
        elif passed := answer.denoised:
            made = passed.likeliest, passed.entropies, answer.logprobs
            canvas.fill(answer.token_ids, *made, seq.num_tokens, seq.seed)
        found = canvas.take(seq.max_len - seq.num_tokens, seq.stop_token_ids)
    if not found and not (seq.max_len <= seq.prompt_len and end == seq.num_tokens):
        return None
    new = tuple([one.token_id for one in found])
    tokens, reason = seq.keep_tokens(new)
    seq.token_ids += tokens
    scores = found if seq.params.logprobs is not None else None
    return Update(seq.id, seq.event(Sampled(new, scores), tokens, reason, is_scoring=False))
