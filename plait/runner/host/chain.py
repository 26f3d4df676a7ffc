"""The samplers beyond temperature, top-k, top-p and min-p: token rules, cuts of the distribution, the draw.

A row that needs one of them (`SamplingParams.needs_chain`) is chosen here, on a CPU and for a GPU alike. Each
sampler is a function from candidates to candidates; `SamplingParams.samplers` is their order. All of it is
float64, and a function of the row, its settings, its history and (seed, position) alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
from msgspec import Struct

from plait.errors import EngineError
from plait.ops.seed import uniform
from plait.request import SamplingParams
from plait.sampling_fields import MAX_DRY_LENGTH, SAMPLERS

BEFORE_MIROSTAT = frozenset({"penalties", "dry", "temperature", "smoothing"})  # it replaces the others
XTC_SEED = 0x9E6C63D0876A9A47  # XTC's random numbers are not those of the draw
DRY_MOST = 3e38  # the largest penalty of DRY: float32's range, as llama.cpp has it
DRY_LONGEST = 2 * MAX_DRY_LENGTH  # longer repetitions count as so long
Longs = npt.NDArray[np.int64]
Doubles = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Candidates:
    """The tokens that are left: ids [n], and their logits [n] float64; in `is_sorted`, largest first."""

    ids: Longs
    logits: Doubles
    is_sorted: bool = False

    def sort_down(self) -> Candidates:
        """Largest first, the lower id first among equals."""
        if self.is_sorted:
            return self
        order = np.lexsort((self.ids, -self.logits))
        return Candidates(self.ids[order], self.logits[order], True)

    def where(self, kept: npt.NDArray[np.bool_]) -> Candidates:
        """Those that are kept, in the same order."""
        return Candidates(self.ids[kept], self.logits[kept], self.is_sorted)

    def first(self, count: int) -> Candidates:
        """The first of sorted candidates, at least one."""
        count = max(count, 1)
        return Candidates(self.ids[:count], self.logits[:count], self.is_sorted)

    def probabilities(self) -> Doubles:
        """Of each candidate, among the candidates: [n]."""
        weight = np.exp(self.logits - self.logits.max())
        found: Doubles = weight / weight.sum()
        return found


class ChainRow(Struct, frozen=True):
    """What one token is chosen by: settings, what came before (prompt and output), and where it will be."""

    params: SamplingParams
    past: Longs
    prompt_len: int
    seed: int
    position: int


Stage = Callable[[Candidates, ChainRow], Candidates]


def list_candidates(logits: npt.NDArray[np.float32], row: ChainRow) -> Candidates:
    """What the samplers leave of logits [vocab], in which what is banned is -inf.

    Raises EngineError if no logit is finite.
    """
    left = list_allowed(logits, row)
    for name in row.params.samplers or SAMPLERS:
        if not row.params.mirostat or name in BEFORE_MIROSTAT:
            left = STAGES[name](left, row)
    return left


def list_allowed(logits: npt.NDArray[np.float32], row: ChainRow) -> Candidates:
    """What rules leave of logits [vocab]. Raises EngineError if no logit is finite."""
    if not math.isfinite(float(logits.max())):
        raise EngineError(f"the model computed {logits.max()} as the largest logit of a token")
    rules = keep_allowed(logits, row)
    ids = np.flatnonzero(np.isfinite(rules))
    return Candidates(ids, rules[ids].astype(np.float64))


def denoise(logits: npt.NDArray[np.float32], row: ChainRow, temperature: float) -> tuple[int, float]:
    """(the likeliest token that the samplers leave, the entropy in nats at a temperature of all that rules
    leave, penalties included)."""
    allowed, samplers = list_allowed(logits, row), row.params.samplers
    allowed = penalize(allowed, row) if "penalties" in samplers else allowed
    heated = (allowed.logits - allowed.logits.max()) / temperature
    shares = np.exp(heated)
    mass = shares.sum()
    entropy = float(np.log(mass) - (shares * heated).sum() / mass)
    return int(list_candidates(logits, row).sort_down().ids[0]), entropy


def draw(left: Candidates, number: float) -> int:
    """One of sorted candidates by inverse transform sampling; number: in [0, 1)."""
    mass = np.cumsum(np.exp(left.logits - left.logits[0]))
    index = int(np.searchsorted(mass, number * mass[-1], side="right"))
    return int(left.ids[min(index, len(mass) - 1)])


def keep_allowed(logits: npt.NDArray[np.float32], row: ChainRow) -> npt.NDArray[np.float32]:
    """Logits with -inf for what `allowed_token_ids` and `bad_words` forbid; a copy if anything is.

    A rule that would leave no token is not applied: what a grammar demands counts more.
    """
    params, limit = row.params, len(logits)
    if params.allowed_token_ids:
        ids = [t for t in params.allowed_token_ids if t < limit]
        kept = np.full_like(logits, -np.inf)
        kept[ids] = logits[ids]
        logits = kept if np.isfinite(kept).any() else logits
    output = row.past[row.prompt_len :]
    if banned := [t for t in find_banned(params.bad_word_ids, output) if t < limit]:
        kept = logits.copy()
        kept[banned] = -np.inf
        logits = kept if np.isfinite(kept).any() else logits
    return logits


def find_banned(words: Sequence[Sequence[int]], output: Longs) -> list[int]:
    """The tokens that would complete a word at the end of the output, as vLLM's `bad_words` has it."""
    found = []
    for *begin, last in words:
        if not begin or output[-len(begin) :].tolist() == begin:
            found.append(last)
    return found


def penalize(left: Candidates, row: ChainRow) -> Candidates:
    """Repetition counts prompt and output, presence and frequency the output only."""
    if not row.params.samplers:
        return left  # done before, in the sampler that every penalised row has
    params, logits = row.params, left.logits.copy()
    by, output = params.repetition_penalty or 1.0, row.past[row.prompt_len :]
    seen = np.isin(left.ids, row.past)
    logits[seen] = np.where(logits[seen] > 0, logits[seen] / by, logits[seen] * by)
    ids, counts = np.unique(output, return_counts=True)
    place = np.isin(left.ids, ids)
    times = counts[np.searchsorted(ids, left.ids[place])]
    logits[place] -= params.frequency_penalty * times + params.presence_penalty
    return Candidates(left.ids, logits)


def penalize_repeats(left: Candidates, row: ChainRow) -> Candidates:
    """DRY (p-e-w): a token that would lengthen a repetition of n ≥ allowed_length tokens loses
    multiplier · base^(n - allowed_length)."""
    params = row.params
    if not (params.dry_multiplier and params.dry_penalty_last_n):
        return left
    past = row.past if params.dry_penalty_last_n < 0 else row.past[-params.dry_penalty_last_n :]
    lengths = measure_repeats(past, *params.dry_breaks)
    place = {int(t): i for i, t in enumerate(left.ids)} if lengths else {}
    logits = left.logits.copy()
    for token, length in lengths.items():
        over = length - params.dry_allowed_length
        if token in place and over >= 0:
            growth = min(over * math.log(params.dry_base), math.log(DRY_MOST))
            logits[place[token]] -= min(params.dry_multiplier * math.exp(growth), DRY_MOST)
    return Candidates(left.ids, logits)


def measure_repeats(
    past: Longs, breaks: Container[int], sequences: Sequence[Sequence[int]]
) -> dict[int, int]:
    """By token, the longest end of `past` that came before that token already.

    No repetition reaches across a breaker: one of the tokens `breaks`, or one of `sequences` of tokens. Such
    a token is never penalised itself, because the repetition ends there.
    """
    most = min(measure_reach(past, breaks, sequences), DRY_LONGEST)
    lengths = np.zeros(len(past), np.int64)  # of the repetition that ends before each token
    at = np.arange(len(past) - 1)  # what may match the last token: every one with a next token
    for length in range(1, most + 1):
        at = at[at >= length - 1]
        at = at[past[at - length + 1] == past[len(past) - length]]
        if not len(at):
            break
        lengths[at + 1] = length
    found: dict[int, int] = {}
    for i in np.flatnonzero(lengths).tolist():
        found[int(past[i])] = max(found.get(int(past[i]), 0), int(lengths[i]))
    return {token: length for token, length in found.items() if token not in breaks}


def measure_reach(past: Longs, breaks: Container[int], sequences: Sequence[Sequence[int]]) -> int:
    """How many tokens come after the last breaker."""
    last = len(past) - 1
    while last >= 0 and int(past[last]) not in breaks:
        last -= 1
    for words in sequences:
        size = len(words)
        if size > len(past):
            continue
        begins = np.ones(len(past) - size + 1, np.bool_)
        for i, token in enumerate(words):
            begins &= past[i : len(past) - size + 1 + i] == token
        if begins.any():
            last = max(last, int(np.flatnonzero(begins)[-1]) + size - 1)
    return len(past) - 1 - last


def cut_below_sigma(left: Candidates, row: ChainRow) -> Candidates:
    """Top-nσ (Tang et al. 2024): logits within n standard deviations of the largest one."""
    by, logits = row.params.top_n_sigma, left.logits
    return left if by <= 0 else left.where(logits >= logits.max() - by * logits.std())


def warm(left: Candidates, row: ChainRow) -> Candidates:
    """Temperature; with a range, llama.cpp's dynamic temperature by the entropy of the candidates."""
    params = row.params
    heat, spread = params.temperature or 0.0, params.dynatemp_range
    if spread and len(left.ids) > 1:
        share = left.probabilities()
        entropy = -float((share * np.log(np.maximum(share, 1e-300))).sum()) / math.log(len(left.ids))
        low = max(heat - spread, 0.0)
        heat = low + (heat + spread - low) * min(max(entropy, 0.0), 1.0) ** params.dynatemp_exponent
    if heat <= 0:
        return left.sort_down().first(1)
    with np.errstate(over="ignore"):
        left = replace(left, logits=(left.logits - left.logits.max()) / heat)
    return left.where(np.isfinite(left.logits))


def smooth(left: Candidates, row: ChainRow) -> Candidates:
    """Quadratic smoothing (kalomaze): max - f·(3-c)/2·d² + f·(c-1)/2·d³, of d = logit - max."""
    factor, curve = row.params.smoothing_factor, row.params.smoothing_curve
    if not factor:
        return left
    largest = left.logits.max()
    d = left.logits - largest
    square, cube = factor * (3 - curve) / 2, factor * (curve - 1) / 2
    return Candidates(left.ids, largest - square * d**2 + cube * d**3)


def cut_top_k(left: Candidates, row: ChainRow) -> Candidates:
    """The k largest."""
    count = row.params.top_k or 0
    if not 0 < count < len(left.ids):
        return left
    if not left.is_sorted:  # no more than what can be among them is sorted
        left = left.where(left.logits >= np.partition(left.logits, -count)[-count])
    return left.sort_down().first(count)


def cut_top_p(left: Candidates, row: ChainRow) -> Candidates:
    """The nucleus (Holtzman et al. 2020): the fewest of the largest that have this probability."""
    most = 1.0 if row.params.top_p is None else row.params.top_p
    if most >= 1:
        return left
    left = left.sort_down()
    mass = np.cumsum(np.exp(left.logits - left.logits[0]))
    return left.first(1 + int(np.count_nonzero(mass[:-1] < most * mass[-1])))


def cut_min_p(left: Candidates, row: ChainRow) -> Candidates:
    """Those with at least this share of the largest probability."""
    least = row.params.min_p or 0.0
    return left.where(np.exp(left.logits - left.logits.max()) >= least) if least else left


def cut_atypical(left: Candidates, row: ChainRow) -> Candidates:
    """Locally typical sampling (Meister et al. 2023): those with the information nearest to the entropy,
    as few as have more than this probability; the likelier first among equals."""
    if row.params.typical_p >= 1:
        return left
    left = left.sort_down()
    share = left.probabilities()
    information = -np.log(np.maximum(share, 1e-300))
    order = np.argsort(np.abs(information - (share * information).sum()), kind="stable")
    mass = np.cumsum(share[order])
    count = min(1 + int(np.count_nonzero(mass <= row.params.typical_p)), len(order))
    return left.where(np.isin(np.arange(len(order)), order[:count]))


def exclude_top(left: Candidates, row: ChainRow) -> Candidates:
    """XTC (p-e-w): at this chance, drop all tokens from the threshold up but the least likely of them."""
    params = row.params
    if not params.xtc_probability or params.xtc_threshold > 0.5 or len(left.ids) < 2:
        return left
    if uniform(row.seed ^ XTC_SEED, row.position) >= params.xtc_probability:
        return left
    left = left.sort_down()
    above = int(np.count_nonzero(left.probabilities() >= params.xtc_threshold))
    return left if above < 2 else Candidates(left.ids[above - 1 :], left.logits[above - 1 :], True)


STAGES: Mapping[str, Stage] = {
    "penalties": penalize,
    "dry": penalize_repeats,
    "top_n_sigma": cut_below_sigma,
    "temperature": warm,
    "smoothing": smooth,
    "top_k": cut_top_k,
    "top_p": cut_top_p,
    "min_p": cut_min_p,
    "typ_p": cut_atypical,
    "xtc": exclude_top,
}
