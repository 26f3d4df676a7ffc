"""The load of `plait bench serve` on one server: when clients come, and what it costs to be all of them."""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from importlib import import_module
from random import Random
from typing import TYPE_CHECKING, Any

import numpy as np

from plait.bench.model.measure import round_number
from plait.bench.serve.client import Messages, RequestOutcome, ServerTarget, ask, open_session
from plait.bench.serve.workload import Chat, Workload
from plait.errors import ConfigError

if TYPE_CHECKING:
    from aiohttp import ClientSession

NAP_S = 0.01  # how late a nap of this length ends is what a token may wait to be seen
LATE_MS, BUSY = 20.0, 0.9  # beyond these the client is what was measured
Done = Callable[[RequestOutcome], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrivals:
    """rate: requests per second, inf: at once; concurrency: the most at a time, None: no limit.

    burst: so many come at the same moment. burstiness: the shape of a gamma distribution of the gaps between
    them. 1 is Poisson; below it they come more in heaps, above it more evenly. Ends after `num_prompts`
    requests were begun, or when `duration_s` seconds are over and what runs then has ended.
    """

    rate: float = math.inf
    concurrency: int | None = None
    burst: int = 1
    burstiness: float = 1.0
    num_prompts: int | None = 100
    duration_s: float | None = None

    def __post_init__(self) -> None:
        for name in ("rate", "concurrency", "burst", "burstiness", "num_prompts", "duration_s"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ConfigError(f"{name}: {value} is not more than 0")
        if self.num_prompts is None and self.duration_s is None:
            raise ConfigError(
                "give a number of requests (num_prompts) or a time (duration_s): one must end it"
            )
        if self.num_prompts is None and math.isinf(self.rate) and self.concurrency is None:
            raise ConfigError("duration_s: without a rate or a concurrency it asks for requests without end")

    def times(self, seed: int) -> Iterator[float]:
        """Seconds after the start at which one chat after the other begins, without end."""
        random, at = Random(f"{seed}/arrivals"), 0.0
        while True:
            for _ in range(self.burst):
                yield at
            if not math.isinf(self.rate):
                mean = self.burst / self.rate
                at += random.gammavariate(self.burstiness, mean / self.burstiness)

    def chats(self, turns: int) -> float:
        """How many chats to begin, of so many turns each."""
        return math.inf if self.num_prompts is None else max(1, round(self.num_prompts / turns))


@dataclass(slots=True)
class Run:
    """What came of it: every request, in the order of their starts, and the client's own costs."""

    outcomes: list[RequestOutcome] = field(default_factory=list)
    duration_s: float = 0.0
    cpu_s: float = 0.0
    late_s: list[float] = field(default_factory=list)

    def client(self) -> dict[str, object]:
        """How busy and how late this client was. `is_bottleneck`: the client may have limited the numbers."""
        events = sum(len(one.gaps_s) + (one.ttft_s is not None) for one in self.outcomes)
        late = [1000 * float(np.percentile(self.late_s, p)) if self.late_s else 0.0 for p in (50, 99, 100)]
        busy = self.cpu_s / self.duration_s
        return {
            "cpu_s": round_number(self.cpu_s),
            "cpu_share": round_number(busy),
            "cpu_us_per_event": round_number(1e6 * self.cpu_s / events) if events else None,
            "lag_p50_ms": round_number(late[0]),
            "lag_p99_ms": round_number(late[1]),
            "lag_max_ms": round_number(late[2]),
            "is_bottleneck": late[1] > LATE_MS or busy > BUSY,
        }


def drive(
    target: ServerTarget, workload: Workload, arrivals: Arrivals, on_done: Done = lambda one: None
) -> Run:
    """Load one server and wait for all replies. Raises ConfigError where aiohttp is not installed."""
    with runner() as loop:
        return loop.run(run_load(target, workload, arrivals, on_done))


def runner() -> asyncio.Runner:
    """An event loop of its own, uvloop's where it is installed."""
    try:
        faster = import_module("uvloop")
    except ImportError:
        return asyncio.Runner()
    return asyncio.Runner(loop_factory=faster.new_event_loop)


async def run_load(target: ServerTarget, workload: Workload, arrivals: Arrivals, on_done: Done) -> Run:
    """`drive` within an event loop."""
    run = Run()
    async with open_session(target) as session:
        napping = asyncio.create_task(_nap(run.late_s))
        began, cpu = time.perf_counter(), time.process_time()
        clients = Clients(session, target, workload, arrivals, began, run, on_done)
        try:
            await clients.all()
        finally:
            run.duration_s, run.cpu_s = time.perf_counter() - began, time.process_time() - cpu
            napping.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await napping
    run.outcomes.sort(key=lambda one: (one.started, one.index))
    return run


async def _nap(late_s: list[float]) -> None:
    """Record how much later than requested short naps end."""
    while True:
        began = time.perf_counter()
        await asyncio.sleep(NAP_S)
        late_s.append(max(time.perf_counter() - began - NAP_S, 0.0))


@dataclass(slots=True)
class Clients:
    """All clients of one run."""

    session: ClientSession
    target: ServerTarget
    workload: Workload
    arrivals: Arrivals
    began: float
    run: Run
    on_done: Done
    begun: int = 0

    async def all(self) -> None:
        """Begin chats when their time comes, or, at a fixed concurrency, when another ends."""
        wanted, most = self.arrivals.chats(self.workload.turns), self.arrivals.concurrency
        if math.isinf(self.arrivals.rate) and most is not None:
            await _together(*(self._one_by_one(wanted) for _ in range(int(min(most, wanted)))))
            return
        door = asyncio.Semaphore(most) if most is not None else contextlib.nullcontext()
        async with asyncio.TaskGroup() as group:
            for at in self.arrivals.times(self.workload.seed):
                if self.begun >= wanted or self._is_over(at):
                    return
                await asyncio.sleep(self.began + at - time.perf_counter())
                group.create_task(self._enter(door, self._next()))

    async def _enter(self, door: contextlib.AbstractAsyncContextManager[object], chat: Chat) -> None:
        async with door:
            await self._talk(chat)

    async def _one_by_one(self, wanted: float) -> None:
        while self.begun < wanted and not self._is_over(0.0):
            await self._talk(self._next())

    def _is_over(self, at: float) -> bool:
        limit = self.arrivals.duration_s
        return limit is not None and max(at, time.perf_counter() - self.began) >= limit

    def _next(self) -> Chat:
        self.begun += 1
        return self.workload.chat(self.begun - 1)

    async def _talk(self, chat: Chat) -> None:
        """One chat: every turn is sent with all replies before it; one without a whole reply is the last."""
        messages: Messages = []
        for number, turn in enumerate(chat.turns):
            if number and self._is_over(0.0):
                return
            messages.append({"role": "user", "content": turn.text})
            outcome = RequestOutcome(chat.index, number, time.perf_counter() - self.began)
            await ask(self.session, self.target, messages, turn, outcome)
            self.run.outcomes.append(outcome)
            self.on_done(outcome)
            if not outcome.is_ok:
                return
            messages.append({"role": "assistant", "content": outcome.text})


async def _together(*clients: Any) -> None:
    async with asyncio.TaskGroup() as group:
        for client in clients:
            group.create_task(client)
