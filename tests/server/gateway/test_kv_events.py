"""KV events as readers of vLLM's format get them, from a real socket; missed ones again."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import pytest

from plait.config import ServerConfig
from plait.errors import ConfigError
from plait.server.gateway import kv_events
from plait.server.gateway.kv_events import EventPublisher, list_events
from plait.state.blocks import extend, root
from plait.state.prefix_tree import PrefixChanges, StoredBlock
from tests.engine.hash_model import Reader
from tests.patience import PATIENCE_S, until
from tests.worker.test_client import done, kill, request, running

zmq = pytest.importorskip("zmq")
SIZE = 4


class BlockStored(msgspec.Struct, array_like=True, tag=True):
    """Fields as readers declare them, in their order."""

    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: list[list[Any] | None] | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None


class BlockRemoved(msgspec.Struct, array_like=True, tag=True):
    block_hashes: list[int]
    medium: str | None
    group_idx: int | None = None


class AllBlocksCleared(msgspec.Struct, array_like=True, tag=True):
    pass


class EventBatch(msgspec.Struct, array_like=True):
    ts: float
    events: list[BlockStored | BlockRemoved | AllBlocksCleared]
    data_parallel_rank: int | None = None


def number(name: bytes) -> int:
    return int.from_bytes(name[-8:], "big")


def blocks(tokens: list[int], salt: str = "") -> list[StoredBlock]:
    chain = [root(salt)]
    extend(chain, tokens, SIZE)
    parts = [tuple(tokens[i : i + SIZE]) for i in range(0, len(tokens), SIZE)]
    first = StoredBlock(chain[1], b"", parts[0], chain[0])
    return [first, *(StoredBlock(*one) for one in zip(chain[2:], chain[1:], parts[1:], strict=False))]


def read(events: list[kv_events.Event]) -> list[Any]:
    decoded = msgspec.msgpack.decode(msgspec.msgpack.encode((1.0, events, 0)), type=EventBatch)
    return list(decoded.events)


class Follower:
    """A reader's view: the tokens of every block, by its number, and what it may start from."""

    def __init__(self, publisher: EventPublisher) -> None:
        self.context = zmq.Context()
        self.socket = self.context.socket(zmq.SUB)
        self.socket.connect(publisher.addresses[0])
        self.socket.setsockopt(zmq.SUBSCRIBE, b"kv@")
        self.known: dict[int, tuple[int | None, list[int]]] = {}
        self.numbers: list[int] = []
        self.topic = b""
        while not self.socket.poll(20):  # a subscriber gets what is sent once it is connected
            publisher.publish(PrefixChanges(begins=True))

    def take(self) -> None:
        while self.socket.poll(20):
            self.topic, raw, payload = self.socket.recv_multipart()
            self.numbers.append(int.from_bytes(raw, "big"))
            batch = msgspec.msgpack.decode(payload, type=EventBatch)
            assert abs(batch.ts - time.time()) < 60
            for event in batch.events:
                self.apply(event)

    def apply(self, event: BlockStored | BlockRemoved | AllBlocksCleared) -> None:
        match event:
            case AllBlocksCleared():
                self.known.clear()
            case BlockRemoved():
                for name in event.block_hashes:
                    del self.known[name]
            case BlockStored():
                assert len(event.token_ids) == len(event.block_hashes) * event.block_size
                parent = event.parent_block_hash
                assert parent is None or parent in self.known
                for i, name in enumerate(event.block_hashes):
                    tokens = event.token_ids[i * event.block_size : (i + 1) * event.block_size]
                    self.known[name], parent = (parent, tokens), name

    def close(self) -> None:
        self.context.destroy(linger=0)


@pytest.fixture
def publisher() -> Iterator[EventPublisher]:
    made = EventPublisher("tcp://127.0.0.1:*", "tcp://127.0.0.1:*", "kv@pod@model")
    yield made
    made.close()


def test_blocks_in_a_row_are_one_event_with_their_tokens() -> None:
    one, two = blocks(list(range(12))), blocks([0, 1, 2, 3, 9, 9, 9, 9])
    (found,) = read(list_events(PrefixChanges(stored=tuple(one))))
    assert found.block_hashes == [number(block.name) for block in one]
    assert (found.parent_block_hash, found.token_ids, found.block_size) == (None, list(range(12)), SIZE)
    assert (found.extra_keys, found.lora_id, found.medium, found.group_idx) == (None, None, "GPU", 0)
    assert found.kv_cache_spec_kind == "full_attention"
    first, branch = read(list_events(PrefixChanges(stored=(one[0], one[1], two[1]))))
    assert branch.parent_block_hash == number(one[0].name) == first.block_hashes[0]
    assert branch.token_ids == [9] * 4


def test_a_salt_is_a_digest_in_the_first_blocks_extra_keys() -> None:
    (found,) = read(list_events(PrefixChanges(stored=tuple(blocks(list(range(8)), "secret")))))
    assert found.extra_keys == [[root("secret").hex()], None]


def test_begins_and_dropped_come_before_what_is_stored() -> None:
    one = blocks(list(range(8)))
    changes = PrefixChanges(begins=True, stored=tuple(one), dropped=(b"x" * 16,))
    assert [type(event).__name__ for event in read(list_events(changes))] == [
        "AllBlocksCleared",
        "BlockRemoved",
        "BlockStored",
    ]
    assert list_events(PrefixChanges(added=(b"x" * 16,))) == []


def test_a_subscriber_follows_an_engine_through_its_replacement(publisher: EventPublisher) -> None:
    follower, reader = Follower(publisher), Reader()

    def has(prompt: list[int]) -> Callable[[], bool]:
        def look() -> bool:
            follower.take()
            return any(tokens == prompt[: len(tokens)] for _, tokens in follower.known.values())

        return look

    try:
        with running() as process:
            publisher.follow(process, "ignored: there is a topic")
            process.submit(request("one", [5, 6, 7, 8] * 10, max_tokens=2), reader)
            until(done(reader, "one"))
            until(has([5, 6, 7, 8] * 10))
            kill(process)
            until(lambda: not has([5, 6, 7, 8] * 10)())
            process.submit(request("two", [1, 2, 3, 4] * 10, max_tokens=2), reader)
            until(has([1, 2, 3, 4] * 10))
        first = follower.numbers[0]
        assert follower.numbers == [*range(first, first + len(follower.numbers))]
        assert follower.topic == b"kv@pod@model"
    finally:
        follower.close()


def test_missed_messages_are_sent_again_from_a_number_on(publisher: EventPublisher) -> None:
    for i in range(5):
        publisher.publish(PrefixChanges(stored=tuple(blocks([i] * SIZE))))
    context = zmq.Context()
    try:
        asking = context.socket(zmq.DEALER)
        asking.connect(publisher.addresses[1])
        for garbage in ([b"x"], [b"", b"short"], [b"no", bytes(8)], [b"", bytes(8), b"more"]):
            asking.send_multipart(garbage)
        time.sleep(0.1)
        asking.send_multipart([b"", (3).to_bytes(8, "big")])
        answers = []
        while not answers or answers[-1][1] != kv_events.END:
            assert asking.poll(1000 * int(PATIENCE_S))
            answers.append(asking.recv_multipart())
        assert [int.from_bytes(raw, "big", signed=True) for _, raw, _ in answers] == [3, 4, -1]
        batch = msgspec.msgpack.decode(answers[0][2], type=EventBatch)
        assert batch.events[0].token_ids == [3] * SIZE
    finally:
        context.destroy(linger=0)


class Source:
    def __init__(self) -> None:
        self.num_calls = 0

    def follow_prefixes(self, on_changes: kv_events.OnChanges) -> None:
        self.num_calls += 1


def test_more_than_can_wait_is_dropped_and_reported_anew(
    publisher: EventPublisher, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kv_events, "MAX_QUEUED", 10)
    monkeypatch.setattr(publisher, "_wake_up", lambda: None)  # nothing is sent meanwhile
    source, part = Source(), PrefixChanges(stored=tuple(blocks(list(range(4 * SIZE)))))
    publisher.follow(source, "model")
    for _ in range(5):
        publisher.publish(part)
    assert (source.num_calls, len(publisher._queue)) == (2, 0)
    publisher.publish(PrefixChanges(begins=True))
    publisher.publish(part)
    assert len(publisher._queue) == 2


def test_messages_that_are_kept_are_bounded(
    publisher: EventPublisher, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kv_events, "MAX_KEPT_NBYTES", 500)
    for i in range(50):
        publisher.publish(PrefixChanges(stored=tuple(blocks([i] * SIZE))))
    until(lambda: publisher._last == 50)
    assert sum(len(payload) for _, payload in publisher._kept) <= 500


def test_wrong_options_are_refused() -> None:
    with pytest.raises(ConfigError, match="kv_events: cannot listen on 'nowhere'"):
        EventPublisher("nowhere")
    with pytest.raises(ConfigError, match="kv_events_replay"):
        EventPublisher("tcp://127.0.0.1:*", "udp://127.0.0.1:9999")
    with pytest.raises(ConfigError, match="kv_events"):
        ServerConfig(kv_events_topic="topic")
