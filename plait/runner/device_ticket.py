"""The tickets of a device's steps: answers that are on their way to the host, or that no one waits for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from msgspec.structs import replace
from torch import Tensor

from plait.request import TokenLogprobs
from plait.runner.batches.device_batch import DeviceBatch
from plait.runner.host.sampler import FLOOR
from plait.runner.sampler import Sampler
from plait.schedule.plan import Done, Sampled


class TicketOwner(Protocol):
    """What launched a step (`DeviceReplay`)."""

    sampler: Sampler
    batch: DeviceBatch

    def forget(self) -> None: ...


@dataclass(frozen=True, slots=True)
class DeviceTicket:
    """A step of which the answers are on their way to the host.

    `reads`: of each of its decode steps, ids and largest logits, [2, n] float64; if it fills canvases [3, n],
    with log-probabilities. `columns`: the columns of each answer, in order. `seq_ids`: the sequences with
    one token each of each step.
    """

    replay: TicketOwner
    step: int
    reads: Sequence[Callable[[], Tensor]]
    columns: Sequence[Sequence[int]]
    seq_ids: Sequence[int]
    can_be_followed: bool

    def wait(self) -> list[Sampled]:
        """The answers to the plan's chunks. Raises EngineError for logits that are no numbers."""
        order = [column for columns in self.columns for column in columns]
        try:
            found = np.stack([read().numpy() for read in self.reads])  # [steps, 2 or 3, n]
            ids, values = found[:, 0, order].astype(np.int64), found[:, 1, order].astype(np.float32)
            drawn = self.replay.sampler.host.likeliest(ids, values)
        except BaseException:
            self.replay.forget()
            raise
        tokens = iter([answer.token_ids for answer in drawn])
        answers = [Sampled(tuple(t for _ in columns for t in next(tokens))) for columns in self.columns]
        if found.shape[1] > 2:
            scores = iter(found[0, 2, order].tolist())
            answers = [
                replace(a, logprobs=tuple(TokenLogprobs(t, max(next(scores), FLOOR)) for t in a.token_ids))
                for a in answers
            ]
        if self.can_be_followed:
            last = [answer.token_ids[-1] for answer in answers if answer.token_ids]
            self.replay.batch.learn(self.step, self.seq_ids, last)
        return answers


@dataclass(frozen=True, slots=True)
class Nothing(Done):
    """The ticket of a step without answers: nothing has to be known before the next one."""

    @property
    def can_be_followed(self) -> bool:
        return True
