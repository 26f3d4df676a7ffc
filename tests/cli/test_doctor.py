"""`plait doctor`: facts of a machine, and what is made of them."""

from __future__ import annotations

import copy
import dataclasses
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from plait.bench.machine import find_version
from plait.cli.common import doctor_checks, machine_facts
from plait.cli.common.doctor_checks import (
    CHECKS,
    DoctorRequest,
    gpu_kernel_facts,
    torch_facts,
)
from plait.cli.common.machine_facts import compiler_facts, gpu_facts, hub_facts
from plait.cli.doctor import format_rows, text_lines
from plait.loading.kernel_trials.verdicts import TrialSite, hash_sources, keep_verdicts

Run = Callable[..., Any]
WELL: dict[str, Any] = {
    "system": {"os": "Linux", "machine": "x86_64", "python": "3.11.7", "executable": "python"},
    "cpu": {
        "name": "c",
        "flags": ["avx2"],
        "logical": 8,
        "physical": 4,
        "quota": None,
        "threads": 4,
        "load": 0.1,
    },
    "memory": {"total": 64 << 30, "available": 60 << 30, "limit": None, "huge_pages": "madvise"},
    "gpus": [],
    "versions": dict.fromkeys(("plait", *doctor_checks.NEEDED, *doctor_checks.WANTED), "1.0"),
    "torch": {"version": "2.9", "cuda": None, "finds_gpu": None},
    "compiler": {},
    "kernels": {
        "target": "znver4-vnni",
        "dot": "vnni",
        "no_amx": "this processor has no amx-tile",
        "formats": ["Q4_0"],
        "cache": {
            "folder": "kernels",
            "writable": True,
            "refused": None,
            "free": 9 << 30,
            "current": {"room": "a", "nbytes": 5},
            "old": {},
        },
    },
    "walls": ["Landlock 7", "limit of memory", "seccomp"],
    "packed": {"folder": "packed", "models": [], "nbytes": 0},
    "gpu_kernels": [],
    "hub": {
        "library": "2.4",
        "folder": "hub",
        "repositories": 2,
        "free": 9 << 30,
        "offline": False,
        "logged_in": False,
    },
}
GPU = {"name": "H200", "driver": "570", "memory_mib": "1000"}


def findings(asked: DoctorRequest | None = None, **changes: Any) -> list[doctor_checks.Finding]:
    """What `doctor` reports for a machine that differs from a good one; a key is `room__key`."""
    facts = copy.deepcopy(WELL)
    for path, value in changes.items():
        *rooms, key = path.split("__")
        place = facts
        for room in rooms:
            place = place[room]
        place[key] = value
    return [f for check in CHECKS for f in check(facts, asked or DoctorRequest())]


def test_a_good_machine_has_no_findings() -> None:
    assert findings() == []
    assert text_lines(copy.deepcopy(WELL), [])[-1].endswith("nothing is wrong")


@pytest.mark.parametrize(
    ("changes", "level", "what", "advice"),
    [
        ({"versions__torch": None}, "broken", "not installed: torch", "pip install torch"),
        (
            {"kernels__cache__refused": "others may write x"},
            "warning",
            "neither read nor kept",
            "--cache-dir",
        ),
        ({"kernels__cache": None}, "warning", "no home folder", "--cache-dir"),
        ({"versions__numba": None}, "warning", "many times slower", "pip install numba"),
        ({"versions__huggingface-hub": None}, "note", "cannot be fetched", "plait-engine[hub]"),
        ({"kernels__dot": "generic"}, "warning", "no AVX2", "fraction"),
        ({"kernels__dot": "avx2"}, "note", "no VNNI", "nothing to do"),
        ({"cpu__quota": 0.5}, "warning", "a quota of 0.5 CPUs, and 4 threads", "a quota of one CPU or more"),
        ({"cpu__load": 30.0}, "note", "busy", "lower"),
        ({"memory__available": 1 << 30}, "warning", "1.0 GiB of memory available", "--quantize"),
        ({"memory__limit": 1 << 30}, "warning", "the container's limit", "--quantize"),
        ({"memory__huge_pages": "never"}, "note", "huge pages are off", "madvise"),
        ({"gpus": [GPU]}, "warning", "H200 is not used: torch 2.9 has no CUDA", "a CUDA build"),
        (
            {"gpus": [GPU], "torch": {"version": "2.9", "cuda": "12.8", "finds_gpu": False}},
            *("warning", "finds no device with driver 570", "a newer driver"),
        ),
        ({"torch__cuda": "12.8"}, "note", "and there is no GPU", "CPU build"),
        (
            {
                "gpus": [{**GPU, "capability": "7.0"}],
                "torch": {"version": "2.9", "cuda": "12.8", "finds_gpu": True},
            },
            *("warning", "H200 is not used: compute capability 7.0, the least is 7.5", "on the CPU"),
        ),
        (
            {
                "gpus": [{**GPU, "capability": "7.5"}],
                "torch": {"version": "2.9", "cuda": "12.8", "finds_gpu": True},
            },
            *("note", "H200: attention, linear layers and experts run torch's operators", "8.0 and newer"),
        ),
        (
            {
                "gpus": [GPU],
                "torch": {"version": "2.9", "cuda": "12.8", "finds_gpu": True},
                "compiler": {"command": None, "headers": "Python.h"},
            },
            *("warning", "cannot be launched, for there is no C compiler: models", "gcc and python3-dev"),
        ),
        (
            {
                "gpu_kernels": [
                    {"chip": "H200", "driver": "570", "tried": 2, "rejected": {"a/b//float32": "it hangs"}}
                ]
            },
            *("warning", "on H200 the kernel a/b//float32 is not used: it hangs", "report it"),
        ),
        ({"kernels__cache__writable": False}, "warning", "cannot be written", "--cache-dir"),
        ({"kernels__cache__free": 1 << 20}, "warning", "left for kernels", "--cache-dir"),
        (
            {"kernels__cache__old": {"b": 2 << 30}},
            "note",
            "1 old folders of kernels take 2.0 GiB",
            "plait cache clean",
        ),
        ({"walls": ["limit of memory"]}, "note", "by limits of the process alone", "allows seccomp"),
        ({"walls": []}, "warning", "does not start", "limits of processes"),
        ({"hub__free": 1 << 20}, "warning", "left for models of the Hub", "plait rm"),
        ({"hub__offline": True}, "note", "HF_HUB_OFFLINE is set", "unset"),
    ],
)
def test_every_trouble_has_a_finding_with_advice(
    changes: dict[str, Any], level: str, what: str, advice: str
) -> None:
    (found,) = findings(**changes)
    assert found.level == level
    assert what in found.what
    assert advice in found.advice


def test_options_are_checked_against_the_machine() -> None:
    (found,) = findings(DoctorRequest(threads=16))
    assert (found.what.startswith("16 threads on 8 logical CPUs"), found.advice) == (True, "--threads 4")
    (found,) = findings(DoctorRequest(threads=4), cpu__quota=2.5, cpu__threads=2)
    assert (found.what.startswith("a quota of 2.5 CPUs, and 4 threads"), found.advice) == (
        True,
        "--threads 2",
    )
    assert not findings(cpu__quota=2.5, cpu__threads=2), "the default keeps within it"
    (asked,) = findings(DoctorRequest(isa="generic"), kernels__dot="generic")
    assert "--isa generic is set" in asked.what


def test_without_numba_there_is_one_finding_and_a_word_for_it() -> None:
    facts = copy.deepcopy(WELL)
    facts["kernels"] = {"target": None, "dot": None, "formats": [], "cache": None}
    assert [f for check in CHECKS for f in check(facts, DoctorRequest())] == []
    assert any("Numba is not installed" in line for line in text_lines(facts, []))


def test_this_machine_is_described(plait: Run, tmp_path: Path) -> None:
    result = plait("doctor", "--json", "--cache-dir", str(tmp_path / "none"))
    assert result.code == 0, result.err
    facts = json.loads(result.out)
    assert facts["cpu"]["physical"] >= 1
    assert facts["memory"]["total"] > 0
    assert facts["kernels"]["target"]
    assert facts["kernels"]["cache"]["current"]["nbytes"] == 0
    assert not (tmp_path / "none").exists()  # it looks and does not touch
    shown = plait("doctor").out
    for words in ("machine", "processor", "compiled for", "findings", f"Python {sys.version.split()[0]}"):
        assert words in shown


def test_something_broken_is_the_exit_code(plait: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor_checks, "find_version", lambda name: None if name == "safetensors" else "1.0")
    result = plait("doctor")
    assert result.code == 1
    assert "broken: not installed: safetensors" in result.out


def test_it_does_not_import_torch() -> None:
    code = "import sys; from plait.cli.common.doctor_checks import DoctorRequest, examine"
    code += "; examine(DoctorRequest())"
    code += "; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_formats_say_which_kernel_reads_them() -> None:
    rows = {row["format"]: row for row in format_rows()}
    assert rows["Q4_K"]["variant"].startswith("native")
    assert rows["float32"]["variant"].startswith("native")
    assert all(row["why"] or row["variant"] != "reference" for row in rows.values())


def test_a_driver_answers_with_its_devices(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    smi = tmp_path / "nvidia-smi"
    smi.write_text("#!/bin/sh\necho 'NVIDIA H200, 570.1, 143771, 9.0'\n")
    smi.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    gpu = {"name": "NVIDIA H200", "driver": "570.1", "memory_mib": "143771", "capability": "9.0"}
    assert gpu_facts() == [gpu]
    assert torch_facts(gpu_facts())["finds_gpu"] in (None, False)
    smi.write_text("#!/bin/sh\ncase $1 in *compute_cap) exit 6;; esac\necho 'NVIDIA K80, 470.1, 11441'\n")
    assert gpu_facts() == [{"name": "NVIDIA K80", "driver": "470.1", "memory_mib": "11441"}]
    smi.write_text("#!/bin/sh\nexit 9\n")
    assert gpu_facts() == []


def test_without_the_driver_s_command_devices_are_those_of_torch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A container may have the driver's library and /dev/nvidia0 alone."""
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(machine_facts, "NVIDIA", tmp_path / "version")
    monkeypatch.setattr(machine_facts, "DEVICES", tmp_path)
    monkeypatch.setattr(machine_facts, "ASK_TORCH", "raise SystemExit('it looked')")
    assert gpu_facts() == []
    (tmp_path / "nvidia0").touch()
    assert gpu_facts() == [{"name": "an NVIDIA device", "driver": "unknown"}]
    script = 'print(\'[{"name": "NVIDIA H200", "driver": "of CUDA 12.8"}]\')'
    monkeypatch.setattr(machine_facts, "ASK_TORCH", script)
    assert gpu_facts() == [{"name": "NVIDIA H200", "driver": "of CUDA 12.8"}]


def test_a_compiler_is_looked_for_where_there_is_a_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Triton compiles what it launches kernels with; verdicts that are kept do not say that it cannot."""
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr("sysconfig.get_paths", lambda scheme: {"include": str(tmp_path)})
    assert compiler_facts([]) == {}
    assert compiler_facts([GPU]) == {"command": None, "headers": None}
    for name in ("clang", "Python.h"):
        (tmp_path / name).touch(0o755)
    found = {"command": str(tmp_path / "clang"), "headers": str(tmp_path / "Python.h")}
    assert compiler_facts([GPU]) == found
    monkeypatch.setenv("CC", "/opt/cc")
    assert compiler_facts([GPU]) == {**found, "command": "/opt/cc"}


def test_kernels_that_were_tried_on_a_gpu_are_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert gpu_kernel_facts(str(tmp_path)) == []
    torch, triton = (find_version(name) or "" for name in ("torch", "triton"))
    build = f"{torch.partition('+')[0]}+cu130"  # as torch.__version__ of PyPI's wheel, not its metadata
    site = TrialSite("H200, sm_90", "570", build, triton, hash_sources())
    folder = tmp_path / "gpu_trials"
    keep_verdicts(folder, site, {"a/b//float32": "it hangs", "a/c//float32": ""})
    keep_verdicts(folder, dataclasses.replace(site, torch="1.0"), {"a/b//float32": "old"})
    found = gpu_kernel_facts(str(tmp_path))
    assert found == [
        {"chip": "H200, sm_90", "driver": "570", "tried": 2, "rejected": {"a/b//float32": "it hangs"}}
    ]
    shown = text_lines({**copy.deepcopy(WELL), "gpu_kernels": found}, [])
    assert any("on GPUs" in line and "H200, sm_90, driver 570: 2 tried, 1 not used" in line for line in shown)


def test_a_token_that_may_not_be_read_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    huggingface_hub = pytest.importorskip("huggingface_hub")

    def refuse() -> str:
        raise PermissionError(13, "Permission denied", "token")

    monkeypatch.setattr(huggingface_hub, "get_token", refuse)
    assert hub_facts()["logged_in"] is False
