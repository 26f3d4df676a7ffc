"""Steps that check drafts are captured, and give the text of steps op by op: a GPU's kernels, interpreted."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton", reason="Triton is not installed here")

from plait.memory import BlockGroup
from plait.model.decoder import Decoder
from plait.runner.device.check_batch import LONGEST, CheckBatch, CheckSize
from plait.runner.host.static_batch import Capacity
from plait.schedule.plan import FOLLOW, Chunk, StepPlan
from plait.schedule.speculate import Speculation
from plait.verify.matrix import CheapRows, KnownReplies
from tests.runner.device_engine import CPU, Side, gpu_decoder

PROMPTS, LENGTHS = ([3, 5, 7], [11], [2, 9, 4, 4, 8, 1, 30]), (9, 5, 7)
ONE = {"num_hidden_layers": 1}


def submit_all(one: Side, **params: Any) -> None:
    for i, (prompt, length) in enumerate(zip(PROMPTS, LENGTHS, strict=True)):
        one.submit(
            f"r{i}", prompt, **{"max_tokens": length, "temperature": 0.8 * (i % 2), "seed": i, **params}
        )


def drafting(decoder: Decoder, texts: Sequence[list[int]], has_graphs: bool) -> Side:
    """An engine of which the drafts are right but for each third token."""
    one = Side(decoder, has_graphs)
    one.engine.speculation = Speculation(
        KnownReplies(texts, decoder.spec.vocab_size), CheapRows(), 3, replays=True
    )
    return one


def check_family(decoder: Decoder, **params: Any) -> Side:
    """Replies without drafts, with drafts that are checked op by op, and in captured steps."""
    plain = Side(decoder, has_graphs=False)
    submit_all(plain, **params)
    want = plain.finish()
    texts = [[*prompt, *want[f"r{i}"]] for i, prompt in enumerate(PROMPTS)]
    one = drafting(decoder, texts, has_graphs=True)
    shown: list[int] = []
    one.replay.show(lambda plan, hidden: shown.append(len(hidden) - plan.num_tokens))
    submit_all(one, **params)
    assert one.finish() == want
    assert one.engine.metrics.num_accepted_tokens > 0
    checks = one.replay.checks
    assert checks is not None
    assert checks.graphs
    assert not checks.refused
    assert shown
    assert min(shown) >= 0
    return one


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gemma2", "mamba2", "deepseek_v3", "qwen3_next"])
def test_drafts_are_checked_in_captured_steps_with_the_text_of_steps_op_by_op(
    name: str, tmp_path: Path
) -> None:
    check_family(gpu_decoder(name, tmp_path / name, **ONE if name == "mamba2" else {}))


@pytest.mark.slow
def test_so_are_those_of_requests_with_penalties(tmp_path: Path) -> None:
    check_family(
        gpu_decoder("llama", tmp_path / "llama", **ONE), repetition_penalty=1.7, frequency_penalty=0.9
    )


def make_batch(capacity: Capacity) -> CheckBatch:
    return CheckBatch(capacity, [BlockGroup("all", None, ())], 8, CPU)


def chunk(seq_id: int, start: int, ids: Sequence[int], **more: Any) -> Chunk:
    return Chunk(seq_id, start, tuple(ids), ((1 + seq_id, 9),), seq_id, **{"num_logits": len(ids), **more})


def test_a_plan_is_written_in_front_of_padding_that_no_sequence_reads() -> None:
    batch = make_batch(Capacity(tokens=64, logits=20, seqs=4, blocks=3))
    plan = StepPlan(1, (chunk(1, 6, [5, 6, 7]), chunk(2, 4, [8], num_logits=1)))
    size = batch.size_of(plan)
    assert size == CheckSize(2, 4)
    for written in (StepPlan(0, ()), plan):  # what a step wrote before is gone
        batch.fill(written, CheckSize(2, 8))
    made = batch.batch(CheckSize(2, 8))
    assert made.token_ids.tolist() == [5, 6, 7, 8, 0, 0, 0, 0]
    assert made.positions.tolist() == [6, 7, 8, 4, 0, 0, 0, 0]
    assert made.query_start.tolist() == [0, 3, 4, 8]
    assert made.seq_lens.tolist() == [9, 5, 4]
    assert made.state_slots.tolist() == [1, 2, 0]
    assert made.has_history.tolist() == [True] * 3
    assert made.logit_rows.tolist() == [0, 1, 2, 3, 0, 0, 0, 0]
    paged = made.paged["all"]
    assert paged.slot_mapping.tolist() == [22, 23, 72, 28, 0, 0, 0, 0]
    assert paged.block_table[:, :2].tolist() == [[2, 9], [3, 9], [0, 0]]
    assert not paged.block_table[:, 2:].any()


def test_a_step_without_padding_has_an_empty_last_row() -> None:
    batch = make_batch(Capacity(tokens=64, logits=20, seqs=2, blocks=3))
    plan = StepPlan(1, (chunk(1, 6, [5, 6, 7]), chunk(2, 4, [8])))
    batch.fill(plan, CheckSize(2, 4))
    made = batch.batch(CheckSize(2, 4))
    assert made.query_start.tolist() == [0, 3, 4, 4]
    assert made.seq_lens.tolist() == [9, 5, 1]


@pytest.mark.parametrize(
    "other",
    [
        chunk(3, 0, [1, 2]),
        chunk(3, 4, [FOLLOW]),
        chunk(3, 4, [1] * (LONGEST + 1)),
        chunk(3, 4, [1, 2], num_logits=0),
        chunk(3, 4, [1, 2], num_pooled=1),
        chunk(3, 4, [1, 2], adapter=1),
    ],
)
def test_prompts_and_what_needs_more_than_tokens_are_no_checks(other: Chunk) -> None:
    batch = make_batch(Capacity(tokens=64, logits=20, seqs=4, blocks=3))
    assert batch.size_of(StepPlan(1, (chunk(1, 6, [5, 6, 7]), other))) is None
    assert batch.size_of(StepPlan(1, (chunk(1, 6, [5, 6, 7]),) * 5)) is None


def test_there_are_never_as_many_tokens_as_sequences() -> None:
    """Some ops know decodes by that, and a sequence of such a step may have no token."""
    batch = make_batch(Capacity(tokens=64, logits=20, seqs=4, blocks=3))
    size = batch.size_of(StepPlan(1, (chunk(1, 6, [5, 6]),)))
    assert size == CheckSize(1, 4)
    made = batch.batch(size)
    assert len(made.token_ids) > len(made.seq_lens)
