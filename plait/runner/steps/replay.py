"""What runs a step: on a CPU a native program, on a device graphs, each recorded once; and on all ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt
from torch import Tensor

from plait.schedule.plan import SamplingBatch, StepPlan, Ticket

Run = Callable[[StepPlan, SamplingBatch], Ticket]
# (a plan that has run, its hidden states [its tokens or more, hidden], which the next step overwrites)
Observe = Callable[[StepPlan, Tensor | npt.NDArray[np.float32]], None]


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

    def show(self, observe: Observe) -> None:
        """Show the hidden states of every step from now on."""

    def forget(self) -> None:
        """A step failed: nothing that is known about buffers can be trusted."""


def ignore_hidden(plan: StepPlan, hidden: object) -> None:
    """Observes nothing."""


def copy_pooled(plan: StepPlan, hidden: Tensor) -> npt.NDArray[np.float32]:
    """Hidden states on the host, as `add_pooled` takes them; none of a plan that pools none."""
    pools = any(chunk.num_pooled for chunk in plan.chunks)
    found: npt.NDArray[np.float32] = (hidden if pools else hidden[:0]).float().cpu().numpy()
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
