"""The sampler, from logits to tokens: penalties, biases, bans, the draw, and log-probabilities.

A row's answer is a function of that row, its settings and its history alone, whatever else is in the batch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from plait.errors import EngineError
from plait.ops.chip import Chip
from plait.ops.edit_logits import count_tokens, edit_logits
from plait.ops.logprobs import log_probabilities
from plait.ops.registry import OpFacts
from plait.ops.sample import largest, sample, sample_at
from plait.ops.seed import uniform
from plait.request import SamplingParams, TokenLogprobs
from plait.runner.logprobs import (
    FLOOR,
    ROWS_AT_ONCE,
    best,
    list_requests,
    read_answers,
    read_score,
    score_requests,
    with_target,
)
from plait.runner.sampling_tables import SamplingTables, is_edited, upload
from plait.schedule.plan import Sampled, SamplingBatch, SamplingRow

LEAST_ROWS = 16  # of the tables of a GPU
Draw = tuple[SamplingRow, int]  # which of a row's samples, from 0
Numbers = Tensor | npt.NDArray[np.generic]
Largest = tuple[Numbers, Numbers]  # the ids and values of a batch's largest logits: tensors or arrays


class Sampler:
    """Samples tokens and computes log-probabilities for the rows of a step.

    `banned`: ids without text in the tokenizer (holes of the vocabulary, padding rows). They are never
    sampled and never an alternative; the model's probabilities are not changed by it. `executor`: what runs
    native kernels on this device, if there is one. `chip`: the GPU, if it is one; then a batch is sampled by
    kernels over `SamplingTables`, and read once. `bindings`: which variants were bound, and why.
    """

    def __init__(
        self,
        vocab_size: int,
        *,
        banned: Iterable[int] = (),
        device: str = "cpu",
        ops: str = "auto",
        executor: object = None,
        chip: Chip | None = None,
    ) -> None:
        holes = sorted({i for i in banned if 0 <= i < vocab_size})
        self.limit = vocab_size
        while holes and holes[-1] == self.limit - 1:
            self.limit = holes.pop()
        if self.limit == 0:
            raise EngineError(f"all {vocab_size} tokens of the vocabulary are banned")
        self.vocab_size, self._hole_ids = vocab_size, holes
        self.holes, self._has_holes = torch.tensor(holes, dtype=torch.int64, device=device), bool(holes)
        platform = "cuda" if chip else torch.device(device).type
        self._is_gpu = platform != "cpu"
        facts = OpFacts(platform, torch.float32, {"vocab_size": vocab_size}, executor, chip)
        self._largest, found = largest.bind(facts, "sampler", ops)
        self._draw, binding = sample.bind(facts, "sampler", ops)
        self._draw_at, at = sample_at.bind(facts, "sampler", ops)
        self._edit_rows, edit = edit_logits.bind(facts, "sampler", ops)
        self._count, count = count_tokens.bind(facts, "sampler", ops)
        self._score, score = log_probabilities.bind(facts, "sampler", ops)
        self.bindings = (found, at, edit, count, score) if self._is_gpu else (found, binding)
        self._scratch: SamplingTables | None = None  # of the batches that `sample` gets on a GPU

    @property
    def plain_largest(self) -> Callable[[Tensor], tuple[Tensor, Tensor]] | None:
        """Finds what `sample` takes as `largest`; None where every row is edited."""
        return None if self._has_holes else lambda logits: self._largest(self._limited(logits))

    def sample(self, logits: Tensor, batch: SamplingBatch, largest: Largest | None = None) -> list[Sampled]:
        """logits: [L, vocab] float, each row's `num_logits` in turn -> one answer per row of the batch.

        `largest`: what `plain_largest` finds in them, of L rows or more, if that is known. Raises EngineError
        if a row to sample from has no finite maximum, naming the row.
        """
        rows = batch.rows
        if logits.dtype != torch.float32:
            logits = logits.float()
        expected, count = sum([row.num_logits for row in rows]), logits.shape[0]
        if expected != count:
            raise EngineError(f"{count} rows of logits, and {expected} are requested")
        draws = [(row, i) for row in rows for i in range(row.num_samples)]
        if self._is_gpu:
            return self._sample_on_gpu(logits, batch, draws)
        ids: list[int] = []
        if draws:
            if len(draws) == count:
                ids = self._choose(logits, draws, largest)
            else:
                ids = self._choose(logits[_sampled_rows(rows)], draws)
        answers, at, end = [], 0, 0
        for row in rows:
            first, end = end, end + row.num_logits
            mine, at = tuple(ids[at : at + row.num_samples]), at + row.num_samples
            scores = self._logprobs_of(logits, end - row.num_samples, row, mine)
            prompt = self._prompt_logprobs(logits, first, row) if row.prompt_targets else ()
            answers.append(Sampled(mine, scores, prompt))
        return answers

    def tables(self, capacity: int, device: torch.device | None = None) -> SamplingTables:
        """Settings on the device for `draw`, of up to so many rows of logits."""
        return SamplingTables(capacity, self.limit, self._hole_ids, device or self.holes.device)

    def draw(self, logits: Tensor, tables: SamplingTables) -> tuple[Tensor, Tensor]:
        """logits: [L, vocab] float -> ids [L] int64, and the largest edited logits [L], by launches alone.

        The rows are the first L columns of `tables`. What is launched depends on L and `tables.form`. A value
        that is not finite is of a broken row: it has to be checked where ids are read, as `sample` does.
        """
        rows, form = logits.shape[0], tables.form
        logits = self._limited(logits)
        if form.is_edited:
            logits = self._edit_rows(logits, *tables.edits(rows))
        if form.is_drawn:
            ids, values = self._draw_at(logits, *tables.settings(rows))
        else:
            ids, values = self._largest(logits)
        if form.moves_on and (form.is_drawn or form.is_edited):
            self._count(ids, *tables.counted(rows))
        return ids, values

    def follow(
        self, logits: Tensor, batch: SamplingBatch, step: int, largest: Largest | None = None
    ) -> list[int]:
        """The tokens of a batch's decode step that comes so many after the one of `sample`; raises the same.

        Rows must ask for nothing but tokens, without penalties and masks.
        """
        return self._choose(logits, [(row, step) for row in batch.rows], largest)

    def likeliest(self, ids: npt.NDArray[np.int64], values: npt.NDArray[np.float32]) -> list[Sampled]:
        """Answers of rows that `is_greedy`: ids and values of the largest logits, arrays [steps, rows]."""
        _check(values.ravel().tolist())
        return [Sampled(tuple(tokens)) for tokens in ids.T.tolist()]

    def prepare(self) -> None:
        """Choose and draw once, so that no request waits for what is compiled at its first use."""
        params = [SamplingParams(temperature=temperature, logprobs=1) for temperature in (0.0, 1.0)]
        rows = tuple(SamplingRow(p, num_logits=1, num_samples=1, position=0, seed=0) for p in params)
        logits = torch.zeros(len(rows), self.vocab_size, device=self.holes.device)
        self.sample(logits, SamplingBatch(rows))
        if self._is_gpu:
            penalized = SamplingParams(temperature=0.0, presence_penalty=1.0)
            edited = SamplingRow(penalized, 1, 1, position=1, seed=0, history=(0,), prompt_len=1)
            tables = self.tables(LEAST_ROWS)
            for count in (1, LEAST_ROWS):  # kernels of few rows and of many are compiled apart
                logits = torch.zeros(count, self.vocab_size, device=self.holes.device)
                for row in (*rows, edited):
                    tables.fill_draws([(row, 0)], moves_on=True)
                    self.draw(logits, tables)

    def _choose(self, logits: Tensor, draws: Sequence[Draw], largest: Largest | None = None) -> list[int]:
        """logits: [n, vocab], not changed -> n tokens."""
        if self._is_gpu:
            answers = read_answers(*self._drawn_on_gpu(logits[: len(draws)], draws), [])
            _check(answers.values)
            return answers.tokens
        edited = self._edited(logits, draws)
        if largest is None or edited is not logits:
            largest = self._largest(self._limited(edited))
        found, values = (part[: len(draws)].tolist() for part in largest)
        _check(values)
        ids: list[int] = found
        if drawn := [i for i, (row, _) in enumerate(draws) if row.params.temperature]:
            chosen = self._drawn(_rows(self._limited(edited), drawn), [draws[i] for i in drawn])
            for i, token_id in zip(drawn, chosen, strict=True):
                ids[i] = token_id
        return ids

    def _drawn_on_gpu(self, logits: Tensor, draws: Sequence[Draw]) -> tuple[Tensor, Tensor]:
        """A row of logits for each draw -> ids and largest logits, on the device."""
        if self._scratch is None or self._scratch.capacity < len(draws):
            self._scratch = self.tables(max(LEAST_ROWS, 1 << (len(draws) - 1).bit_length()))
        self._scratch.fill_draws(draws)
        return self.draw(logits, self._scratch)

    def _sample_on_gpu(self, logits: Tensor, batch: SamplingBatch, draws: Sequence[Draw]) -> list[Sampled]:
        """`sample` with one read for all of its tokens and log-probabilities."""
        ids, values = logits.new_empty(0, dtype=torch.int64), logits.new_empty(0)
        if draws:
            index = _sampled_rows(batch.rows)
            if len(index) < logits.shape[0]:
                ids, values = self._drawn_on_gpu(logits[upload(np.array(index), logits.device)], draws)
            else:
                ids, values = self._drawn_on_gpu(logits, draws)
        requests = list(list_requests(batch, self.limit - len(self.holes)))
        if not draws and not requests:
            return [Sampled() for _ in batch.rows]
        banned = self.holes if self._has_holes else None
        parts = score_requests(self._score, logits, ids, requests, self.limit, banned)
        found = read_answers(ids, values, parts)
        _check(found.values)
        scores: list[list[TokenLogprobs]] = [[] for _ in batch.rows]
        prompts: list[list[TokenLogprobs]] = [[] for _ in batch.rows]
        for request, score in zip(requests, found.scores, strict=True):
            kind = scores if request.target is None else prompts
            kind[request.answer].append(read_score(request, score, found.tokens))
        answers, at = [], 0
        for row, own, prompt in zip(batch.rows, scores, prompts, strict=True):
            mine, at = tuple(found.tokens[at : at + row.num_samples]), at + row.num_samples
            answers.append(Sampled(mine, tuple(own) or None, tuple(prompt)))
        return answers

    def _limited(self, logits: Tensor) -> Tensor:
        """Without the ids behind the last one that may be sampled."""
        return logits if logits.shape[1] == self.limit else logits[:, : self.limit]

    def _drawn(self, logits: Tensor, draws: Sequence[Draw]) -> list[int]:
        params = [row.params for row, _ in draws]
        settings = (
            [p.temperature or 0.0 for p in params],
            [1.0 if p.top_p is None else p.top_p for p in params],
            [p.min_p or 0.0 for p in params],
            [uniform(row.seed, row.position + i) for row, i in draws],
        )
        limits = [min(p.top_k or 0, self.vocab_size) for p in params]
        top_k = torch.tensor(limits, dtype=torch.int64, device=logits.device)
        temperature, top_p, min_p, random = torch.tensor(settings, dtype=torch.float64, device=logits.device)
        chosen: list[int] = self._draw(logits, temperature, top_k, top_p, min_p, random).tolist()
        return chosen

    def _edited(self, logits: Tensor, draws: Sequence[Draw]) -> Tensor:
        """With what each row's settings forbid, favour or penalise; a copy [n, limit] if anything changes."""
        edits = [at for at, (row, i) in enumerate(draws) if is_edited(row, i)]
        if not edits and not self._has_holes:
            return logits
        logits = logits[:, : self.limit].clone()
        logits.index_fill_(1, self.holes, -torch.inf)
        pasts: dict[int, Tensor] = {}  # by row: one for all of its samples
        for at in edits:
            row, i = draws[at]
            if row.history and id(row) not in pasts:
                pasts[id(row)] = torch.tensor((*row.history, *row.draft), dtype=torch.int64)
            past = pasts[id(row)][: len(row.history) + i] if row.history else None
            self._edit(logits[at], draws[at], past)
        return logits

    def _edit(self, logits: Tensor, draw: Draw, past: Tensor | None) -> None:
        """In place, [vocab]: first masks and what must not stop yet, then biases, then penalties."""
        row, i = draw
        params = row.params
        early = [t for t in row.stop_token_ids if 0 <= t < self.limit] if i < row.num_stopless else []
        if row.masks and row.masks[i]:
            allowed = self._mask(row.masks[i])
            logits.masked_fill_(~allowed, -torch.inf)
            allowed[early] = False
            early = early if allowed.any() else []  # what the mask demands cannot wait
        if early:
            logits[early] = -torch.inf
        if bias := {t: b for t, b in params.logit_bias.items() if t < self.limit}:
            logits[list(bias)] += torch.tensor(list(bias.values()), device=logits.device)
        if past is not None:
            _penalise(logits, past, row.prompt_len, params)

    def _mask(self, words: bytes) -> Tensor:
        """Which tokens may be sampled, [limit] bool."""
        bits = np.unpackbits(np.frombuffer(words, np.uint8), count=self.limit, bitorder="little")
        allowed = torch.from_numpy(bits.view(np.bool_)).to(self.holes.device)
        if len(self.holes):
            allowed[self.holes] = False
        return allowed

    def _logprobs_of(
        self, logits: Tensor, first: int, row: SamplingRow, ids: Sequence[int]
    ) -> tuple[TokenLogprobs, ...] | None:
        """The model's log-probabilities of the tokens chosen from rows `first`, …; None: not requested."""
        num_top = row.params.logprobs
        if num_top is None or not ids:
            return None
        # One by one: a row's bits must not depend on its neighbours.
        return tuple(self._logprobs(logits[n : n + 1], [t], num_top)[0] for n, t in enumerate(ids, first))

    def _prompt_logprobs(self, logits: Tensor, first: int, row: SamplingRow) -> tuple[TokenLogprobs, ...]:
        found: list[TokenLogprobs] = []
        for at in range(0, len(row.prompt_targets), ROWS_AT_ONCE):
            targets = row.prompt_targets[at : at + ROWS_AT_ONCE]
            part = logits[first + at : first + at + len(targets)]
            found += self._logprobs(part, targets, row.params.prompt_logprobs or 0)
        return tuple(found)

    def _logprobs(self, logits: Tensor, targets: Sequence[int], num_top: int) -> list[TokenLogprobs]:
        """logits: [n, vocab] -> the targets' log-probabilities and the `num_top` best, largest first.

        A target that is not among the best follows them: alternatives are `num_top` or one more.
        """
        values = logits.log_softmax(-1)
        index = torch.tensor(list(targets), device=logits.device)
        chosen = values.gather(-1, index[:, None])[:, 0].clamp_min(FLOOR).tolist()
        if not num_top:
            return [TokenLogprobs(t, p) for t, p in zip(targets, chosen, strict=True)]
        allowed = values[:, : self.limit]
        if len(self.holes):
            allowed = allowed.index_fill(1, self.holes, -torch.inf)
        tops = best(allowed, min(num_top, self.limit - len(self.holes)))
        found = []
        for target, logprob, top in zip(targets, chosen, tops, strict=True):
            found.append(with_target(target, logprob, top))
        return found


def _penalise(logits: Tensor, past: Tensor, prompt_len: int, params: SamplingParams) -> None:
    """In place, [vocab]. Repetition counts prompt and output, presence and frequency the output only."""
    width = logits.shape[0]
    by = params.repetition_penalty or 1.0
    if by != 1:
        seen = past[past < width].unique().to(logits.device)
        values = logits[seen]
        logits[seen] = torch.where(values > 0, values / by, values * by)
    output = past[prompt_len:]
    ids, counts = output[output < width].unique(return_counts=True)
    ids, counts = ids.to(logits.device), counts.to(logits.device)
    if params.frequency_penalty:
        logits[ids] -= params.frequency_penalty * counts
    if params.presence_penalty:
        logits[ids] -= params.presence_penalty


def is_greedy(batch: SamplingBatch) -> bool:
    """Whether all tokens are those of the model's largest logits, if no row has a past or a mask."""
    return not any(row.params.temperature or row.params.logit_bias or row.num_stopless for row in batch.rows)


def _check(values: Sequence[float]) -> None:
    """The largest logits of some tokens. Raises EngineError."""
    if broken := [value for value in values if not math.isfinite(value)]:
        raise EngineError(
            f"the model computed {broken[0]} as the largest logit of {len(broken)} of {len(values)} tokens; "
            "a weight or a state is broken, or every token is forbidden"
        )


def _sampled_rows(rows: Sequence[SamplingRow]) -> list[int]:
    """Which rows of logits are sampled from: of each row the last `num_samples`."""
    index: list[int] = []
    for row, end in zip(rows, accumulate(row.num_logits for row in rows), strict=True):
        index += range(end - row.num_samples, end)
    return index


def _rows(logits: Tensor, index: Sequence[int]) -> Tensor:
    """These rows; the tensor itself if they are all of them."""
    return logits if len(index) == logits.shape[0] else logits[list(index)]
