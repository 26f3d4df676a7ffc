"""Attempts at GPU kernels in child processes, and what each says of a kernel.

A kernel that hangs or crashes ends its child, and so does a machine that is short of memory, or too busy to
compile in time. So such an attempt is repeated when all others are done, by one child alone: only what
happens twice is a verdict. What a child answers is one at once.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from dataclasses import dataclass
from threading import Lock
from types import TracebackType

from plait.errors import clip_text
from plait.loading.kernel_trials.verdicts import MAX_REASON, Verdicts
from plait.text.isolation.child_process import ChildProcess, is_foreign

START_S = 180.0  # for the child to import torch and start the device
TRIAL_S = 150.0  # for one kernel: some are four launches, which a slow processor compiles first
END_S = 30.0  # for a child to be gone that has closed its pipe: the driver frees a context first
KEEP_S = 5.0  # between two times that verdicts are kept: an engine may end before all trials are done
WORKERS = 4  # children at a time: most of a trial is compiling
MAX_ANSWER = 1 << 14  # bytes
CHILD = "plait.loading.kernel_trials.child"
EARLY, IN_TURNS = "early", "in-turns"  # how a child launches kernels
UNTRIED = "it could not be tried"
OnTrial = Callable[[int, int], None]  # (done, of)
OnVerdicts = Callable[[Verdicts], None]


@dataclass(frozen=True, slots=True)
class TrialCase:
    """A case of an op, by its number. `changes`: (word, value) of what is otherwise in it."""

    number: int
    changes: tuple[tuple[str, str], ...] = ()

    def apply(self, cases: Sequence[Mapping[str, object]]) -> dict[str, object]:
        """What the case says, of the op's `cases`."""
        return {**cases[self.number], **dict(self.changes)}


@dataclass(frozen=True, slots=True)
class KernelTrial:
    """One kernel on some cases of its op. `key`: as `trial_keys` names it."""

    key: str
    op: str
    variant: str
    dtype: str
    cases: tuple[TrialCase, ...]

    def request(self) -> str:
        cases = [(case.number, case.changes) for case in self.cases]
        asked = {"op": self.op, "variant": self.variant, "cases": cases, "dtype": self.dtype}
        return json.dumps(asked) + "\n"


@dataclass(frozen=True, slots=True)
class TrialRun:
    """How trials run: on which device, in how many children at a time, how many seconds each may take.

    `modules`: imported by the children, too, because they register variants. `is_early`: kernels may begin
    before those before them have ended, as the engine will launch them.
    """

    device: str
    modules: tuple[str, ...] = ()
    trial_s: float = TRIAL_S
    workers: int = WORKERS
    is_early: bool = False


@dataclass(frozen=True, slots=True)
class Attempt:
    """What one attempt found. is_verdict: on the kernel, else why it could not be tried.

    ends_child: the child is of no use any more. is_sure: another attempt would find the same.
    """

    is_verdict: bool
    text: str
    ends_child: bool = False
    is_sure: bool = True


class TrialFindings:
    """What the trials of one run have found, by key: verdicts, and why others could not be tried."""

    def __init__(self, total: int, on_trial: OnTrial, on_verdicts: OnVerdicts) -> None:
        self.lasting, self.passing = dict[str, str](), dict[str, str]()
        self._total, self._on_trial, self._on_verdicts = total, on_trial, on_verdicts
        self._lock, self._kept_s = Lock(), time.monotonic()

    def add(self, trial: KernelTrial, attempt: Attempt) -> None:
        with self._lock:
            found = self.lasting if attempt.is_verdict else self.passing
            found[trial.key] = clip_text(attempt.text, MAX_REASON)
            if attempt.is_verdict and time.monotonic() - self._kept_s >= KEEP_S:
                self._on_verdicts(self.lasting)
                self._kept_s = time.monotonic()
            self._on_trial(len(self.lasting) + len(self.passing), self._total)


class TrialChildren:
    """The children that run now. Where this context ends, so do they, whatever they are doing."""

    def __init__(self, run: TrialRun) -> None:
        self.run, self.is_closed = run, False
        self._live, self._lock = set[ChildProcess](), Lock()

    def __enter__(self) -> TrialChildren:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def begin(self) -> ChildProcess:
        """A child that may not be ready yet. Raises OSError."""
        run = self.run
        how = EARLY if run.is_early else IN_TURNS
        child = ChildProcess(CHILD, run.device, how, *run.modules, max_bytes=MAX_ANSWER, inherits=True)
        with self._lock:
            self._live.add(child)
            if self.is_closed:
                child.kill()
        return child

    def end(self, child: ChildProcess) -> None:
        child.stop()
        with self._lock:
            self._live.discard(child)

    def close(self) -> None:
        """Kill all of them: a thread that waits for one finds that it has ended."""
        with self._lock:
            self.is_closed = True
            for child in self._live:
                child.kill()


def run_trials(
    run: TrialRun,
    trials: Sequence[KernelTrial],
    on_trial: OnTrial = lambda done, total: None,
    on_verdicts: OnVerdicts = lambda verdicts: None,
) -> tuple[Mapping[str, str], Mapping[str, str]]:
    """(verdicts, why others could not be tried) by key; several children at a time.

    on_verdicts: gets all verdicts so far, now and then. An exception, Ctrl-C too, ends the children first.
    """
    findings = TrialFindings(len(trials), on_trial, on_verdicts)
    with TrialChildren(run) as children:
        again = _run_shares(children, trials, findings, run.workers, is_last=False)
        _run_shares(children, again, findings, 1, is_last=True)
    return findings.lasting, findings.passing


def _run_shares(
    children: TrialChildren,
    trials: Sequence[KernelTrial],
    findings: TrialFindings,
    workers: int,
    *,
    is_last: bool,
) -> list[KernelTrial]:
    """Run trials by so many threads, and return those that are to be repeated."""
    shares = [trials[i::workers] for i in range(min(workers, len(trials)))]
    if not shares:
        return []
    with ThreadPoolExecutor(len(shares)) as pool:
        waiting = [pool.submit(_run_share, children, share, findings, is_last) for share in shares]
        try:
            wait(waiting, return_when=FIRST_EXCEPTION)
            if any(share.done() and share.exception() for share in waiting):
                children.close()
            return [trial for share in waiting for trial in share.result()]
        except BaseException:
            children.close()  # else the pool would wait until all trials are done
            raise


def _run_share(
    children: TrialChildren, trials: Sequence[KernelTrial], findings: TrialFindings, is_last: bool
) -> list[KernelTrial]:
    """One trial after the other, with a new child after one that ended."""
    child: ChildProcess | None = None
    again: list[KernelTrial] = []
    try:
        for n, trial in enumerate(trials):
            if child is None:
                child, why = start_child(children)
                if child is None:
                    if not why.is_sure and not is_last:
                        return [*again, *trials[n:]]
                    for left in trials[n:]:
                        findings.add(left, why)
                    return again
            attempt = _ask(child, trial, children.run.trial_s)
            if children.is_closed:
                return again
            if attempt.ends_child:
                children.end(child)
                child = None
            if attempt.is_sure or is_last:
                findings.add(trial, attempt)
            else:
                again.append(trial)
        return again
    finally:
        if child is not None:
            children.end(child)


def start_child(children: TrialChildren) -> tuple[ChildProcess | None, Attempt]:
    """A child that is ready; or None, and why."""
    try:
        child = children.begin()
    except OSError as error:
        return None, Attempt(False, f"{UNTRIED}: no process could be started ({error})", is_sure=False)
    is_sure = True
    try:
        obstacle = json.loads(child.read_line(START_S)).get("failed")
    except (TimeoutError, EOFError, OSError, ValueError) as error:
        if isinstance(error, EOFError):
            child.read_status(END_S)  # its pipe closes before it is gone
        obstacle = f"the trial's process {child.explain_start(error, START_S)}"
        is_sure = isinstance(error, TimeoutError)
    if obstacle is None:
        return child, Attempt(False, "")
    children.end(child)
    return None, Attempt(False, f"{UNTRIED}: {obstacle}", is_sure=is_sure)


def find_start_failure(run: TrialRun) -> str:
    """Why no kernel can be launched here, as a child finds out; empty: they can be."""
    with TrialChildren(run) as children:
        child, why = start_child(children)
        if child is not None:
            children.end(child)
    return why.text


def _ask(child: ChildProcess, trial: KernelTrial, trial_s: float) -> Attempt:
    """Have a child try a kernel."""
    try:
        found = json.loads(child.ask(trial.request(), trial_s))
    except TimeoutError:
        return Attempt(True, f"it hangs: it had {trial_s:g} s", ends_child=True, is_sure=False)
    except (EOFError, OSError):
        return _explain_end(child.read_status(END_S))
    except ValueError as error:
        return Attempt(True, f"its trial gives no answer ({error})", ends_child=True, is_sure=False)
    if "failed" in found:
        return Attempt(False, f"{UNTRIED}: {found['failed']}", ends_child=bool(found.get("over")))
    text = str(found["verdict"])
    # An error on the device stays with the process, and would be seen by the next trial.
    return Attempt(True, text, ends_child=text.startswith("it does not run"))


def _explain_end(status: int | None) -> Attempt:
    """What a child's exit status says of the kernel that it tried; None: it has not ended."""
    if status is None:
        why = f"{UNTRIED}: the trial's process closed its pipe, and has not ended in {END_S:g} s"
    elif is_foreign(status):
        why = f"{UNTRIED}: the trial's process was ended by signal {-status}"
    else:
        why = f"it crashes the process (exit status {status})"
    return Attempt(not why.startswith(UNTRIED), why, ends_child=True, is_sure=False)
