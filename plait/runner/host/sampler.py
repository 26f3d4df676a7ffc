"""The sampler on a CPU, from logits to tokens: penalties, biases, bans, the draw, and log-probabilities.

A row's answer is a function of that row, its settings and its history alone, whatever else is in the batch.
It works on numpy's arrays, and needs no torch but for log-probabilities.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate
from typing import Any

import numpy as np
import numpy.typing as npt
from msgspec import Struct

from plait.errors import EngineError
from plait.ops.seed import uniform
from plait.request import SamplingParams, TokenLogprobs
from plait.runner.host.chain import ChainRow, denoise, draw, list_candidates
from plait.runner.host.mirostat import choose_by_surprise
from plait.schedule.drafts.passes import Denoised
from plait.schedule.plan import Sampled, SamplingBatch, SamplingRow

FLOOR = -9999.0  # log-probabilities stay finite: JSON has no infinity
ROWS_AT_ONCE = 64  # of log-probabilities: [64, vocab] float32 in addition to the logits
Draw = tuple[SamplingRow, int]  # which of a row's samples, from 0
Floats = npt.NDArray[np.float32]
Longs = npt.NDArray[np.int64]
Largest = tuple[Any, Any]  # the ids and values of a batch's largest logits: arrays
Bounds = dict[int, list[float]]  # mirostat's μ after each sample, by the identity of its row
Alternatives = tuple[tuple[int, float], ...]
Settings = tuple[npt.NDArray[np.generic], ...]  # temperature, top_k, top_p, min_p, uniform: one for each row


class RowOps(Struct, frozen=True):
    """What is computed over whole rows of logits, [n, vocab] float32.

    largest: ids and values of the largest logits; draw: ids drawn by settings; log_softmax: of each row.
    """

    largest: Callable[[Floats], Largest]
    draw: Callable[[Floats, Settings], Longs]
    log_softmax: Callable[[Floats], Floats]


class HostSampler:
    """Samples tokens and computes log-probabilities for the rows of a step.

    `banned`: ids without text in the tokenizer (holes of the vocabulary, padding rows). They are never
    sampled and never an alternative; the model's probabilities are not changed by it.
    """

    def __init__(self, vocab_size: int, ops: RowOps, banned: Iterable[int] = ()) -> None:
        holes = sorted({i for i in banned if 0 <= i < vocab_size})
        self.limit, self.banned = vocab_size, tuple(holes)
        while holes and holes[-1] == self.limit - 1:
            self.limit = holes.pop()
        if self.limit == 0:
            raise EngineError(f"all {vocab_size} tokens of the vocabulary are banned")
        self.vocab_size, self.holes, self._ops = vocab_size, np.array(holes, np.int64), ops

    def sample(self, logits: Floats, batch: SamplingBatch, largest: Largest | None = None) -> list[Sampled]:
        """logits: [L, vocab], each row's `num_logits` in turn -> one answer per row of the batch.

        `largest`: ids and values of the largest logits, of L rows or more, if they are known. Raises
        EngineError if a row to sample from has no finite maximum, naming the row.
        """
        rows, count = batch.rows, logits.shape[0]
        check_count(rows, count)
        if any(row.negative >= 0 for row in rows):
            logits, largest = guide(logits, rows, self._ops.log_softmax), None
        draws = [(row, i) for row in rows for i in range(row.num_samples)]
        ids: list[int] = []
        bounds: Bounds = {}
        if draws:
            if len(draws) == count:
                ids = self._choose(logits, draws, largest, bounds)
            else:
                ids = self._choose(logits[sampled_rows(rows)], draws, None, bounds)
        answers, at, end = [], 0, 0
        for row in rows:
            first, end = end, end + row.num_logits
            mine, at = tuple(ids[at : at + row.num_samples]), at + row.num_samples
            found = self._denoise(logits[end - row.num_samples : end], row) if row.entropy_at else None
            ids_of = found.likeliest if found else mine
            scores = self._logprobs_of(logits, end - row.num_samples, row, ids_of)
            prompt = self._prompt_logprobs(logits, first, row) if row.prompt_targets else ()
            mu = tuple(bounds.get(id(row), ()))
            answers.append(Sampled(mine, scores, prompt, mirostat_mu=mu, denoised=found))
        return answers

    def follow(
        self, logits: Floats, batch: SamplingBatch, step: int, largest: Largest | None = None
    ) -> list[int]:
        """The tokens of a batch's decode step that comes so many after the one of `sample`; raises the same.

        Rows must ask for nothing but tokens, without penalties and masks.
        """
        return self._choose(logits, [(row, step) for row in batch.rows], largest)

    def likeliest(self, ids: Longs, values: Floats) -> list[Sampled]:
        """Answers of rows that `is_greedy`: ids and values of the largest logits, arrays [steps, rows]."""
        check_finite(values.ravel().tolist())
        return [Sampled(tuple(tokens)) for tokens in ids.T.tolist()]

    def cut_to_limit(self, logits: Any) -> Any:
        """Without the ids behind the last one that may be sampled; of an array or a tensor."""
        return logits if logits.shape[1] == self.limit else logits[:, : self.limit]

    def _choose(
        self,
        logits: Floats,
        draws: Sequence[Draw],
        largest: Largest | None = None,
        bounds: Bounds | None = None,
    ) -> list[int]:
        """logits: [n, vocab], not changed -> n tokens, and in `bounds` what mirostat goes on with."""
        edited = self._edit_rows(logits, draws)
        if largest is None or edited is not logits:
            largest = self._ops.largest(self.cut_to_limit(edited))
        found, values = (part[: len(draws)].tolist() for part in largest)
        check_finite(values)
        ids: list[int] = found
        chained = [i for i, (row, _) in enumerate(draws) if row.params.needs_chain]
        if drawn := [i for i, (row, _) in enumerate(draws) if row.params.temperature and i not in chained]:
            limited = self.cut_to_limit(edited)
            chosen = self._draw_ids(
                limited if len(drawn) == len(limited) else limited[drawn], [draws[i] for i in drawn]
            )
            for i, token_id in zip(drawn, chosen, strict=True):
                ids[i] = token_id
        for i in chained:
            ids[i] = _choose_by_chain(edited[i, : self.limit], draws[i], {} if bounds is None else bounds)
        return ids

    def _denoise(self, logits: Floats, row: SamplingRow) -> Denoised:
        """The likeliest token of each sample, and its entropy, of what settings leave."""
        draws = [(row, i) for i in range(row.num_samples)]
        edited = self.cut_to_limit(self._edit_rows(logits, draws))
        if row.params.needs_chain:
            chained = [_chain_row(draw_of) for draw_of in draws]
            both = [denoise(*one, row.entropy_at) for one in zip(edited, chained, strict=True)]
            return Denoised(tuple([token for token, _ in both]), tuple([entropy for _, entropy in both]))
        ids: list[int] = self._ops.largest(edited)[0][: len(edited)].tolist()
        # One by one: a row's bits must not depend on its neighbours.
        logs = (
            self._ops.log_softmax(edited[i : i + 1] / np.float32(row.entropy_at)) for i in range(len(ids))
        )
        return Denoised(tuple(ids), tuple(entropy_of(one[0]) for one in logs))

    def _draw_ids(self, logits: Floats, draws: Sequence[Draw]) -> list[int]:
        params = [row.params for row, _ in draws]
        settings = (
            np.array([p.temperature or 0.0 for p in params]),
            np.array([min(p.top_k or 0, self.vocab_size) for p in params], np.int64),
            np.array([1.0 if p.top_p is None else p.top_p for p in params]),
            np.array([p.min_p or 0.0 for p in params]),
            np.array([uniform(row.seed, row.position + i) for row, i in draws]),
        )
        chosen: list[int] = self._ops.draw(logits, settings).tolist()
        return chosen

    def _edit_rows(self, logits: Floats, draws: Sequence[Draw]) -> Floats:
        """With what each row's settings forbid, favour or penalise; a copy [n, limit] if anything changes."""
        edits = [at for at, (row, i) in enumerate(draws) if is_edited(row, i)]
        if not edits and not len(self.holes):
            return logits
        logits = logits[:, : self.limit].copy()
        logits[:, self.holes] = -np.inf
        pasts: dict[int, Longs] = {}  # by row: one for all of its samples
        for at in edits:
            row, i = draws[at]
            if row.history and id(row) not in pasts:
                pasts[id(row)] = np.array((*row.history, *row.draft), np.int64)
            past = pasts[id(row)][: len(row.history) + i] if row.history else None
            self._edit(logits[at], draws[at], past)
        return logits

    def _edit(self, logits: Floats, draw: Draw, past: Longs | None) -> None:
        """In place, [vocab]: first masks and what must not stop yet, then biases, then penalties."""
        row, i = draw
        params = row.params
        early = [t for t in row.stop_token_ids if 0 <= t < self.limit] if i < row.num_stopless else []
        if row.masks and row.masks[i]:
            allowed = self._mask(row.masks[i])
            logits[~allowed] = -np.inf
            allowed[early] = False
            early = early if allowed.any() else []  # what the mask demands cannot wait
        if early:
            logits[early] = -np.inf
        if bias := {t: b for t, b in params.logit_bias.items() if t < self.limit}:
            logits[list(bias)] += np.array(list(bias.values()), np.float32)
        if past is not None and not params.samplers:  # else the chain does, at its place
            _penalise(logits, past, row.prompt_len, params)

    def _mask(self, words: bytes) -> npt.NDArray[np.bool_]:
        """Which tokens may be sampled, [limit]."""
        bits = np.unpackbits(np.frombuffer(words, np.uint8), count=self.limit, bitorder="little")
        allowed = bits.view(np.bool_)
        allowed[self.holes] = False
        return allowed

    def _logprobs_of(
        self, logits: Floats, first: int, row: SamplingRow, ids: Sequence[int]
    ) -> tuple[TokenLogprobs, ...] | None:
        """The model's log-probabilities of the tokens chosen from rows `first`, …; None: not requested."""
        num_top = count_alternatives(row)
        if num_top is None or not ids:
            return None
        # One by one: a row's bits must not depend on its neighbours.
        return tuple(self._logprobs(logits[n : n + 1], [t], num_top)[0] for n, t in enumerate(ids, first))

    def _prompt_logprobs(self, logits: Floats, first: int, row: SamplingRow) -> tuple[TokenLogprobs, ...]:
        found: list[TokenLogprobs] = []
        for at in range(0, len(row.prompt_targets), ROWS_AT_ONCE):
            targets = row.prompt_targets[at : at + ROWS_AT_ONCE]
            part = logits[first + at : first + at + len(targets)]
            found += self._logprobs(part, targets, row.params.prompt_logprobs or 0)
        return tuple(found)

    def _logprobs(self, logits: Floats, targets: Sequence[int], num_top: int) -> list[TokenLogprobs]:
        """logits: [n, vocab] -> the targets' log-probabilities and the `num_top` best, largest first.

        A target that is not among the best follows them: alternatives are `num_top` or one more.
        """
        values = self._ops.log_softmax(logits)
        chosen = [max(float(row[target]), FLOOR) for row, target in zip(values, targets, strict=True)]
        if not num_top:
            return [TokenLogprobs(t, p) for t, p in zip(targets, chosen, strict=True)]
        allowed = values[:, : self.limit]
        if len(self.holes):
            allowed = allowed.copy()
            allowed[:, self.holes] = -np.inf
        found, count = [], min(num_top, self.limit - len(self.holes))
        for target, logprob, row in zip(targets, chosen, allowed, strict=True):
            found.append(with_target(target, logprob, best(row, count)))
        return found


def count_alternatives(row: SamplingRow) -> int | None:
    """How many alternatives the log-probability of each sample has; None: there is none."""
    requested = row.num_candidates or row.params.logprobs
    return 0 if requested is None and row.is_scored else requested


def guide(logits: Floats, rows: Sequence[SamplingRow], log_softmax: Callable[[Floats], Floats]) -> Floats:
    """A copy with classifier-free guidance in the rows that are sampled: n + scale · (p - n).

    p and n: log-probabilities behind the prompt, and behind the negative prompt (Sanchez and others, 2023:
    "Stay on topic with Classifier-Free Guidance"; transformers has the same formula).
    """
    guided, ends = logits.copy(), [*accumulate(row.num_logits for row in rows)]
    for row, end in zip(rows, ends, strict=True):
        if row.negative < 0:
            continue
        # One by one: a row's bits must not depend on its neighbours.
        positive = log_softmax(logits[end - 1 : end])
        negative = log_softmax(logits[ends[row.negative] - 1 : ends[row.negative]])
        with np.errstate(invalid="ignore"):
            mixed = negative + np.float32(row.params.guidance_scale) * (positive - negative)
        # A token that neither prompt allows has no number.
        guided[end - 1] = np.where(np.isneginf(positive) | np.isneginf(negative), -np.inf, mixed)[0]
    return guided


def entropy_of(logs: Floats) -> float:
    """The entropy in nats of a distribution, by its log-probabilities. -inf: it cannot be."""
    there = logs[logs > -np.inf].astype(np.float64)
    return float(-(np.exp(there) * there).sum())


def best(values: Floats, k: int) -> Alternatives:
    """values: [width] -> the k largest as (id, value), the lower id first among equals."""
    if k < len(values):
        least = np.partition(values, len(values) - k)[len(values) - k]
        candidates = np.flatnonzero(values >= least)
    else:
        candidates = np.arange(len(values))
    ids = candidates[np.argsort(-values[candidates], kind="stable")[:k]]
    return tuple(zip(ids.tolist(), np.maximum(values[ids], np.float32(FLOOR)).tolist(), strict=True))


def with_target(target: int, logprob: float, top: Alternatives) -> TokenLogprobs:
    """The answer for one token: alternatives, largest first, and behind them the token if it is none."""
    known = not top or any(token_id == target for token_id, _ in top)
    return TokenLogprobs(target, logprob, top if known else (*top, (target, logprob)))


def _penalise(logits: Floats, past: Longs, prompt_len: int, params: SamplingParams) -> None:
    """In place, [vocab]. Repetition counts prompt and output, presence and frequency the output only."""
    width, by = logits.shape[0], np.float32(params.repetition_penalty or 1.0)
    if by != 1:
        seen = np.unique(past[past < width])
        values = logits[seen]
        logits[seen] = np.where(values > 0, values / by, values * by)
    output = past[prompt_len:]
    ids, counts = np.unique(output[output < width], return_counts=True)
    if params.frequency_penalty:
        logits[ids] -= np.float32(params.frequency_penalty) * counts.astype(np.float32)
    if params.presence_penalty:
        logits[ids] -= np.float32(params.presence_penalty)


def _chain_row(draw_of: Draw) -> ChainRow:
    """What a token is chosen by."""
    row, i = draw_of
    past = np.array((*row.history, *row.draft[:i]) if row.history else (), np.int64)
    return ChainRow(row.params, past, row.prompt_len, row.seed, row.position + i)


def _choose_by_chain(logits: Floats, draw_of: Draw, bounds: Bounds) -> int:
    """A token of logits [limit] by all samplers of its row."""
    row, i = draw_of
    chained = _chain_row(draw_of)
    left = list_candidates(logits, chained)
    if not row.params.mirostat:
        return draw(left.sort_down(), uniform(row.seed, row.position + i))
    known = bounds.setdefault(id(row), [])
    token_id, bound = choose_by_surprise(left, chained, known[-1] if known else row.mirostat_mu)
    known.append(bound)
    return token_id


def is_edited(row: SamplingRow, i: int) -> bool:
    """Whether a sample of a row is chosen from other logits than the model's."""
    must_go_on = bool(row.stop_token_ids) and i < row.num_stopless
    return bool(row.history or row.params.logit_bias or row.masks or must_go_on)


def is_greedy(batch: SamplingBatch) -> bool:
    """Whether all tokens are those of the model's largest logits, if no row has a past or a mask."""
    return not any(
        row.params.temperature or row.params.logit_bias or row.num_stopless or row.params.needs_chain
        for row in batch.rows
    )


def check_count(rows: Sequence[SamplingRow], count: int) -> None:
    """Raises EngineError if there are not as many rows of logits as are requested."""
    expected = sum([row.num_logits for row in rows])
    if expected != count:
        raise EngineError(f"{count} rows of logits, and {expected} are requested")


def check_finite(values: Sequence[float]) -> None:
    """The largest logits of some tokens. Raises EngineError."""
    if broken := [value for value in values if not math.isfinite(value)]:
        raise EngineError(
            f"the model computed {broken[0]} as the largest logit of {len(broken)} of {len(values)} tokens; "
            "a weight or a state is broken, or every token is forbidden"
        )


def sampled_rows(rows: Sequence[SamplingRow]) -> list[int]:
    """Which rows of logits are sampled from: of each row the last `num_samples`."""
    index: list[int] = []
    for row, end in zip(rows, accumulate(row.num_logits for row in rows), strict=True):
        index += range(end - row.num_samples, end)
    return index
