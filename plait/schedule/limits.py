"""The limits of a scheduler, and how many decode steps one plan may have."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from plait.schedule.costs import StepCosts
from plait.schedule.sequence import TokenSequence

LONGEST_S = 0.05  # of several decode steps at once: a request that arrives meanwhile waits for them


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerLimits:
    """What the scheduler may do in one step and at one time, with the names of `EngineConfig`.

    `max_step_s`: prompts are cut so that a step with running replies takes no longer, if not None.
    `num_steps`: the most decode steps of one plan. `causal` False: all is computed in each step.
    """

    max_num_seqs: int
    max_num_batched_tokens: int
    max_waiting: int
    max_model_len: int
    max_step_s: float | None = None
    num_steps: int = 1
    causal: bool = True


def most_steps(limits: SchedulerLimits, costs: StepCosts, running: Sequence[TokenSequence]) -> int:
    """The most decode steps of one plan of these sequences.

    Planning, committing and emitting events cost a small model 5 % of a step, so several are planned at once
    where no reply has to be read in between. Each computes what the one before it sampled, so the text is the
    same. A model with recurrent state takes one: behind a sequence's end it would be that of tokens that do
    not count, so no sequence could start from it.
    """
    most = limits.num_steps
    if most == 1 or not running:
        return 1
    for seq in running:
        # A first token is emitted at once, because its time is how long the client waited for it.
        if not seq.is_unobserved or seq.is_prefilling or not seq.num_output_tokens:
            return 1
        most = min(most, seq.max_len - seq.length)
    seconds = costs.step_s(len(running))  # expensive: computed after all cheap checks
    if seconds is None:
        return 1
    return min(most, int(min(LONGEST_S, limits.max_step_s or LONGEST_S) / seconds))
