"""From hidden states to one vector for a chunk: what embeddings are made of."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from torch import Tensor

from plait.schedule.plan import Plan, Sampled


def with_pooled(plan: Plan, hidden: Tensor, answers: Sequence[Sampled]) -> list[Sampled]:
    """The answers to a plan's chunks, in order, with the sums that they asked for.

    hidden: [at least the plan's tokens, hidden]; a sum is computed in float64, so that it does not depend on
    how a prompt was cut beyond the last bits of float64.
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
            rows = hidden[end - chunk.num_pooled : end]
            answer = replace(answer, pooled=tuple(rows.double().sum(0).tolist()))
        found.append(answer)
    return found
