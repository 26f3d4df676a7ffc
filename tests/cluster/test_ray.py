"""A real Ray on this machine: two engines of the nano hybrid, a gateway, and everything that can be killed.

One cluster for the module: it takes half a minute to start. Skipped where Ray is not installed.
"""

from __future__ import annotations

import http.client
import json
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("ray", reason="the extra [cluster] is not installed")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.ray,
    pytest.mark.timeout(300),
    pytest.mark.filterwarnings("ignore"),
]
MODEL = Path(__file__).parents[2] / "examples/nano-hybrid"
TOKENS, STREAMS = 400, 6


@dataclass
class StreamedReply:
    """A streamed reply as its client sees it."""

    text: str = ""
    times: list[float] = field(default_factory=list)
    finish_reason: str = ""
    error: str = ""

    @property
    def longest_gap_s(self) -> float:
        return max((b - a for a, b in zip(self.times, self.times[1:], strict=False)), default=0.0)


def body_of(i: int, num_tokens: int = TOKENS) -> dict[str, Any]:
    prompt = f"And it came to pass in the days of {i}"
    return {"prompt": prompt, "max_tokens": num_tokens, "temperature": 0.8, "seed": i, "ignore_eos": True}


class RunningCluster:
    """The cluster of this module, as its clients see it."""

    def __init__(self, port: int) -> None:
        self.port = port

    def stream(self, i: int, on_event: Callable[[int], None] = lambda count: None) -> StreamedReply:
        reply = StreamedReply()
        try:
            link = http.client.HTTPConnection("127.0.0.1", self.port, timeout=120)
            link.request(
                "POST",
                "/v1/completions",
                json.dumps({**body_of(i), "stream": True}),
                {"Content-Type": "application/json"},
            )
            answer = link.getresponse()
            if answer.status != 200:
                reply.error = f"{answer.status} {answer.read()!r}"
            while not reply.error and (line := answer.readline()):
                if line.startswith(b"data: {"):
                    self._take(reply, json.loads(line[6:]), on_event)
        except (OSError, http.client.HTTPException) as error:
            reply.error = f"{type(error).__name__}: {error}"
        return reply

    def _take(self, reply: StreamedReply, event: dict[str, Any], on_event: Callable[[int], None]) -> None:
        if "error" in event:
            reply.error = str(event["error"])
        for choice in event.get("choices", ()):
            reply.text += choice["text"]
            reply.finish_reason = choice["finish_reason"] or reply.finish_reason
            reply.times.append(time.perf_counter())
            on_event(len(reply.times))

    def streams(self, at_event: int, act: Callable[[], object]) -> list[StreamedReply]:
        """STREAMS replies at once; `act` is called when the first of them has had so many events."""
        replies = [StreamedReply()] * STREAMS
        has_acted = threading.Event()

        def on_event(count: int) -> None:
            if count >= at_event and not has_acted.is_set():
                has_acted.set()
                act()

        def read(i: int) -> None:
            replies[i] = self.stream(i, on_event)

        threads = [threading.Thread(target=read, args=(i,)) for i in range(STREAMS)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert has_acted.is_set()
        return replies

    def get(self, path: str) -> tuple[int, str]:
        link = http.client.HTTPConnection("127.0.0.1", self.port, timeout=20)
        link.request("GET", path)
        answer = link.getresponse()
        return answer.status, answer.read().decode()

    def wait_ready(self, number: int = 2) -> None:
        """Until so many replicas take requests."""
        until = time.monotonic() + 120
        while time.monotonic() < until:
            try:
                _, text = self.get("/metrics")
                if f'plait_cluster_replicas{{state="ready"}} {number}.0' in text and len(pids()) == number:
                    return
            except (OSError, http.client.HTTPException):
                pass
            time.sleep(0.3)
        lines = [line for line in self.get("/metrics")[1].splitlines() if line.startswith("plait_cluster")]
        raise AssertionError(f"{number} replicas are not ready: {pids()} {lines}")

    def busiest(self) -> tuple[int, int]:
        """The processes of the replica with most open streams: its own, and its engine's."""
        from ray import serve

        found = serve.get_deployment_handle("gateway", "plait").describe.remote().result(timeout_s=20)
        name = max(found["replicas"], key=lambda replica: replica["open"])["name"]
        engines = serve.get_deployment_handle("engine", "plait")
        return engines.pids.remote(at=name).result(timeout_s=20)

    def end(self, sign: int, *, engine: bool = False) -> int:
        """Send a signal to the busiest replica, or to its engine; its process."""
        actor, child = self.busiest()
        os.kill(child if engine else actor, sign)
        return actor

    def moved(self) -> float:
        lines = self.get("/metrics")[1].splitlines()
        return sum(float(line.split()[-1]) for line in lines if line.startswith("plait_cluster_moved_total{"))


def pids(name: str = "engine") -> list[int]:
    """Processes of a deployment's replicas, by what the system calls them."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            if f"ServeReplica:plait:{name}".encode() in (entry / "cmdline").read_bytes():
                found.append(int(entry.name))
        except OSError:
            continue
    return sorted(found)


@pytest.fixture(scope="module")
def running() -> Iterator[RunningCluster]:
    slow = ("RAY_SERVE_PROXY_HEALTH_CHECK_TIMEOUT_S", "RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S")
    before = {name: os.environ.get(name) for name in slow}
    os.environ.update(dict.fromkeys(slow, "60"))
    import ray
    from ray import serve

    from plait.cluster.ray_serve.app import build
    from plait.cluster.ray_serve.run import connect

    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    connect(None, 8)
    try:
        serve.start(http_options={"host": "127.0.0.1", "port": port})
        args = {"model": str(MODEL), "replicas": "2", "gateways": "1", "threads": "1", "cpus": "1"}
        serve.run(build(args), name="plait", route_prefix="/")
        made = RunningCluster(port)
        made.wait_ready()
        yield made
    finally:
        serve.shutdown()
        ray.shutdown()
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


@pytest.fixture(scope="module")
def expected(running: RunningCluster) -> list[str]:
    """The texts that one engine in this process gives."""
    from plait import LLM, SamplingParams

    llm = LLM(str(MODEL), threads=1)
    texts = []
    for i in range(STREAMS):
        body = body_of(i)
        params = SamplingParams(max_tokens=TOKENS, temperature=0.8, seed=i, ignore_eos=True)
        texts.append(llm.generate([body["prompt"]], params)[0].outputs[0].text)
    llm.close()
    return texts


def check(replies: list[StreamedReply], expected: list[str]) -> None:
    assert [reply.error for reply in replies] == [""] * STREAMS
    assert [reply.text for reply in replies] == expected
    assert {reply.finish_reason for reply in replies} == {"length"}


def test_text_is_that_of_one_engine_and_a_gateway_has_no_torch(
    running: RunningCluster, expected: list[str]
) -> None:
    check(running.streams(1, lambda: None), expected)
    (gateway,) = pids("gateway")
    assert "torch" not in Path(f"/proc/{gateway}/maps").read_text()
    rows = dict(line.split(":", 1) for line in Path(f"/proc/{gateway}/status").read_text().splitlines())
    assert int(rows["VmRSS"].split()[0]) < 300_000


def test_streams_go_on_when_an_engine_process_is_killed(running: RunningCluster, expected: list[str]) -> None:
    running.wait_ready()
    before = running.moved()
    check(running.streams(30, lambda: running.end(signal.SIGKILL, engine=True)), expected)
    assert running.moved() > before
    running.wait_ready()


def test_streams_go_on_when_a_replica_is_killed(running: RunningCluster, expected: list[str]) -> None:
    running.wait_ready()
    before, victims = running.moved(), list[int]()
    check(running.streams(30, lambda: victims.append(running.end(signal.SIGKILL))), expected)
    assert running.moved() > before
    running.wait_ready()
    assert not {*victims} & {*pids()}


def test_streams_move_when_a_replica_is_stopped_and_it_is_replaced(
    running: RunningCluster, expected: list[str]
) -> None:
    running.wait_ready()
    before, victims = running.moved(), list[int]()
    check(running.streams(30, lambda: victims.append(running.end(signal.SIGSTOP))), expected)
    assert running.moved() > before
    running.wait_ready()
    assert not {*victims} & {*pids()}


def test_streams_wait_for_a_new_replica_when_all_are_killed(
    running: RunningCluster, expected: list[str]
) -> None:
    running.wait_ready()
    check(running.streams(30, lambda: [os.kill(pid, signal.SIGKILL) for pid in pids()]), expected)
    running.wait_ready()


def test_streams_go_on_when_the_controller_is_killed(running: RunningCluster, expected: list[str]) -> None:
    import ray

    running.wait_ready()

    def kill() -> None:
        ray.kill(ray.get_actor("SERVE_CONTROLLER_ACTOR", namespace="serve"), no_restart=False)

    check(running.streams(30, kill), expected)
    check(running.streams(1, lambda: None), expected)


def test_no_stream_breaks_when_a_changed_version_is_run(running: RunningCluster, expected: list[str]) -> None:
    from ray import serve

    from plait.cluster.ray_serve.app import build

    running.wait_ready()
    before = pids()
    args = {"model": str(MODEL), "replicas": "2", "gateways": "1", "threads": "1", "cpus": "0.9"}
    updating = threading.Thread(target=lambda: serve.run(build(args), name="plait", route_prefix="/"))
    check(running.streams(30, updating.start), expected)
    updating.join()
    running.wait_ready()
    assert not {*before} & {*pids()}
    check(running.streams(1, lambda: None), expected)


def test_the_same_seed_gives_the_same_text_after_a_gateway_is_killed(
    running: RunningCluster, expected: list[str]
) -> None:
    running.wait_ready()
    (gateway,) = pids("gateway")
    broken = running.streams(30, lambda: os.kill(gateway, signal.SIGKILL))
    assert any(reply.error or not reply.finish_reason for reply in broken)
    assert all(whole.startswith(reply.text) for reply, whole in zip(broken, expected, strict=True))
    running.wait_ready()
    check(running.streams(1, lambda: None), expected)
