"""Sums of hidden states that a plan's chunks ask for: embeddings."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
from msgspec.structs import replace

from plait.errors import EngineError
from plait.schedule.plan import Sampled, StepPlan


def add_pooled(plan: StepPlan, hidden: npt.NDArray[np.float32], answers: Sequence[Sampled]) -> list[Sampled]:
    """The answers to a plan's chunks, in order, with the sums of hidden states that they requested.

    hidden: [at least the plan's tokens, hidden]. A sum is computed in float64, so that only its last bits
    depend on how a prompt was cut into chunks. Raises EngineError for a sum that is not finite.
    """
    if not any(chunk.num_pooled for chunk in plan.chunks):
        return list(answers)
    found, given, end = [], iter(answers), 0
    for chunk in plan.chunks:
        end += len(chunk.token_ids)
        if not chunk.has_answer:
            continue
        answer = next(given)
        if chunk.num_pooled:
            total = hidden[end - chunk.num_pooled : end].sum(0, dtype=np.float64)
            if not np.isfinite(total).all():
                raise EngineError("the hidden states are no numbers; a weight or a state is broken")
            answer = replace(answer, pooled=tuple(total.tolist()))
        found.append(answer)
    return found
