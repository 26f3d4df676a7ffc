"""Trials of GPU kernels: wrong, hanging and crashing ones end their child, and are not bound.

The "GPU" is the CPU, where Triton's kernels run in the interpreter.
"""

from __future__ import annotations

import importlib.util
import json
import logging
import os
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from plait.checkpoint.weights import Target
from plait.config import EngineConfig
from plait.kernels.load import load_for_gpu
from plait.loading.kernel_trials import attempts, child, trials, verdicts
from plait.loading.kernel_trials.attempts import Attempt, KernelTrial, TrialRun, run_trials
from plait.loading.kernel_trials.child import answer, find_obstacle, try_variant
from plait.loading.kernel_trials.plan import TrialNeeds, plan_trials
from plait.loading.kernel_trials.trials import prove_kernels
from plait.loading.kernel_trials.verdicts import TrialSite, keep_verdicts, list_verdicts, read_verdicts
from plait.loading.open_model import open_model, weight_formats
from plait.ops.chip import EXAMPLES, Chip
from plait.ops.registry import REGISTRY, OpFacts
from tests.loading.fake_gpu_kernels import MODULE, OPS

CHIP = EXAMPLES[90]
SITE = TrialSite("a chip", "590.1", "2.13", "3.6", "abc")
FLOAT = (torch.float32,)
FAKES = TrialRun("cpu", (MODULE,))
for fake in OPS.values():  # tests that are collected later walk through the registry
    REGISTRY.pop(fake.name, None)


@pytest.fixture(autouse=True)
def fakes() -> Iterator[None]:
    """The fake ops are in the registry meanwhile."""
    names = {op.name: op for op in OPS.values()}
    REGISTRY.update(names)
    yield
    for name in names:
        REGISTRY.pop(name, None)


def plan(*fates: str) -> list[KernelTrial]:
    wanted = {OPS[fate].name for fate in fates}
    return [t for t in plan_trials(TrialNeeds(CHIP, FLOAT, ()), [MODULE]) if t.op in wanted]


def test_each_variant_is_tried_once_for_each_kind_on_its_first_and_last_case() -> None:
    found = plan("right")
    assert [(t.key, tuple(case.number for case in t.cases)) for t in found] == [
        ("double_right/fake//float32", (0, 2)),
        ("double_right/fake/large/float32", (1,)),
    ]


@pytest.mark.slow  # it waits for the hanging one
def test_a_wrong_a_hanging_and_a_crashing_kernel_are_rejected_and_the_start_goes_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    asked = plan("right", "wrong", "racing", "hanging", "crashing", "raising", "killed")
    asked = [t for t in asked if "large" not in t.key]
    seen: list[tuple[int, int]] = []
    with caplog.at_level(logging.INFO, "plait"):
        run = TrialRun("cpu", (MODULE,), trial_s=6.0, workers=1)
        chip = prove_kernels(CHIP, run, asked, tmp_path, lambda *at: seen.append(at))
    why = {key.split("/")[0].removeprefix("double_"): text for key, text in chip.trials.items()}
    assert why["right"] == ""
    assert "off the reference (allowed: 2e-05)" in why["wrong"]
    assert why["racing"] == "two runs on the same input give different bits"
    assert why["hanging"] == "it hangs: it had 6 s"
    assert why["crashing"] == "it crashes the process (exit status -6)"
    assert why["raising"] == "it does not run: RuntimeError: PassManager::run failed at line 3"
    assert why["killed"] == "it could not be tried: the trial's process was ended by signal 9"
    assert seen[-1] == (7, 7)
    assert "GPU kernel double_wrong/fake//float32 is not used: it is" in caplog.text
    kept = read_verdicts(tmp_path, trials.find_site(CHIP))
    assert len(kept) == 6
    assert "double_killed/fake//float32" not in kept, "a kill from outside says nothing about the kernel"

    for fate, op in OPS.items():
        _, row = op.bind(OpFacts("cuda", torch.float32, {}, chip=chip))
        assert row.variant == ("fake" if fate == "right" else "reference")
    assert OPS["wrong"].bind(OpFacts("cuda", torch.float32, {}))[1].variant == "fake"
    _, row = OPS["wrong"].bind(OpFacts("cuda", torch.float32, {"kind": "large"}, chip=chip))
    assert row.skipped[0][1].startswith("in its trial on this GPU it is")


def test_what_was_tried_at_an_earlier_start_is_not_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = plan("right", "wrong")
    site = trials.find_site(CHIP)
    keep_verdicts(tmp_path, site, {t.key: "it is off" if "wrong" in t.key else "" for t in asked[:-1]})
    tried: list[KernelTrial] = []

    def run(_: TrialRun, due: list[KernelTrial], *__: object) -> tuple[dict[str, str], dict[str, str]]:
        tried.extend(due)
        return {t.key: "" for t in due}, {}

    monkeypatch.setattr(trials, "run_trials", run)
    chip = prove_kernels(CHIP, FAKES, asked, tmp_path, lambda done, total: None)
    assert tried == asked[-1:]
    assert chip.trials == {**dict.fromkeys((t.key for t in asked), ""), asked[2].key: "it is off"}
    prove_kernels(CHIP, FAKES, asked, tmp_path, lambda done, total: None)
    assert tried == asked[-1:]
    other = replace(CHIP, name="another chip")
    prove_kernels(other, FAKES, asked, tmp_path, lambda done, total: None)
    assert tried[1:] == asked, "another chip begins anew"


@pytest.mark.parametrize(
    "modules", [(), pytest.param(("tests.loading.no_such_module",), marks=pytest.mark.slow)]
)
def test_a_process_that_does_not_start_leaves_no_kernel_bound_and_keeps_nothing(
    modules: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    if not modules:  # the child itself ends, before it imports torch and all kernels
        monkeypatch.setattr(attempts, "CHILD", "tests.loading.no_such_module")
    asked = plan("right")
    lasting, passing = run_trials(TrialRun("cpu", modules, workers=1), asked)
    assert lasting == {}
    why = "it could not be tried: the trial's process ended with exit code 1 before it was ready; look for"
    assert passing.keys() == {t.key for t in asked}
    assert all(text.startswith(why) for text in passing.values())
    chip = replace(CHIP, trials=passing)
    assert OPS["right"].bind(OpFacts("cuda", torch.float32, {}, chip=chip))[1].variant == "reference"


def test_a_trial_finds_modules_where_the_engine_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch may come by PYTHONPATH, as on clusters: without it no child starts, and no kernel was bound."""
    (tmp_path / "kernels_elsewhere.py").write_text(f"from {MODULE} import OPS\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    asked = plan("right")
    assert run_trials(TrialRun("cpu", ("kernels_elsewhere",), workers=1), asked) == (
        dict.fromkeys((t.key for t in asked), ""),
        {},
    )


def test_startup_on_a_gpu_tries_the_formats_of_the_model_and_says_what_is_not_proved(
    nano_hybrid: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    formats = weight_formats(open_model(str(nano_hybrid), EngineConfig(quantize="q4_0")))
    assert formats >= {"bfloat16", "Q4_0"}
    where = str(tmp_path)
    target, seen = Target(torch.device("cpu"), torch.float16, 64, 32), list[tuple[str, int, int]]()

    def report(what: str, done: int, of: int) -> None:
        seen.append((what, done, of))

    assert trials.try_kernels(target, formats, where, report) is None
    target.chip = CHIP

    def run(
        how: TrialRun, due: list[KernelTrial], on_trial: trials.OnTrial, _: object
    ) -> tuple[dict[str, str], ...]:
        on_trial(1, len(due))
        return {t.key: f"it hangs on {how.device}" for t in due}, {}

    monkeypatch.setattr(trials, "run_trials", run)
    load_for_gpu()
    target.chip = chip = trials.try_kernels(target, formats, where, report)
    assert chip is not None
    kinds = {key.split("/")[2] for key in chip.trials if key.startswith("linear/triton/")}
    assert "Q4_0" in kinds
    assert "Q4_K" not in kinds
    assert {key.split("/")[3] for key in chip.trials} == {"float16", "float32"}
    assert set(chip.trials.values()) == {"it hangs on cpu"}
    assert seen[0][0].startswith("trying GPU kernels")
    assert "no run on a GPU is recorded yet" in caplog.text
    assert read_verdicts(tmp_path / "gpu_trials", trials.find_site(CHIP, is_early=True)) == chip.trials
    target.chip = CHIP
    fewer = trials.try_kernels(target, formats, where, report, {"linear": ()})
    assert fewer is not None
    assert {key.split("/")[0] for key in fewer.trials} - trials.AROUND == {"chain_launches", "linear"}
    target.chip, target.ops = CHIP, "reference"
    assert trials.try_kernels(target, formats, where, report) is CHIP


@pytest.mark.parametrize(("verdict", "is_early"), [("", True), ("it is 2 off the reference", False)])
def test_kernels_are_tried_as_they_will_be_launched(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    verdict: str,
    is_early: bool,
) -> None:
    """The trial of launches comes first: it decides whether kernels begin while those before them end."""
    runs, permitted = list[tuple[bool, set[str]]](), list[bool]()

    def run(
        how: TrialRun, due: list[KernelTrial], on_trial: trials.OnTrial, _: object
    ) -> tuple[dict[str, str], ...]:
        runs.append((how.is_early, {t.op for t in due}))
        on_trial(len(due), len(due))
        return {t.key: verdict if t.op == "chain_launches" else "" for t in due}, {}

    monkeypatch.setattr(trials, "run_trials", run)
    monkeypatch.setattr(trials, "permit_dependent", lambda _, is_permitted: permitted.append(is_permitted))
    load_for_gpu()
    target = Target(torch.device("cpu"), torch.float32, 64, 32)
    counts: list[tuple[int, int]] = []

    def start(chip: Chip, *, pdl: bool = True) -> Chip:
        target.chip, target.pdl = chip, pdl
        made = trials.try_kernels(
            target, (), str(tmp_path), lambda _, *at: counts.append(at), {"rms_norm": ()}
        )
        assert made is not None
        return made

    with caplog.at_level(logging.INFO, "plait"):
        start(CHIP)
        assert [early for early, _ in runs] == [False, is_early]
        assert runs[0][1] == {"chain_launches"}
        assert "rms_norm" in runs[1][1]
        assert counts == [(1, counts[1][1]), (counts[1][1],) * 2]
        why = "" if is_early else f"programmatic dependent launch: {verdict}"
        assert (trials.why_in_turns(start(CHIP)) or "") == why, "kept, and not tried again"
        assert len(runs) == 2
        assert permitted == [is_early] * 2
        assert ("launched early (PDL)" if is_early else f"one after the other: {why}") in caplog.text
        start(CHIP, pdl=False)
        assert "one after the other: --no-pdl" in caplog.text
        start(EXAMPLES[80])
        assert "one after the other: programmatic dependent launch begins with sm_90" in caplog.text
    assert permitted[2:] == [False, False]
    assert [early for early, _ in runs[2:]] == [False, False]
    assert "chain_launches" not in runs[2][1], "with --no-pdl kernels are tried without it"
    assert "chain_launches" not in runs[3][1], "nor on an sm_80"


def test_each_way_of_launching_has_verdicts_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = list[tuple[bool, int]]()

    def run(how: TrialRun, due: list[KernelTrial], *_: object) -> tuple[dict[str, str], dict[str, str]]:
        runs.append((how.is_early, len(due)))
        return {t.key: "" for t in due}, {}

    monkeypatch.setattr(trials, "run_trials", run)
    load_for_gpu()
    target = Target(torch.device("cpu"), torch.float32, 64, 32)
    for pdl in (False, True, True, False):
        target.chip, target.pdl = CHIP, pdl
        assert trials.try_kernels(target, (), str(tmp_path), lambda *_: None, {"rms_norm": ()})
    in_turns, first, early = runs
    assert in_turns == (False, early[1])
    assert (first, early[0]) == ((False, 1), True)


def test_a_kernel_without_a_trial_is_not_bound_where_others_had_theirs() -> None:
    load_for_gpu()
    facts = OpFacts(
        "cuda", torch.float32, {"size": 64}, chip=replace(CHIP, trials={"linear/triton//float32": ""})
    )
    _, row = REGISTRY["rms_norm"].bind(facts)
    assert row.variant == "reference"
    assert ("triton", "it was not tried on this GPU") in row.skipped
    assert REGISTRY["linear"].bind(facts)[1].variant == "triton"


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"), "failed"),
        (MemoryError("no memory"), "failed"),
        (PermissionError("Permission denied: 'cache/triton'"), "failed"),
        (subprocess.CalledProcessError(1, ["gcc"]), "failed"),
        (RuntimeError("Triton Error [CUDA]: out of memory"), "failed"),
        (RuntimeError("PassManager::run failed"), "verdict"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_the_machine_lacks_is_no_verdict_on_a_kernel(
    error: Exception, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: object) -> str:
        raise error

    monkeypatch.setattr(child, "try_variant", fails)
    trial = plan("right")[0]
    found = answer({"op": trial.op, "variant": "fake", "cases": [[0, []]], "dtype": "float32"}, "cpu")
    assert list(found) == [kind]
    assert type(error).__name__ in found[kind]


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed here")
def test_without_a_c_compiler_no_kernel_is_tried_and_none_is_at_fault(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Triton compiles its launcher. A verdict would stay when a compiler is installed."""

    def no_compiler() -> None:
        raise RuntimeError("Failed to find C compiler. Please specify via CC environment variable")

    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *size, device: empty(*size))
    monkeypatch.setattr(child, "start_launcher", no_compiler)
    why = find_obstacle("cuda:0")
    assert (
        "needs a C compiler and Python's headers (gcc and python3-dev): RuntimeError: Failed to find" in why
    )
    assert find_obstacle("cpu") == ""
    asked = [replace(plan("right")[0], key=f"op {n}") for n in range(5)]
    obstacle = Attempt(False, f"it could not be tried: {why}")
    monkeypatch.setattr(attempts, "start_child", lambda children: (None, obstacle))
    chip = prove_kernels(CHIP, FAKES, asked, tmp_path, lambda done, total: None)
    assert all(found.endswith(why[-60:]) for found in chip.trials.values())
    assert not read_verdicts(tmp_path, trials.find_site(CHIP)), "tried again at the next startup"
    assert caplog.text.count("Failed to find C compiler") == 1, "one line for all of them"
    keep_verdicts(tmp_path, trials.find_site(CHIP), {trial.key: "" for trial in asked})
    caplog.clear()
    assert not any(prove_kernels(CHIP, FAKES, asked, tmp_path, lambda done, total: None).trials.values())
    monkeypatch.setattr(trials, "COMPILERS", ("no-compiler",))
    later = prove_kernels(CHIP, FAKES, asked, tmp_path, lambda done, total: None)
    assert later.trials == chip.trials, "also with verdicts of a time when there was one"
    assert caplog.text.count("Failed to find C compiler") == 1
    assert not any(read_verdicts(tmp_path, trials.find_site(CHIP)).values()), "these stay"
    assert "5 GPU kernels are not used (op 0, op 1, op 2, …): it could not be tried: Triton" in caplog.text


def test_small_gpus_and_small_machines_have_few_trials_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    def count(processors: int, gib: int) -> int:
        monkeypatch.setattr(os, "cpu_count", lambda: processors)
        return trials.count_workers(replace(CHIP, memory_nbytes=gib << 30))

    assert [count(2, 141), count(16, 141), count(128, 24), count(128, 8)] == [4, 8, 8, 4]


def test_an_unknown_kernel_is_no_verdict() -> None:
    asked = {"op": "no_such_op", "variant": "fake", "cases": [[0, []]], "dtype": "float32"}
    assert answer(asked, "cpu") == {"failed": "the trial's process knows no no_such_op (fake)"}


@pytest.mark.sampled(2, across="heavy")
@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed here")
def test_our_own_kernels_pass_their_trial_in_the_interpreter() -> None:
    load_for_gpu()
    asked = {t.key: t for t in plan_trials(TrialNeeds(CHIP, FLOAT, ["Q4_0"]))}
    assert "linear/triton/Q4_0/float32" in asked
    assert "linear/triton/Q8_0/float32" not in asked, "the model has no such weights"
    assert "paged_attention/triton//float32" in asked
    trial = asked["linear/triton/Q4_0/float32"]
    assert run_trials(TrialRun("cpu"), [trial]) == ({trial.key: ""}, {})
    op = REGISTRY["linear"]
    variant = next(v for v in op.variants if v.name == "triton")
    off = replace(variant, fn=lambda *args: 1.01 * variant.fn(*args))
    found = try_variant(op, off, trial.cases[0].apply(op.cases), torch.float32, "cpu")
    assert found.startswith("it is 0.0")
    assert "off the reference" in found


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed here")
def test_layers_with_stored_weights_are_tried_in_the_model_s_own_dtype() -> None:
    load_for_gpu()
    asked = plan_trials(TrialNeeds(CHIP, [torch.float16, torch.float32], ["Q4_0"]))
    dtypes = {t.dtype for t in asked if t.key.startswith("linear/triton/Q4_0")}
    assert dtypes == {"float16"}
    assert {t.dtype for t in asked if t.op == "paged_attention"} == {"float16", "float32"}


def test_verdicts_are_read_back_and_listed(tmp_path: Path) -> None:
    keep_verdicts(tmp_path / "new", SITE, {"a/b//float32": "", "c/d//float32": "it hangs"})
    assert read_verdicts(tmp_path / "new", SITE) == {"a/b//float32": "", "c/d//float32": "it hangs"}
    assert read_verdicts(tmp_path / "new", replace(SITE, driver="591")) == {}
    assert list(list_verdicts(tmp_path / "new")) == [(SITE, {"a/b//float32": "", "c/d//float32": "it hangs"})]
    assert read_verdicts(None, SITE) == {}
    assert list(list_verdicts(None)) == []
    keep_verdicts(None, SITE, {})


def _written(folder: Path, text: str) -> Path:
    path = folder / f"{SITE.digest}.json"
    path.write_text(text)
    path.chmod(0o644)
    return path


@pytest.mark.parametrize(
    "change",
    [
        "{", "[]", "null", '{"kind": 1}', "[" * 100_000,
        {"version": 2}, {"site": {}}, {"site": None}, {"verdicts": []}, {"verdicts": {"a": 1}},
        {"verdicts": {"a": "x" * 301}}, {"verdicts": {"k" * 201: ""}},
        {"verdicts": {str(i): "" for i in range(5000)}}, "x" * (2 << 20),
    ],
)  # fmt: skip
def test_a_damaged_or_lying_file_of_verdicts_is_not_believed(
    tmp_path: Path, change: str | dict[str, object], caplog: pytest.LogCaptureFixture
) -> None:
    keep_verdicts(tmp_path, SITE, {"a/b//float32": ""})
    path = tmp_path / f"{SITE.digest}.json"
    _written(
        tmp_path,
        change if isinstance(change, str) else json.dumps({**json.loads(path.read_text()), **change}),
    )
    assert read_verdicts(tmp_path, SITE) == {}
    assert "is not read, and GPU kernels are tried again" in caplog.text
    assert list(list_verdicts(tmp_path)) == []


def test_a_file_of_another_site_or_that_others_may_write_is_not_believed(tmp_path: Path) -> None:
    keep_verdicts(tmp_path, SITE, {"a/b//float32": ""})
    path = tmp_path / f"{SITE.digest}.json"
    path.chmod(0o666)
    assert read_verdicts(tmp_path, SITE) == {}
    path.chmod(0o644)
    assert read_verdicts(tmp_path, SITE) != {}
    tmp_path.chmod(0o777)
    assert read_verdicts(tmp_path, SITE) == {}
    tmp_path.chmod(0o755)
    other = replace(SITE, torch="2.14")
    path.rename(tmp_path / f"{other.digest}.json")
    assert read_verdicts(tmp_path, other) == {}
    os.mkfifo(path)
    assert read_verdicts(tmp_path, SITE) == {}


@pytest.mark.parametrize("source", ["ops/norm.py", "kernels/triton/forms.py", "kernels/triton/ssm/mamba2.py"])
def test_a_change_in_any_source_of_a_kernel_begins_anew(tmp_path: Path, source: str) -> None:
    """Those of nested packages too, where most kernels are."""
    (tmp_path / source).parent.mkdir(parents=True)
    (tmp_path / source).write_text("a")
    before = verdicts.hash_sources(tmp_path)
    (tmp_path / source).write_text("b")
    assert verdicts.hash_sources(tmp_path) != before


def test_every_module_that_registers_a_kernel_is_in_the_hash() -> None:
    """A package that moves out of `SOURCES` would keep verdicts of other code."""
    root = Path(verdicts.__file__).resolve().parents[2]
    registers = [p for p in root.rglob("*.py") if 'on="cuda"' in p.read_text(encoding="utf-8")]
    outside = [p for p in registers if not any(p.is_relative_to(root / f) for f in verdicts.SOURCES)]
    assert registers
    assert not outside
    assert len(verdicts.hash_sources()) == 64


def test_the_driver_is_read_where_the_system_says_it(tmp_path: Path) -> None:
    file = tmp_path / "version"
    file.write_text(
        "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  590.48.01  Release Build\nGCC 12.3.0\n"
    )
    assert verdicts.driver_version(file) == "590.48.01"
    assert verdicts.driver_version(tmp_path / "none") == ""
