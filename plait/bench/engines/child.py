"""A child process of `plait bench`: loads one engine, then measures on command.

python child.py SIDE_FILE [ROOT]      ROOT comes first on the import path: another revision of Plait

Commands come on stdin and answers go to stdout, one JSON object a line; whatever else the engine prints goes
to stderr. Standard library only: any Python from 3.10 runs it.
"""

from __future__ import annotations

import importlib.util
import json
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any


def memory_mib(what: str) -> float:
    """Resident now ("VmRSS") or most so far ("VmHWM", and without /proc), with processes it has started."""
    if kib := sum(memory_kib(pid, what) for pid in (os.getpid(), *descendants(os.getpid()))):
        return round(kib / 2**10, 1)
    try:
        import resource
    except ImportError:  # Windows
        return 0.0
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return round(peak / (2**20 if sys.platform == "darwin" else 2**10), 1)


def descendants(pid: int) -> list[int]:
    """Processes that `pid` has started, and those that they have; some engines work in them."""
    found = []
    for tasks in Path(f"/proc/{pid}/task").glob("*/children"):
        try:
            children = tasks.read_text().split()
        except OSError:  # it has ended meanwhile
            continue
        for child in map(int, children):
            found += [child, *descendants(child)]
    return found


def memory_kib(pid: int, what: str) -> int:
    """Memory of a process, by its name in /proc; 0 if it has ended meanwhile."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return 0
    lines = (line.split() for line in status.splitlines())
    return next((int(words[1]) for words in lines if words[0] == f"{what}:"), 0)


class Measures:
    """What is measured of a side that has `run` alone."""

    run: Callable[[list[list[int]], int], tuple[list[list[int]], float, float]]

    def greedy(self, prompts: list[list[int]], tokens: int) -> list[list[int]]:
        """The new ids of each prompt."""
        return [self.run([ids], tokens)[0][0] for ids in prompts]

    def prefill(self, ids: list[int], level: str) -> float:
        """Seconds to the first new token."""
        return self.run([ids], 1)[1]

    def decode(self, ids: list[int], tokens: int, level: str) -> float:
        """Seconds of `tokens` after the first."""
        return self.run([ids], tokens + 1)[2]

    def batch(self, prompts: list[list[int]], tokens: int, level: str) -> dict[str, float]:
        """Seconds and tokens of all together, and of the part in which all decode."""
        _, before, decoding = self.run(prompts, tokens)
        return {
            "seconds": before + decoding,
            "tokens": len(prompts) * tokens,
            "decode_seconds": decoding,
            "decode_tokens": len(prompts) * (tokens - 1),
        }


def load_side(path: str) -> Any:
    """The class of a file with a name that ends in `Side`, with the measures that it lacks.

    Raises ImportError for none, or several.
    """
    spec = importlib.util.spec_from_file_location("bench_side", path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # its dataclasses look for it there
    spec.loader.exec_module(module)
    found = [
        value
        for name, value in vars(module).items()
        if name.endswith("Side") and isinstance(value, type) and value.__module__ == module.__name__
    ]
    if len(found) != 1:
        raise ImportError(f"{path}: one class with a name like LlamaCppSide was expected, found {len(found)}")
    (side,) = found
    return side if hasattr(side, "prefill") else type(side.__name__, (side, Measures), {})


class Child:
    """Answers commands; `path` is a side file."""

    def __init__(self, path: str) -> None:
        self.path, self.side = path, None  # type: str, Any

    def load(self, started: float, **given: object) -> dict[str, object]:
        self.side = load_side(self.path)(**given)
        startup = time.time() - started
        return {**self.side.facts, "startup_s": round(startup, 2), "loaded_mib": memory_mib("VmRSS")}

    def memory(self) -> dict[str, object]:
        """The most memory so far, and what the side noticed while it was measured (`observed`)."""
        return {"peak_mib": memory_mib("VmHWM"), **getattr(self.side, "observed", {})}

    def run(self, do: str, **given: object) -> Any:
        own: dict[str, Callable[..., Any]] = {"load": self.load, "memory": self.memory}
        return (own.get(do) or getattr(self.side, do))(**given)


def answers(child: Child, lines: Iterator[str]) -> Iterator[dict[str, object]]:
    """One answer a command: {"value": …}, {"cannot": why} or {"error": what, "type": name}."""
    for line in lines:
        command = json.loads(line)
        if command["do"] == "quit":
            break
        try:
            yield {"value": child.run(**command)}
        except NotImplementedError as error:
            yield {"cannot": str(error)}
        except Exception as error:
            if type(error).__module__ != "plait.errors":  # of those the message says all
                traceback.print_exc()
            yield {"error": " ".join(str(error).split())[:500], "type": type(error).__name__}
    if child.side is not None:
        child.side.close()


def main() -> None:
    if len(sys.argv) > 2:
        sys.path.insert(0, sys.argv[2])
    pipe = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # libraries that print must not be heard on the pipe
    for answer in answers(Child(sys.argv[1]), iter(sys.stdin.readline, "")):
        pipe.write(json.dumps(answer) + "\n")
        pipe.flush()


if __name__ == "__main__":
    main()
