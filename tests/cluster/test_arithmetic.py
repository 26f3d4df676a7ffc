"""Replicas with other instructions: a continuation goes to an equal one, and elsewhere where none is left."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest

from plait.cluster.card import add_digest, make_card, make_front
from plait.cluster.loop import ClusterLoop
from plait.cluster.replica_server import ReplicaServer
from plait.cluster.wire import ReplicaCard
from plait.config import EngineConfig
from plait.frontend.frontend import Front, Parsers
from plait.kernels.cpu.codegen.target import host_features
from plait.request import SamplingParams
from plait.worker.client import EngineProcess

NUM_TOKENS = 450


class ProcessReplicas:
    """Engine processes behind replica servers, and a gateway's front over them."""

    def __init__(self, model: Path) -> None:
        self._model = str(model)
        self.loop = ClusterLoop()
        self.replicas: dict[str, tuple[EngineProcess, ReplicaServer]] = {}
        self.cards: dict[str, ReplicaCard] = {}

    def start(self, name: str, isa: str) -> Front:
        """A replica with kernels that are compiled for `isa`, not a member yet; returns a front for it."""
        config = EngineConfig(threads=1, isa=isa)  # type: ignore[arg-type]
        engine = EngineProcess(self._model, config)
        card = add_digest(make_card(engine, config), engine, config)
        server = ReplicaServer(engine, card)
        engine.on_charged = server.report_charged
        self.replicas[name], self.cards[name] = (engine, server), card
        return make_front(card, self.loop, config, Parsers())

    def connect(self, *names: str) -> None:
        """Have these as members, and no others."""
        self.loop.set_members({name: self.replicas[name][1].address for name in names})
        until = time.monotonic() + 30
        while self.loop.count_states()["ready"] < len(names):
            assert time.monotonic() < until
            time.sleep(0.01)

    def kill_holder(self) -> str:
        """End the one replica that has an open lease."""
        (name,) = [name for name, (_, server) in self.replicas.items() if server.num_open]
        self.kill(name)
        return name

    def kill(self, name: str) -> None:
        engine, server = self.replicas.pop(name)
        server.close()
        engine.close(drain=False)

    def close(self) -> None:
        self.loop.close(drain=False)
        for name in [*self.replicas]:
            self.kill(name)


@pytest.fixture
def made(nano_hybrid: Path) -> Iterator[ProcessReplicas]:
    found = ProcessReplicas(nano_hybrid)
    try:
        yield found
    finally:
        found.close()


@pytest.mark.slow
@pytest.mark.skipif("avx512bw" not in host_features(), reason="--isa native is avx2 or less on this machine")
def test_a_stream_goes_on_with_other_instructions_only_where_no_equal_replica_is_left(
    made: ProcessReplicas,
) -> None:
    front = made.start("r0", "native")
    made.start("r1", "native")
    made.start("other", "avx2")
    equality = {name: card.equality for name, card in made.cards.items()}
    assert equality["r0"] == equality["r1"] != equality["other"]
    assert all(len(card.digest) == 16 for card in made.cards.values())
    made.connect("r0", "r1")
    whole = read(front, {})
    moved: list[dict[tuple[str, str], int]] = []
    shown: list[str] = []

    def kill(text: str) -> None:
        shown.append(text)
        made.kill_holder()
        until = time.monotonic() + 30
        while sum(made.loop.counts()[0].values()) < len(shown):
            assert time.monotonic() < until
            time.sleep(0.005)
        moved.append(made.loop.counts()[0])

    text = read(front, {20: lambda _: made.connect("r0", "r1", "other"), 60: kill, 150: kill})
    assert moved == [{("replica", "yes"): 1}, {("replica", "yes"): 1, ("replica", "no"): 1}]
    assert whole.startswith(shown[1])
    assert text.startswith(shown[1])


def read(front: Front, acts: Mapping[int, Callable[[str], None]]) -> str:
    """A sampled reply; each of `acts` is called with its text when so many tokens have come."""
    params = SamplingParams(max_tokens=NUM_TOKENS, temperature=0.8, seed=7, ignore_eos=True)
    text, left = "", dict(acts)
    for delta in front.submit(front.prepare("And it came to pass", params)):
        assert delta.error is None
        text += delta.text
        for at in [at for at in left if delta.num_tokens >= at]:
            left.pop(at)(text)
    assert delta.finish_reason == "length"
    assert delta.num_tokens == NUM_TOKENS
    assert not left
    return text
