"""Multi-step decoding: several decode steps from one plan, where no reply has to be read in between.

Planning, committing and emitting events cost a small model 5 % of a step. Each step computes what the one
before it sampled, with the same kernels, so the text is the same. A sequence that ends early computes a few
tokens for nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from plait.schedule.allocation import Allocation
from plait.schedule.costs import StepCosts
from plait.schedule.sequence import TokenSequence

LONGEST_S = 0.05  # the longest that a request which arrives, or is cancelled, meanwhile has to wait


class MultiStepLimits(Protocol):
    @property
    def num_steps(self) -> int: ...
    @property
    def max_step_s(self) -> float | None: ...


def num_steps(
    running: Sequence[TokenSequence], limits: MultiStepLimits, costs: StepCosts, memory: Allocation
) -> int:
    """How many steps these sequences can run at once, with blocks for all of them reserved.

    One for a model with recurrent state. Behind a sequence's end it would be the state of tokens that do not
    count, so no sequence could start from it.
    """
    most = limits.num_steps
    if most == 1 or memory.has_slots or not running:
        return 1
    for seq in running:
        # A first token is emitted at once, because its time is how long the client waited for it.
        if not seq.is_unobserved or seq.is_prefilling or not seq.num_output_tokens:
            return 1
        most = min(most, seq.max_len - seq.num_tokens)
    seconds = costs.step_s(len(running))  # expensive: computed after all cheap checks
    if seconds is None:
        return 1
    most = min(most, int(min(LONGEST_S, limits.max_step_s or LONGEST_S) / seconds))
    return most if most > 1 and memory.reserve_ahead(running, most) else 1
