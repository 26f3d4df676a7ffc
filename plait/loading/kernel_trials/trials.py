"""Try each GPU kernel against its reference on the GPU, once, before any is bound.

A trial runs in a child process with a time limit, so that a kernel which hangs or crashes ends the child and
not the start. A kernel that is off, hangs, crashes or does not compile is not bound: `Chip.trials` says so to
every choice. Verdicts are kept (`verdicts`), so that each startup tries only what none has tried.

In exclusive-process compute mode one process alone may have the GPU open. There one child at a time tries
kernels, and it ends before the engine opens the device: so trials come before all that makes a context.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from threading import Lock

import torch

from plait.checkpoint.weights import Target
from plait.config import UNPROVEN
from plait.engine.device import is_exclusive
from plait.errors import clip_text
from plait.loading.kernel_trials.verdicts import (
    MAX_REASON,
    TrialSite,
    driver_version,
    find_folder,
    hash_sources,
    keep_verdicts,
    list_accelerators,
    read_verdicts,
)
from plait.ops.attention import BLOCK
from plait.ops.chip import Chip
from plait.ops.edit_logits import count_tokens, edit_logits
from plait.ops.linear import FLOATS, KINDS, STORED
from plait.ops.logprobs import log_probabilities
from plait.ops.registry import OURS, REGISTRY, Op, OpFacts, Variant, trial_key
from plait.ops.sample import largest, sample, sample_at
from plait.ops.step import locate_tokens, move_rows_on
from plait.text.isolation.child_process import ChildProcess, is_foreign

START_S = 180.0  # for the child to import torch and start the device
TRIAL_S = 150.0  # for one kernel: some are four launches, which a slow processor compiles first
WORKERS = 4  # children at a time: most of a trial is compiling
MOST_WORKERS = 8  # where there are processors for more; each has the context of a GPU, half a gigabyte there
SMALL_GPU = 16 << 30  # bytes
MAX_ANSWER = 1 << 14  # bytes
MOST_NAMED = 3  # kernels that a line of the log names
CHILD = "plait.loading.kernel_trials.child"
WHAT = "trying GPU kernels (at the first startup with this GPU and these versions)"
STANDARD = {"block_size": BLOCK, "kv_dtype": "model"}  # what every mixer adds to an op's own sizes
# Ops that no mixer binds: those of the sampler, and of a step's buffers.
AROUND = {
    op.name
    for op in (
        largest,
        sample,
        sample_at,
        edit_logits,
        count_tokens,
        log_probabilities,
        locate_tokens,
        move_rows_on,
    )
}
STORAGES = {*KINDS, *(name.partition("+")[0] for name in STORED), *FLOATS, "bfloat16", "float16"}
log = logging.getLogger("plait")
OnTrial = Callable[[int, int], None]  # (done, of)


@dataclass(frozen=True, slots=True)
class KernelTrial:
    """One kernel on some cases of its op, by their numbers. `key`: as `trial_key` names it."""

    key: str
    op: str
    variant: str
    dtype: str
    cases: tuple[int, ...]

    def request(self) -> str:
        asked = {"op": self.op, "variant": self.variant, "cases": self.cases, "dtype": self.dtype}
        return json.dumps(asked) + "\n"


@dataclass(frozen=True, slots=True)
class TrialRun:
    """How trials run: on which device, in how many children at a time, how many seconds each may take.

    `modules`: imported by the children, too, because they register variants.
    """

    device: str
    modules: tuple[str, ...] = ()
    trial_s: float = TRIAL_S
    workers: int = WORKERS


def try_kernels(
    target: Target,
    formats: Collection[str],
    cache_dir: str | None,
    report: Callable[[str, int, int], None],
    used: Collection[str] | None = None,
) -> Chip | None:
    """The target's GPU with the verdicts on every kernel that a model may bind there. None: it is no GPU.

    `formats`: of the model's weights; `used`: the ops of the model, None: any op. A kernel is tried when it
    is first needed on this GPU.
    """
    chip = target.chip
    if chip is None or target.ops == "reference":
        return chip
    log.warning("%s; each is compared with its reference on this GPU, once", UNPROVEN)
    dtypes = list(dict.fromkeys((target.dtype, torch.float32)))
    trials = plan_trials(chip, dtypes, formats, deterministic=target.deterministic)
    if used is not None:
        trials = [trial for trial in trials if trial.op in used or trial.op in AROUND]
    workers = count_workers(chip)
    if is_exclusive(target.device):
        log.info("%s is in exclusive-process compute mode: kernels are tried one by one", target.device)
        workers = 1
    run = TrialRun(str(target.device), workers=workers)
    return prove_kernels(chip, run, trials, find_folder(cache_dir), lambda done, of: report(WHAT, done, of))


def count_workers(chip: Chip) -> int:
    """How many children try kernels at a time: as many as processors and the GPU's memory are good for."""
    is_small = chip.memory_nbytes < SMALL_GPU
    return WORKERS if is_small else max(WORKERS, min(MOST_WORKERS, (os.cpu_count() or 1) // 2))


def plan_trials(
    chip: Chip,
    dtypes: Sequence[torch.dtype],
    formats: Collection[str],
    modules: Sequence[str] = (),
    *,
    deterministic: bool = False,
) -> list[KernelTrial]:
    """The trials of every registered GPU kernel of ours that serves this chip: one for each `trial_key`.

    Of the cases of a key the first and the last are tried: most ops have one row in the first, and many in
    the last. `dtypes`: the model's own first; `formats`: of its weights; `modules`: others with variants;
    `deterministic`: as the model is built, because that decides which variants serve.
    """
    standard = STANDARD | {"deterministic": deterministic}
    found: dict[str, KernelTrial] = {}
    for op in REGISTRY.values():
        for variant in op.variants:
            module = f"{variant.module}."
            if variant.on == "cuda" and module.startswith((OURS, *(f"{name}." for name in modules))):
                for trial in _cases(op, variant, chip, dtypes, formats, standard):
                    first = found.setdefault(trial.key, trial)
                    found[trial.key] = replace(
                        first, cases=tuple(dict.fromkeys((first.cases[0], *trial.cases)))
                    )
    return [*found.values()]


def _cases(
    op: Op,
    variant: Variant,
    chip: Chip,
    dtypes: Sequence[torch.dtype],
    formats: Collection[str],
    standard: Mapping[str, object],
) -> Iterator[KernelTrial]:
    for i, case in enumerate(op.cases if op.make else ()):
        kind = case.get("kind")
        if kind in KINDS and kind not in formats:
            continue
        # Layers with stored weights compute in the model's dtype; others, as the sampler, in float32, too.
        for dtype in dtypes[:1] if kind in STORAGES else dtypes:
            facts = OpFacts("cuda", dtype, {**standard, **case}, chip=chip)
            if dtype in op.tolerance and variant.refusal(facts) is None:
                name = str(dtype).removeprefix("torch.")
                yield KernelTrial(trial_key(op.name, variant.name, facts), op.name, variant.name, name, (i,))


def find_site(chip: Chip) -> TrialSite:
    """What verdicts on this chip hold for."""
    cuda = getattr(torch._C, "_cuda_getDriverVersion", None)
    driver = driver_version() or (str(cuda()) if cuda and torch.cuda.is_available() else "")
    try:
        triton = version("triton")
    except PackageNotFoundError:
        triton = ""
    name = f"{chip.name}, sm_{chip.capability}"
    return TrialSite(name, driver, torch.__version__, triton, hash_sources(), list_accelerators())


def prove_kernels(
    chip: Chip, run: TrialRun, trials: Sequence[KernelTrial], folder: Path | None, on_trial: OnTrial
) -> Chip:
    """The chip, with the verdicts of these trials in `trials`. What is not kept yet is tried now.

    `folder`: where verdicts are kept. A kernel that could not be tried is rejected, too, and is tried again
    at the next startup: what the chip has in `trials` is of this one.
    """
    site, new = find_site(chip), [trial for trial in trials if trial.key not in chip.trials]
    known = read_verdicts(folder, site)
    due = [trial for trial in new if trial.key not in known]
    lasting, passing = run_trials(run, due, on_trial)
    if lasting:
        known |= lasting
        keep_verdicts(folder, site, known)
    verdicts = {trial.key: {**known, **passing}[trial.key] for trial in new}
    rejected = {key: why for key, why in verdicts.items() if why}
    kept = f"{len(new) - len(due)} of them at an earlier startup"
    log.info("GPU kernels: %d tried (%s), %d are not used", len(new), kept, len(rejected))
    for line in describe_rejected(rejected):
        log.warning("%s", line)
    return replace(chip, trials={**chip.trials, **verdicts})


def describe_rejected(rejected: Mapping[str, str]) -> Iterator[str]:
    """A line for each reason, with its kernels: one obstacle may keep all of them from a trial."""
    keys: dict[str, list[str]] = {}
    for key, why in sorted(rejected.items()):
        keys.setdefault(why, []).append(key)
    for why, some in keys.items():
        if len(some) <= MOST_NAMED:
            yield from (f"GPU kernel {key} is not used: {why}" for key in some)
        else:
            named = ", ".join(some[:MOST_NAMED])
            yield f"{len(some)} GPU kernels are not used ({named}, …): {why}"


def run_trials(
    run: TrialRun, trials: Sequence[KernelTrial], on_trial: OnTrial = lambda done, total: None
) -> tuple[dict[str, str], dict[str, str]]:
    """(verdicts, why others could not be tried) by key; several children at a time."""
    if not trials:
        return {}, {}
    lasting, passing, lock = dict[str, str](), dict[str, str](), Lock()

    def work(share: Sequence[KernelTrial]) -> None:
        for trial, is_verdict, text in _run_share(run, share):
            with lock:
                (lasting if is_verdict else passing)[trial.key] = clip_text(text, MAX_REASON)
                on_trial(len(lasting) + len(passing), len(trials))

    shares = [trials[i :: run.workers] for i in range(min(run.workers, len(trials)))]
    with ThreadPoolExecutor(len(shares)) as pool:
        for ended in [pool.submit(work, share) for share in shares]:
            ended.result()
    return lasting, passing


def _run_share(run: TrialRun, trials: Sequence[KernelTrial]) -> Iterator[tuple[KernelTrial, bool, str]]:
    """(trial, whether it is a verdict on the kernel, text) of each; a new child after one that ended."""
    child: ChildProcess | None = None
    try:
        for trial in trials:
            if child is None:
                child, why = _start(run)
                if child is None:
                    yield from ((left, False, why) for left in trials[trials.index(trial) :])
                    return
            is_verdict, text, is_over = _ask(child, trial, run.trial_s)
            if is_over:
                child.stop()
                child = None
            yield trial, is_verdict, text
    finally:
        if child is not None:
            child.stop()


def _start(run: TrialRun) -> tuple[ChildProcess | None, str]:
    """A child that is ready; or None, and why."""
    try:
        child = ChildProcess(CHILD, run.device, *run.modules, max_bytes=MAX_ANSWER, inherits=True)
    except OSError as error:
        return None, f"it could not be tried: no process could be started ({error})"
    try:
        obstacle = json.loads(child.read_line(START_S)).get("failed")
    except (TimeoutError, EOFError, OSError, ValueError) as error:
        obstacle = f"the trial's process did not start ({type(error).__name__})"
    if obstacle is None:
        return child, ""
    child.stop()
    return None, f"it could not be tried: {obstacle}"


def _ask(child: ChildProcess, trial: KernelTrial, trial_s: float) -> tuple[bool, str, bool]:
    """(whether it is a verdict, text, whether the child is of no use any more)."""
    try:
        found = json.loads(child.ask(trial.request(), trial_s))
    except TimeoutError:
        return True, f"it hangs: it had {trial_s:g} s", True
    except (EOFError, OSError):
        status = child.ended()
        if status is not None and is_foreign(status):
            return False, f"it could not be tried: the trial's process was ended by signal {-status}", True
        return True, f"it crashes the process (exit status {status})", True
    except ValueError as error:
        return True, f"its trial gives no answer ({error})", True
    if "failed" in found:
        return False, f"it could not be tried: {found['failed']}", False
    # An error on the device stays with the process, and would be seen by the next trial.
    return True, str(found["verdict"]), str(found["verdict"]).startswith("it does not run")
