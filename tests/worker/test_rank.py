"""Ranks as processes: the same text as one process, and what happens when one of them is lost."""

from __future__ import annotations

import os
import signal
import threading
from collections import deque
from collections.abc import Iterator
from dataclasses import replace
from multiprocessing import Pipe
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from msgspec import Struct

from plait import LLM, SamplingParams
from plait.config import EngineConfig
from plait.errors import CannotDivide, ConfigError, EngineError, RankLost
from plait.llm.outputs import RequestOutput
from plait.loading.measure_memory import list_steps
from plait.ops.chip import EXAMPLES, Chip
from plait.partition import Rank
from plait.runner.ranks import guard
from plait.runner.ranks.group import RankGroup
from plait.runner.ranks.messages import Leave, RankGpu, RankLoaded, Step, Stepped, encode, receive_report
from plait.schedule.plan import Sampled, SamplingBatch, StepPlan
from plait.worker.rank import Follower
from tests.loading.adapters.made import write_llama
from tests.patience import PATIENCE_S, until

NANO = str(Path(__file__).parents[2] / "examples" / "nano-hybrid")
PROMPTS = ["In the beginning", "And the king said unto them that"]
PARAMS = [
    SamplingParams(max_tokens=24, temperature=0.0, logprobs=1),
    SamplingParams(max_tokens=24, temperature=0.9, seed=3, logprobs=1),
]


def said(outputs: list[RequestOutput]) -> list[tuple[tuple[int, ...], object]]:
    return [(tuple(o.outputs[0].token_ids), o.outputs[0].logprobs) for o in outputs]


def group_of(llm: LLM) -> RankGroup:
    group = llm._loaded.target.ranks
    assert isinstance(group, RankGroup)
    return group


@pytest.fixture(scope="module")
def ranks() -> Iterator[LLM]:
    """Two, and their processes end with the engine."""
    with LLM(NANO, device="cpu", tensor_parallel_size=2, deterministic=True) as llm:
        (pid,) = group_of(llm).pids
        yield llm
    until(lambda: not Path(f"/proc/{pid}").exists())


@pytest.fixture(scope="module")
def alone() -> Iterator[LLM]:
    with LLM(NANO, device="cpu", deterministic=True) as llm:
        yield llm


def test_two_ranks_give_tokens_and_log_probabilities_of_one_to_the_bit(ranks: LLM, alone: LLM) -> None:
    wanted = said(alone.generate(PROMPTS, PARAMS))
    assert said(ranks.generate(PROMPTS, PARAMS)) == wanted
    assert len({tokens for tokens, _ in wanted}) == 2


def test_ranks_run_the_steps_by_which_memory_is_measured_together(ranks: LLM) -> None:
    """Each of their sums waits for all ranks: one alone would wait for ever."""
    loaded = ranks._loaded
    config = EngineConfig(device="cpu", max_num_batched_tokens=8, max_num_seqs=2)
    where = 16, loaded.target.device, loaded.target.dtype
    runs, graphs = list_steps(loaded.runner.decoder, config, *where)
    seen: list[str] = []

    def measure() -> int:
        for what, run in (*runs, *graphs):
            run()
            seen.append(what)
        return 1 << 60

    before = said(ranks.generate(PROMPTS[:1], PARAMS[:1]))
    found = group_of(ranks).measure(measure, config, 16)
    assert len(seen) == 4, "the largest step, a small prompt, decodes, checks"
    assert 0 < found < 1 << 60, "what the other rank has, which is less"
    assert said(ranks.generate(PROMPTS[:1], PARAMS[:1])) == before


def test_a_rank_has_its_share_of_the_weights(ranks: LLM, alone: LLM) -> None:
    whole = alone._loaded.target.weights_nbytes
    assert ranks._loaded.target.weights_nbytes < 0.75 * whole  # embeddings are on every rank


def test_requests_of_an_engine_that_lost_a_rank_end_with_an_error_that_names_it() -> None:
    with LLM(NANO, device="cpu", tensor_parallel_size=2) as llm:
        os.kill(group_of(llm).pids[0], signal.SIGKILL)
        with pytest.raises(RankLost, match="rank 1 ended by signal 9"):
            llm.generate(PROMPTS, PARAMS)


def count_guards() -> int:
    return sum(thread.name == "plait-ranks" for thread in threading.enumerate())


@pytest.mark.sampled(2)
@pytest.mark.parametrize("is_stuck", [False, True])
def test_a_generation_that_waits_for_a_killed_rank_ends_within_seconds(
    is_stuck: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on GPUs, where neither NCCL nor a kernel sees the end of a rank. NCCL can be broken off."""
    monkeypatch.setattr(guard, "ENDED_S", 0.0)
    monkeypatch.setattr(guard, "GRACE_S", 0.2 if is_stuck else PATIENCE_S)
    waiting, broken_off = threading.Event(), threading.Event()

    def wait() -> list[Sampled]:
        waiting.set()
        assert broken_off.wait(PATIENCE_S)
        return [Sampled((0,))]  # of a sum that was broken off

    num_guards = count_guards()
    llm = LLM(NANO, device="cpu", tensor_parallel_size=2)
    group, loop = group_of(llm), llm.front.loop
    llm.generate(PROMPTS[:1], PARAMS[:1])
    ticket: Any = SimpleNamespace(can_be_followed=False, wait=wait)
    monkeypatch.setattr(llm._loaded.runner, "_launch_here", lambda plan, sampling: ticket)
    monkeypatch.setattr(group, "abort", lambda: None if is_stuck else broken_off.set())
    pids = group.pids

    def kill() -> None:
        assert waiting.wait(PATIENCE_S)
        os.kill(pids[0], signal.SIGKILL)

    threading.Thread(target=kill).start()
    with pytest.raises(RankLost, match=rf"a rank \(process {pids[0]}\) has ended"):
        llm.generate(PROMPTS[:1], PARAMS[:1])
    with pytest.raises(EngineError, match=r"has stopped after a fault: .* has ended"):
        llm.generate(PROMPTS[:1], PARAMS[:1])
    broken_off.set()
    llm.close()
    until(lambda: not loop.is_alive and not group.is_open and not Path(f"/proc/{pids[0]}").exists())
    until(lambda: count_guards() <= num_guards)


def test_a_rank_that_computed_something_else_ends_the_engine(ranks: LLM) -> None:
    group = group_of(ranks)
    group._expected[7_000_000] = b"right"
    group._reported[7_000_000] = {1: b"wrong"}
    with pytest.raises(RankLost, match="rank 1 computed something else in step 7000000 than rank 0"):
        group._check()
    del group._reported[7_000_000], group._expected[7_000_000]


def test_a_model_that_cannot_be_divided_is_refused_before_any_process_starts(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(RankGroup, "_start", lambda *_: pytest.fail("a process was started"))
    with pytest.raises(CannotDivide, match=r"layers\.\d+\.\w+: \d+ \w+ cannot be divided .* among 3"):
        LLM(NANO, device="cpu", tensor_parallel_size=3)
    with pytest.raises(ConfigError, match="expert_parallel: there is one rank"):
        LLM(NANO, device="cpu", expert_parallel=True)
    write_llama(tmp_path)
    with pytest.raises(ConfigError, match="expert_parallel: this model has no experts to divide"):
        LLM(str(tmp_path), device="cpu", tensor_parallel_size=2, expert_parallel=True)
    with pytest.raises(ConfigError, match="names 3 GPUs, and tensor_parallel_size is 2"):
        LLM(NANO, device="cuda:0,1,2", tensor_parallel_size=2)


def test_a_rank_that_fails_at_once_is_reported_before_any_other_waits_for_it(tmp_path: Path) -> None:
    group = RankGroup(Rank(0, 2), str(tmp_path / "nothing"), EngineConfig(device="cpu"))
    try:
        with pytest.raises(RankLost, match=r"rank 1 has failed: .*nothing"):
            group.wait_joined()
    finally:
        group.close()


def test_a_rank_launches_a_step_while_the_one_before_it_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """All GPUs wait for the last rank: one that reads a step's tokens first keeps them idle until then."""
    seen: list[str] = []

    class Running(Struct):
        number: int
        can_be_followed: bool

        def wait(self) -> list[Sampled]:
            seen.append(f"wait {self.number}")
            return []

    class Steps:
        def launch(self, plan: StepPlan, sampling: SamplingBatch) -> Running:
            seen.append(f"launch {plan.step}")
            return Running(plan.step, can_be_followed=plan.step < 4)

    def leave(code: int) -> None:
        raise SystemExit(code)

    monkeypatch.setattr(os, "_exit", leave)
    lead, connection = Pipe()
    follower = Follower.__new__(Follower)
    follower._connection, follower._runner, follower._running = connection, Steps(), deque()  # type: ignore[assignment]
    for number in range(1, 6):
        lead.send_bytes(encode(Step(number, StepPlan(number, ()), SamplingBatch(()))))
    lead.send_bytes(encode(Leave()))
    with pytest.raises(SystemExit):
        follower.run()
    first = ["launch 1", "launch 2", "wait 1", "launch 3", "wait 2"]
    assert seen == [*first, "launch 4", "wait 3", "wait 4", "launch 5", "wait 5"]
    reports = [receive_report(lead) for _ in range(5)]
    assert [report.number for report in reports if isinstance(report, Stepped)] == [1, 2, 3, 4, 5]


def test_a_rank_reports_a_step_that_none_follows() -> None:
    lead, connection = Pipe()
    follower = Follower.__new__(Follower)
    ticket: Any = SimpleNamespace(can_be_followed=True, wait=list)
    runner: Any = SimpleNamespace(launch=lambda plan, sampling: ticket)
    follower._connection, follower._runner, follower._running = connection, runner, deque()

    def serve() -> None:
        with pytest.raises(EOFError):
            follower.run()

    serving = threading.Thread(target=serve)
    serving.start()
    lead.send_bytes(encode(Step(7, StepPlan(7, ()), SamplingBatch(()))))
    assert lead.poll(PATIENCE_S)
    report = receive_report(lead)
    assert isinstance(report, Stepped)
    assert report.number == 7
    lead.close()
    serving.join(PATIENCE_S)
    assert not serving.is_alive()


HOPPER, ADA = EXAMPLES[90], EXAMPLES[89]
BROKEN = {"linear/triton/4-bit": "it is off by 0.3", "norm/triton/rms": ""}


@pytest.mark.parametrize(
    ("other", "reason"),
    [
        (HOPPER, None),
        (replace(HOPPER, name="another card of this kind", trials={"norm/triton/rms": ""}), None),
        (ADA, r"rank 1 has an sm_89 as RTX 4090 \(sm_89\), and rank 0 an sm_90 .* CUDA_VISIBLE_DEVICES"),
        (
            replace(HOPPER, trials=BROKEN),
            "rank 1 has other kernels than rank 0: linear/triton/4-bit went wrong",
        ),
    ],
)
def test_ranks_on_other_gpus_or_with_other_kernels_are_refused(
    other: Chip, reason: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours, theirs = Pipe()

    def start(group: RankGroup, join: object) -> None:
        group._members.append(SimpleNamespace(index=1, connection=ours))  # type: ignore[arg-type]

    monkeypatch.setattr(RankGroup, "_start", start)
    monkeypatch.setattr(RankGroup, "close", lambda self: None)
    group = RankGroup(Rank(0, 2), "a model", EngineConfig(device="cpu"))
    theirs.send_bytes(encode(RankLoaded("the same", 0, RankGpu.of(other))))
    if reason is None:
        group.wait_loaded("the same", HOPPER)
        return
    with pytest.raises(CannotDivide, match=reason):
        group.wait_loaded("the same", HOPPER)
