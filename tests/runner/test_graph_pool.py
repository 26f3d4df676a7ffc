"""The memory that captured graphs share is that of the largest one, whatever batches need later.

The pool is a model of torch's (`pool_model`), the steps are those of a real decoder on a CPU.
"""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch

from plait.errors import RankLost
from plait.memory import block_groups
from plait.model.decoder import Decoder
from plait.request import SamplingParams
from plait.runner.device.check_batch import CheckBatch
from plait.runner.device.graph_backends import CaptureRefusals
from plait.runner.device.replay import AT_START, DeviceReplay, GraphKey
from plait.runner.host.static_batch import Capacity
from plait.runner.runner import ModelRunner
from plait.runner.sampling.sampler import Sampler
from plait.schedule.plan import SamplingBatch, SamplingRow, StepPlan
from plait.state.store import StateStore
from tests.runner.device_engine import BLOCK, CPU, LONGEST, plain_decoder
from tests.runner.pool_model import Pool, PoolGraphs

SEQS = 96
FRAGMENTS = 1.25  # blocks that a smaller step has divided do not always serve a larger one
# With so few layers a step is as large as its logits: then whatever keeps them shows.
SMALL = {"num_hidden_layers": 1}
DRAWN = SamplingRow(SamplingParams(temperature=1.0), 1, 1, position=1, seed=0)


@pytest.fixture(scope="module")
def decoder(tmp_path_factory: pytest.TempPathFactory) -> Decoder:
    return plain_decoder("llama", tmp_path_factory.mktemp("model"), **SMALL)


def make_replay(decoder: Decoder, backend: PoolGraphs, drafts: int = 0) -> tuple[DeviceReplay, ModelRunner]:
    """The graphs that a runner has when it is made."""
    blocks = {group.name: 4 for group in block_groups(decoder.states)}
    store = StateStore(decoder.states, blocks, 0, BLOCK, CPU, torch.float32)
    for tensor in store.tensors:
        tensor.zero_()
    sampler = Sampler(decoder.spec.vocab_size)
    capacity = Capacity.of(512, SEQS, LONGEST, BLOCK, num_draft_tokens=drafts)
    runner = ModelRunner(decoder, store, sampler, CPU, executor=backend, capacity=capacity)
    assert isinstance(runner.replay, DeviceReplay)
    return runner.replay, runner


def capture(replay: DeviceReplay, bucket: int, row: SamplingRow | None) -> None:
    """Capture what a batch of such rows needs. None: the host samples."""
    if row is None:
        replay._graphs[key] = replay._capture(key := GraphKey(bucket, None))
    else:
        replay._prepare_graph(bucket, row)


def grown(decoder: Decoder, buckets: list[int]) -> int:
    """Bytes of a pool into which nothing but decodes of these sizes were captured, in this order."""
    backend = PoolGraphs()
    backend.captures_at_start = False
    replay, _ = make_replay(decoder, backend)
    for bucket in buckets:
        capture(replay, bucket, DRAWN)
    return backend.pool.nbytes


def test_a_pool_grows_where_graphs_are_captured_in_rising_order(decoder: Decoder) -> None:
    sizes = [8, 16, 32, 48, 64, 80, 96]
    largest = grown(decoder, [96])
    assert grown(decoder, sizes[::-1]) == largest
    assert grown(decoder, sizes) > 2 * largest


def test_the_largest_graph_is_captured_first_and_then_the_small_ones(decoder: Decoder) -> None:
    backend = PoolGraphs()
    replay, runner = make_replay(decoder, backend)
    keys = [*replay._graphs]
    small = [size for size in reversed(replay.batch.buckets) if size <= AT_START]
    assert [key.bucket for key in keys] == [SEQS, *(size for size in small for _ in range(2))]
    assert keys[0].form is not None
    assert keys[0].form[:3] == (True, True, True), "drawn and edited: no form has more memory"
    assert {key.form[:2] for key in keys[1:] if key.form} == {(True, False), (False, False)}
    assert set(backend.sizes) == {backend.sizes[0]}, "the others find their memory there"
    assert runner.is_recorded
    assert "those of 1, 2, 4, 8, 12, 16, 24, 32, 96 are captured" in runner.step_kind


def test_what_batches_need_later_finds_its_memory_in_any_order(decoder: Decoder) -> None:
    backend = PoolGraphs()
    replay, _ = make_replay(decoder, backend)
    at_start = backend.pool.nbytes
    ends = SamplingRow(
        SamplingParams(temperature=0.0), 1, 1, 1, 0, stop_token_ids=frozenset({3}), num_stopless=2
    )
    for row in (DRAWN, ends, None):
        for bucket in replay.batch.buckets:
            capture(replay, bucket, row)
    assert backend.pool.nbytes < at_start * FRAGMENTS
    assert replay._logits.shape == (SEQS, decoder.spec.vocab_size), "one memory of logits for all"


def test_the_pool_stays_when_tables_are_replaced(decoder: Decoder) -> None:
    """Graphs that read tables that are gone are dropped, and no others; they are captured anew in rising
    order here."""
    backend = PoolGraphs()
    replay, _ = make_replay(decoder, backend)
    at_start, largest = backend.pool.nbytes, replay._largest
    unedited = [key for key in replay._graphs if key.form and not key.form.is_edited]
    biased = SamplingParams(temperature=1.0, logit_bias={5: 2.0})
    rows = SamplingBatch((SamplingRow(biased, 1, 1, position=1, seed=0),) * 2)
    assert replay._tables.fill(rows)
    key = GraphKey(2, replay._tables.form)
    assert key.form is not None
    assert key.form.generation == 1
    plan: Any = None  # `_graph` hands it to `_fill` alone
    replay._fill = lambda *_: True  # type: ignore[method-assign]
    assert replay._graph(key, plan, rows, [0, 1]) is replay._graphs[key]
    assert [*replay._graphs] == [*unedited, key]
    assert replay._largest is largest is not None
    for bucket in replay.batch.buckets:
        capture(replay, bucket, rows.rows[0])
    assert backend.pool.nbytes < at_start * FRAGMENTS


def test_steps_that_check_drafts_share_that_memory(decoder: Decoder) -> None:
    backend = PoolGraphs()
    replay, _ = make_replay(decoder, backend, drafts=4)
    assert replay.checks is not None
    (key,) = replay.checks.graphs
    assert key.size == (SEQS, replay.checks.tokens)
    assert key.form[:3] == (True, True, False)
    assert not replay.checks.refused
    assert set(backend.sizes) == {backend.sizes[0]}, "they have more tokens than decodes, and come first"
    assert len(backend.sizes) == 2 + 2 * sum(size <= AT_START for size in replay.batch.buckets)


def test_padding_of_steps_that_check_drafts_has_a_block_for_each_of_its_tokens(decoder: Decoder) -> None:
    """All tokens of a step may be padding of one sequence, which may be longer than any other may get."""
    capacity = Capacity.of(512, SEQS, LONGEST, BLOCK, num_draft_tokens=4)
    batch = CheckBatch(capacity, block_groups(decoder.states), BLOCK, CPU)
    batch.fill(StepPlan(0, ()), batch.largest)
    step = batch.batch(batch.largest)
    (paged,) = step.paged.values()
    assert int(step.seq_lens[-1]) == batch.tokens == 512 > LONGEST
    assert paged.block_table.shape[1] * BLOCK >= batch.tokens
    assert not paged.block_table.any()


def test_what_does_not_fit_is_left_to_smaller_graphs(
    decoder: Decoder, caplog: pytest.LogCaptureFixture
) -> None:
    full = PoolGraphs()
    make_replay(decoder, full)
    short = PoolGraphs(most=full.pool.nbytes * 3 // 4)
    with caplog.at_level(logging.INFO, "plait"):
        replay, runner = make_replay(decoder, short)
    assert next(iter(replay._graphs)).bucket < SEQS
    assert f"steps of {SEQS} sequences are not captured" in caplog.text
    assert caplog.text.count("CUDA out of memory") == 1, "a cause is named once"
    assert runner.is_recorded
    assert runner.graphs is not None
    assert runner.graphs.count_refusals()["decode", str(SEQS), "memory"] == 1
    assert runner.graphs.count_graphs()["decode", "4"] == 2, "drawn, and the likeliest"
    assert ("decode", str(SEQS)) not in runner.graphs.count_graphs()
    taken = (short.pool.nbytes) >> 20
    assert f"memory: the graphs of startup have taken {taken} MiB" in caplog.text


def test_a_rank_that_lacks_the_memory_of_a_graph_ends_the_group(decoder: Decoder) -> None:
    """The others have captured the step: they would wait for sums that this rank does not compute."""
    short = PoolGraphs(most=1)
    short.refusals = CaptureRefusals(num_ranks=2)
    with pytest.raises(RankLost, match=f"steps of {SEQS} sequences cannot be captured.* out of memory"):
        make_replay(decoder, short)
    short.captures_at_start = False
    replay, _ = make_replay(decoder, short)
    replay._fill = lambda *_: True  # type: ignore[method-assign]
    plan: Any = None  # `_graph` hands it to `_fill` alone
    rows = SamplingBatch((DRAWN,))
    assert replay._tables.fill(rows)
    with pytest.raises(RankLost, match="steps of 1 sequences cannot be captured"):
        replay._graph(GraphKey(1, replay._tables.form), plan, rows, [0])


def test_the_model_of_a_pool_splits_and_joins_blocks() -> None:
    pool = Pool()
    first = pool.allocate(4096)
    pool.free(first)
    halves = [pool.allocate(2048), pool.allocate(2000)]
    assert halves == [(0, 0), (0, 2048)]
    assert pool.nbytes == 4096
    for half in halves:
        pool.free(half)
    assert pool.allocate(4096) == (0, 0)
    assert pool.allocate(1) == (1, 0)
    assert pool.nbytes == 4096 + 512
