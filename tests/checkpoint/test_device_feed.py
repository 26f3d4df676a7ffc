"""Weights read ahead onto a device: in order, whole, and no buffer written before its copy has passed.

The "device" is a thread that makes the copies late, one after the other, as a stream does.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from queue import SimpleQueue

import pytest
import torch
from torch import Tensor

from plait.checkpoint import device_feed
from plait.checkpoint.device_feed import CopyEvent, DeviceFeed
from plait.checkpoint.divided import WHOLE, StoredPart
from plait.checkpoint.weights import Target
from plait.config import EngineConfig
from plait.errors import BadFile
from plait.loading.meta.meta_model import meta_cuts, read_order
from plait.loading.open_model import feed_device, load_decoder, open_model
from plait.ops.blocks import random_weight
from plait.partition import Rank
from plait.quant.weight import Weight, as_tensor
from plait.runner.device.capture import decoder_tensors
from tests.patience import until

PIECE = 64


class LateStream:
    """Copies in the order in which they were started, later, by a thread."""

    def __init__(self) -> None:
        self.work: SimpleQueue[tuple[Tensor, Tensor, threading.Event] | None] = SimpleQueue()
        self.num_buffers = self.num_joined = 0
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()

    def buffer(self, nbytes: int) -> Tensor:
        self.num_buffers += 1
        return torch.zeros(nbytes, dtype=torch.uint8)

    def empty(self, like: Tensor) -> Tensor:
        return torch.empty(like.shape, dtype=like.dtype)

    def copy(self, target: Tensor, source: Tensor) -> CopyEvent:
        done = LateEvent()
        self.work.put((target, source, done.passed))
        return done

    def join(self, events: Sequence[CopyEvent], tensors: Sequence[Tensor]) -> None:
        self.num_joined += 1
        for event in events:
            event.synchronize()

    def end(self) -> None:
        self.work.put(None)
        self.thread.join()

    def _run(self) -> None:
        draw = random.Random(0)
        while (one := self.work.get()) is not None:
            target, source, passed = one
            time.sleep(draw.random() / 2000)
            target.copy_(source)
            passed.set()


class LateEvent:
    def __init__(self) -> None:
        self.passed = threading.Event()

    def synchronize(self) -> None:
        self.passed.wait()


@pytest.fixture
def stream() -> Iterator[LateStream]:
    made = LateStream()
    yield made
    made.end()


class Made:
    """A checkpoint of these tensors and weights; a name with an error raises it."""

    def __init__(
        self, content: dict[str, Weight | Tensor], errors: dict[str, Exception] | None = None
    ) -> None:
        self.content, self.errors = content, errors or {}
        self.read_names: list[str] = []

    def read(self, name: str) -> Weight | Tensor:
        self.read_names.append(name)
        if name in self.errors:
            raise self.errors[name]
        return self.content[name]


def some_content() -> dict[str, Weight | Tensor]:
    sizes = [(5, 7), (3, 64), (1,), (33, 31), (0, 4), (2, 3, 5), (640,)]
    dtypes = [torch.float32, torch.bfloat16, torch.float16, torch.uint8, torch.int32]
    found: dict[str, Weight | Tensor] = {
        f"t{i}": (torch.randn(size) * 9).to(dtypes[i % 5]) for i, size in enumerate(sizes)
    }
    found |= {
        kind: random_weight(kind, 6, 256) for kind in ("Q4_K", "int4_g64+zeros+order", "nvfp4", "bnb_nf4")
    }
    found["scalar"] = torch.tensor(3.5)
    found["turned"] = torch.randn(8, 9).T
    return found


def wholes(names: Iterable[str]) -> list[tuple[str, StoredPart]]:
    return [(name, WHOLE) for name in names]


def test_what_is_taken_is_what_the_checkpoint_has_though_every_copy_is_late(stream: LateStream) -> None:
    content = some_content()
    names = [*content]
    feed = DeviceFeed(Made(content), wholes(names), stream, piece=PIECE)
    taken = {name: feed.take(name, WHOLE) for name in names}
    feed.close()
    for name, value in taken.items():
        want = content[name]
        assert type(value) is type(want)
        assert torch.equal(as_tensor(value).float(), as_tensor(want).float()), name
        if not isinstance(want, Tensor):
            assert value.format == want.format
    assert stream.num_buffers == device_feed.BUFFERS
    assert stream.num_joined == len(names)
    assert not feed.has(names[0], WHOLE), "what was taken is the builder's"


def test_tensors_are_begun_in_order_and_not_further_ahead_than_is_allowed(stream: LateStream) -> None:
    content: dict[str, Weight | Tensor] = {
        f"t{i}": torch.full((100,), i, dtype=torch.uint8) for i in range(20)
    }
    made = Made(content)
    feed = DeviceFeed(made, wholes(content), stream, piece=PIECE, ahead=250)
    until(lambda: len(made.read_names) >= 3)
    time.sleep(0.02)
    assert made.read_names == ["t0", "t1", "t2"]
    for i in range(20):
        assert torch.equal(as_tensor(feed.take(f"t{i}", WHOLE)), as_tensor(content[f"t{i}"]))
        assert len(made.read_names) <= i + 4
    assert made.read_names == [*content]
    feed.close()


@pytest.mark.parametrize("seed", range(3))
def test_a_builder_in_another_order_waits_and_gets_everything(stream: LateStream, seed: int) -> None:
    content = some_content()
    names = [*content]
    random.Random(seed).shuffle(names)
    feed = DeviceFeed(Made(content), wholes(content), stream, piece=PIECE, ahead=1)
    for name in names[: len(names) // 2]:
        assert torch.equal(as_tensor(feed.take(name, WHOLE)).float(), as_tensor(content[name]).float())
    feed.close()  # the others were never taken


def test_an_error_in_a_reader_is_raised_where_the_tensor_is_taken(stream: LateStream) -> None:
    content = some_content()
    feed = DeviceFeed(Made(content, {"t1": BadFile("damaged")}), wholes(content), stream, piece=PIECE)
    feed.take("t0", WHOLE)
    with pytest.raises(BadFile, match="damaged"):
        feed.take("t1", WHOLE)
    assert torch.equal(as_tensor(feed.take("t3", WHOLE)), as_tensor(content["t3"])), (
        "others are read all the same"
    )
    feed.close()


def test_a_file_that_became_shorter_is_a_typed_error_and_not_the_end_of_the_process(
    stream: LateStream, tmp_path: Path
) -> None:
    file = tmp_path / "model.gguf"
    file.write_bytes(b"x" * 100)
    content: dict[str, Weight | Tensor] = {f"t{i}": torch.zeros(200, dtype=torch.uint8) for i in range(3)}
    feed = DeviceFeed(Made(content), wholes(content), stream, [file], piece=PIECE, ahead=1)
    feed.take("t0", WHOLE)
    file.write_bytes(b"x" * 60)
    with pytest.raises(BadFile, match=r"model.gguf: has 60 bytes; it had 100 when it was opened"):
        feed.take("t2", WHOLE)
    feed.close()


def test_a_feed_that_is_closed_early_leaves_no_thread(stream: LateStream) -> None:
    content = some_content()
    feed = DeviceFeed(Made(content), wholes(content), stream, piece=PIECE, ahead=1)
    feed.close()
    assert not any(thread.is_alive() for thread in feed._threads)


class Counting(LateStream):
    """Counts the bytes of what is allocated on the device."""

    nbytes = 0

    def empty(self, like: Tensor) -> Tensor:
        self.nbytes += like.nbytes
        return super().empty(like)


@pytest.mark.parametrize(("size", "shares"), [(2, 0), (2, 4), (4, 4)])
def test_a_rank_is_fed_its_rows_and_columns_alone(nano_hybrid: Path, size: int, shares: int) -> None:
    opened = open_model(str(nano_hybrid), EngineConfig())
    spec, rank = opened.resolved.spec, Rank(1, size, shares)

    def target() -> Target:
        made = Target(torch.device("cpu"), torch.float32, 64, spec.hidden_size, ops="reference")
        made.cuts = meta_cuts(spec, rank)
        return made

    plain, fed, stream = target(), target(), Counting()
    first = load_decoder(opened, plain, lambda *_: None)
    order = read_order(opened.resolved, opened.checkpoint, fed)
    fed.feed = feed = DeviceFeed(opened.checkpoint, order, stream, piece=4096)
    second = load_decoder(opened, fed, lambda *_: None)
    feed.close()
    stream.end()
    assert not any(feed.has(*item) for item in order)
    assert fed.weights_nbytes == plain.weights_nbytes
    pairs = zip(decoder_tensors(first), decoder_tensors(second), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)
    whole = sum(opened.checkpoint.nbytes(name) for name in {name for name, _ in order})
    tables = sum(opened.checkpoint.nbytes(name) for name in opened.checkpoint.names() if "embed" in name)
    assert stream.nbytes - tables < 1.2 * (whole - tables) / size  # norms and routers are whole


@pytest.mark.parametrize(
    ("model", "quantize"), [("nano_hybrid", None), ("smollm2", None), ("nano_hybrid", "q8_0")]
)
def test_a_model_built_from_the_feed_is_the_one_that_is_built_from_the_files(
    model: str, quantize: str | None, request: pytest.FixtureRequest, stream: LateStream
) -> None:
    """As on a GPU, with copies made by a thread: plain tensors are fed, in the order of the dry build."""
    path = request.getfixturevalue(model)
    opened = open_model(str(path), EngineConfig())
    spec = opened.resolved.spec

    def target() -> Target:
        made = Target(torch.device("cpu"), torch.float32, 64, spec.hidden_size, ops="reference")
        made.quantize = quantize
        return made

    plain, fed = target(), target()
    first = load_decoder(opened, plain, lambda *_: None)
    order = read_order(opened.resolved, opened.checkpoint, fed)
    assert len(order) > 0.5 * len([*opened.checkpoint.names()])
    taken: list[tuple[str, StoredPart]] = []

    class Noted(DeviceFeed):
        def take(self, name: str, part: StoredPart) -> Weight | Tensor:
            taken.append((name, part))
            return super().take(name, part)

    fed.feed = feed = Noted(opened.checkpoint, order, stream, opened.files.weights)
    second = load_decoder(opened, fed, lambda *_: None)
    feed.close()
    assert taken == order
    assert fed.weights_nbytes == plain.weights_nbytes
    pairs = zip(decoder_tensors(first), decoder_tensors(second), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)


def test_only_a_gpu_is_fed(nano_hybrid: Path, stream: LateStream) -> None:
    opened = open_model(str(nano_hybrid), EngineConfig())
    target = Target(torch.device("cpu"), torch.float32, 64, 32)
    with feed_device(opened, target, lambda device: stream):
        assert target.feed is None
    target.device = torch.device("cuda", 0)
    feeding = feed_device(opened, target, lambda device: stream)
    feeding.__enter__()
    assert target.feed is not None
    error = RuntimeError("of the builder")
    assert not feeding.__exit__(RuntimeError, error, None), "the error is the caller's"
    assert target.feed is None
