"""Many clients at once that leave, cancel, fork and run out of time, in a quarter of the memory they need.

A client that stays gets the text of a single run, and one that leaves gets the beginning of it. Afterwards no
request holds anything.
"""

from __future__ import annotations

import contextlib
import random
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
from msgspec import structs

from plait.config import EngineConfig
from plait.engine.core import Engine
from plait.engine.thread import EngineLoop
from plait.errors import DeadlineExceeded
from plait.frontend.output_stream import OutputStream
from plait.loading.build import Loaded, engine_over, load
from plait.memory import has_slots
from plait.ops.seed import choice_seed
from plait.request import Request, SamplingParams
from plait.runner.runner import ModelRunner
from plait.schedule.drafts.ngram import NgramProposer
from plait.schedule.drafts.turns import DraftRequest
from plait.schedule.speculate import Speculation
from plait.verify.matrix import CheapRows
from tests.families import tiny
from tests.server.fake import ByteTokenizer

BLOCK, LONGEST, NUM_SEQS, NUM_CLIENTS = 16, 160, 8, 16
OPTIONS = {"device": "cpu", "threads": 1, "max_model_len": LONGEST, "block_size": BLOCK, "max_step_ms": 0}
# The rest are counts of how much is there and how much is free.
TOTALS = (
    *("num_preemptions", "num_swaps", "num_steps", "num_prompt_tokens", "num_output_tokens"),
    *("prompt_tokens_per_s", "reply_ms"),  # what steps and replies have cost so far
)


class Signs(ByteTokenizer):
    """One character of three bytes for each token."""

    name, vocab_size = "signs", tiny.SIZES["vocab_size"]
    special_ids: frozenset[int] = frozenset()

    def token_bytes(self, token_id: int) -> bytes:
        return chr(0x4E00 + token_id).encode()


class EitherWay(CheapRows):
    """Every other sequence that is preempted is cheaper to move, the others are cheaper to compute again."""

    num_asked = 0

    def move_s(self, nbytes: int) -> float | None:
        self.num_asked += 1
        return 2.0 * (self.num_asked % 2)


class Guesses:
    """Prompt lookup; and for every other sequence the reply that it will give, every fourth token wrong."""

    def __init__(self, replies: Mapping[int, Sequence[int]]) -> None:
        self._lookup, self._replies = NgramProposer(), replies  # by the seed of a sequence

    def propose(self, wanted: Sequence[DraftRequest]) -> dict[int, tuple[int, ...]]:
        found = dict(self._lookup.propose([one for one in wanted if one.seq_id % 2]))
        for one in wanted:
            if one.seq_id not in found:
                ahead = [*self._replies.get(one.seed, ())][len(one.token_ids) :][: one.limit]
                found[one.seq_id] = tuple((t + (i % 4 == 3)) % 97 for i, t in enumerate(ahead))
        return found

    def forget(self, seq_id: int) -> None:
        self._lookup.forget(seq_id)


@dataclass(frozen=True)
class Client:
    """A request, and after how many deltas its reader leaves, or cancels and reads on (None: never)."""

    request: Request
    leaves_after: int | None = None
    cancels_after: int | None = None


@dataclass
class Said:
    """The text of one choice, and how it ended ("": its reader had left)."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    reason: str = ""
    error: Exception | None = None


@dataclass
class Model:
    """A tiny model with weights that are loaded once."""

    loaded: Loaded
    slots: bool


@contextlib.contextmanager
def tiny_model(name: str, folder: Path) -> Iterator[Model]:
    tiny.write(name, folder)
    longer = () if name == "mamba2" else (f"max_position_embeddings={LONGEST}",)
    config = EngineConfig(
        **OPTIONS, set=longer, max_num_seqs=NUM_SEQS, max_num_batched_tokens=64, swap_memory=1 << 20
    )
    loaded = load(str(folder), config)
    try:
        yield Model(loaded, has_slots(loaded.runner.decoder.states))
    finally:
        loaded.front.close()


def clients(count: int, seed: int) -> list[Client]:
    """What they send: few beginnings, so that much is shared; half of them is greedy."""
    luck = random.Random(seed)
    bases = [[luck.randrange(97) for _ in range(n)] for n in (3, 16, 40, 64, 90)]
    bases.append([*range(10, 22)] * 5)  # prompt lookup finds something in it
    return [_client(luck, bases, number) for number in range(count)]


def _client(luck: random.Random, bases: Sequence[Sequence[int]], number: int) -> Client:
    prompt = [*luck.choice(bases), *(luck.randrange(97) for _ in range(luck.choice((0, 1, 5, 20))))]
    fate = luck.random()
    hot = luck.random() < 0.5
    params = SamplingParams(
        n=luck.choice((1, 1, 1, 2, 4)),
        max_tokens=luck.choice((3, 4, 16, 30, 45)),
        min_tokens=luck.choice((0, 0, 3)),
        temperature=0.9 if hot else 0.0,
        top_p=0.95,
        top_k=40,
        min_p=0.0,
        repetition_penalty=luck.choice((1.0, 1.0, 1.2)),
        seed=luck.randrange(1 << 40),
        stop=(chr(0x4E00 + luck.randrange(97)),) if luck.random() < 0.3 else (),
        ignore_eos=True,
    )
    request = Request(
        f"request-{number}",
        tuple(prompt),
        params,
        frozenset({luck.randrange(97)}) if luck.random() < 0.3 else frozenset(),
        boundaries=tuple(sorted({luck.randrange(1, len(prompt)) for _ in range(luck.choice((0, 2)))})),
        cache_salt=luck.choice(("", "", "", "another tenant")),
        priority=luck.choice((-1, 0, 0, 1)),
        timeout_s=luck.choice((1e-4, 0.02, 0.1)) if fate > 0.9 else None,
    )
    return Client(
        request,
        leaves_after=luck.randint(0, 10) if fate < 0.15 else None,
        cancels_after=luck.randint(0, 10) if 0.15 <= fate < 0.3 else None,
    )


def single_runs(model: Model, storm: Sequence[Client]) -> dict[tuple[str, int], Said]:
    """The replies of single runs: without prefix cache and drafts, and with memory for all."""
    sizing = model.loaded.sizing
    config = replace(model.loaded.config, prefix_cache=False, max_num_seqs=32, max_num_batched_tokens=256)
    groups = tuple(structs.replace(g, num_blocks=32 * (LONGEST // BLOCK + 1) + 1) for g in sizing.groups)
    roomy = structs.replace(
        sizing, groups=groups, num_slots=33 if model.slots else 0, num_snapshots=0, host_nbytes=0
    )
    runner = model.loaded.runner
    _, engine = engine_over(runner.decoder, runner.sampler, model.loaded.target, config, roomy)
    streams = {}
    for client in storm:
        request = replace(client.request, timeout_s=None, priority=0)
        stream = streams[request.id] = OutputStream(request, Signs(), engine.cancel)
        engine.submit(request, stream.on_event)
    while engine.step():
        pass
    assert not engine.stats()["num_preemptions"]
    return {
        (name, i): said for name, s in streams.items() for i, said in _heard(s, Client(s.request)).items()
    }


def _heard(stream: OutputStream, client: Client) -> dict[int, Said]:
    said = {index: Said() for index in range(client.request.params.n)}
    with contextlib.closing(iter(stream)) as deltas:
        if client.leaves_after == 0:
            stream.cancel()
            return said
        for number, delta in enumerate(deltas, 1):
            one = said[delta.index]
            one.text += delta.text
            one.token_ids += delta.token_ids
            one.reason, one.error = delta.finish_reason or "", delta.error
            if number == client.leaves_after:
                break
            if number == client.cancels_after:
                stream.cancel()
    return said


def crowded(model: Model, replies: Mapping[int, Sequence[int]]) -> Engine:
    """An engine with a quarter of the memory that its sequences need, where drafting always pays."""
    sizing = model.loaded.sizing
    num_blocks = NUM_SEQS * LONGEST // BLOCK // 4 + 1
    groups = tuple(structs.replace(g, num_blocks=min(g.num_blocks, num_blocks)) for g in sizing.groups)
    num_seqs = NUM_SEQS if groups else NUM_SEQS // 4  # recurrent state alone never grows
    # Two slots are for drafts and snapshots.
    tight = structs.replace(
        sizing, groups=groups, num_slots=1 + num_seqs + 2 if model.slots else 0, host_nbytes=1 << 20
    )
    config = replace(model.loaded.config, max_num_seqs=num_seqs, speculate="ngram")
    runner = model.loaded.runner
    _, engine = engine_over(runner.decoder, runner.sampler, model.loaded.target, config, tight)
    engine.scheduler.costs = EitherWay()
    engine.speculation = Speculation(Guesses(replies), CheapRows(), 8, replays=model.slots)
    return engine


def weather(engine: Engine, storm: Sequence[Client]) -> dict[tuple[str, int], Said]:
    """Every client on a thread of its own, some at a time, against the engine's thread; then all is quiet."""
    loop = EngineLoop(engine)

    def talk(client: Client) -> tuple[str, dict[int, Said]]:
        stream = OutputStream(client.request, Signs(), loop.cancel)
        loop.submit(client.request, stream.on_event)
        return client.request.id, _heard(stream, client)

    try:
        with ThreadPoolExecutor(NUM_CLIENTS) as pool:
            heard = dict(pool.map(talk, storm))
        deadline = time.monotonic() + 60
        while (loop.has_work or engine.open_requests) and time.monotonic() < deadline:
            time.sleep(0.001)
        assert loop.healthy, loop.fault
        assert not engine.open_requests
    finally:
        assert loop.close()
    return {(name, index): one for name, said in heard.items() for index, one in said.items()}


def assert_texts(
    storm: Sequence[Client],
    heard: Mapping[tuple[str, int], Said],
    alone: Mapping[tuple[str, int], Said],
) -> Counter[str]:
    """Compare; how many ended how."""
    ended: Counter[str] = Counter()
    by_name = {client.request.id: client for client in storm}
    for key, said in heard.items():
        client, single = by_name[key[0]], alone[key]
        ended[said.reason or "left"] += 1
        if said.reason in ("stop", "length"):
            assert said == single, key
            continue
        assert single.text.startswith(said.text), key
        if said.reason == "error":
            assert client.request.timeout_s is not None, said.error
            assert isinstance(said.error, DeadlineExceeded)
        else:
            assert client.leaves_after is not None or client.cancels_after is not None, (key, said)
    return ended


def assert_at_rest(engine: Engine, before: Mapping[str, int]) -> None:
    """Everything is free or cached; and when the cache is forgotten, as it was at the start."""
    engine.scheduler.check()
    after = engine.stats()
    assert after["num_running"] == after["num_waiting"] == 0
    assert after["num_free_blocks"] + after["num_cached_blocks"] == after["num_blocks"]
    assert after["num_free_slots"] + after["num_snapshots"] == after["num_slots"]
    assert not engine.metrics.num_failed_steps
    assert not engine.metrics.num_repairs
    engine.scheduler.isolate()
    engine.step()  # what is dropped is dropped in host memory too
    assert isinstance(engine.runner, ModelRunner)
    assert not engine.runner.store.nbytes_saved
    assert {k: v for k, v in engine.stats().items() if k not in TOTALS} == {
        k: v for k, v in before.items() if k not in TOTALS
    }


def known(storm: Sequence[Client], alone: Mapping[tuple[str, int], Said]) -> dict[int, Sequence[int]]:
    """Prompt and reply of every choice, by its seed."""
    found: dict[int, Sequence[int]] = {}
    for request in (client.request for client in storm):
        for index in range(request.params.n):
            seed = choice_seed(request.params.seed or 0, index)
            found[seed] = (*request.prompt_token_ids, *alone[request.id, index].token_ids)
    return found


ROUNDS = 3  # at most, until both kinds of preemption occurred: which does depends on the order of arrival


def run_storm(name: str, folder: Path, count: int, seed: int) -> None:
    for again in range(ROUNDS):
        stats, grows = one_storm(name, folder / str(again), count, seed)
        if not grows or 0 < stats["num_swaps"] < stats["num_preemptions"]:
            return
    raise AssertionError(f"what grows makes room in one way only: {stats}")


def one_storm(name: str, folder: Path, count: int, seed: int) -> tuple[Mapping[str, int], bool]:
    """The engine's counts at the end, and whether it had anything that grows."""
    with tiny_model(name, folder) as model:
        storm = clients(count, seed)
        alone = single_runs(model, storm)
        engine = crowded(model, known(storm, alone))
        before, threads = engine.stats(), set(threading.enumerate())
        ended = assert_texts(storm, weather(engine, storm), alone)
        assert set(threading.enumerate()) <= threads  # those of earlier tests may end meanwhile
        stats, hits = engine.stats(), engine.scheduler.cache_counts
        assert_at_rest(engine, before)
    assert ended["stop"] + ended["length"] > count / 2, ended
    assert all(ended[reason] for reason in ("stop", "length", "cancelled", "error", "left")), ended
    assert hits["hit_tokens"], hits
    assert engine.metrics.num_drafted_tokens > engine.metrics.num_accepted_tokens > 0
    return stats, bool(engine.scheduler.memory.groups)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", ["llama", "gemma3", "deepseek_v3", "mamba2", "bamba"])
def test_a_hundred_requests_in_a_quarter_of_the_memory(name: str, tmp_path: Path) -> None:
    run_storm(name, tmp_path, 100, seed=1)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama", "gemma3", "deepseek_v3", "mamba2", "bamba", "granite"])
def test_a_thousand_requests_in_a_quarter_of_the_memory(name: str, tmp_path: Path) -> None:
    run_storm(name, tmp_path, 1000, seed=2)
