"""What a step costs on this machine, and what one may do: its limits, and how many steps one plan may have.

`StepCosts` measures seconds by tokens, and by bytes that are moved. Steps are sorted by size into powers of
two, and of each size the last few are remembered. The median of a size counts, because a hiccup, or a slow
first step, can only make a step look slower than it is. A size that seems slower than a larger one is assumed
to be as fast as that, unless several steps have shown it since.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from plait.schedule.plan import StepPlan
from plait.schedule.sequence import TokenSequence
from plait.spec.canvas import AnyCanvas

LONGEST_S = 0.05  # of several decode steps at once: a request that arrives meanwhile waits for them
LATE_S = 0.02  # that a streamed token may wait for further steps of its plan
BURST_S = 0.03  # behind a streamed reply's first token, in which further requests are likely to arrive
COPIED = 0.02  # of the time of several steps at once that copies of recurrent state before them may take
COPIES_NBYTES_S = 4e9  # bytes of state that are copied in a second
NUM_REMEMBERED = 9  # steps of each size: of these, four may be hiccups
NUM_BELIEVED = 5  # steps of a size that are newer than all of another count for more
FIXED_TOKENS = 8.0  # where nothing is measured: a step without tokens would cost as much as so many


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerLimits:
    """What the scheduler may do in one step and at one time, with the names of `EngineConfig`.

    `max_step_s`: prompts are cut so that a step with running replies takes no longer, if not None.
    `num_steps`: the most decode steps of one plan; `num_streamed_steps`: where some reply is streamed.
    `num_turns`: the most speculative turns of one plan. `causal` False: all is computed in each step.
    `canvas`: what sequences write on, if the model fills canvases.
    """

    max_num_seqs: int
    max_num_batched_tokens: int
    max_waiting: int
    max_model_len: int
    max_step_s: float | None = None
    num_steps: int = 1
    num_streamed_steps: int = 1
    num_turns: int = 1
    causal: bool = True
    canvas: AnyCanvas | None = None

    @property
    def tail(self) -> int:
        """Places of a canvas behind the longest sequence."""
        return self.canvas.tail if self.canvas else 0


class StepCosts:
    """Seconds of a step as a function of its tokens: positive and never falling.

    Straight lines between measured sizes; beyond them in proportion to the tokens and `FIXED_TOKENS`.
    """

    def __init__(self) -> None:
        self._sizes: dict[int, _Size] = {}  # by bits of the number of tokens
        self._knots: list[tuple[float, float]] = []  # (tokens, seconds), neither ever falling
        self._moved: deque[float] = deque(maxlen=NUM_REMEMBERED)  # seconds per byte
        self._num_steps = 0

    @staticmethod
    def assume(num_tokens: float) -> float:
        """The assumed cost of a step of so many tokens before anything is measured, in no unit."""
        return max(num_tokens, 0.0) + FIXED_TOKENS

    def observe(self, num_tokens: int, seconds: float) -> None:
        """Record a step that moved no memory. One without tokens, or with a time of 0 s, is ignored."""
        if num_tokens < 1 or not 0 < seconds < math.inf:
            return
        self._num_steps += 1
        size = self._sizes.setdefault(num_tokens.bit_length(), _Size())
        size.observe(num_tokens, seconds, self._num_steps)
        self._knots = []

    def observe_plan(self, plan: StepPlan, num_steps: int, nbytes: int, seconds: float) -> None:
        """Record what a plan took: the time of its passes, `num_steps`, and of the bytes that it moved."""
        if not nbytes:
            self.observe(plan.num_tokens, seconds / num_steps)
            return
        pass_s = self.step_s(plan.num_tokens) if plan.chunks else 0.0
        if pass_s is not None:
            self.observe_moved(nbytes, seconds - pass_s * num_steps)

    def observe_moved(self, nbytes: int, seconds: float) -> None:
        """Record seconds that a step took beyond its tokens' cost, for so many bytes saved and loaded."""
        if nbytes > 0 and seconds < math.inf:
            self._moved.append(max(seconds, 0.0) / nbytes)

    def step_s(self, num_tokens: float) -> float | None:
        """Seconds of a step of so many tokens (a mean may be fractional); None: nothing was measured yet."""
        knots = self._curve()
        if not knots:
            return None
        i = bisect_left(knots, (num_tokens, 0.0))
        if i == 0 or i == len(knots):
            at, seconds = knots[min(i, len(knots) - 1)]
            return seconds * self.assume(num_tokens) / self.assume(at)
        (left, low), (right, high) = knots[i - 1], knots[i]
        return low + (high - low) * (num_tokens - left) / (right - left)

    def tokens_within(self, seconds: float) -> int | None:
        """The most tokens of a step that takes at most so long, maybe 0; None: nothing was measured yet."""
        knots = self._curve()
        if not knots:
            return None
        i = next((n for n, (_, cost) in enumerate(knots) if cost > seconds), len(knots))
        if i == 0 or i == len(knots):
            at, cost = knots[min(i, len(knots) - 1)]
            return max(math.floor(self.assume(at) * seconds / cost - FIXED_TOKENS), 0)
        (left, low), (right, high) = knots[i - 1], knots[i]
        return math.floor(left + (right - left) * (seconds - low) / (high - low))

    def move_s(self, nbytes: int) -> float | None:
        """Seconds to save or load so many bytes; None: nothing was measured yet."""
        return median(self._moved) * nbytes if self._moved else None

    def prefers_moving(self, nbytes: int, num_tokens: int) -> bool:
        """Whether moving so many bytes is known to be faster than computing so many tokens, or may be."""
        moved, again = self.move_s(nbytes), self.step_s(num_tokens)
        return moved is None or again is None or moved < again

    def _curve(self) -> list[tuple[float, float]]:
        if not self._knots and self._sizes:
            for size in self._sizes.values():
                size.sum_up()
            self._knots = _rising([self._sizes[bits] for bits in sorted(self._sizes)])
        return self._knots


def median(values: Iterable[float]) -> float:
    """The median; of an even number the lower of both, because the slower one may be a hiccup."""
    ordered = sorted(values)
    return ordered[(len(ordered) - 1) // 2]


class _Size:
    """Steps of about the same size. `tokens`, `seconds`: what stands for them all, once summed up."""

    def __init__(self) -> None:
        self.tokens = self.seconds = 0.0
        self.newest = self.believed = 0  # numbers of the last step, and of the first of the last few
        self._steps: deque[tuple[int, float, int]] = deque(maxlen=NUM_REMEMBERED)
        self._is_summed = True

    def observe(self, num_tokens: int, seconds: float, number: int) -> None:
        self._steps.append((num_tokens, seconds / StepCosts.assume(num_tokens), number))
        self.newest, self._is_summed = number, False
        self.believed = self._steps[-NUM_BELIEVED][2] if len(self._steps) >= NUM_BELIEVED else 0

    def sum_up(self) -> None:
        """Compute `tokens` and `seconds` only when they are read, because most steps do not need them."""
        if not self._is_summed:
            self.tokens = sum(step[0] for step in self._steps) / len(self._steps)
            self.seconds = median(rate for _, rate, _ in self._steps) * StepCosts.assume(self.tokens)
            self._is_summed = True


def _rising(sizes: Sequence[_Size]) -> list[tuple[float, float]]:
    """(tokens, seconds) by size, never falling: where two sizes disagree the cheaper or the newer counts."""
    seconds = [size.seconds for size in sizes]
    for i in reversed(range(len(sizes))):
        larger = range(i + 1, len(sizes))
        outdated = {j for j in larger if sizes[j].newest < sizes[i].believed}
        seconds[i] = min([seconds[i], *(seconds[j] for j in larger if j not in outdated)])
        for j in larger:
            seconds[j] = max(seconds[j], seconds[i])
    return [(size.tokens, cost) for size, cost in zip(sizes, seconds, strict=True)]


def describe_load(
    waiting: Sequence[TokenSequence], running: Sequence[TokenSequence], costs: StepCosts
) -> dict[str, int]:
    """Sequences that run and wait, tokens that are to be computed before their next one, and prompt speed.

    What the prefix cache has of a sequence that waits is counted, too: it is looked up when that starts.
    """
    prompts = sum(seq.num_left for seq in running if seq.is_prefilling)
    return {
        "num_running": len(running),
        "num_waiting": len(waiting),
        "num_waiting_tokens": prompts + sum(seq.num_tokens for seq in waiting),
        "prompt_tokens_per_s": costs.tokens_within(1.0) or 0,
    }


def most_steps(
    limits: SchedulerLimits, costs: StepCosts, running: Sequence[TokenSequence], slot_nbytes: int = 0
) -> int:
    """The most decode steps of one plan of these sequences. slot_nbytes: of recurrent state that is copied.

    Planning, committing and emitting events cost a small model 5 % of a step, so several are planned at once
    where no reply has to be read in between. Each computes what the one before it sampled, so the text is the
    same. A streamed token is late by the steps behind it, at most LATE_S. Where recurrent state has to be
    copied before them, and the copies take more than what is saved, there is one step.

    Streamed requests often come in bursts, and an arrival waits for the plan that runs. So there is one step
    at a time until the newest reply has run for BURST_S, while another request could start.
    """
    is_streamed = any(seq.is_watched for seq in running)
    most = min(limits.num_steps, limits.num_streamed_steps) if is_streamed else limits.num_steps
    if most == 1 or not running:
        return 1
    for seq in running:
        # A first token is emitted at once, because its time is how long the client waited for it.
        if not seq.is_unobserved or seq.is_prefilling or not seq.num_output_tokens:
            return 1
        most = min(most, seq.max_len - seq.length)
    seconds = costs.step_s(len(running))  # expensive: computed after all cheap checks
    if seconds is None:
        return 1
    most = min(most, int(min(LONGEST_S, limits.max_step_s or LONGEST_S) / seconds))
    if is_streamed:
        newest = min(seq.num_output_tokens for seq in running)
        if len(running) < limits.max_num_seqs and newest * seconds < BURST_S:
            return 1
        most = min(most, 1 + int(LATE_S / seconds))
    copies_s = slot_nbytes * len(running) / COPIES_NBYTES_S
    return most if copies_s <= COPIED * most * seconds else 1
