"""What overload.py, soak.py and overhead.py share: the server under test, and an observer of it."""

from __future__ import annotations

import argparse
import json
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent), str(HERE)]

from plait.bench.serve.client import RequestOutcome, ServerTarget  # noqa: E402
from plait.bench.serve.run import reach  # noqa: E402
from plait.bench.serve.server_process import ServerProcess, census, read_health  # noqa: E402


@dataclass(frozen=True, slots=True)
class Served:
    """A server under test. `pid`: its first process, 0 where that is not known."""

    target: ServerTarget
    max_len: int | None
    pid: int

    def engine(self) -> dict[str, Any]:
        """The engine's numbers of this moment, as /health has them."""
        return dict(read_health(self.target.base_url)[1].get("engine") or {})

    def census(self) -> dict[str, Any]:
        return census(self.pid) if self.pid else {}

    def idle(self, timeout_s: float = 120.0) -> bool:
        """Wait until nothing runs or waits, and a moment longer, because engines check their memory then."""
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            now = self.engine()
            if now and not any(
                now.get(name) for name in ("running", "waiting", "num_running", "num_waiting")
            ):
                time.sleep(1.5)
                return True
            time.sleep(0.1)
        return False


class Watch:
    """Samples of a server, one a second, while the context lasts."""

    def __init__(self, served: Served) -> None:
        self.served, self.samples = served, list[dict[str, Any]]()
        self._ends = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Watch:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ends.set()
        self._thread.join(60)

    def _run(self) -> None:
        began = time.monotonic()
        while not self._ends.wait(1.0):
            asked = time.monotonic()
            status, health = read_health(self.served.target.base_url)
            took = time.monotonic() - asked
            found = {"at_s": round(asked - began, 1), "health": status, "health_ms": round(1000 * took, 1)}
            self.samples.append(found | self.served.census() | {"engine": health.get("engine")})

    def most(self, name: str) -> float | None:
        return max((sample[name] for sample in self.samples if name in sample), default=None)


def parser(text: str) -> argparse.ArgumentParser:
    """The arguments all three have."""
    found = argparse.ArgumentParser(description=text, formatter_class=argparse.RawDescriptionHelpFormatter)
    found.add_argument("model", nargs="?", help="served by `plait serve` for this measurement")
    found.add_argument("--base-url", help="a server that runs, instead of MODEL")
    found.add_argument("--server-pid", type=int, default=0, help="its process, to see its memory and files")
    found.add_argument("--api-key", default="")
    found.add_argument("--seed", type=int, default=0)
    found.add_argument("--samples", action="store_true", help="in the JSON: also what was seen each second")
    return found


def parse(arguments: argparse.ArgumentParser) -> argparse.Namespace:
    """What was given; `options`: the words after --, which are for `plait serve`."""
    arguments.epilog = "What follows -- are options of `plait serve`."
    words = sys.argv[1:]
    cut = words.index("--") if "--" in words else len(words)
    return arguments.parse_args(words[:cut], argparse.Namespace(options=words[cut + 1 :]))


@contextmanager
def serving(given: argparse.Namespace, options: Sequence[str] = ()) -> Iterator[Served]:
    """The server that was named, or one of the model with `options` and those after --."""
    if bool(given.model) == bool(given.base_url):
        raise SystemExit("name either a MODEL to serve, or a server that runs with --base-url")
    target = ServerTarget(name="server", base_url=given.base_url or "", api_key=given.api_key)
    if given.base_url:
        yield Served(*reach(target), pid=given.server_pid)
        return
    with ServerProcess(given.model, [*options, *given.options], say) as process:
        found, max_len = reach(ServerTarget(name="server", base_url=process.base_url))
        yield Served(found, max_len, process.pid)


def tokens_within(outcomes: Sequence[RequestOutcome], since_s: float, until_s: float) -> int:
    """Events with text, of replies that came to their end, between two moments of the run."""
    count = 0
    for one in outcomes:
        if one.is_ok and one.ttft_s is not None:
            at = one.started + one.ttft_s
            count += since_s <= at < until_s
            for gap in one.gaps_s:
                at += gap
                count += since_s <= at < until_s
    return count


def say(text: str) -> None:
    if sys.stderr.isatty():
        print(f"\r\x1b[K{text} …", end="", file=sys.stderr, flush=True)


def show(result: dict[str, Any]) -> None:
    print(json.dumps(result, indent=2))
