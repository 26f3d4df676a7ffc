"""A running cluster as its clients see it, and what ends its processes."""

from __future__ import annotations

import http.client
import json
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

MODEL = Path(__file__).parents[3] / "examples/nano-hybrid"
OPTIONS = {"threads": "1", "chat_template": str(Path(__file__).with_name("turns.jinja"))}
TOKENS, STREAMS = 400, 6
PATIENCE_S = 4.0
MOST_S = 120.0  # to wait for anything
Body = Mapping[str, object]


@dataclass
class StreamedReply:
    """A streamed reply as its client sees it."""

    text: str = ""
    times: list[float] = field(default_factory=list)
    choices: list[dict[str, Any]] = field(default_factory=list)  # of all events, as they were sent
    finish_reason: str = ""
    error: str = ""

    @property
    def longest_gap_s(self) -> float:
        return max((b - a for a, b in zip(self.times, self.times[1:], strict=False)), default=0.0)

    @property
    def merged(self) -> dict[int, dict[str, Any]]:
        """By choice: its text, its log-probabilities and its end, however they were cut into events."""
        found: dict[int, dict[str, Any]] = {}
        for event in self.choices:
            own = found.setdefault(event["index"], {"text": "", "tokens": [], "logprobs": [], "ends": []})
            own["text"] += event["text"]
            scores = event.get("logprobs") or {"tokens": [], "token_logprobs": [], "top_logprobs": []}
            own["tokens"] += scores["tokens"]
            own["logprobs"] += [*zip(scores["token_logprobs"], scores["top_logprobs"], strict=True)]
            own["ends"] += [event["finish_reason"]] if event["finish_reason"] else []
        return found


def body_of(i: int) -> dict[str, Any]:
    prompt = f"And it came to pass in the days of {i}"
    return {"prompt": prompt, "max_tokens": TOKENS, "temperature": 0.8, "seed": i, "ignore_eos": True}


def check(replies: list[StreamedReply], expected: list[str]) -> None:
    """Each has the text of one engine, to its end."""
    assert [reply.error for reply in replies] == [""] * STREAMS
    assert [reply.text for reply in replies] == expected
    assert {reply.finish_reason for reply in replies} == {"length"}


class RunningCluster:
    """The cluster of these tests. `nodes`: of `ray.cluster_utils.Cluster`; the first one is the head."""

    def __init__(self, port: int, nodes: Any) -> None:
        self.port, self.nodes = port, nodes
        self.options = {"model": str(MODEL), "replicas": "2", "gateways": "1", "cpus": "2"}
        self.options |= {**OPTIONS, "patience_s": str(PATIENCE_S), "drain_s": "3"}

    # What runs

    def run(self, **options: str) -> None:
        """Run the application, with these options changed from now on."""
        from ray import serve

        from plait.cluster.ray_serve.app import build

        self.options |= options
        serve.run(build(self.options), name="plait", route_prefix="/")

    def wait_ready(self, number: int = 2) -> None:
        """Until exactly so many replicas run, and all take requests."""
        until = time.monotonic() + MOST_S
        found: dict[str, Any] = {}
        while time.monotonic() < until:
            with suppress(OSError, http.client.HTTPException, KeyError):
                found = self.describe()
                states = found["states"]
                if states["ready"] == number == sum(states.values()) == len(self.pids()):
                    return
            time.sleep(0.2)
        raise AssertionError(f"{number} replicas are not ready: {self.pids()} {found}")

    def wait_gateways(self, number: int) -> None:
        """Until exactly so many gateways run, and Serve counts no other."""
        from ray import serve

        until = time.monotonic() + MOST_S
        while time.monotonic() < until:
            states = serve.status().applications["plait"].deployments["gateway"].replica_states
            if states == {"RUNNING": number} and len(self.pids("gateway")) == number:
                return
            time.sleep(0.2)
        raise AssertionError(f"{number} gateways do not run: {states}")

    def wait_served(self) -> None:
        """Until clients are answered."""
        wait_until(lambda: self.get("/ready")[0] == 200, "nothing answers")

    def describe(self) -> dict[str, Any]:
        """What a gateway knows."""
        from ray import serve

        return serve.get_deployment_handle("gateway", "plait").describe.remote().result(timeout_s=20)

    def ask_status(self) -> subprocess.CompletedProcess[str]:
        """What `plait cluster status --json` answers."""
        return run_plait("cluster", "status", "--address", self.nodes.address, "--json")

    def moved(self) -> dict[str, int]:
        """Streams that moved, by cause and whether the arithmetic is the same: "replica yes"."""
        return self.describe()["moved"]

    def pids(self, name: str = "engine") -> list[int]:
        """Processes of a deployment's replicas, on the nodes of this cluster."""
        return self._find(f"ServeReplica:plait:{name}")

    def proxy(self) -> int:
        (found,) = self._find("ProxyActor")
        return found

    def busiest(self) -> tuple[int, int]:
        """The processes of the replica with most open streams: its own, and its engine's."""
        return self.processes_of(self.find_busiest())

    def find_busiest(self) -> str:
        """The name of the replica with most open streams."""
        found: str = max(self.describe()["replicas"], key=lambda replica: replica["open"])["name"]
        return found

    def count_open(self, name: str) -> int:
        """Streams that a replica has."""
        return next(r["open"] for r in self.describe()["replicas"] if r["name"] == name)

    def count_restarts(self) -> int:
        """Engine processes that took the place of another, below the replicas that run."""
        return sum(replica["restarts"] for replica in self.describe()["replicas"])

    def kill_busiest_gateway(self) -> None:
        """Kill the gateway with most open streams. Calls of a handle would find the idle one."""
        import ray

        names = [found["name"] for found in ray.util.list_named_actors(all_namespaces=True)]
        gateways = [ray.get_actor(name, namespace="serve") for name in names if "#gateway#" in name]
        num_open = [ray.get(gateway.get_num_ongoing_requests.remote(), timeout=20) for gateway in gateways]
        assert max(num_open) > 0, names
        ray.kill(gateways[num_open.index(max(num_open))])

    def processes_of(self, name: str) -> tuple[int, int]:
        from ray import serve

        engines = serve.get_deployment_handle("engine", "plait")
        return engines.pids.remote(at=name).result(timeout_s=20)

    def end(self, sign: int, *, engine: bool = False) -> int:
        """Send a signal to the busiest replica, or to its engine; its process."""
        actor, child = self.busiest()
        os.kill(child if engine else actor, sign)
        return actor

    def raylet(self, node: Any) -> int:
        return node.all_processes["raylet"][0].process.pid

    def children(self, pid: int) -> list[int]:
        found = []
        for entry in Path("/proc").glob("[0-9]*"):
            with suppress(OSError, IndexError):
                if (entry / "stat").read_text().rpartition(")")[2].split()[1] == str(pid):
                    found.append(int(entry.name))
        return found

    def _find(self, title: str) -> list[int]:
        """Workers with this in what they call themselves."""
        found = []
        for node in self.nodes.list_all_nodes():
            for pid in self.children(self.raylet(node)):
                with suppress(OSError):
                    if title.encode() in Path(f"/proc/{pid}/cmdline").read_bytes():
                        found.append(pid)
        return sorted(found)

    # Clients

    def get(self, path: str) -> tuple[int, str]:
        return get(self.port, path)

    def stream(
        self, i: int, on_event: Callable[[int], None] = lambda count: None, **more: object
    ) -> StreamedReply:
        return read_stream(self.port, {**body_of(i), **more}, on_event)

    def streams(
        self,
        act: Callable[[], object] = lambda: None,
        *,
        bodies: Sequence[Body] | None = None,
        at_event: int = 30,
    ) -> list[StreamedReply]:
        """Replies at once; `act` is called when each of them has had so many events, or has ended."""
        bodies = bodies or [body_of(i) for i in range(STREAMS)]
        replies = [StreamedReply()] * len(bodies)
        has_come = [threading.Event() for _ in bodies]

        def read(i: int) -> None:
            def on_event(count: int) -> None:
                if count >= at_event:
                    has_come[i].set()

            replies[i] = read_stream(self.port, bodies[i], on_event)
            has_come[i].set()

        threads = [threading.Thread(target=read, args=(i,)) for i in range(len(bodies))]
        for thread in threads:
            thread.start()
        assert all(event.wait(MOST_S) for event in has_come), replies
        act()
        for thread in threads:
            thread.join()
        return replies

    @contextmanager
    def load(self, expected: list[str]) -> Iterator[list[StreamedReply]]:
        """A client for each text, which asks again and again meanwhile; then all replies must be whole."""
        replies: list[StreamedReply] = []
        wanted: list[str] = []
        is_over = threading.Event()

        def read(i: int) -> None:
            while not is_over.is_set():
                reply = self.stream(i)
                replies.append(reply)
                wanted.append(expected[i])
                if reply.error:
                    return

        threads = [threading.Thread(target=read, args=(i,)) for i in range(len(expected))]
        for thread in threads:
            thread.start()
        try:
            yield replies
        finally:
            is_over.set()
            for thread in threads:
                thread.join()
        assert {reply.error for reply in replies} == {""}
        assert sorted(reply.text for reply in replies) == sorted(wanted)


def run_plait(*words: str) -> subprocess.CompletedProcess[str]:
    """A command of `plait`, to its end."""
    command = [sys.executable, "-m", "plait", *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=MOST_S)


def read_json(answer: subprocess.CompletedProcess[str]) -> Any:
    """What a command that went well has printed."""
    assert answer.returncode == 0, answer.stderr
    return json.loads(answer.stdout)


def get(port: int, path: str) -> tuple[int, str]:
    """The status and the body of an answer."""
    link = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
    link.request("GET", path)
    answer = link.getresponse()
    return answer.status, answer.read().decode()


def open_stream(port: int, body: Body) -> tuple[http.client.HTTPConnection, http.client.HTTPResponse]:
    """A streamed completion that is to be read."""
    link = http.client.HTTPConnection("127.0.0.1", port, timeout=MOST_S)
    sent = json.dumps({**body, "stream": True})
    link.request("POST", "/v1/completions", sent, {"Content-Type": "application/json"})
    return link, link.getresponse()


def read_stream(port: int, body: Body, on_event: Callable[[int], None] = lambda count: None) -> StreamedReply:
    """A streamed completion, to its end."""
    reply = StreamedReply()
    try:
        _, answer = open_stream(port, body)
        if answer.status != 200:
            reply.error = f"{answer.status} {answer.read()!r}"
        while not reply.error and (line := answer.readline()):
            if line.startswith(b"data: {"):
                take(reply, json.loads(line[6:]), on_event)
    except (OSError, http.client.HTTPException) as error:
        reply.error = f"{type(error).__name__}: {error}"
    return reply


def take(reply: StreamedReply, event: dict[str, Any], on_event: Callable[[int], None]) -> None:
    if "error" in event:
        reply.error = str(event["error"])
    for choice in event.get("choices", ()):
        reply.text += choice["text"]
        reply.choices.append(choice)
        reply.finish_reason = choice["finish_reason"] or reply.finish_reason
        reply.times.append(time.perf_counter())
        on_event(len(reply.times))


def is_stopped(pid: int) -> bool:
    """Whether SIGSTOP holds a process."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"


def wait_until(is_true: Callable[[], bool], otherwise: str) -> None:
    """Look until it is true. A server that does not answer is a reason to look again."""
    until = time.monotonic() + MOST_S
    while time.monotonic() < until:
        with suppress(OSError, http.client.HTTPException):
            if is_true():
                return
        time.sleep(0.1)
    raise AssertionError(otherwise)


def copy_as_other_version(folder: Path) -> Path:
    """Plait in `folder` under another version's number, so with another fingerprint; for PYTHONPATH."""
    import plait

    source = Path(plait.__file__).parent
    shutil.copytree(source, folder / "plait", ignore=shutil.ignore_patterns("__pycache__"))
    version = folder / "plait/version.py"
    version.write_text(version.read_text() + '\n__version__ += ".dev1"\n')
    return folder
