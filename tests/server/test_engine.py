"""Leaving, crowding and stopping, with the engine as it is behind the server."""

from __future__ import annotations

import http.client
import json
import random
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from plait.config import ServerConfig
from tests.patience import PATIENCE_S
from tests.server.conftest import Client, serving, start, wait_until
from tests.server.real_engine import engine_front


def leave_after(client: Client, asked: dict[str, Any], delay_s: float) -> None:
    raw = json.dumps(asked).encode()
    head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    with socket.create_connection(client.address, timeout=20) as sock:
        sock.sendall(f"{head}Content-Length: {len(raw)}\r\n\r\n".encode() + raw)
        time.sleep(delay_s)


def held(client: Client) -> tuple[int, ...]:
    """What requests hold: sequences, blocks and slots. What is only cached is free for the next one."""
    now = client.get("/health").json["engine"]
    blocks = now["num_blocks"] - now["num_free_blocks"] - now["num_cached_blocks"]
    slots = now["num_slots"] - now["num_free_slots"] - now["num_snapshots"]
    return now["num_running"], now["num_waiting"], blocks, slots


def test_random_cancels_leave_nothing_behind() -> None:
    choose = random.Random(4)
    with serving(engine_front(step_s=0.002)) as client, ThreadPoolExecutor(16) as pool:
        before = held(client)
        expected = client.complete("Stay", max_tokens=40, ignore_eos=True).json["choices"][0]["text"]
        kept = [pool.submit(client.complete, "Stay", max_tokens=40, ignore_eos=True) for _ in range(2)]
        for i in range(120):
            asked = {
                "prompt": ["x" * choose.randrange(1, 1200)] * choose.choice([1, 1, 3]),
                "n": choose.choice([1, 1, 4]),
                "stream": i % 2 > 0,
                "ignore_eos": True,
                "max_tokens": 700,
            }
            pool.submit(leave_after, client, asked, choose.random() * 0.1)
        assert {one.result().json["choices"][0]["text"] for one in kept} == {expected}
        pool.shutdown()
        wait_until(lambda: held(client) == before)
        assert held(client) == before


def test_a_crowd_is_served_or_rejected_with_a_time_to_retry() -> None:
    with serving(engine_front(step_s=0.001)) as client, ThreadPoolExecutor(20) as pool:
        sent: dict[str, Any] = {"n": 60, "max_tokens": 5}
        found = list(pool.map(lambda i: client.complete(f"Crowd {i}", **sent), range(20)))
        assert {answer.status for answer in found} <= {200, 429}
        assert all(len(a.json["choices"]) == 60 for a in found if a.status == 200)
        assert all(a.headers["retry-after"] for a in found if a.status == 429)
        assert client.complete("After", max_tokens=2).status == 200


def test_stopping_ends_what_takes_too_long_with_an_error() -> None:
    running = start(lambda report: engine_front(0.01), ServerConfig(port=0, shutdown_timeout_s=0.2))
    client = Client(running.url)
    assert wait_until(lambda: client.get("/health").status == 200)
    whole: list[Any] = []
    asked: dict[str, Any] = {"ignore_eos": True, "max_tokens": 1500}
    waiting = threading.Thread(target=lambda: whole.append(client.complete("Long", **asked)))
    waiting.start()
    connection = http.client.HTTPConnection(*client.address, timeout=30)
    body = json.dumps({"prompt": "Long", "stream": True, **asked})
    connection.request("POST", "/v1/completions", body, {"Content-Type": "application/json"})
    response = connection.getresponse()
    assert response.read(10) == b'data: {"id'
    running.stop()
    events = response.read().decode()
    assert "the server is stopping" in events
    assert events.endswith("data: [DONE]\n\n")
    waiting.join(PATIENCE_S)
    assert (whole[0].status, whole[0].error["code"]) == (503, "not_ready")
    connection.close()
    assert running.raised == []


def test_a_request_that_is_prepared_when_the_time_to_stop_is_over_may_be_sent_again() -> None:
    front, has_come, go = engine_front(), threading.Event(), threading.Event()
    prepare = front.prepare

    def wait(*given: Any, **more: Any) -> Any:
        has_come.set()
        assert go.wait(PATIENCE_S)
        return prepare(*given, **more)

    front.prepare = wait  # type: ignore[method-assign]
    running = start(lambda report: front, ServerConfig(port=0, shutdown_timeout_s=0.05))
    client = Client(running.url)
    assert wait_until(lambda: client.get("/health").status == 200)
    found: list[Any] = []
    sending = threading.Thread(target=lambda: found.append(client.complete("Late")))
    sending.start()
    assert has_come.wait(PATIENCE_S)
    running.server.should_exit = True
    assert wait_until(lambda: not front.healthy)
    go.set()
    sending.join(PATIENCE_S)
    running.stop()
    assert (found[0].status, found[0].error["code"]) == (503, "not_ready")
    assert found[0].headers["retry-after"]


def test_a_request_that_takes_longer_than_its_timeout_ends_with_an_error() -> None:
    asked: dict[str, Any] = {"ignore_eos": True, "max_tokens": 1500, "timeout_s": 0.2}
    with serving(engine_front(step_s=0.01)) as client:
        whole = client.complete("Long", **asked)
        assert (whole.status, whole.error["code"]) == (504, "deadline_exceeded")
        assert whole.headers["x-should-retry"] == "false"
        *chunks, last = client.chat("Long", stream=True, **asked | {"timeout_s": 1.0}).events
        assert last["error"]["code"] == "deadline_exceeded"
        assert chunks, "what was generated in time is delivered"
        assert client.complete("Short", max_tokens=2, timeout_s=60).status == 200
        assert wait_until(lambda: held(client) == (0, 0, 0, 0))
