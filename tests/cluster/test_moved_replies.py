"""Replies with choices, stops, grammars, thinking and log-probabilities, moved twice: as in one engine.

Engines, scheduler, sampler and grammars are the real ones, over a model that is one matrix. A reply of each
kind runs to its end through a gateway's loop, and its replica is killed two times in the middle.
"""

from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace

import pytest

from plait.cluster.loop import ClusterLoop
from plait.cluster.replica_server import ReplicaServer
from plait.frontend.frontend import Front, Language
from plait.frontend.output_stream import OutputStream
from plait.request import Request, SamplingParams, ThinkingBudget
from tests.cluster.replicas import make_card
from tests.patience import PATIENCE_S, until
from tests.server.fake import CONTEXT, EOS, ByteTokenizer, TurnTemplate
from tests.server.real_engine import BLOCK, engine_front

NUM_TOKENS, STEP_S = 90, 0.002
MOVES_AT = (10, 40)  # tokens that every choice has before its replica is killed
CLOSING = tuple(b"</think>")
REGEX, BUDGET = "[a-f]{20}-[0-9]{20}(x|y){20}", 25
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "minLength": 50, "maxLength": 60}},
    "required": ["name"],
    "additionalProperties": False,
}
DRAWN = {"temperature": 1.0, "seed": 5, "max_tokens": NUM_TOKENS, "ignore_eos": True}
KINDS: dict[str, dict[str, object]] = {
    "logprobs": {"temperature": 0.0, "logprobs": 2, "prompt_logprobs": 1},
    "choices": {"n": 3, "frequency_penalty": 0.5, "repetition_penalty": 1.1},
    "stop": {},
    "regex": {"structured_outputs": {"regex": REGEX}},
    "schema": {"structured_outputs": {"json": SCHEMA}},
    "thinking": {},
}


@dataclass
class ReadChoice:
    """What a reader has of one choice."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[object] = field(default_factory=list)
    prompt_logprobs: list[object] = field(default_factory=list)
    ends: list[tuple[str, object]] = field(default_factory=list)


Choices = dict[int, ReadChoice]


def request_of(front: Front, kind: str, stop: tuple[str, ...] = ()) -> Request:
    params = SamplingParams(**{**DRAWN, **KINDS[kind]}, stop=stop)  # type: ignore[arg-type]
    request = front.prepare(f"tell me of {kind}", params)
    if kind == "thinking":  # the prompt ends inside of it
        budget = ThinkingBudget(BUDGET, "<think>", "</think>", CLOSING, is_open=True)
        request = replace(request, thinking=budget)
    return request


def read(stream: OutputStream, choices: Choices) -> None:
    for delta in stream:
        choice = choices[delta.index]
        choice.text += delta.text
        choice.token_ids += delta.token_ids
        choice.logprobs += delta.logprobs or ()
        choice.prompt_logprobs += delta.prompt_logprobs or ()
        if delta.finish_reason is not None:
            choice.ends.append((delta.finish_reason, delta.stop_reason))


class Replicas:
    """Real engines behind replica servers, and a gateway's front over them."""

    def __init__(self, step_s: float = STEP_S) -> None:
        self._step_s = step_s
        self.engines: dict[str, tuple[Front, ReplicaServer]] = {}
        self.loop = ClusterLoop(patience_s=PATIENCE_S)
        language = Language(ByteTokenizer(), TurnTemplate(), {}, frozenset({EOS}))
        self.add("r0")
        self.loop.first_card()
        self.front = Front("bigrams", self.engines["r0"][0].spec, CONTEXT, self.loop, language)

    def add(self, name: str) -> None:
        engine = engine_front(self._step_s)
        own = engine.loop.fingerprint
        limits = {"max_open": 64, "max_model_len": CONTEXT, "longest": CONTEXT}
        card = make_card(block_size=BLOCK, model=own.model, arithmetic=own.arithmetic, **limits)
        self.engines[name] = engine, ReplicaServer(engine.loop, card, beat_s=0.05)
        self.loop.set_members({name: server.address for name, (_, server) in self.engines.items()})

    def kill(self, name: str) -> None:
        engine, server = self.engines.pop(name)
        server.close()
        engine.close(drain=False)

    def wait_ready(self) -> None:
        until(lambda: self.loop.count_states()["ready"] >= len(self.engines))

    def close(self) -> None:
        self.front.close(drain=False)
        for name in [*self.engines]:
            self.kill(name)


@contextmanager
def closing_front(front: Front) -> Iterator[Front]:
    try:
        yield front
    finally:
        front.close(drain=False)


@pytest.fixture(scope="module")
def moved() -> Iterator[dict[str, tuple[Choices, Choices]]]:
    """For each kind, its choices as one engine gives them, and as they came through two losses."""
    with ExitStack() as stack:
        alone = stack.enter_context(closing_front(engine_front()))
        unstopped = read_all(alone, {"stop": request_of(alone, "stop")})["stop"][0].text
        stops = {"stop": (unstopped[60:66],)}
        requests = {kind: request_of(alone, kind, stops.get(kind, ())) for kind in KINDS}
        wanted = read_all(alone, requests)
        made = Replicas()
        stack.callback(made.close)
        found = read_all(made.front, requests, lambda streams: move_twice(made, streams))
        assert sum(made.loop.counts()[0].values()) == len(MOVES_AT) * len(KINDS)
        yield {kind: (wanted[kind], found[kind]) for kind in KINDS}


def move_twice(made: Replicas, streams: list[OutputStream]) -> None:
    for i, at in enumerate(MOVES_AT):
        end = time.monotonic() + PATIENCE_S
        while any(stream.num_arrived < at * stream.request.params.n for stream in streams):
            assert time.monotonic() < end, [stream.num_arrived for stream in streams]
            time.sleep(0.001)
        made.add(f"r{i + 1}")
        made.wait_ready()
        assert not any(stream.done for stream in streams)
        made.kill(f"r{i}")


def read_all(
    front: Front,
    requests: dict[str, Request],
    interrupt: Callable[[list[OutputStream]], None] = lambda streams: None,
) -> dict[str, Choices]:
    """All of them at the same time, to their ends."""
    found = {kind: {i: ReadChoice() for i in range(r.params.n)} for kind, r in requests.items()}
    streams = {kind: front.submit(request) for kind, request in requests.items()}
    threads = [threading.Thread(target=read, args=(streams[kind], found[kind])) for kind in requests]
    for thread in threads:
        thread.start()
    interrupt([*streams.values()])
    for thread in threads:
        thread.join(PATIENCE_S)
        assert not thread.is_alive()
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_a_moved_reply_is_what_one_engine_gives(kind: str, moved: dict[str, tuple[Choices, Choices]]) -> None:
    wanted, found = moved[kind]
    assert found == wanted
    first = wanted[0]
    match kind:
        case "logprobs":
            assert len(first.logprobs) == NUM_TOKENS
            assert first.prompt_logprobs
        case "choices":
            assert len({choice.text for choice in wanted.values()}) == 3
        case "stop":
            (reason, stop) = first.ends[0]
            assert reason == "stop"
            assert isinstance(stop, str)
            assert stop not in first.text
        case "regex":
            assert re.fullmatch(REGEX, first.text)
        case "schema":
            assert 50 <= len(json.loads(first.text)["name"]) <= 60
        case "thinking":
            assert len(first.text.encode().partition(b"</think>")[0]) == BUDGET
