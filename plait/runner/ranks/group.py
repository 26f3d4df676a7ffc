"""The other ranks of a model, as rank 0 holds them: started, sent every plan, and checked."""

from __future__ import annotations

import subprocess
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import TypeVar

from torch import Tensor

from plait.config import EngineConfig
from plait.errors import BadFile, CannotDivide, EngineError, PlaitError, RankLost, clip_text
from plait.ops.chip import Chip
from plait.partition import Rank
from plait.runner.ranks.meeting import MeetingFolder
from plait.runner.ranks.messages import (
    AdapterLoaded,
    ClearAdapter,
    Failed,
    FromRank,
    Join,
    Joined,
    Leave,
    LoadAdapter,
    MeasureMemory,
    MemoryMeasured,
    Prepare,
    RankGpu,
    RankLoaded,
    RankMessage,
    Score,
    Step,
    Stepped,
    digest_of,
    encode,
    receive_report,
)
from plait.runner.ranks.processes import RankProcess, StartedRank, take_rank
from plait.runner.steps.replay import Run
from plait.schedule.plan import Sampled, SamplingBatch, StepPlan, Ticket

R = TypeVar("R", Joined, RankLoaded, MemoryMeasured, AdapterLoaded)


@dataclass(frozen=True, slots=True)
class _Member:
    index: int
    started: StartedRank

    @property
    def connection(self) -> Connection:
        return self.started.connection

    @property
    def process(self) -> RankProcess:
        return self.started.process


class RankGroup:
    """Ranks 1 and up, each a process. They end when this process does, however it ends.

    Every call that finds a rank gone, failed, or with other tokens raises RankLost: memory of the ranks may
    differ from then on, so nothing can run any more.
    """

    def __init__(self, rank: Rank, model: str, config: EngineConfig) -> None:
        """Start the processes. Raises OSError and RankLost. `rank`: this process's, number 0."""
        self.rank = rank
        self._folder = MeetingFolder()
        self.meeting = str(self._folder.path / "meeting")
        self._members: list[_Member] = []
        self.is_open, self._lost_by = True, list[RankLost]()
        self.abort: Callable[[], object] = _abort_nothing  # breaks off what this rank waits for, where it can
        self._number = 0
        self._expected: dict[int, bytes] = {}  # by the number of a step that some rank has not reported
        self._reported: dict[int, dict[int, bytes]] = {}  # by step, then rank
        try:
            for index in range(1, rank.size):
                join = Join(
                    *(index, rank.size, rank.shares, rank.block, rank.whole_experts, self.meeting, model),
                    config,
                )
                self._start(join)
        except BaseException:
            self.close()
            raise

    def _start(self, join: Join) -> None:
        member = _Member(join.index, take_rank())
        self._members.append(member)
        try:
            member.connection.send_bytes(encode(join))
        except OSError as error:
            raise self._explain(error) from error

    @property
    def started(self) -> list[StartedRank]:
        """Ranks 1 and up."""
        return [member.started for member in self._members]

    @property
    def pids(self) -> list[int]:
        """The processes of ranks 1 and up."""
        return [member.process.pid for member in self._members]

    def wait_joined(self) -> None:
        """Wait until all are about to meet: in the meeting, one that has failed is waited for for minutes."""
        for member in self._members:
            self._expect_report(member, Joined)

    def wait_loaded(self, agreement: str, chip: Chip | None = None) -> None:
        """Wait until all have loaded. Raises RankLost if one has another model, and CannotDivide if one's GPU
        or kernels are not those of rank 0, which has `chip`."""
        own = RankGpu.of(chip)
        for member in self._members:
            loaded = self._expect_report(member, RankLoaded)
            if loaded.agreement != agreement:
                raise RankLost(
                    f"rank {member.index} has loaded another model, or with other options or another version"
                )
            if own and loaded.gpu and (why := own.why_unlike(loaded.gpu)):
                raise CannotDivide(f"rank {member.index} {why}")

    def _expect_report(self, member: _Member, kind: type[R]) -> R:
        report = self._receive(member)
        while isinstance(report, Stepped):  # of an earlier step, which was not waited for
            self._record(member, report)
            report = self._receive(member)
        if not isinstance(report, kind):
            raise RankLost(f"rank {member.index} sent {type(report).__name__}, not {kind.__name__}")
        return report

    def measure(self, run: Callable[[], int], config: EngineConfig, max_model_len: int) -> int:
        """Run the steps by which memory is divided on all ranks, which wait for each other in every step.

        run: those of this rank -> bytes that it has left for state. Returns what the rank with the least has.
        """
        self._send(MeasureMemory(config, max_model_len))
        try:
            own = run()
        except PlaitError:  # of this rank alone: too little memory, or a kernel that cannot run
            raise
        except Exception as error:
            raise self._explain(error) from error
        return min(own, *(self._expect_report(member, MemoryMeasured).nbytes for member in self._members))

    def prepare(self, message: Prepare) -> None:
        """Have all make the memory of sequences."""
        self._send(message)

    def load_adapter(self, slot: int, path: str, digest: str) -> None:
        """Have the others put an adapter into a slot, as this rank has. digest: of what this one has read.

        Raises BadFile where one of them cannot, or reads other numbers; the slot is to be cleared then.
        """
        self._send(LoadAdapter(slot, path))
        reports = [(member.index, self._expect_report(member, AdapterLoaded)) for member in self._members]
        for index, report in reports:
            if report.why or report.digest != digest:
                why = report.why or "it reads other numbers there than rank 0"
                raise BadFile(f"{path}: rank {index} has not loaded this adapter: {why}")

    def clear_adapter(self, slot: int) -> None:
        """Have the others free a slot."""
        self._send(ClearAdapter(slot))

    def launch(self, run: Run, plan: StepPlan, sampling: SamplingBatch) -> Ticket:
        """Run a step on all ranks. What fails here has failed in the middle of what others compute."""
        self._number += 1
        data = self._send(Step(self._number, plan, sampling))
        try:
            return RankTicket(self, run(plan, sampling), self._number, data)
        except Exception as error:
            raise self._explain(error) from error

    def score(self, run: Callable[[], Tensor], token_ids: Sequence[int], chunk_size: int) -> Tensor:
        """Logits of a prompt, computed by all ranks."""
        self._send(Score(tuple(token_ids), chunk_size))
        try:
            return run()
        except Exception as error:
            raise self._explain(error) from error

    def expect(self, number: int, data: bytes, answers: Sequence[Sampled]) -> None:
        """Compare what this rank sampled in a step with what the others did, as far as they have reported."""
        self._expected[number] = digest_of(data, answers)
        self._check()

    def close(self) -> None:
        """End the other ranks."""
        for member in self._members:
            with suppress(OSError):
                member.connection.send_bytes(encode(Leave()))
            member.started.let_go()
        for member in self._members:
            member.started.end()
        self._members, self.is_open = [], False
        self._folder.remove()

    def kill(self, error: RankLost) -> None:
        """End the other ranks at once, so that what waits for them raises this error. From any thread."""
        self._lost_by.append(error)
        for started in self.started:
            started.process.kill()
        # What it breaks off may hold it, too.
        threading.Thread(target=self.abort, name="plait-abort", daemon=True).start()

    def _send(self, message: RankMessage) -> bytes:
        self._check()
        data = encode(message)
        for member in self._members:
            try:
                member.connection.send_bytes(data)
            except OSError as error:
                raise self._explain(error) from error
        return data

    def _check(self) -> None:
        """Take the reports that are there, and compare them."""
        for member in self._members:
            while member.connection.poll():
                report = self._receive(member)
                if isinstance(report, Stepped):
                    self._record(member, report)
        for number in self._expected.keys() & self._reported.keys():
            for index, digest in self._reported[number].items():
                if digest != self._expected[number]:
                    raise RankLost(f"rank {index} computed something else in step {number} than rank 0")
            if len(self._reported[number]) == len(self._members):
                del self._expected[number], self._reported[number]

    def _record(self, member: _Member, report: Stepped) -> None:
        self._reported.setdefault(report.number, {})[member.index] = report.digest

    def _receive(self, member: _Member) -> FromRank:
        try:
            report = receive_report(member.connection)
        except (EOFError, OSError, EngineError) as error:
            raise self._explain(error) from error
        if isinstance(report, Failed):
            raise RankLost(f"rank {member.index} has failed: {report.text}")
        return report

    def _explain(self, error: BaseException) -> RankLost:
        """What to report of an error that ends the group."""
        if self._lost_by:
            return RankLost(str(self._lost_by[0]))
        if isinstance(error, RankLost):
            return error
        ended = ", ".join(self._ends())
        what = f"{ended}; " if ended else ""
        kind = "" if isinstance(error, PlaitError) else f"{type(error).__name__}: "
        return RankLost(f"a step cannot go on: {what}{kind}{clip_text(' '.join(str(error).split()), 200)}")

    def _ends(self) -> Iterator[str]:
        for member in self._members:
            if (failure := member.started.read_failure()) is not None:
                yield f"rank {member.index} has failed: {failure}"
            with suppress(subprocess.TimeoutExpired):
                code = member.process.wait(0.2)
                how = f"by signal {-code}" if code < 0 else f"with code {code}"
                yield f"rank {member.index} ended {how}"


def _abort_nothing() -> None:
    """Before ranks have met."""


@dataclass(frozen=True, slots=True)
class RankTicket:
    """A step that runs on all ranks."""

    group: RankGroup
    ticket: Ticket
    number: int
    data: bytes

    @property
    def can_be_followed(self) -> bool:
        return self.ticket.can_be_followed

    def wait(self) -> list[Sampled]:
        """The answers. Raises RankLost."""
        try:
            answers = self.ticket.wait()
        except Exception as error:
            raise self.group._explain(error) from error
        self.group.expect(self.number, self.data, answers)
        return answers
