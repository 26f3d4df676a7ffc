"""A server under everything at once: clients that leave, spoilt requests, little memory, engines that die.

Each request that is answered has the text that it has alone; every error is an error object, and none is a
5xx; afterwards nothing runs, waits or is held, no counter has fallen, and the log has no traceback.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import random
import re
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.contract.conftest import TEMPLATE
from tests.contract.wire import Answer, Client
from tests.e2e.conftest import NANO_HYBRID, Server, serve
from tests.e2e.soak_requests import Asked, draw_requests, spoil
from tests.e2e.test_supervision import engine_of
from tests.patience import until

pytestmark = pytest.mark.slow
NUM_REQUESTS, NUM_CLIENTS, NUM_ROUNDS, NUM_KILLS = 60, 8, 40, 3
COMMON = ("--chat-template", str(TEMPLATE), "--max-model-len", "512", "--threads", "1")
AT_REST = (
    *(
        "plait_requests_running",
        "plait_requests_waiting",
        "plait_waiting_seconds",
        "plait_memory_usage_ratio",
    ),
    *('plait_blocks{state="held"}', 'plait_slots{state="held"}', "plait_failed_steps_total"),
    *("plait_repairs_total", "plait_log_lines_dropped_total"),
)


def tight(folder: Path) -> tuple[str, ...]:
    """Memory for two of six sequences, drafts, a small disk cache and a store."""
    return (
        *COMMON,
        *("--max-num-seqs", "6", "--memory-limit", "5MiB", "--swap-memory", "2MiB", "--max-step-ms", "20"),
        *("--max-num-batched-tokens", "96", "--snapshot-interval", "64", "--speculate", "ngram"),
        *(
            "--cache-disk",
            str(folder / "kept"),
            "--cache-disk-limit",
            "8MiB",
            "--store",
            str(folder / "s.db"),
        ),
        *("--max-body-bytes", "262144", "--log-file", str(folder / "log")),
    )


@dataclass(frozen=True)
class Said:
    """What of a reply must be the same whenever it is made. By choice: its text, and how it ended."""

    texts: tuple[tuple[str, ...], ...]
    num_tokens: int | None


def said(asked: Asked, answer: Answer, *, streamed: bool) -> Said:
    body = answer.json if not streamed else None
    if asked.path == "/v1/embeddings":
        return Said((tuple(str(one["embedding"]) for one in body["data"]),), None)
    if asked.path == "/v1/responses":
        texts = [part["text"] for item in body["output"] for part in item.get("content") or []]
        return Said(((*texts, body["status"]),), body["usage"]["output_tokens"])
    if asked.path == "/v1/messages":
        return _said_message(answer.named_events if streamed else None, body)
    return _said_choices(answer.events if streamed else [body])


def _said_message(events: list[dict[str, Any]] | None, body: Any) -> Said:
    if events is None:
        texts = [block.get("text") or block.get("thinking") or "" for block in body["content"]]
        return Said((("".join(texts), body["stop_reason"]),), body["usage"]["output_tokens"])
    deltas = [event["delta"] for event in events if event["type"] == "content_block_delta"]
    (end,) = (event for event in events if event["type"] == "message_delta")
    text = "".join(delta.get("text") or delta.get("thinking") or "" for delta in deltas)
    return Said(((text, end["delta"]["stop_reason"]),), end["usage"]["output_tokens"])


def _said_choices(bodies: list[dict[str, Any]]) -> Said:
    """Of chats and completions, from one whole body or from the chunks of a stream."""
    found: dict[int, list[str]] = {}
    usage = None
    for body in bodies:
        usage = body.get("usage") or usage
        for choice in body["choices"]:
            parts = found.setdefault(choice["index"], [""] * 4)
            words = choice.get("message") or choice.get("delta") or {"content": choice.get("text")}
            parts[0] += words.get("content") or ""
            parts[1] += words.get("reasoning_content") or ""
            parts[2] += "".join(
                call["function"].get("arguments") or "" for call in words.get("tool_calls") or ()
            )
            parts[3] += choice["finish_reason"] or ""
    for parts in found.values():
        if parts[3] != "tool_calls":
            parts[2] = ""  # a stream had sent the beginning of a call that was then cut
    assert usage is not None
    return Said(tuple(tuple(found[i]) for i in sorted(found)), usage["completion_tokens"])


def read_alone(requests: list[Asked]) -> list[Said]:
    """What each request is answered by a server with memory for all, without a cache and without drafts."""
    with serve(NANO_HYBRID, *COMMON, "--no-prefix-cache", "--max-num-seqs", "4") as server:
        client = Client(server.url)
        answers = [client.post(asked.path, asked.body) for asked in requests]
    assert [answer.status for answer in answers] == [200] * len(requests), answers
    return [said(asked, answer, streamed=False) for asked, answer in zip(requests, answers, strict=True)]


@dataclass
class Weather:
    """Clients on threads of their own, each with its own luck."""

    client: Client
    requests: list[Asked]
    alone: list[Said]
    faults: list[Any] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)

    def talk(self, seed: int) -> None:
        luck = random.Random(seed)
        ways = (self._compare, self._compare, self._compare, self._leave, self._half_close, self._spoil)
        for _ in range(NUM_ROUNDS):
            way, number = luck.choice(ways), luck.randrange(len(self.requests))
            try:
                way(luck, number)
            except Exception as error:  # a thread's own failure would be lost
                self.faults.append((way.__name__, self.requests[number], repr(error)))
            time.sleep(luck.random() * 0.05)

    def _compare(self, luck: random.Random, number: int) -> None:
        asked = self.requests[number]
        streamed = asked.streams and luck.random() < 0.5
        answer = self.client.post(asked.path, asked.streamed() if streamed else asked.body)
        if answer.status == 429:
            return
        assert answer.status == 200, answer.body[:500]
        found, right = said(asked, answer, streamed=streamed), self.alone[number]
        assert found == right, (streamed, found, right)
        self.counts["compared"] += 1

    def _leave(self, luck: random.Random, number: int) -> None:
        with self._sent(number, streamed=True) as connection:
            connection.getresponse().read(luck.choice((0, 1, 400, 2000)))
        self.counts["left"] += 1

    def _half_close(self, luck: random.Random, number: int) -> None:
        """A client that sends no more: it is answered, or taken for one that has left."""
        with self._sent(number, streamed=False) as connection:
            connection.sock.shutdown(1)
            with contextlib.suppress(http.client.HTTPException, ConnectionError):
                connection.getresponse().read()
        self.counts["half closed"] += 1

    def _spoil(self, luck: random.Random, number: int) -> None:
        asked = self.requests[number]
        raw = spoil(luck, asked)
        answer = self.client.post(asked.path, raw)
        assert answer.status < 500 or b"timeout_s" in raw, (raw[:500], answer.body[:500])
        if answer.status >= 400:
            error = answer.json["error"]
            assert isinstance(error["message"], str)
            assert len(answer.body) < 4000, "an error repeats what was sent"
            self.counts["refused"] += 1

    @contextlib.contextmanager
    def _sent(self, number: int, *, streamed: bool) -> Any:
        asked = self.requests[number]
        body = asked.streamed() if streamed and asked.streams else asked.body
        connection = http.client.HTTPConnection(*self.client.address, timeout=120)
        with contextlib.closing(connection):
            connection.request("POST", asked.path, json.dumps(body), {"Content-Type": "application/json"})
            yield connection


def metrics(client: Client) -> dict[str, float]:
    lines = client.get("/metrics").body.decode().splitlines()
    found = (line.rsplit(" ", 1) for line in lines if line and not line.startswith("#"))
    return {name: float(value) for name, value in found}


def fallen(before: dict[str, float], after: dict[str, float]) -> list[str]:
    """Counters that are smaller than they were."""
    counters = (n for n in before if re.search(r"_(total|count|sum|bucket)(\{|$)", n))
    return [name for name in counters if after.get(name, -1.0) < before[name] - 1e-9]


def run_weather(
    server: Server, requests: list[Asked], alone: list[Said], interrupt: Callable[[], None]
) -> Weather:
    weather = Weather(Client(server.url), requests, alone)
    threads = [threading.Thread(target=weather.talk, args=(seed,)) for seed in range(NUM_CLIENTS)]
    for thread in threads:
        thread.start()
    seen: dict[str, float] = {}
    kills = 0
    while any(thread.is_alive() for thread in threads):
        now = metrics(weather.client)
        assert not fallen(seen, now), fallen(seen, now)
        seen = now
        if kills < NUM_KILLS and weather.counts.total() > (kills + 1) * 60:
            kills += 1
            interrupt()
        time.sleep(0.5)
    for thread in threads:
        thread.join()
    return weather


def test_everything_at_once(tmp_path: Path) -> None:
    requests = draw_requests(NUM_REQUESTS, seed=5)
    alone = read_alone(requests)
    with serve(NANO_HYBRID, *tight(tmp_path)) as server:
        client = Client(server.url)

        def kill_engine() -> None:
            until(lambda: client.get("/ready").status == 200, 120)
            os.kill(engine_of(server), signal.SIGKILL)

        weather = run_weather(server, requests, alone, kill_engine)
        assert weather.faults == []
        assert weather.counts["compared"] > NUM_CLIENTS * NUM_ROUNDS / 3
        assert min(weather.counts[name] for name in ("left", "half closed", "refused")) > 5
        until(lambda: not any(metrics(client)[name] for name in AT_REST))
        seen = metrics(client)
        assert seen["plait_http_requests_open"] == 1  # this one
        assert seen["plait_engine_restarts_total"] == NUM_KILLS
        assert seen['plait_prefix_cache_lookups_total{cause="hit"}']
        assert seen["plait_accepted_tokens_total"]
        assert sum(seen[f'plait_preemptions_total{{kind="{kind}"}}'] for kind in ("swap", "recompute"))
    log = (tmp_path / "log").read_text()
    assert "Traceback" not in log
    assert len(re.findall(" ERROR ", log)) == NUM_KILLS  # each names an engine that ended
