"""Log-probabilities of tokens and of their alternatives on a GPU, from logits.

All rows that a step wants are scored first, and then read with the step's tokens in one copy. A row's
alternatives are found by integers of (value, id), of which no two are equal, so their order needs no second
look.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from plait.request import TokenLogprobs
from plait.runner.host.sampler import FLOOR, ROWS_AT_ONCE, count_alternatives, with_target
from plait.runner.sampling.tables import copy_to_device
from plait.schedule.plan import SamplingBatch

LOW_HALF, LARGEST_ID = 0xFFFFFFFF, 0x7FFFFFFF


class LogprobRequest(NamedTuple):
    """A log-probability that a batch wants: of the token `target`, or of sample `draw` of the batch.

    row: of the logits; answer: the row of the batch that wants it; num_top: how many alternatives.
    """

    answer: int
    row: int
    target: int | None
    draw: int
    num_top: int


class StepAnswers(NamedTuple):
    """What a step on a GPU has found, on the host: tokens, largest logits, and a line for each request."""

    tokens: list[int]
    values: list[float]
    scores: npt.NDArray[np.int64]


def list_requests(batch: SamplingBatch, most: int) -> Iterator[LogprobRequest]:
    """Every log-probability that a batch wants, of at most `most` alternatives."""
    first, draw = 0, 0
    for answer, row in enumerate(batch.rows):
        end = first + row.num_logits
        if (num_top := count_alternatives(row)) is not None:
            for i in range(row.num_samples):
                yield LogprobRequest(answer, end - row.num_samples + i, None, draw + i, min(num_top, most))
        num_top = min(row.params.prompt_logprobs or 0, most)
        for i, target in enumerate(row.prompt_targets):
            yield LogprobRequest(answer, first + i, target, 0, num_top)
        first, draw = end, draw + row.num_samples


def score_requests(
    score: Callable[[Tensor, Tensor], Tensor],
    logits: Tensor,
    ids: Tensor,
    requests: Sequence[LogprobRequest],
    limit: int,
    banned: Tensor | None,
) -> list[Tensor]:
    """logits: [n, vocab], ids: of all samples -> [requests, 1 + alternatives] int64 in parts, not waited for.

    First the bits of the target's log-probability, then alternatives, packed by `_pack`. `score`: what is
    bound for `log_probabilities`.
    """
    most = max((request.num_top for request in requests), default=0)
    parts = []
    for at in range(0, len(requests), ROWS_AT_ONCE):
        some = requests[at : at + ROWS_AT_ONCE]
        columns = [[r.row for r in some], [r.draw for r in some], [r.target or 0 for r in some]]
        columns.append([int(r.target is None) for r in some])
        row, draw, target, is_drawn = copy_to_device(np.array(columns, np.int64), logits.device)
        if ids.numel():
            target = torch.where(is_drawn > 0, ids[draw], target)
        values = score(logits, row)
        found = [values.gather(-1, target[:, None]).view(torch.int32).long()]
        if most:
            packed = _pack(values[:, :limit])
            if banned is not None:
                packed.index_fill_(1, banned, torch.iinfo(torch.int64).min)
            found.append(packed.topk(most, -1).values)
        parts.append(torch.cat(found, 1))
    return parts


def read_answers(ids: Tensor, values: Tensor, parts: Sequence[Tensor]) -> StepAnswers:
    """Everything a step has found, in one copy to the host."""
    bits = values.float().view(torch.int32).long()
    found = torch.cat([ids, bits, *(part.flatten() for part in parts)]).cpu().numpy()
    count, wanted = len(ids), sum(map(len, parts))
    logits = found[count : 2 * count].astype(np.int32).view(np.float32)
    scores = found[2 * count :].reshape(wanted, -1) if wanted else found[2 * count :]
    return StepAnswers(found[:count].tolist(), logits.tolist(), scores)


def read_score(request: LogprobRequest, score: npt.NDArray[np.int64], tokens: Sequence[int]) -> TokenLogprobs:
    """The answer to one request from its line."""
    target = tokens[request.draw] if request.target is None else request.target
    packed = score[1 : 1 + request.num_top]
    ids, ranks = LARGEST_ID - (packed & LOW_HALF), packed >> 32
    bits = np.concatenate([score[:1], np.where(ranks < 0, ranks ^ LARGEST_ID, ranks)])
    own, *others = np.maximum(bits.astype(np.int32).view(np.float32), FLOOR).tolist()
    return with_target(target, own, tuple(zip(ids.tolist(), others, strict=True)))


def _pack(values: Tensor) -> Tensor:
    """[n, width] float32 -> int64: larger for larger values, and for the lower id among equals."""
    bits = torch.where(values == 0, 0, values.view(torch.int32)).long()
    ranks = torch.where(bits < 0, bits ^ LARGEST_ID, bits)
    return (ranks << 32) | (LARGEST_ID - torch.arange(values.shape[1], device=values.device))
