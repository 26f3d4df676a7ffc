"""The sampler, from logits to tokens: on a CPU numpy's arrays (`host.sampler`), on a GPU kernels, read once.

A row's answer is a function of that row, its settings and its history alone, whatever else is in the batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import numpy as np
import torch
from msgspec.structs import replace
from torch import Tensor

from plait.ops.chip import Chip
from plait.ops.edit_logits import count_tokens, edit_logits
from plait.ops.logprobs import log_probabilities
from plait.ops.registry import OpFacts
from plait.ops.sample import largest, sample, sample_at
from plait.request import SamplingParams, TokenLogprobs
from plait.runner.host.sampler import (
    ROWS_AT_ONCE,
    Draw,
    Floats,
    HostSampler,
    Largest,
    Longs,
    RowOps,
    Settings,
    check_count,
    check_finite,
    sampled_rows,
)
from plait.runner.sampling.logprobs import list_requests, read_answers, read_score, score_requests
from plait.runner.sampling.tables import SamplingTables, copy_to_device
from plait.schedule.drafts.passes import Denoised
from plait.schedule.plan import Sampled, SamplingBatch, SamplingRow

LEAST_ROWS = 16  # of the tables of a GPU
LEAST = -1e30  # a log-probability of what cannot be: its share is 0, and 0 times it a number


class Sampler:
    """Samples tokens and computes log-probabilities for the rows of a step.

    `banned`: see `HostSampler`. `executor`: what runs native kernels on this device, if there is one. `chip`:
    the GPU, if it is one; then a batch is sampled by kernels over `SamplingTables`, and read once. `host`:
    samples on a CPU. `bindings`: which variants were bound, and why. `native_rows`: the kernels of the native
    variants over arrays, for where these are bound: a wrapper in tensors is a quarter of a draw.
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
        native_rows: Callable[[], RowOps] | None = None,
    ) -> None:
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
        is_native = not self._is_gpu and all(row.variant == "native" for row in self.bindings)
        rows = native_rows() if native_rows and is_native else self._row_ops()
        self.host = HostSampler(vocab_size, rows, banned)
        self.vocab_size, self.limit = vocab_size, self.host.limit
        self.holes = torch.from_numpy(self.host.holes).to(device)
        self._scratch: SamplingTables | None = None  # of the batches that `sample` gets on a GPU

    @property
    def plain_largest(self) -> Callable[[Tensor], tuple[Tensor, Tensor]] | None:
        """Finds what `sample` takes as `largest`; None where every row is edited."""
        return None if len(self.holes) else lambda logits: self._largest(self.host.cut_to_limit(logits))

    def sample(self, logits: Tensor, batch: SamplingBatch) -> list[Sampled]:
        """logits: [L, vocab] float, each row's `num_logits` in turn -> one answer per row of the batch.

        Raises EngineError if a row to sample from has no finite maximum, naming the row.
        """
        if logits.dtype != torch.float32:
            logits = logits.float()
        if not self._is_gpu:
            return self.host.sample(logits.numpy(), batch)
        check_count(batch.rows, logits.shape[0])
        if len(batch.rows) > 1 and any(row.entropy_at for row in batch.rows):
            # One canvas after the other: a copy of all rows at once would take as much memory again.
            parts = logits.split([row.num_logits for row in batch.rows])
            pairs = zip(parts, batch.rows, strict=True)
            return [answer for part, row in pairs for answer in self.sample(part, SamplingBatch((row,)))]
        if any(row.params.needs_chain or row.negative >= 0 for row in batch.rows):
            return self._sample_in_parts(logits, batch)
        if len(batch.rows) == 1 and batch.rows[0].entropy_at:
            return [self._sample_places(logits, batch.rows[0])]
        draws = [(row, i) for row in batch.rows for i in range(row.num_samples)]
        return self._sample_on_gpu(logits, batch, draws)

    def tables(self, capacity: int, device: torch.device | None = None) -> SamplingTables:
        """Settings on the device for `draw`, of up to so many rows of logits."""
        return SamplingTables(capacity, self.limit, self.host.holes.tolist(), device or self.holes.device)

    def draw(self, logits: Tensor, tables: SamplingTables) -> tuple[Tensor, Tensor]:
        """logits: [L, vocab] float -> ids [L] int64, and the largest edited logits [L], by launches alone.

        The rows are the first L columns of `tables`. What is launched depends on L and `tables.form`. A value
        that is not finite is of a broken row: it has to be checked where ids are read, as `sample` does.
        """
        return self._draw_edited(self._edit(logits, tables), tables)

    def draw_places(
        self, logits: Tensor, tables: SamplingTables, temperatures: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """`draw` for places of noisy canvases: also the likeliest token of each, and the entropy in nats of
        its edited logits at a temperature, all [L]. temperatures: [L] float32."""
        edited = self._edit(logits, tables)
        ids, values = self._draw_edited(edited, tables)
        likeliest = self._largest(edited)[0] if tables.form.is_drawn else ids
        entropies = []  # some rows at a time
        for rows, by in zip(edited.split(ROWS_AT_ONCE), temperatures.split(ROWS_AT_ONCE), strict=True):
            logs = (rows / by[:, None]).log_softmax(-1)
            entropies.append(-(logs.exp() * logs.clamp(min=LEAST)).sum(-1))
        return ids, values, likeliest, torch.cat(entropies)

    def _draw_edited(self, logits: Tensor, tables: SamplingTables) -> tuple[Tensor, Tensor]:
        rows, form = logits.shape[0], tables.form
        if form.is_drawn:
            ids, values = self._draw_at(logits, *tables.settings(rows))
        else:
            ids, values = self._largest(logits)
        if form.moves_on and (form.is_drawn or form.is_edited):
            self._count(ids, *tables.counters(rows))
        return ids, values

    def _edit(self, logits: Tensor, tables: SamplingTables) -> Tensor:
        logits = self.host.cut_to_limit(logits)
        return self._edit_rows(logits, *tables.edits(len(logits))) if tables.form.is_edited else logits

    def score(self, logits: Tensor, ids: Tensor) -> Tensor:
        """The log-probability of an id of each row, by launches. logits: [L, vocab], ids: [L] -> [L]."""
        values: Tensor = self._score(logits, torch.arange(len(ids), device=ids.device))
        return values.gather(1, ids[:, None])[:, 0]

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
                    tables.fill_draws([(row, 0)], seq_ids=(0,))
                    self.draw(logits, tables)

    def _row_ops(self) -> RowOps:
        """What is bound, over arrays."""

        top = largest.reference if self._is_gpu else self._largest  # a GPU's rows that need the host
        draw_from = sample.reference if self._is_gpu else self._draw

        def find_largest(logits: Floats) -> Largest:
            ids, values = top(torch.from_numpy(logits))
            return ids.numpy(), values.numpy()

        def draw(logits: Floats, settings: Settings) -> Longs:
            chosen = draw_from(torch.from_numpy(logits), *map(torch.from_numpy, settings))
            found: Longs = chosen.numpy()
            return found

        return RowOps(find_largest, draw, log_softmax)

    def _sample_in_parts(self, logits: Tensor, batch: SamplingBatch) -> list[Sampled]:
        """`sample` where rows need a sampler that only the host has: their logits are read, no others."""
        answers: dict[int, Sampled] = {}
        ends = np.cumsum([row.num_logits for row in batch.rows])
        negatives = {row.negative for row in batch.rows}  # the host mixes each with the row that it guides
        hosted = [
            row.params.needs_chain or row.negative >= 0 or n in negatives for n, row in enumerate(batch.rows)
        ]
        for on_host in (False, True):
            places = [n for n, is_hosted in enumerate(hosted) if is_hosted is on_host]
            if not places:
                continue
            rows = [batch.rows[n] for n in places]
            found_at = {n: place for place, n in enumerate(places)}
            part = SamplingBatch(
                tuple(replace(r, negative=found_at[r.negative]) if r.negative >= 0 else r for r in rows)
            )
            index = [i for n in places for i in range(ends[n] - batch.rows[n].num_logits, ends[n])]
            mine = logits[copy_to_device(np.array(index, np.int64), logits.device)]
            found = self.host.sample(mine.cpu().numpy(), part) if on_host else self.sample(mine, part)
            answers.update(zip(places, found, strict=True))
        return [answers[n] for n in range(len(batch.rows))]

    def _fill_scratch(self, draws: Sequence[Draw]) -> SamplingTables:
        """Tables with the settings of these draws, in their order."""
        if self._scratch is None or self._scratch.capacity < len(draws):
            self._scratch = self.tables(count_scratch(len(draws)))
        self._scratch.fill_draws(draws)
        return self._scratch

    def _sample_places(self, logits: Tensor, row: SamplingRow) -> Sampled:
        """`sample` for a noisy canvas: log-probabilities are of the likeliest tokens."""
        batch, device = SamplingBatch((row,)), logits.device
        tables = self._fill_scratch([(row, i) for i in range(row.num_samples)])
        heat = torch.full((len(logits),), row.entropy_at, device=device)
        ids, values, likeliest, entropies = self.draw_places(logits, tables, heat)
        banned = self.holes if len(self.holes) else None
        requests = list(list_requests(batch, self.limit - len(self.holes)))
        parts = score_requests(self._score, logits, likeliest, requests, self.limit, banned)
        found = read_answers(ids, values, parts)
        check_finite(found.values)
        chosen = tuple(likeliest.tolist())
        scores = [read_score(r, score, chosen) for r, score in zip(requests, found.scores, strict=True)]
        made = Denoised(chosen, tuple(entropies.tolist()))
        return Sampled(tuple(found.tokens), tuple(scores) or None, denoised=made)

    def _sample_on_gpu(self, logits: Tensor, batch: SamplingBatch, draws: Sequence[Draw]) -> list[Sampled]:
        """`sample` with one read for all of its tokens and log-probabilities."""
        ids, values = logits.new_empty(0, dtype=torch.int64), logits.new_empty(0)
        if draws:
            index = sampled_rows(batch.rows)
            sampled = logits
            if len(index) < logits.shape[0]:
                sampled = logits[copy_to_device(np.array(index), logits.device)]
            ids, values = self.draw(sampled, self._fill_scratch(draws))
        requests = list(list_requests(batch, self.limit - len(self.holes)))
        if not draws and not requests:
            return [Sampled() for _ in batch.rows]
        banned = self.holes if len(self.holes) else None
        parts = score_requests(self._score, logits, ids, requests, self.limit, banned)
        found = read_answers(ids, values, parts)
        check_finite(found.values)
        scores: list[list[TokenLogprobs]] = [[] for _ in batch.rows]
        prompts: list[list[TokenLogprobs]] = [[] for _ in batch.rows]
        for request, score in zip(requests, found.scores, strict=True):
            kind = scores if request.target is None else prompts
            kind[request.answer].append(read_score(request, score, found.tokens))
        answers, at = [], 0
        for row, own, prompt in zip(batch.rows, scores, prompts, strict=True):
            here, at = slice(at, at + row.num_samples), at + row.num_samples
            answers.append(Sampled(tuple(found.tokens[here]), tuple(own) or None, tuple(prompt)))
        return answers


def count_scratch(draws: int) -> int:
    """Rows of the tables for batches of so many draws that `Sampler.sample` gets on a GPU."""
    return max(LEAST_ROWS, 1 << (draws - 1).bit_length())


def log_softmax(logits: Floats) -> Floats:
    """[n, vocab] -> log-probabilities, [n, vocab]."""
    found: Floats = torch.from_numpy(logits).log_softmax(-1).numpy()
    return found
