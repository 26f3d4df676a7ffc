"""The steps of a device through an engine: rows, faults, drafts, snapshots, what the host must sample.

Mamba's ops and draws are torch's here, so nothing is interpreted, and this is quick.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from msgspec.structs import replace

pytest.importorskip("triton", reason="Triton is not installed here")

from plait.errors import CannotRecord, EngineError
from plait.model.decoder import Decoder
from plait.runner.device.ticket import DeviceTicket
from plait.runner.steps.inputs import upload
from plait.schedule.plan import FOLLOW, Sampled, SamplingBatch, StepPlan, Ticket
from plait.schedule.pools import CacheOptions
from plait.schedule.speculate import Speculation
from plait.verify.matrix import CheapRows, FailingRunner, KnownReplies
from tests.runner.device_engine import Side, plain_decoder

PROMPTS = ([3, 5, 7], [11], [2, 9, 4, 4, 8, 1, 30], [17, 6], [8] * 20, [1, 2], [44, 3, 9, 10, 12])
LENGTHS = (9, 3, 17, 1, 12, 5, 20)


@pytest.fixture(scope="module")
def decoder(tmp_path_factory: pytest.TempPathFactory) -> Decoder:
    return plain_decoder("mamba2", tmp_path_factory.mktemp("mamba2"))


def side(decoder: Decoder, has_graphs: bool = True, **options: Any) -> Side:
    return Side(decoder, has_graphs, chip=None, **{"num_seqs": 5, **options})


def submit_all(one: Side, **params: Any) -> None:
    for i, (prompt, length) in enumerate(zip(PROMPTS, LENGTHS, strict=True)):
        one.submit(
            f"r{i}", prompt, **{"max_tokens": length, "temperature": 0.8 * (i % 2), "seed": i, **params}
        )


@pytest.fixture(scope="module")
def want(decoder: Decoder) -> dict[str, list[int]]:
    """What the requests get op by op, one step after the other."""
    one = side(decoder, has_graphs=False)
    submit_all(one)
    return one.finish()


def watch(one: Side) -> list[StepPlan]:
    """The plans that its runner gets from now on."""
    plans: list[StepPlan] = []
    launch = one.runner.launch

    def launched(plan: StepPlan, sampling: SamplingBatch) -> Ticket:
        plans.append(plan)
        return launch(plan, sampling)

    one.runner.launch = launched  # type: ignore[method-assign]
    return plans


def test_rows_come_and_go_and_the_text_is_that_of_steps_op_by_op(
    decoder: Decoder, want: dict[str, list[int]]
) -> None:
    one = side(decoder)
    plans, moved = watch(one), list[int]()
    place = one.replay.batch.place

    def placed(*args: Any) -> Any:
        changes = place(*args)
        moved.extend(changes.targets)
        return changes

    one.replay.batch.place = placed  # type: ignore[method-assign]
    submit_all(one)
    assert one.finish() == want
    assert moved, "rows behind a smaller graph move into it, with tokens that only the device knows"
    assert not one.replay._refused
    assert {key.bucket for key in one.replay._graphs} == {1, 2, 4, 8}
    follows = [c for plan in plans for c in plan.chunks if c.token_ids == (FOLLOW,)]
    assert len(follows) > sum(LENGTHS) // 2
    assert one.engine.num_ahead > 20


def test_a_rank_that_waits_for_each_step_follows_what_it_knows_by_then(
    decoder: Decoder, want: dict[str, list[int]]
) -> None:
    """Rank 0 launches a step before it knows the last one's tokens. The others may know them: they failed."""
    lead, other = side(decoder), side(decoder)
    launch, answers = lead.runner.launch, list[tuple[Ticket, list[Sampled]]]()

    def launch_on_both(plan: StepPlan, sampling: SamplingBatch) -> Ticket:
        ticket = launch(plan, sampling)
        answers.append((ticket, other.runner.launch(plan, sampling).wait()))
        return ticket

    lead.runner.launch = launch_on_both  # type: ignore[method-assign]
    submit_all(lead)
    assert lead.finish() == want
    assert lead.engine.num_ahead > 20
    assert not lead.engine.metrics.num_failed_steps
    assert all(ticket.wait() == found for ticket, found in answers)


def test_a_token_of_the_host_is_no_token_to_follow(decoder: Decoder) -> None:
    one = side(decoder)
    one.submit("a", [3, 4, 5], max_tokens=4)
    plans = watch(one)
    one.finish()
    decode = next(plan for plan in plans if plan.chunks[0].token_ids == (FOLLOW,))
    (chunk,) = decode.chunks
    given = replace(chunk, seq_id=99, token_ids=(7,))
    one.replay.batch.update(StepPlan(90, (given,)), 1)
    with pytest.raises(EngineError, match="sequence 99 follows a token that was not sampled"):
        one.replay.batch.update(StepPlan(91, (replace(given, token_ids=(FOLLOW,)),)), 1)


def test_a_steady_decode_writes_nothing_to_the_device(
    decoder: Decoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, written = side(decoder, num_seqs=2), list[int]()
    apply = type(one.replay.batch)._apply

    def seen(batch: Any, changes: Any) -> None:
        written.append(len(changes.addresses) + len(changes.targets))
        apply(batch, changes)

    monkeypatch.setattr(type(one.replay.batch), "_apply", seen)
    for name in ("a", "b"):
        one.submit(name, [3, 4, 5], max_tokens=14, temperature=0.5)
    one.finish()
    steady = written[3:]
    assert len(steady) > 8
    assert not any(steady)


@pytest.mark.parametrize("is_late", [False, True])
def test_a_step_that_fails_costs_no_reply(
    decoder: Decoder, want: dict[str, list[int]], is_late: bool
) -> None:
    one = side(decoder)
    if is_late:  # it has run, and the one behind it, too
        failing: Any = FailingRunner(one.engine)
        one.engine.runner = failing
    else:
        launch, numbers = one.replay.launch, iter(range(10_000))

        def broken(plan: StepPlan, sampling: SamplingBatch) -> Ticket:
            if next(numbers) % 9 == 8 and len(plan.chunks) > 1:
                raise OSError("the device is lost for a moment")
            return launch(plan, sampling)

        one.replay.launch = broken  # type: ignore[method-assign]
    submit_all(one)
    assert one.finish() == want
    assert one.engine.metrics.num_failed_steps > 1


def test_snapshots_of_prompts_are_right_though_the_next_step_runs_already(decoder: Decoder) -> None:
    """Each prompt comes three times, and goes on where the one before ended."""
    cache = CacheOptions(snapshot_interval=16)
    found, hits = [], []
    for has_graphs in (False, True):
        one = side(decoder, has_graphs, cache=cache, budget=32)
        replies = []
        text = [5, 9, 2] * 7
        for turn in range(4):
            one.submit(f"t{turn}", text, more={"boundaries": (16,)}, max_tokens=5)
            one.submit(f"u{turn}", [*text[:18], 40, turn], max_tokens=4)
            replies.append(one.finish())
            text = [*text, *replies[-1][f"t{turn}"], 7]
        found.append(replies)
        hits.append(one.engine.scheduler.cache_counts["hit_tokens"])
    assert found[0] == found[1]
    assert hits[1] > 0


def test_drafts_are_checked_op_by_op_and_nothing_runs_ahead_of_them(
    decoder: Decoder, want: dict[str, list[int]]
) -> None:
    one = side(decoder)
    known = [[*prompt, *want[f"r{i}"]] for i, prompt in enumerate(PROMPTS)]
    proposer = KnownReplies(known, decoder.spec.vocab_size)
    one.engine.speculation = Speculation(proposer, CheapRows(), 3, replays=True)
    submit_all(one)
    assert one.finish() == want
    assert one.engine.metrics.num_accepted_tokens > 0
    assert one.engine.num_ahead == 0


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    "params",
    [
        {"logprobs": 2},
        {"prompt_logprobs": 0},
        {"repetition_penalty": 1.9, "frequency_penalty": 1.7, "temperature": 0.2},
        {"logit_bias": {5: 3.0, 7: -9.0}},
        {"min_tokens": 4},
        {"top_k": 4, "top_p": 0.7, "min_p": 0.02},
    ],
)
def test_what_requests_ask_of_the_sampler_is_the_same(decoder: Decoder, params: dict[str, Any]) -> None:
    events = []
    for has_graphs in (False, True):
        one = side(decoder, has_graphs)
        more = {"stop_token_ids": frozenset(range(0, 90, 3))} if "min_tokens" in params else {}
        for i, prompt in enumerate(PROMPTS):
            chosen = params if i % 3 else {}  # next to others without such requests
            one.submit(
                f"r{i}", prompt, more=more, **{"max_tokens": 9, "temperature": 0.7, "seed": i, **chosen}
            )
        one.finish()
        events.append(
            {
                name: (
                    [t for e in found for t in e.token_ids],
                    [lp.token_id for e in found for lp in e.logprobs or ()],
                    [e.finish_reason for e in found][-1],
                )
                for (name, _), found in one.reader.events.items()
            }
        )
    assert events[0] == events[1]


def test_a_model_that_overflows_is_found_when_its_step_is_read(
    decoder: Decoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = side(decoder)
    wait = DeviceTicket.wait
    numbers = iter(range(1000))

    def broken(ticket: DeviceTicket) -> list[Sampled]:
        if next(numbers) == 5:
            bad = torch.full((2, 8), torch.nan, dtype=torch.float64)
            object.__setattr__(ticket, "reads", [lambda: bad for _ in ticket.reads])
        return wait(ticket)

    monkeypatch.setattr(DeviceTicket, "wait", broken)
    one.submit("a", [3, 4], max_tokens=12)
    with pytest.raises(EngineError, match="a weight or a state is broken"), pytest.warns(RuntimeWarning):
        one.finish()
    assert one.engine.metrics.num_failed_steps == 1


def test_where_a_step_cannot_be_captured_it_runs_op_by_op(
    decoder: Decoder, want: dict[str, list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any) -> Any:
        raise CannotRecord("this driver is too old")

    one = side(decoder)
    monkeypatch.setattr(one.replay, "_capture", refuse)
    submit_all(one)
    assert one.finish() == want
    assert set(one.replay._refused.values()) == {"this driver is too old"}
    assert one.engine.num_ahead > 20, "the host is not waited for all the same"


def test_rows_of_a_table_have_the_same_stride_on_a_device_whatever_their_width() -> None:
    """A kernel is compiled for strides that 16 divides and anew for others: not while a request waits."""
    parts = [np.arange(3), *(np.arange(2 * width).reshape(2, width) for width in (1, 3, 16, 17))]
    for found, part in zip(upload(parts, torch.device("meta")), parts, strict=True):
        assert found.shape == part.shape
        assert found.stride(-1) == 1
        assert found.stride(0) % 16 == 0 or found.dim() == 1
        assert found.storage_offset() % 16 == 0
    for found, part in zip(upload(parts, torch.device("cpu")), parts, strict=True):
        assert found.is_contiguous()
        assert found.tolist() == part.tolist()


def test_a_request_with_penalties_gets_its_tokens_each_time_it_comes(decoder: Decoder) -> None:
    """The first draw has counted its token on the device, in the line that the same request finds again."""
    one = side(decoder)
    for name in ("first", "second"):
        one.submit(name, PROMPTS[0], max_tokens=5, temperature=0.0, seed=3, frequency_penalty=2.0)
        found = one.finish()
    assert found["first"] == found["second"]


def test_requests_that_differ_in_penalties_alone_do_not_take_each_others_counts(decoder: Decoder) -> None:
    """When one ends, the other has as many tokens, and the same up to where counts were written."""
    one = side(decoder)
    params = {"temperature": 0.0, "seed": 3, "frequency_penalty": -0.7, "max_tokens": 16}
    other = {**params, "frequency_penalty": -2.0, "max_tokens": 9}
    one.submit("alone", PROMPTS[0], **params)
    wanted = one.finish()["alone"]
    one.submit("first", PROMPTS[1], **other)  # these make tables and graphs
    one.submit("second", PROMPTS[3], **params)
    one.finish()
    one.submit("a", PROMPTS[0], **other)
    one.submit("b", PROMPTS[0], **params)
    found = one.finish()
    assert found["a"][0] == found["b"][0]
    assert found["a"] != found["b"][:9]
    assert found["b"] == wanted
