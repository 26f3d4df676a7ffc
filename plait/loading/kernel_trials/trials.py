"""Try each GPU kernel against its reference on the GPU, once, before any is bound.

A trial runs in a child process with a time limit (`attempts`), so that a kernel which hangs or crashes ends
the child and not the start. A kernel that is off, hangs, crashes or does not compile is not bound:
`Chip.trials` says so to every choice. Verdicts are kept (`verdicts`), so that each startup tries only what
none has tried. Of processes that have kernels to try on the same kind of GPU, as ranks have, one does it at a
time: the next one finds what it has left.

In exclusive-process compute mode one process alone may have the GPU open. There one child at a time tries
kernels, and it ends before the engine opens the device: so trials come before all that makes a context.
"""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

from plait.checkpoint.weights import Target
from plait.config import UNPROVEN
from plait.engine.device import is_exclusive
from plait.loading.kernel_trials.attempts import (
    WORKERS,
    KernelTrial,
    OnTrial,
    OnVerdicts,
    TrialRun,
    find_start_failure,
    run_trials,
)
from plait.loading.kernel_trials.plan import OpKinds, TrialNeeds, plan_trials
from plait.loading.kernel_trials.verdicts import (
    TrialSite,
    driver_version,
    find_folder,
    hash_sources,
    hold_site,
    keep_verdicts,
    list_accelerators,
    read_verdicts,
)
from plait.ops.chip import Chip
from plait.ops.edit_logits import count_tokens, edit_logits
from plait.ops.launch import permit_dependent
from plait.ops.launch_chain import FIRST, chain_launches
from plait.ops.logprobs import log_probabilities
from plait.ops.sample import largest, sample, sample_at
from plait.ops.step import locate_tokens, move_rows_on

MOST_WORKERS = 8  # where there are processors for more; each has the context of a GPU, half a gigabyte there
SMALL_GPU = 16 << 30  # bytes
COMPILERS = ("gcc", "clang")  # without both a child finds out whether another one serves, or Triton's cache
MOST_NAMED = 3  # kernels that a line of the log names
WHAT = "trying GPU kernels (at the first startup with this GPU and these versions)"
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
log = logging.getLogger("plait")


def try_kernels(
    target: Target,
    formats: Collection[str],
    cache_dir: str | None,
    report: Callable[[str, int, int], None],
    used: OpKinds | None = None,
) -> Chip | None:
    """The target's GPU with the verdicts on every kernel that a model may bind there. None: it is no GPU.

    `formats`: of the model's weights; `used`: the ops of the model and the activations that it binds each
    for, None: any op. A kernel is tried when it is first needed on this GPU.
    """
    chip = target.chip
    if chip is None or target.ops == "reference":
        return chip
    if is_first := not chip.trials:  # else a model before this one has reported it
        log.warning("%s; each is compared with its reference on this GPU, once", UNPROVEN)
    dtypes = list(dict.fromkeys((target.dtype, torch.float32)))
    ops = None if used is None else {**dict.fromkeys([*AROUND, chain_launches.name], ()), **used}
    trials = plan_trials(TrialNeeds(chip, dtypes, formats, target.deterministic, ops))
    trials = [trial for trial in trials if target.pdl or trial.op != chain_launches.name]
    workers = count_workers(chip)
    if is_exclusive(target.device):
        log.info("%s is in exclusive-process compute mode: kernels are tried one by one", target.device)
        workers = 1
    run = TrialRun(str(target.device), workers=workers, is_early=target.pdl and chip.capability >= FIRST)
    chip = prove_kernels(chip, run, trials, find_folder(cache_dir), lambda done, of: report(WHAT, done, of))
    permit_dependent(target.device, target.pdl and why_in_turns(chip) is None)
    if is_first:
        log.info("GPU kernels are %s", describe_launches(chip, pdl=target.pdl))
    return chip


def describe_launches(chip: Chip, *, pdl: bool) -> str:
    """Whether kernels begin before those before them have ended, and why not. pdl: of the options."""
    why = why_in_turns(chip) if pdl else "--no-pdl"
    return f"launched one after the other: {why}" if why else "launched early (PDL)"


def why_in_turns(chip: Chip) -> str | None:
    """Why no kernel may begin before those before it have ended; None: the trial of that was right."""
    if chip.capability < FIRST:
        return f"programmatic dependent launch begins with sm_{FIRST}"
    mark = f"{chain_launches.name}/"
    found = next((why for key, why in chip.trials.items() if key.startswith(mark)), "it was not tried")
    return f"programmatic dependent launch: {found}" if found else None


def count_workers(chip: Chip) -> int:
    """How many children try kernels at a time: as many as processors and the GPU's memory are good for."""
    is_small = chip.memory_nbytes < SMALL_GPU
    return WORKERS if is_small else max(WORKERS, min(MOST_WORKERS, (os.cpu_count() or 1) // 2))


def find_site(chip: Chip, is_early: bool = False) -> TrialSite:
    """What verdicts on this chip hold for. is_early: see `TrialRun`; each way of launching has its own."""
    cuda = getattr(torch._C, "_cuda_getDriverVersion", None)
    driver = driver_version() or (str(cuda()) if cuda and torch.cuda.is_available() else "")
    try:
        triton = version("triton")
    except PackageNotFoundError:
        triton = ""
    name = f"{chip.name}, sm_{chip.capability}"
    others = ", ".join(filter(None, [list_accelerators(), "PDL" if is_early else ""]))
    return TrialSite(name, driver, torch.__version__, triton, hash_sources(), others)


def prove_kernels(
    chip: Chip, run: TrialRun, trials: Sequence[KernelTrial], folder: Path | None, on_trial: OnTrial
) -> Chip:
    """The chip, with the verdicts of these trials in `trials`. What is not kept yet is tried now.

    `folder`: where verdicts are kept. A kernel that could not be tried is rejected, too, and is tried again
    at the next startup: what the chip has in `trials` is of this one.
    """
    site, new = find_site(chip, run.is_early), [trial for trial in trials if trial.key not in chip.trials]
    known = read_verdicts(folder, site)
    due = [trial for trial in new if trial.key not in known]
    if due:
        with hold_site(folder, site, lambda: on_trial(0, len(new))) as has_waited:
            if has_waited:
                known = read_verdicts(folder, site)
                due = [trial for trial in new if trial.key not in known]
            lasting, passing = _run_due(chip, run, due, known, on_trial, partial(keep_verdicts, folder, site))
            keep_verdicts(folder, site, lasting)
        known = {**known, **lasting, **passing}
    elif new and not any(map(shutil.which, COMPILERS)) and (why := find_start_failure(run)):
        known = {trial.key: why for trial in new}  # Triton's cache has no launcher, and it can make none
    verdicts = {trial.key: known[trial.key] for trial in new}
    rejected = {key: why for key, why in verdicts.items() if why}
    kept = f"{len(new) - len(due)} of them at an earlier startup"
    if new:
        log.info("GPU kernels: %d tried (%s), %d are not used", len(new), kept, len(rejected))
    for line in describe_rejected(rejected):
        log.warning("%s", line)
    return replace(chip, trials={**chip.trials, **verdicts})


def _run_due(
    chip: Chip,
    run: TrialRun,
    due: Sequence[KernelTrial],
    known: Mapping[str, str],
    on_trial: OnTrial,
    on_verdicts: OnVerdicts,
) -> tuple[Mapping[str, str], Mapping[str, str]]:
    """`run_trials`, that of early launches first: all other kernels are tried as they will be launched."""
    if not run.is_early:
        return run_trials(run, due, on_trial, on_verdicts)
    first = [trial for trial in due if trial.op == chain_launches.name]
    rest = [trial for trial in due if trial.op != chain_launches.name]
    in_turns = replace(run, is_early=False)
    lasting, passing = run_trials(in_turns, first, lambda done, of: on_trial(done, len(due)), on_verdicts)
    seen = replace(chip, trials={**chip.trials, **known, **lasting, **passing})
    run, count = replace(run, is_early=why_in_turns(seen) is None), len(first)
    found = run_trials(run, rest, lambda done, of: on_trial(count + done, len(due)), on_verdicts)
    return {**lasting, **found[0]}, {**passing, **found[1]}


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
