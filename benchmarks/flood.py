"""A client that costs as little as it can: for loads on the very cores that the server computes on.

Bodies are made before the load begins, and replies are looked at when it is over. In between there are
sockets only, each used again and again. A reply's bytes are kept with the moments they came at.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any
from urllib.parse import urlsplit

import msgspec

from plait.bench.serve.client import KEPT_S, RequestOutcome, ServerTarget
from plait.bench.serve.load_generator import Run, runner
from plait.bench.serve.workload import Workload

END = b"\r\n0\r\n\r\n"  # of a reply in chunks
HEAD = b"\r\n\r\n"


@dataclass(slots=True)
class Exchange:
    """One request and what came back, as it came."""

    index: int
    began: float
    parts: list[tuple[float, bytes]] = field(default_factory=list)
    size: int = 0  # of the whole reply; 0: not known yet, or in chunks
    got: int = 0
    ended: float = 0.0
    broken: str = ""


class Connection(asyncio.Protocol):
    """A connection that is used for one request after the other; `free` is called when a reply has ended."""

    def __init__(self, free: Callable[[Connection], None]) -> None:
        self._free, self._now = free, None
        self.transport: Any = None
        self.free_since = 0.0

    def connection_made(self, transport: Any) -> None:
        self.transport = transport

    def send(self, raw: bytes, exchange: Exchange) -> None:
        self._now = exchange
        self.transport.write(raw)

    def data_received(self, raw: bytes) -> None:
        now = self._now
        if now is None:
            return
        now.parts.append((time.perf_counter(), raw))
        now.got += len(raw)
        if not now.size and HEAD in raw and len(now.parts) == 1:
            head, _, _ = raw.partition(HEAD)
            length = head.lower().partition(b"\r\ncontent-length:")[2].partition(b"\r\n")[0]
            now.size = len(head) + len(HEAD) + int(length) if length else 0
        if now.got == now.size or (not now.size and raw.endswith(END)):
            self._end("")

    def connection_lost(self, error: Exception | None) -> None:
        self.transport = None
        self._end(str(error or "the server closed the connection"))

    def _end(self, broken: str) -> None:
        now, self._now = self._now, None
        if now is not None:
            now.ended = self.free_since = time.perf_counter()
            now.broken = broken
            self._free(self)


@dataclass(slots=True)
class Flood:
    """The load of one run. `bodies`: whole requests, taken in order; after the last comes the first."""

    host: str
    port: int
    bodies: Sequence[bytes]
    exchanges: list[Exchange] = field(default_factory=list)
    _idle: list[Connection] = field(default_factory=list)
    _again: bool = False
    _all_ended: Any = None
    _open: int = 0

    @classmethod
    def of(cls, target: ServerTarget, workload: Workload, count: int) -> Flood:
        """So many different requests of that workload."""
        place = urlsplit(target.path)
        lines = [f"POST {place.path} HTTP/1.1", f"Host: {place.netloc}", "Content-Type: application/json"]
        lines += [f"{name}: {value}" for name, value in target.headers.items()]
        bodies = []
        for index in range(count):
            turn = workload.chat(index).turns[0]
            raw = msgspec.json.encode(target.body([{"role": "user", "content": turn.text}], turn))
            head = "\r\n".join([*lines, f"Content-Length: {len(raw)}", "", ""])
            bodies.append(head.encode() + raw)
        return cls(place.hostname or "127.0.0.1", place.port or 80, bodies)

    async def full(self, clients: int, seconds: float) -> None:
        """So many clients, each asking again when it has its reply; then wait for all replies."""
        self._begin(again=True)
        for _ in range(clients):
            await self._send()
        await asyncio.sleep(seconds)
        await self._finish()

    async def at(self, rate: float, seconds: float, seed: int) -> None:
        """Requests at `rate` a second (Poisson), whatever becomes of them; then wait for all replies."""
        self._begin(again=False)
        random, began, at = Random(f"{seed}/flood"), time.perf_counter(), 0.0
        while (at := at + random.expovariate(rate)) < seconds:
            if (wait := began + at - time.perf_counter()) > 0:
                await asyncio.sleep(wait)
            await self._send()
        await self._finish()

    async def once(self) -> None:
        """Every request once, all at one moment; then wait for all replies."""
        self._begin(again=False)
        for _ in self.bodies:
            await self._send()
        await self._finish()

    def _begin(self, *, again: bool) -> None:
        self._again, self._all_ended = again, asyncio.Event()

    async def _send(self) -> None:
        while self._idle:
            connection = self._idle.pop()  # the last that was used; a server may be closing older ones
            is_open = connection.transport is not None and not connection.transport.is_closing()
            if is_open and time.perf_counter() - connection.free_since < KEPT_S:
                break
            if is_open:
                connection.transport.close()
        else:
            loop = asyncio.get_running_loop()
            _, connection = await loop.create_connection(
                lambda: Connection(self._ended), self.host, self.port
            )
        self._open += 1
        self._put(connection)

    def _put(self, connection: Connection) -> None:
        exchange = Exchange(len(self.exchanges), time.perf_counter())
        self.exchanges.append(exchange)
        connection.send(self.bodies[exchange.index % len(self.bodies)], exchange)

    def _ended(self, connection: Connection) -> None:
        if self._again and connection.transport is not None:
            self._put(connection)
            return
        self._open -= 1
        self._idle.append(connection)
        if not self._open:
            self._all_ended.set()

    async def _finish(self) -> None:
        self._again = False
        while self._open:
            self._all_ended.clear()
            await self._all_ended.wait()
        for connection in self._idle:
            if connection.transport is not None:
                connection.transport.close()


def drive(flood: Flood, load: Callable[[Flood], Any]) -> Run:
    """Run one load and read what came. Costs and lengths are of the load alone."""

    async def whole() -> Run:
        began, cpu = time.perf_counter(), time.process_time()
        await load(flood)
        run = Run(duration_s=time.perf_counter() - began, cpu_s=time.process_time() - cpu)
        run.outcomes = [outcome_of(exchange, began) for exchange in flood.exchanges]
        return run

    with runner() as loop:
        return loop.run(whole())


def outcome_of(exchange: Exchange, began: float) -> RequestOutcome:
    """What became of it: refusals with their code, streams with the moments of their text."""
    one = RequestOutcome(exchange.index, 0, exchange.began - began, e2e_s=exchange.ended - exchange.began)
    if not exchange.parts:
        one.fail("connection cut", exchange.broken)
        return one
    one.status = int(exchange.parts[0][1].split(b" ", 2)[1])
    if one.status != 200:
        body = b"".join(raw for _, raw in exchange.parts).partition(HEAD)[2]
        error = msgspec.json.decode(body).get("error") or {}
        one.fail(f"{one.status} {error.get('code') or ''}".strip(), error.get("message") or "")
        return one
    is_done, before = False, exchange.began
    for at, event in _events(exchange):
        if event == b"[DONE]":
            is_done = True
            continue
        said = msgspec.json.decode(event)
        choices = said.get("choices") or ()
        if text := "".join((c.get("delta") or {}).get("content") or c.get("text") or "" for c in choices):
            one.text += text
            if one.ttft_s is None:
                one.ttft_s = at - exchange.began
            else:
                one.gaps_s.append(at - before)
            before = at
        if usage := said.get("usage"):
            one.input_len, one.output_len = usage["prompt_tokens"], usage["completion_tokens"]
        if error := said.get("error"):
            one.fail(f"in stream: {error.get('code')}", error.get("message"))
    if not (is_done or one.error):
        one.fail("stream cut", exchange.broken or "the stream ended without [DONE]")
    return one


def _events(exchange: Exchange) -> Iterator[tuple[float, bytes]]:
    """The events of a stream, each with the moment its last byte came."""
    rest = b""
    for at, raw in exchange.parts:
        rest += raw
        *lines, rest = rest.split(b"\n")
        for line in lines:  # the head and the lengths of chunks are lines, too, but none of data
            if line.startswith(b"data:"):
                yield at, line[5:].strip()
