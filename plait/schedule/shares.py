"""How many tokens each sequence gets in a step: one for every decode, the rest to prompts in line.

A sequence with a canvas gets all places of it, and what is known and not computed in front of them.

The members of a gang are sampled in the same step. So the last token of each waits until it is the only one
that is left of all of them.
"""

from __future__ import annotations

from collections.abc import Sequence

from plait.errors import CapacityError
from plait.schedule.allocation import Allocation
from plait.schedule.costs import SchedulerLimits, StepCosts
from plait.schedule.sequence import TokenSequence

LEAST_PIECE = 32  # the smallest prompt chunk in a step with running replies, however slow the machine


def share_of(seq: TokenSequence, budget: int, limits: SchedulerLimits, memory: Allocation) -> int:
    """The next chunk of one sequence, of at most `budget` tokens."""
    if not limits.causal:
        return seq.num_tokens if seq.num_tokens <= budget else 0
    if seq.canvas is not None:  # places come behind all known tokens; else chunks end where a canvas does
        whole = max(min(seq.num_left, budget), 0) // seq.canvas.spec.size * seq.canvas.spec.size
        return seq.num_due if seq.num_due <= budget else whole
    if seq.gang is None:
        return min(seq.num_left, budget, memory.until_mark(seq))
    if seq.is_idle or seq.gang.is_due:  # those that are due get theirs together
        return 0
    return max(min(seq.num_left - 1, budget, memory.until_mark(seq)), 0)


def share_members(
    seq: TokenSequence, budget: int, limits: SchedulerLimits, memory: Allocation
) -> dict[int, int]:
    """The next chunks of a sequence and of those that it is sampled with, of `budget` tokens in all."""
    if seq.gang is not None and seq.gang.is_due:
        return {one.id: 1 for one in seq.gang.ranked if len(seq.gang.ranked) <= budget}
    shares: dict[int, int] = {}
    for one in seq.members:
        shares[one.id] = share_of(one, budget, limits, memory)
        budget -= shares[one.id]
    return shares


def prompt_budget(limits: SchedulerLimits, costs: StepCosts, decodes: Sequence[TokenSequence]) -> int:
    """The most prompt tokens of a step with these running replies."""
    most, due = limits.max_num_batched_tokens, sum(seq.num_due for seq in decodes)
    if limits.max_step_s is not None and any(seq.is_watched for seq in decodes):
        within = costs.tokens_within(limits.max_step_s)
        if within is not None:
            least = max(LEAST_PIECE, 2 * max(seq.num_due for seq in decodes))
            most = min(most, max(within, due + least))
    return most - due


def share_step(
    running: Sequence[TokenSequence], limits: SchedulerLimits, costs: StepCosts, memory: Allocation
) -> dict[int, int]:
    """Tokens of the next step, by the ids of running sequences."""
    if not any(seq.is_prefilling for seq in running):  # most steps: the budget is expensive
        return {seq.id: seq.num_due for seq in running if seq.has_more}
    decodes = [seq for seq in running if seq.is_due]
    shares, budget = {seq.id: seq.num_due for seq in decodes}, prompt_budget(limits, costs, decodes)
    for seq in running:
        if seq.id not in shares and (seq.is_prefilling or seq.gang is not None):
            shares[seq.id] = share_of(seq, budget, limits, memory)
            budget -= shares[seq.id]
    return shares


def check_fits(seq: TokenSequence, limits: SchedulerLimits, memory: Allocation) -> None:
    """Raises CapacityError for a sequence, or a gang, that can never have memory or places."""
    count, lengths = len(seq.members), [one.most_computed for one in seq.members]
    if short := memory.shortage(*lengths):
        what = "a sequence" if count == 1 else f"{count} sequences that are sampled together, each"
        raise CapacityError(
            f"{what} of {max(lengths)} tokens needs {short[0]} blocks and there are {short[1]}; send a "
            "shorter prompt, request fewer tokens, or start with a larger --memory-limit"
        )
    if count > limits.max_num_seqs:
        raise CapacityError(
            f"{count} sequences must be sampled together, and max_num_seqs is {limits.max_num_seqs}; request "
            "fewer beams, or start with a larger --max-num-seqs"
        )


def others_await(seq: TokenSequence, memory: Allocation) -> bool:
    """Whether another member of its gang should wait, because more of its prefix is about to be computed."""
    others = [one for one in seq.members[1:] if not one.is_idle]
    return any(memory.awaits_prefix(one, memory.lookup(one)) for one in others)
