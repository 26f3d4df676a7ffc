"""The tickets of a device's steps: answers that are on their way to the host, or that no one waits for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt
from msgspec.structs import replace
from torch import Tensor

from plait.request import TokenLogprobs
from plait.runner.device.rows import DeviceBatch
from plait.runner.host.sampler import FLOOR
from plait.runner.sampling.sampler import Sampler
from plait.schedule.drafts.passes import Denoised
from plait.schedule.plan import Done, Sampled

NOISY_LINES = 4  # of what is read of a pass over noisy canvases


class TicketOwner(Protocol):
    """What launched a step (`DeviceReplay`)."""

    sampler: Sampler
    batch: DeviceBatch

    def forget(self) -> None: ...


@dataclass(frozen=True, slots=True)
class DeviceTicket:
    """A step of which the answers are on their way to the host.

    `reads`: of each of its decode steps, ids and largest logits, [2, n] float64; if it fills canvases [3, n],
    with log-probabilities, and of noisy ones [4, n], with the likeliest tokens and entropies. `columns`: the
    columns of each answer, in order. `seq_ids`: the sequences with one token each of each step.
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
            found = np.stack([read().numpy() for read in self.reads])  # [steps, 2 to 4, n]
            ids, values = found[:, 0, order].astype(np.int64), found[:, 1, order].astype(np.float32)
            drawn = self.replay.sampler.host.likeliest(ids, values)
        except BaseException:
            self.replay.forget()
            raise
        tokens = iter([answer.token_ids for answer in drawn])
        answers = [Sampled(tuple(t for _ in columns for t in next(tokens))) for columns in self.columns]
        if found.shape[1] == NOISY_LINES:
            answers = [
                replace(answer, denoised=_read_places(found[0, 2:, list(columns)]))
                for answer, columns in zip(answers, self.columns, strict=True)
            ]
        elif found.shape[1] > 2:
            scores = iter(found[0, 2, order].tolist())
            answers = [
                replace(a, logprobs=tuple(TokenLogprobs(t, max(next(scores), FLOOR)) for t in a.token_ids))
                for a in answers
            ]
        if self.can_be_followed:
            last = [answer.token_ids[-1] for answer in answers if answer.token_ids]
            self.replay.batch.learn(self.step, self.seq_ids, last)
        return answers


def _read_places(found: npt.NDArray[np.float64]) -> Denoised:
    """[places, 2]: likeliest tokens and entropies."""
    return Denoised(tuple(found[:, 0].astype(np.int64).tolist()), tuple(found[:, 1].tolist()))


@dataclass(frozen=True, slots=True)
class Nothing(Done):
    """The ticket of a step without answers: nothing has to be known before the next one."""

    @property
    def can_be_followed(self) -> bool:
        return True
