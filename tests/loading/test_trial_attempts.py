"""Trials of GPU kernels when a child is killed, a machine is busy or full, or two processes try at a time."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from plait.errors import KernelFailed
from plait.kernels.load import load_for_gpu
from plait.loading.kernel_trials import attempts, child, trials, verdicts
from plait.loading.kernel_trials.attempts import (
    Attempt,
    KernelTrial,
    TrialCase,
    TrialChildren,
    TrialRun,
    run_trials,
)
from plait.loading.kernel_trials.child import answer
from plait.loading.kernel_trials.trials import prove_kernels
from plait.loading.kernel_trials.verdicts import TrialSite, hold_site, keep_verdicts, read_verdicts
from plait.ops.chip import EXAMPLES
from plait.ops.registry import REGISTRY

CHIP = EXAMPLES[90]
SITE = TrialSite("a chip", "590.1", "2.13", "3.6", "abc")
TRIALS = [
    KernelTrial(f"rms_norm/triton/{n}/float32", "rms_norm", "triton", "float32", (TrialCase(0),))
    for n in range(4)
]
RIGHT = b'{"verdict": ""}\n'
Ask = Callable[["FakeChild", str], bytes]


class FakeChild:
    """A child that answers by a function, which may raise what `ChildProcess.ask` raises."""

    def __init__(self, ask: Ask, status: int | None = None) -> None:
        self._ask, self.status, self.is_killed, self.patience = ask, status, threading.Event(), 0.0

    def ask(self, line: str, timeout_s: float) -> bytes:
        return self._ask(self, line)

    def read_status(self, within_s: float = 1.0) -> int | None:
        self.patience = within_s
        return self.status

    def kill(self) -> None:
        self.is_killed.set()

    stop = kill


@pytest.fixture
def begun(monkeypatch: pytest.MonkeyPatch) -> Callable[[Ask, int | None], list[FakeChild]]:
    """Makes all children fake ones; returns the list of those that have begun."""

    def use(ask: Ask, status: int | None = None) -> list[FakeChild]:
        made: list[FakeChild] = []

        def start(children: TrialChildren) -> tuple[FakeChild, Attempt]:
            made.append(FakeChild(ask, status))
            children._live.add(made[-1])  # type: ignore[arg-type]
            return made[-1], Attempt(False, "")

        monkeypatch.setattr(attempts, "start_child", start)
        return made

    return use


def fails_once(error: Exception) -> Ask:
    """Raises at the first trial of one key, and answers that all are right."""
    left = [error]

    def ask(_: FakeChild, line: str) -> bytes:
        if "[[1, []]]" in line and left:
            raise left.pop()
        return RIGHT

    return ask


def one_with_case(number: int) -> list[KernelTrial]:
    return [KernelTrial(f"op {n}", "rms_norm", "triton", "float32", (TrialCase(n),)) for n in range(number)]


@pytest.mark.parametrize(
    ("error", "status"),
    [(TimeoutError(), None), (EOFError(), -9), (EOFError(), -6), (ValueError("no JSON"), None)],
    ids=["busy", "killed", "crashed", "garbled"],
)
def test_what_ends_a_child_once_is_no_verdict(
    error: Exception, status: int | None, begun: Callable[[Ask, int | None], list[FakeChild]]
) -> None:
    """A busy machine, or one without memory, does that too: it is tried again, when all others are done."""
    made, seen = begun(fails_once(error), status), list[tuple[int, int]]()
    found = run_trials(TrialRun("cpu", workers=2), one_with_case(4), lambda *at: seen.append(at))
    assert found == (dict.fromkeys(("op 0", "op 1", "op 2", "op 3"), ""), {})
    assert len(made) == 4, "one for each share, one after the failing one, and one for what is repeated"
    assert seen == [(1, 4), (2, 4), (3, 4), (4, 4)]


@pytest.mark.parametrize(
    ("error", "status", "is_verdict", "text"),
    [
        (TimeoutError(), None, True, "it hangs: it had 150 s"),
        (EOFError(), -11, True, "it crashes the process (exit status -11)"),
        (EOFError(), -9, False, "it could not be tried: the trial's process was ended by signal 9"),
        (BrokenPipeError(), None, False, "it could not be tried: the trial's process closed its pipe"),
    ],
)
def test_what_ends_a_child_twice_is_one_unless_it_comes_from_outside(
    error: Exception,
    status: int | None,
    is_verdict: bool,
    text: str,
    begun: Callable[[Ask, int | None], list[FakeChild]],
) -> None:
    """A process that is slow to end, because the driver frees its context, has not crashed."""

    def ask(_: FakeChild, line: str) -> bytes:
        raise error

    made = begun(ask, status)
    lasting, passing = run_trials(TrialRun("cpu"), TRIALS[:1])
    assert len(made) == 2
    assert all(one.is_killed.is_set() for one in made)
    assert (passing, lasting)[is_verdict][TRIALS[0].key].startswith(text)
    assert len(lasting) + len(passing) == 1
    if isinstance(error, EOFError):
        assert made[0].patience == attempts.END_S > 1


def test_children_that_are_killed_while_they_begin_are_begun_once_more(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Eight of them import torch at a time, which may be too much memory."""
    begins: list[int] = []

    def start(children: TrialChildren) -> tuple[FakeChild | None, Attempt]:
        begins.append(len(begins))
        if len(begins) == 1:
            return None, Attempt(False, "it could not be tried: it did not start (EOFError)", is_sure=False)
        return FakeChild(lambda *_: RIGHT), Attempt(False, "")

    monkeypatch.setattr(attempts, "start_child", start)
    assert run_trials(TrialRun("cpu", workers=1), TRIALS) == ({trial.key: "" for trial in TRIALS}, {})
    assert len(begins) == 2


def test_an_interruption_ends_all_children_and_does_not_wait_for_the_rest(
    begun: Callable[[Ask, int | None], list[FakeChild]],
) -> None:
    asked: list[str] = []

    def ask(one: FakeChild, line: str) -> bytes:
        asked.append(line)
        if len(asked) == 2:
            return RIGHT
        assert one.is_killed.wait(30)
        raise EOFError

    made = begun(ask, -9)

    def interrupt(done: int, of: int) -> None:
        raise KeyboardInterrupt

    since = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        run_trials(TrialRun("cpu", workers=2), TRIALS * 5, interrupt)
    assert time.monotonic() - since < 20
    assert len(asked) == len(made) == 2
    assert all(one.is_killed.is_set() for one in made)


def test_verdicts_are_kept_while_others_are_still_tried(
    begun: Callable[[Ask, int | None], list[FakeChild]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An engine that is ended meanwhile does not begin anew, again and again."""
    begun(lambda *_: RIGHT, None)
    monkeypatch.setattr(attempts, "KEEP_S", 0.0)

    def end(done: int, of: int) -> None:
        if done == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        prove_kernels(CHIP, TrialRun("cpu", workers=1), TRIALS, tmp_path, end)
    kept = read_verdicts(tmp_path, trials.find_site(CHIP))
    assert set(kept) == {trial.key for trial in TRIALS[:3]}


def test_two_processes_try_each_kernel_once(
    begun: Callable[[Ask, int | None], list[FakeChild]], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """As ranks do, and replicas that start at the same time: the second waits, and reads what was found."""
    goes_on, asked = threading.Event(), list[str]()

    def ask(_: FakeChild, line: str) -> bytes:
        asked.append(line)
        assert goes_on.wait(30)
        return RIGHT

    begun(ask, None)
    found, waits = list[dict[str, str]](), threading.Event()

    def prove(on_trial: Callable[[int, int], None]) -> None:
        chip = prove_kernels(CHIP, TrialRun("cpu", workers=1), TRIALS, tmp_path, on_trial)
        found.append(dict(chip.trials))

    caplog.set_level("INFO", "plait")
    first = threading.Thread(target=prove, args=(lambda *_: None,))
    first.start()
    while not asked:
        time.sleep(0.01)
    second = threading.Thread(target=prove, args=(lambda *_: waits.set(),))
    second.start()
    assert waits.wait(30), "it shows that it lives"
    goes_on.set()
    first.join(30)
    second.join(30)
    assert found == [{trial.key: "" for trial in TRIALS}] * 2
    assert len(asked) == len(TRIALS)
    assert caplog.text.count("another process tries kernels on an sm_90 as H200, sm_90") == 1


def test_a_process_that_was_stopped_does_not_stop_others(tmp_path: Path) -> None:
    waited: list[int] = []
    with hold_site(tmp_path, SITE, lambda: None) as has_waited:
        assert not has_waited
        with hold_site(tmp_path, SITE, lambda: waited.append(1), patience_s=0.2) as has_waited:
            assert has_waited
            assert waited
    with hold_site(tmp_path, SITE, lambda: waited.append(2)) as has_waited:
        assert not has_waited
    assert 2 not in waited


def test_without_a_folder_or_locks_nothing_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "file"
    file.write_text("")
    for folder in (None, file / "below"):
        with hold_site(folder, SITE, lambda: None), hold_site(folder, SITE, lambda: None) as has_waited:
            assert not has_waited

    def no_locks(*_: object) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(verdicts.fcntl, "flock", no_locks)
    with hold_site(tmp_path, SITE, lambda: None), hold_site(tmp_path, SITE, lambda: None) as has_waited:
        assert not has_waited


def test_what_another_process_has_kept_meanwhile_stays(tmp_path: Path) -> None:
    keep_verdicts(tmp_path, SITE, {"a/b//float32": "", "c/d//float32": "it hangs"})
    keep_verdicts(tmp_path, SITE, {"c/d//float32": "", "e/f//float32": ""})
    assert read_verdicts(tmp_path, SITE) == dict.fromkeys(
        ("a/b//float32", "c/d//float32", "e/f//float32"), ""
    )


def test_a_file_that_is_cut_anywhere_is_no_verdict_and_is_written_anew(tmp_path: Path) -> None:
    keep_verdicts(tmp_path, SITE, {"a/b//float32": ""})
    path = tmp_path / f"{SITE.digest}.json"
    whole = path.read_bytes()
    for length in range(len(whole)):
        path.write_bytes(whole[:length])
        assert read_verdicts(tmp_path, SITE) == {}
    keep_verdicts(tmp_path, SITE, {"c/d//float32": ""})
    assert read_verdicts(tmp_path, SITE) == {"c/d//float32": ""}


def test_a_full_disk_keeps_what_was_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    keep_verdicts(tmp_path, SITE, {"a/b//float32": ""})
    fdopen = os.fdopen

    class FullDisk:
        def __init__(self, *arguments: object, **more: object) -> None:
            self._file = fdopen(*arguments, **more)  # type: ignore[call-overload]

        def __enter__(self) -> FullDisk:
            return self

        def __exit__(self, *_: object) -> None:
            self._file.close()

        def write(self, text: str) -> None:
            self._file.write(text[:40])
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(verdicts.os, "fdopen", lambda *a, **m: (FullDisk if "w" in a else fdopen)(*a, **m))
    with caplog.at_level("INFO", "plait"):
        keep_verdicts(tmp_path, SITE, {"c/d//float32": ""})
    assert "No space left on device" in caplog.text
    assert read_verdicts(tmp_path, SITE) == {"a/b//float32": ""}
    assert [path.name for path in tmp_path.iterdir()] == [f"{SITE.digest}.json"]


def _compiler(cause: BaseException, text: str) -> KernelFailed:
    """What `launch` raises when Triton's assembler failed, with all that is behind it."""
    behind = RuntimeError(text)
    behind.__context__ = cause
    failed = KernelFailed("the kernel attend cannot run at this model's sizes on this GPU (…)")
    failed.__cause__ = behind
    return failed


LACKING = [
    _compiler(subprocess.CalledProcessError(-9, ["ptxas"]), "`ptxas` failed with error code -9"),
    _compiler(subprocess.CalledProcessError(1, ["ptxas"]), "ptxas fatal: No space left on device"),
    RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
    RuntimeError("[enforce fail at alloc_cpu.cpp:127] DefaultCPUAllocator: can't allocate memory: you tried"),
]
FAILING = [
    _compiler(subprocess.CalledProcessError(255, ["ptxas"]), "Internal Triton PTX codegen error"),
    _compiler(subprocess.CalledProcessError(-11, ["ptxas"]), "`ptxas` failed with error code -11"),
    _compiler(FileNotFoundError("no such key"), "out of resource: shared memory, Required: 151552"),
    RuntimeError("CUDA error: an illegal memory access was encountered"),
]


@pytest.mark.parametrize(
    ("error", "kind"),
    [*((error, "failed") for error in LACKING), *((error, "verdict") for error in FAILING)],
    ids=lambda value: str(value)[:40],
)
def test_what_a_compiler_or_a_library_lacked_is_no_verdict(
    error: Exception, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: object) -> str:
        raise error

    monkeypatch.setattr(child, "try_variant", fails)
    load_for_gpu()
    found = answer({"op": "rms_norm", "variant": "triton", "cases": [[0, []]], "dtype": "float32"}, "cpu")
    assert [*found] == [kind]


@pytest.mark.parametrize(
    ("text", "is_over"),
    [("CUDA error: unspecified launch failure", True), ("no kernel image is available", False)],
)
def test_a_reference_that_does_not_run_is_no_verdict_on_the_kernel(
    text: str, is_over: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A device that was lost before, and a torch that was not built for this GPU, are no kernel's fault."""

    def fails(*_: object, **__: object) -> None:
        raise RuntimeError(text)

    load_for_gpu()
    monkeypatch.setattr(REGISTRY["rms_norm"], "reference", fails)
    found = answer({"op": "rms_norm", "variant": "triton", "cases": [[0, []]], "dtype": "float32"}, "cpu")
    assert found == {"failed": f"its reference does not run: RuntimeError: {text}", "over": is_over}
    lost = FakeChild(lambda *_: b'{"failed": "lost", "over": true}\n')
    assert attempts._ask(lost, TRIALS[0], 1.0).ends_child  # type: ignore[arg-type]


HANGING = """
import signal
signal.signal(signal.SIGINT, signal.default_int_handler)  # jobs in the background of a shell ignore it
from plait.loading.kernel_trials.attempts import *
import tests.loading.fake_gpu_kernels as fakes
name = fakes.OPS["hanging"].name
run = TrialRun("cpu", (fakes.MODULE,), workers=1)
begin = TrialChildren.begin
def begin_and_say(children):
    child = begin(children)
    print(child._process.pid, flush=True)
    return child
TrialChildren.begin = begin_and_say
run_trials(run, [KernelTrial("a", name, "fake", "float32", (TrialCase(0),))])
"""


def _is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.fixture
def hanging() -> Iterator[tuple[subprocess.Popen[str], int]]:
    """A process that tries a hanging kernel, and its child, which is at it."""
    root = Path(__file__).resolve().parents[2]
    process = subprocess.Popen(
        [sys.executable, "-c", HANGING], stdout=subprocess.PIPE, text=True, cwd=root, start_new_session=True
    )
    assert process.stdout is not None
    pid = int(process.stdout.readline())
    until = time.monotonic() + 120
    while "hrtimer" not in _wait_channels(pid) and time.monotonic() < until:
        time.sleep(0.2)
    yield process, pid
    for one in (process.pid, pid):
        if _is_alive(one):
            os.kill(one, signal.SIGKILL)
    process.wait()


def _wait_channels(pid: int) -> str:
    """What the main thread of a process waits for: a sleep is a timer's."""
    try:
        text = Path(f"/proc/{pid}/wchan").read_text()
        syscall = Path(f"/proc/{pid}/syscall").read_text()
    except OSError:
        return ""
    return f"{text} {'hrtimer' if syscall.startswith('230 ') else ''}"


@pytest.mark.slow  # it imports torch twice
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="it looks into /proc")
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_a_hanging_kernel_ends_with_the_process_that_tries_it(
    number: signal.Signals, hanging: tuple[subprocess.Popen[str], int]
) -> None:
    process, pid = hanging
    assert _is_alive(pid)
    process.send_signal(number)
    assert process.wait(30) != 0
    until = time.monotonic() + 30
    while _is_alive(pid) and time.monotonic() < until:
        time.sleep(0.05)
    assert not _is_alive(pid)


def test_the_hanging_fake_is_there() -> None:
    """The processes above import it by name."""
    from tests.loading.fake_gpu_kernels import OPS

    assert torch.equal(OPS["right"](torch.ones(2)), torch.full((2,), 2.0))
    for fake in OPS.values():
        REGISTRY.pop(fake.name, None)
