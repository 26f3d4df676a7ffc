"""Sampling settings on the device: static tensors with a column for each row of logits.

`fill` writes a batch's settings there. Then steps of the same sequences need nothing more of the host: a draw
moves positions and counts of tokens on by itself. What is as long as a vocabulary (masks, biases, counts) has
lines that are made for the rows that need one. A line is kept by what it holds, so a batch that changes costs
what is new in it.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from plait.ops.edit_logits import IN_PROMPT, NO_STOP, PER_OUTPUT
from plait.runner.host.sampler import Draw, Longs, is_edited
from plait.schedule.plan import SamplingBatch, SamplingRow

FLOATS = ("temperature", "top_p", "min_p", "repetition", "presence", "frequency")
WHOLE = ("top_k", "seed", "position", "until", "mask", "bias", "count")
PLACES = {name: i for i, name in enumerate((*FLOATS, *WHOLE))}
LEAST_STOPS = 4  # columns of the table of stop ids
ALIGNED = 16  # numbers: a row begins where a wide load may


class DrawForm(NamedTuple):
    """What a batch needs of a draw: a captured step serves batches of its own form alone.

    is_drawn: some row has a temperature; is_edited: some is edited; moves_on: positions and counts follow the
    tokens; generation: how often tables of edits, if any, were replaced: what reads old ones is of no use.
    """

    is_drawn: bool
    is_edited: bool
    moves_on: bool
    generation: int

    def outlives(self, now: DrawForm) -> bool:
        """Whether steps of this form are of use when a batch has the form `now`."""
        return not (self.is_edited and now.is_edited) or self.generation == now.generation


class CountedHistory(NamedTuple):
    """A history as its counts were written; `length`: with the tokens that draws have counted since."""

    tokens: tuple[int, ...]
    length: int


class LineTable:
    """[lines, width] on the device, in which line 0 changes nothing; others are found by what they hold.

    It has `most` lines at most: line 0, and one for each row of a batch.
    """

    def __init__(self, width: int, neutral: Tensor, device: torch.device, most: int) -> None:
        self._stride, self._most = _round_up(width), most
        self._memory = torch.zeros(1, self._stride, dtype=neutral.dtype, device=device)
        self._memory[0, :width] = neutral
        self._width, self._lines = width, dict[Hashable, int]()
        self._used = set[Hashable]()

    @property
    def tensor(self) -> Tensor:
        return self._memory[:, : self._width]

    def start(self) -> None:
        """Lines that the last batch used may now be given to others."""
        self._used.clear()

    def take(self, key: Hashable) -> tuple[int, bool]:
        """The line of a key in this batch, and whether it is new: what it holds is then to be written."""
        self._used.add(key)
        if key in self._lines:
            self._lines[key] = line = self._lines.pop(key)  # the last one to be given away
            return line, False
        unused = next((old for old in self._lines if old not in self._used), None)
        if len(self._lines) + 1 < len(self._memory):
            line = len(self._lines) + 1
        elif unused is not None:
            line = self._lines.pop(unused)
        else:
            line, before = len(self._memory), self._memory
            self._memory = before.new_zeros(min(2 * line, self._most), self._stride)
            self._memory[:line] = before
        self._lines[key] = line
        return line, True

    def __contains__(self, key: object) -> bool:
        return key in self._lines

    @property
    def used(self) -> frozenset[Hashable]:
        """What the last batch has lines of."""
        return frozenset(self._used)

    def write(self, lines: Sequence[int], rows: npt.NDArray[np.generic]) -> None:
        """Whole lines, rows: [lines, width]."""
        if lines:
            device = self._memory.device
            place = copy_to_device(np.array(lines, np.int64), device)
            self.tensor.index_copy_(0, place, copy_to_device(rows, device))

    def put(self, blank: Sequence[int], places: Longs, values: npt.NDArray[np.generic]) -> None:
        """Make lines zero, then set single elements. places: [2, n], lines and columns, each pair once."""
        device = self._memory.device
        if blank:
            self._memory.index_fill_(0, copy_to_device(np.array(blank, np.int64), device), 0)
        if places.size:
            flat = copy_to_device(places[0] * self._stride + places[1], device)
            self._memory.view(-1).index_copy_(0, flat, copy_to_device(values, device))


class SamplingTables:
    """The settings of up to `capacity` rows of logits, on the device.

    limit: ids that may be sampled are below it; holes: banned ones among these. Until the first `fill`, and
    in columns that a batch has no row for, a row takes its largest logit.
    """

    @torch.inference_mode(False)  # else nothing outside of that mode could write them
    def __init__(self, capacity: int, limit: int, holes: Sequence[int], device: torch.device) -> None:
        self.capacity, self.limit, self.device = capacity, limit, device
        columns = _round_up(capacity)
        self._host = np.zeros((len(PLACES), columns), np.int64)
        self._clear()
        self._block = copy_to_device(self._host, device)
        self._stops = torch.full((capacity, LEAST_STOPS), NO_STOP, dtype=torch.int64, device=device)
        self._has_holes, self._words = bool(holes), np.zeros(-(-limit // 32), np.uint32)
        bits = np.ones(limit, np.uint8)
        bits[list(holes)] = 0
        self._words.view(np.uint8)[: -(-limit // 8)] = np.packbits(bits, bitorder="little")
        neutral = torch.from_numpy(self._words.view(np.int32).copy())
        where = device, capacity + 1
        self._masks = LineTable(len(self._words), neutral, *where)
        self._biases = LineTable(limit, torch.zeros(limit), *where)
        self._counts = LineTable(limit, torch.zeros(limit, dtype=torch.int32), *where)
        self._no_counts = self._counts.tensor  # line 0 alone, which no larger table replaces
        self._histories, self._moved = dict[Hashable, CountedHistory](), 0  # launched draws of the last batch
        self._replaced, self.gives_scores = 0, False  # the latter: who draws gives log-probabilities, too
        self._is_drawn, self._is_edited, self._moves_on = False, self._has_holes, False
        self._sizes = self._tensors()

    @property
    def form(self) -> DrawForm:
        """What the last batch needs; see `DrawForm`."""
        how = self._is_drawn, self._is_edited, self._moves_on
        return DrawForm(*how, self._replaced if self._is_edited else 0)

    @property
    def static_tensors(self) -> list[Tensor]:
        """Every tensor that a draw reads or moves on."""
        tables = [table.tensor for table in (self._masks, self._biases, self._counts)]
        return [self._block, self._stops, *tables, self._no_counts]

    def settings(self, rows: int) -> tuple[Tensor, ...]:
        """Of the first rows, as `sample_at` has them: temperature, top_k, top_p, min_p, seed, position."""
        floats = [self._floats(name, rows) for name in ("temperature", "top_p", "min_p")]
        top_k, seed, position = (self._whole(name, rows) for name in ("top_k", "seed", "position"))
        return floats[0], top_k, floats[1], floats[2], seed, position

    def edits(self, rows: int) -> tuple[Tensor, ...]:
        """Of the first rows, as `edit_logits` has them."""
        first, last = PLACES["repetition"], PLACES["mask"]
        penalties = self._block[first : first + 3, :rows].view(torch.float64)
        tables = (self._masks.tensor, self._biases.tensor, self._counts.tensor)
        rest = (self._whole("until", rows), self._whole("position", rows))
        return self._block[last : last + 3, :rows], *tables, penalties, self._stops[:rows], *rest

    def counters(self, rows: int) -> tuple[Tensor, Tensor, Tensor]:
        """What a drawn token changes: positions, lines of counts, and counts."""
        counts = self._counts.tensor if self._is_edited else self._no_counts
        return self._whole("position", rows), self._whole("count", rows), counts

    def fill(
        self, batch: SamplingBatch, rows: Sequence[int] | None = None, seq_ids: Sequence[int] = ()
    ) -> bool:
        """Write the settings of a batch; False, and nothing, if it has more samples than these tables have
        rows, needs answers that are no tokens, or a sampler that only the host has.

        rows: the row of logits of each sample in turn, from 0 on by default. seq_ids: of the batch's rows,
        if draws are reported by `move_on`: the next step of these sequences needs no call then, where
        `form.moves_on`. Without ids each step has a call, and no draw is counted.
        """
        draws = [(row, i) for row in batch.rows for i in range(row.num_samples)]
        if len(draws) > self.capacity or any(_needs_host(r, self.gives_scores) for r in batch.rows):
            return False
        self.fill_draws(draws, rows, seq_ids if all(r.num_samples == 1 for r in batch.rows) else ())
        return True

    @torch.inference_mode(False)
    def fill_draws(
        self, draws: Sequence[Draw], rows: Sequence[int] | None = None, seq_ids: Sequence[int] = ()
    ) -> None:
        """Write the settings of single samples, `capacity` at most. seq_ids: of each, as `fill` has them."""
        self._moves_on, moved, self._moved = bool(seq_ids), self._moved, 0
        for key in self._counts.used & self._histories.keys():
            tokens = self._histories[key].tokens
            self._histories[key] = CountedHistory(tokens, len(tokens) + moved)
        places = np.arange(len(draws)) if rows is None else np.array(rows, np.int64)
        self._clear()
        columns = _plain_columns(draws)
        for name, values in columns.items():
            kind: npt.DTypeLike = np.float64 if name in FLOATS else np.int64
            self._host[PLACES[name]].view(kind)[places] = values
        self._is_drawn = any(columns["temperature"])
        edited = [at for at, (row, i) in enumerate(draws) if is_edited(row, i)]
        self._is_edited = bool(edited) or self._has_holes
        for table in (self._masks, self._biases, self._counts):
            table.start()
        if edited:
            owners = [seq_ids[at] if seq_ids else None for at in edited]
            self._fill_edits([draws[at] for at in edited], owners, places[edited])
        self._block.copy_(copy_to_device(self._host, self.device))
        if (sizes := self._tensors()) != self._sizes:
            self._sizes, self._replaced = sizes, self._replaced + 1

    def move_on(self, steps: int = 1) -> None:
        """Report launches of `draw` over the last batch, each of which added a token to every sequence."""
        self._moved += steps

    def _clear(self) -> None:
        """The settings of rows that a batch does not have: they take the largest logit, unedited."""
        self._host[:] = 0
        self._host[PLACES["repetition"]].view(np.float64)[:] = 1.0

    def _floats(self, name: str, rows: int) -> Tensor:
        return self._block[PLACES[name], :rows].view(torch.float64)

    def _whole(self, name: str, rows: int) -> Tensor:
        return self._block[PLACES[name], :rows]

    def _tensors(self) -> tuple[int, ...]:
        return tuple(t.data_ptr() for t in self.static_tensors)

    def _fill_edits(self, draws: Sequence[Draw], owners: Sequence[int | None], places: Longs) -> None:
        self._set("mask", places, self._mask_lines(draws))
        self._set("bias", places, self._bias_lines(draws))
        self._set("count", places, self._count_lines(draws, owners))
        stops = [self._stops_of(row, i) for row, i in draws]
        self._set("until", places, [row.position + row.num_stopless if s else 0 for (row, _), s in
                                    zip(draws, stops, strict=True)])  # fmt: skip
        widest = max(map(len, stops))
        if not widest:
            return
        if widest > self._stops.shape[1]:
            width = 1 << (widest - 1).bit_length()
            self._stops = torch.full((self.capacity, width), NO_STOP, dtype=torch.int64, device=self.device)
        table = np.full((self.capacity, self._stops.shape[1]), NO_STOP, np.int64)
        for place, ids in zip(places, stops, strict=True):
            table[place, : len(ids)] = ids
        self._stops.copy_(copy_to_device(table, self.device))

    def _set(self, name: str, places: Longs, values: Iterable[int]) -> None:
        self._host[PLACES[name], places] = list(values)

    def _mask_lines(self, draws: Sequence[Draw]) -> list[int]:
        lines, new, rows = [], [], []
        for row, i in draws:
            if not (row.masks and row.masks[i]):
                lines.append(0)
                continue
            line, is_new = self._masks.take(row.masks[i])
            lines.append(line)
            if is_new:
                new.append(line)
                rows.append(self._without_banned(row.masks[i]).view(np.int32))
        self._masks.write(new, np.array(rows))
        return lines

    def _without_banned(self, mask: bytes) -> npt.NDArray[np.uint32]:
        """A mask without the banned ids, as words."""
        found = np.zeros(len(self._words), np.uint32)
        given = np.frombuffer(mask, np.uint8)[: found.nbytes]
        found.view(np.uint8)[: given.size] = given
        return found & self._words

    def _bias_lines(self, draws: Sequence[Draw]) -> list[int]:
        lines, blank = [], []
        places, values = list[tuple[int, int]](), list[float]()
        for row, _ in draws:
            bias = [(t, b) for t, b in row.params.logit_bias.items() if t < self.limit]
            line, is_new = self._biases.take(tuple(bias)) if bias else (0, False)
            lines.append(line)
            if is_new:
                blank.append(line)
                places += [(line, t) for t, _ in bias]
                values += [b for _, b in bias]
        self._biases.put(blank, np.array(places, np.int64).reshape(-1, 2).T, np.array(values, np.float32))
        return lines

    def _count_lines(self, draws: Sequence[Draw], owners: Sequence[int | None]) -> list[int]:
        """Lines of counts, each of one sequence: others with its seed and prompt may have other tokens.

        Of a history that only became longer, what is behind the known end is written. Places of a noisy
        canvas share a line: none of their draws is counted.
        """
        lines, blank, taken = list[int](), list[int](), set[Hashable]()
        places, values, last = list[Longs](), list[npt.NDArray[np.int32]](), None
        for (row, i), owner in zip(draws, owners, strict=True):
            if not row.history or (row is last and row.entropy_at):
                lines.append(lines[-1] if row.history else 0)
                continue
            last = row
            history = (*row.history, *row.draft[:i])
            whose = (row.seed, row.prompt_len) if owner is None else owner
            key = next(k for n in range(len(draws)) if (k := (whose, n)) not in taken)
            taken.add(key)
            line, is_new = self._counts.take(key)
            lines.append(line)
            known, length = self._histories.get(key, ((), 0))
            if is_new or length != len(history) or history[: len(known)] != known:
                blank.append(line)
                known = ()
            self._histories[key] = CountedHistory(history, len(history))
            ids, counts = _count(history, row.prompt_len, len(known), self.limit)
            places.append(np.stack([np.full_like(ids, line), ids]))
            values.append(counts)
        if places:
            self._counts.put(blank, np.concatenate(places, 1), np.concatenate(values))
        self._histories = {k: known for k, known in self._histories.items() if k in self._counts}
        return lines

    def _stops_of(self, row: SamplingRow, i: int) -> list[int]:
        """Ids that must not end this sample; none, if its mask leaves nothing else."""
        if i >= row.num_stopless:
            return []
        early = sorted(t for t in row.stop_token_ids if 0 <= t < self.limit)
        if early and row.masks and row.masks[i]:
            allowed = self._without_banned(row.masks[i])
            for t in early:
                allowed[t // 32] &= ~np.uint32(1 << (t % 32))
            early = early if allowed.any() else []
        return early


def _needs_host(row: SamplingRow, gives_scores: bool) -> bool:
    is_listed = row.params.logprobs is not None or row.prompt_targets or row.num_candidates
    is_left = row.params.needs_chain or row.negative >= 0 or (row.is_scored and not gives_scores)
    return bool(is_listed or is_left)


def _plain_columns(draws: Sequence[Draw]) -> dict[str, list[float] | list[int]]:
    """What every row has, by name."""
    params, seeds = [row.params for row, _ in draws], [row.seed & (2**64 - 1) for row, _ in draws]
    return {
        "temperature": [p.temperature or 0.0 for p in params],
        "top_p": [1.0 if p.top_p is None else p.top_p for p in params],
        "min_p": [p.min_p or 0.0 for p in params],
        "repetition": [p.repetition_penalty or 1.0 for p in params],
        "presence": [p.presence_penalty or 0.0 for p in params],
        "frequency": [p.frequency_penalty or 0.0 for p in params],
        "top_k": [min(p.top_k or 0, 2**31) for p in params],
        "seed": [s - 2**64 if s >= 2**63 else s for s in seeds],
        "position": [row.position + i for row, i in draws],
    }


def _count(
    history: tuple[int, ...], prompt_len: int, known: int, limit: int
) -> tuple[Longs, npt.NDArray[np.int32]]:
    """Ids behind the first `known` tokens of a history, and their counts in all of it."""
    tokens = np.array(history, np.int64)
    ids = np.unique(tokens[known:])
    ids = ids[ids < limit]
    output = tokens[prompt_len:]
    if known < prompt_len:
        found, times = np.unique(output, return_counts=True)
        counts = np.zeros(len(ids), np.int32)
        counts[np.isin(ids, found)] = PER_OUTPUT * times[np.isin(found, ids)]
        return ids, counts + IN_PROMPT * np.isin(ids, tokens[:prompt_len]).astype(np.int32)
    counts = (output[:, None] == ids).sum(0) * PER_OUTPUT
    return ids, (counts + IN_PROMPT * np.isin(ids, tokens[:prompt_len])).astype(np.int32)


def most_nbytes(capacity: int, limit: int, seqs: int) -> int:
    """Bytes of the tables of so many rows, once each row has penalties and a mask of its own.

    Rows of a sequence, of which a batch has at most `seqs`, have the same biases. Tables begin with one line
    each and grow by doubling: twice the lines of biases that are needed, and the largest table is there one
    and a half times then.
    """
    line = 4 * _round_up(limit)
    counts, biases = (capacity + 1) * line, min(capacity + 1, 2 * seqs) * line
    masks = (capacity + 1) * 4 * _round_up(-(-limit // 32))
    return counts + biases + masks + counts // 2 + line  # one that is never replaced


def _round_up(width: int) -> int:
    return -(-width // ALIGNED) * ALIGNED


def copy_to_device(values: npt.NDArray[np.generic], device: torch.device) -> Tensor:
    """An array as a tensor on the device, without a wait: from memory that is not written again."""
    found = torch.from_numpy(values.copy())
    return found.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else found
