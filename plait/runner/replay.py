"""What runs a step: on a CPU a native program, on a device graphs, each recorded once; and on all ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

from msgspec.structs import replace
from torch import Tensor

from plait.errors import EngineError
from plait.schedule.plan import Sampled, SamplingBatch, StepPlan, Ticket

Run = Callable[[StepPlan, SamplingBatch], Ticket]


class Lead(Protocol):
    """Sends to the other ranks of a model what rank 0 is about to run, and checks what they did."""

    def launch(self, run: Run, plan: StepPlan, sampling: SamplingBatch) -> Ticket: ...
    def score(self, run: Callable[[], Tensor], token_ids: Sequence[int], chunk_size: int) -> Tensor: ...


class Replay(Protocol):
    """Launches steps of the plans that fit. `launches`: the names of a step's kernels, in order."""

    @property
    def launches(self) -> Sequence[str]: ...
    def describe(self) -> str:
        """What was recorded, in a line."""

    def fits(self, plan: StepPlan) -> bool:
        """Whether `launch` can run the plan."""

    def launch(self, plan: StepPlan, sampling: SamplingBatch) -> Ticket:
        """Launch all steps of a plan that fits."""

    def forget(self) -> None:
        """A step failed: nothing that is known about buffers can be trusted."""


def add_pooled(plan: StepPlan, hidden: Tensor, answers: Sequence[Sampled]) -> list[Sampled]:
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
            total = hidden[end - chunk.num_pooled : end].double().sum(0)
            if not total.isfinite().all():
                raise EngineError("the hidden states are no numbers; a weight or a state is broken")
            answer = replace(answer, pooled=tuple(total.tolist()))
        found.append(answer)
    return found


def find_tensors(value: object) -> Iterator[Tensor]:
    """Every tensor in nested tuples, lists and dicts."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for item in value:
            yield from find_tensors(item)
    elif isinstance(value, dict):
        yield from find_tensors(list(value.values()))
