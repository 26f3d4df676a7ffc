"""Time to the first token in a chat of ten turns, with the prefix cache, without it, and in llama.cpp.

Every side holds its own chat: the same new tokens in every turn, and its own replies, all of the same length.
So each can keep what it computed. The sides answer in turns, one turn of the chat after the other. The first
chat warms up and does not count.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import replace
from pathlib import Path
from queue import SimpleQueue
from typing import Any, Protocol

from plait.config import EngineConfig
from plait.loading.build import Loaded, load
from plait.loading.open_model import open_model
from plait.request import Event, Request, SamplingParams

HERE = Path(__file__).resolve().parent
NUM_TURNS, LONGEST = 10, 2560
Answer = tuple[float, list[int], int | None]  # seconds to the first token, the reply, cached tokens if known


class Side(Protocol):
    """One of the engines that are compared: it answers a prompt of token ids."""

    def answer(self, prompt: Sequence[int], num_tokens: int) -> Answer: ...


class Plait:
    def __init__(self, loaded: Loaded) -> None:
        self.loaded, self._number = loaded, 0

    def answer(self, prompt: Sequence[int], num_tokens: int) -> Answer:
        """From the submission to the first event with a token."""
        self._number += 1
        params = SamplingParams(
            **dict(temperature=0.0, top_p=1.0, top_k=0, min_p=0.0, repetition_penalty=1.0),
            max_tokens=num_tokens,
        )
        events: SimpleQueue[tuple[float, Event]] = SimpleQueue()
        began = time.perf_counter()
        self.loaded.front.loop.submit(
            Request(f"turn-{self._number}", tuple(prompt), params),
            lambda event: events.put((time.perf_counter(), event)),
        )
        first, reply = 0.0, list[int]()
        while True:
            at, event = events.get()
            if event.error:
                raise event.error
            if event.token_ids and not reply:
                first = at - began
            reply += event.token_ids
            if event.finish_reason:
                return first, reply, event.num_cached_tokens


class Peer:
    """llama-cpp-python in a process of its own; `forgets` before every answer, or keeps what it can."""

    def __init__(self, process: subprocess.Popen[str], *, forgets: bool) -> None:
        self._process, self._forgets = process, forgets

    def answer(self, prompt: Sequence[int], num_tokens: int) -> Answer:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        asked = {"prompt": list(prompt), "num_tokens": num_tokens, "forgets": self._forgets}
        self._process.stdin.write(json.dumps(asked) + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit("llama-cpp-python ended; see above")
        found = json.loads(line)
        return found["first_s"], found["reply"], None


def rows(
    models: Mapping[str, Path], *, threads: int, repeats: int, small: bool, peer: str | None
) -> list[dict[str, Any]]:
    """One row per model and turn: tokens of the prompt, new, cached and computed ones; medians in ms."""
    return [
        row
        for name, path in models.items()
        for row in chats(name, path, threads=threads, repeats=1 if small else repeats, small=small, peer=peer)
    ]


def chats(
    name: str, path: Path, *, threads: int, repeats: int, small: bool, peer: str | None
) -> Iterator[dict[str, Any]]:
    """All chats with one model."""
    with ExitStack() as stack:
        sides: dict[str, Side] = {}
        first = stack.enter_context(opened(path, threads))
        length = min(first.front.max_model_len, 640 if small else LONGEST) // NUM_TURNS
        sides["cached"] = Plait(first)
        sides["uncached"] = Plait(stack.enter_context(opened(path, threads, prefix_cache=False)))
        if peer and path.suffix == ".gguf":
            for side, forgets in (("llama.cpp cached", False), ("llama.cpp uncached", True)):
                process = stack.enter_context(started(peer, path, threads, first.front.max_model_len))
                sides[side] = Peer(process, forgets=forgets)
        new, reply = length - length // 2, length // 2
        found = [chat(sides, texts(first, number, new), reply) for number in range(repeats + 1)][1:]
    for turn in range(NUM_TURNS):
        yield _row(name, turn, new, reply, [one[turn] for one in found])


@contextmanager
def opened(path: Path, threads: int, **options: bool) -> Iterator[Loaded]:
    config = EngineConfig(device="cpu", threads=threads, max_num_seqs=2, **options)
    longest = open_model(str(path), config).resolved.spec.max_len
    loaded = load(str(path), replace(config, max_model_len=min(longest, LONGEST)))
    with closing(loaded.front):
        yield loaded


@contextmanager
def started(python: str, path: Path, threads: int, longest: int) -> Iterator[subprocess.Popen[str]]:
    """A process that answers `Peer`."""
    command = [python, str(HERE / "turns_peer.py"), str(path), str(threads), str(longest)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def texts(loaded: Loaded, number: int, length: int) -> list[list[int]]:
    """What the user says in every turn: another piece of a book for each chat and turn."""
    book = (HERE / "text" / "king-james.txt").read_text()
    tokenizer, found = loaded.front.tokenizer, []
    assert tokenizer is not None
    for turn in range(NUM_TURNS):
        start = (number * NUM_TURNS + turn) * 8 * length % (len(book) - 9 * length)
        found.append(tokenizer.encode(book[start : start + 9 * length], add_special=not turn)[:length])
    return found


def chat(sides: Mapping[str, Side], said: Sequence[Sequence[int]], reply: int) -> list[dict[str, Answer]]:
    """One chat with every side: the answers by turn and side."""
    histories: dict[str, list[int]] = {side: [] for side in sides}
    turns = []
    for turn, new in enumerate(said):
        answers = {}
        order = [*sides] if turn % 2 else [*sides][::-1]
        for side in order:
            histories[side] += new
            answers[side] = sides[side].answer(histories[side], reply)
            histories[side] += answers[side][1]
        if answers["cached"][1] != answers["uncached"][1]:
            raise SystemExit(f"turn {turn + 1}: the cache changed the text, so nothing is measured")
        turns.append(answers)
    return turns


def _row(
    name: str, turn: int, new: int, reply: int, answers: Sequence[Mapping[str, Answer]]
) -> dict[str, Any]:
    prompt = (turn + 1) * new + turn * reply
    cached = answers[0]["cached"][2] or 0
    row = {"model": name, "turn": turn + 1, "prompt": prompt, "new": new, "cached": cached}
    row |= {"prefilled": prompt - cached}
    for side in sorted(answers[0]):  # they answered in turns
        row[f"{side} ms"] = round(1000 * statistics.median(one[side][0] for one in answers), 1)
    return row


if __name__ == "__main__":
    sys.exit("run benchmarks/engine.py --measure turns")
