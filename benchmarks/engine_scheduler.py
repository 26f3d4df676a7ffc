"""Plans per second: the scheduler with nothing behind it, as an engine drives it."""

from __future__ import annotations

import random
import statistics
import time
from itertools import count
from typing import Any

from plait.memory import BlockGroup
from plait.request import SamplingParams
from plait.schedule.allocation import Allocation
from plait.schedule.costs import SchedulerLimits
from plait.schedule.plan import Sampled
from plait.schedule.pools import CacheOptions
from plait.schedule.scheduler import Scheduler
from plait.schedule.sequence import TokenSequence

KINDS = {
    "full attention": (BlockGroup("full", None, ("a",)),),
    "windows and full": (BlockGroup("full", None, ("a",)), BlockGroup("window:512", 512, ("b",))),
    "hybrid (with slots)": (BlockGroup("full", None, ("a",)),),
}
NUM_RUNNING = (10, 100, 1000)
LONGEST, BLOCK, PROMPT, BUDGET = 2048, 16, 256, 8192
GREEDY = SamplingParams(temperature=0.0)
Row = dict[str, Any]


def rows(num_steps: int) -> list[Row]:
    """Medians over `num_steps` (fewer with 1,000 sequences), decodes alone and together with prompts."""
    found = []
    for kind in KINDS:
        for number in NUM_RUNNING:
            steps = max(num_steps // (10 if number == 1000 else 1), 20)
            found += [decodes(kind, number, steps), mixed(kind, number, steps)]
    return found


def scheduler(kind: str, number: int, budget: int) -> Scheduler:
    groups = KINDS[kind]
    blocks = number * (LONGEST // BLOCK + 1) + 1
    memory = Allocation(
        groups,
        [blocks] * len(groups),
        BLOCK,
        num_slots=3 * number + 1 if "slots" in kind else 0,
        max_step_len=budget,
        cache=CacheOptions(block_nbytes=(1,) * len(groups), slot_nbytes=1),
    )
    limits = SchedulerLimits(
        max_num_seqs=number, max_num_batched_tokens=budget, max_waiting=number, max_model_len=LONGEST
    )
    return Scheduler(limits, memory)


def sequence(number: int, luck: random.Random, prompt_len: int, reply_len: int) -> TokenSequence:
    ids = [luck.randrange(50_000) for _ in range(prompt_len)]
    return TokenSequence(number, f"r{number}", 0, ids, GREEDY, frozenset({2}), prompt_len + reply_len)


def step(scheduled: Scheduler) -> tuple[int, int, list[float]]:
    """One step: (chunks, sequences that ended, seconds of plan, sampling and commit), of CPU time."""
    began = time.thread_time()
    plan = scheduled.plan()
    planned = time.thread_time()
    assert plan is not None
    sampling = scheduled.sampling(plan)
    asked = time.thread_time()
    sampled = [Sampled((5,) * row.num_samples) for row in sampling.rows]
    answered = time.thread_time()
    updates = scheduled.commit(plan, sampled)
    committed = time.thread_time()
    ended = sum(update.event.finish_reason is not None for update in updates)
    return len(plan.chunks), ended, [planned - began, asked - planned, committed - answered]


def decodes(kind: str, number: int, num_steps: int) -> Row:
    """Decodes only: every prompt is computed, and no sequence ends."""
    luck = random.Random(0)
    scheduled = scheduler(kind, number, BUDGET)
    scheduled.add(*(sequence(i, luck, PROMPT, LONGEST - PROMPT) for i in range(number)))
    while scheduled.waiting or any(seq.is_prefilling for seq in scheduled.running):
        step(scheduled)
    found = [step(scheduled) for _ in range(num_steps)]
    assert all(chunks == number for chunks, *_ in found)
    return _row(kind, "decodes", number, found)


def mixed(kind: str, number: int, num_steps: int) -> Row:
    """A sequence that ends is followed by another: prompts of 16 to 400 tokens, replies of 16 to 128."""
    luck, ids = random.Random(0), count()
    scheduled = scheduler(kind, number, number + 1024)

    def arrive(many: int) -> None:
        for _ in range(many):
            scheduled.add(sequence(next(ids), luck, luck.randint(16, 400), luck.randint(16, 128)))

    arrive(number)
    for _ in range(max(100, number // 4)):
        arrive(step(scheduled)[1])
    found = []
    for _ in range(num_steps):
        found.append(step(scheduled))
        arrive(found[-1][1])
    return _row(kind, "with prompts", number, found)


def _row(kind: str, work: str, number: int, steps: list[tuple[int, int, list[float]]]) -> Row:
    seconds = [sum(parts) for _, _, parts in steps]
    each = statistics.median(s / chunks for (chunks, _, _), s in zip(steps, seconds, strict=True))
    parts = zip(*(parts for _, _, parts in steps), strict=True)
    plan, sampling, commit = (statistics.median(part) for part in parts)
    return {
        "memory": kind,
        "work": work,
        "running": number,
        "plans_per_s": round(1 / statistics.median(seconds)),
        "us_per_sequence": round(each * 1e6, 1),
        "plan_us": round(plan * 1e6),
        "sampling_us": round(sampling * 1e6),
        "commit_us": round(commit * 1e6),
    }
