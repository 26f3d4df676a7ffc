"""What `plait doctor` looks at: this machine, what is installed, and what of it is wrong or slow.

Nothing here imports torch, except to ask it for a GPU where there seems to be one.
"""

from __future__ import annotations

import os
import platform
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

from plait.bench import machine
from plait.bench.machine import find_version
from plait.checkpoint.packed_cache.file_format import default_folder, list_packed
from plait.cli.common.machine_facts import compiler_facts, free_bytes, gpu_facts, hub_facts, is_writable
from plait.errors import CapacityError
from plait.kernels.load import KernelTarget, cached_kernels, describe_target, why_refused
from plait.loading.kernel_trials.verdicts import find_folder, hash_sources, list_verdicts
from plait.resource_limits import (
    cpu_quota,
    default_threads,
    free_memory,
    memory_limit,
    physical_cores,
    read_text,
)
from plait.text.chat.sandbox import Sandbox
from plait.version import __version__

NEEDED = (
    *("torch", "numpy", "safetensors", "tokenizers", "splintr-rs", "msgspec", "jinja2", "llguidance"),
    *("gguf", "starlette", "uvicorn", "prometheus-client", "click", "rich"),
)
WANTED = ("numba", "llvmlite", "huggingface-hub", "triton")
HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")
OLDEST_GPU = 7.5  # compute capability, as `ops.chip.OLDEST`, which needs torch
MATRIX_GPU = 8.0  # as `ops.chip.PRODUCTS`
GIB = 1 << 30
FOLDER = "--cache-dir FOLDER"
Facts = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Finding:
    """Something to know. broken: Plait cannot work; warning: it works badly; note: it could work better."""

    level: Literal["broken", "warning", "note"]
    what: str
    advice: str


@dataclass(frozen=True, slots=True)
class DoctorRequest:
    """The options a startup would get, which are checked against the machine."""

    threads: int | None = None
    cache_dir: str | None = None
    isa: str = "native"


def examine(asked: DoctorRequest) -> tuple[Facts, list[Finding]]:
    """(facts as plain values, what is wrong or could be better, worst first)."""
    target = describe_target(cache_dir=Path(asked.cache_dir) if asked.cache_dir else None, isa=asked.isa)
    gpus = gpu_facts()
    facts: Facts = {
        "system": {
            "os": platform.platform(),
            "machine": platform.machine(),
            "python": platform.python_version(),
            "executable": sys.executable,
        },
        "cpu": cpu_facts(),
        "memory": memory_facts(),
        "gpus": gpus,
        "versions": {"plait": __version__, **{name: find_version(name) for name in (*NEEDED, *WANTED)}},
        "torch": torch_facts(gpus),
        "compiler": compiler_facts(gpus),
        "kernels": kernel_facts(target),
        "walls": wall_facts(),
        "packed": packed_facts(asked.cache_dir),
        "gpu_kernels": gpu_kernel_facts(asked.cache_dir),
        "hub": hub_facts(),
    }
    findings = [f for check in CHECKS for f in check(facts, asked)]
    order = {"broken": 0, "warning": 1, "note": 2}
    facts["findings"] = [asdict(f) for f in sorted(findings, key=lambda f: order[f.level])]
    return facts, sorted(findings, key=lambda f: order[f.level])


def cpu_facts() -> Facts:
    """Name, vector flags, cores that this process may use, a CPU quota, the default of `--threads`."""
    found, quota = machine.describe(), cpu_quota()
    return {
        "name": found["cpu"],
        "flags": found["flags"],
        "logical": machine.cores(),
        "physical": physical_cores(),
        "quota": None if quota is None else round(quota, 2),
        "threads": default_threads()[0],
        "load": round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else None,
    }


def memory_facts() -> Facts:
    """Bytes of memory: all, what can still be had here, and the tightest limit of a control group."""
    kib = dict(re.findall(r"^(\w+):\s*(\d+) kB$", read_text(machine.MEMINFO), re.MULTILINE))
    return {
        "total": int(kib["MemTotal"]) * 1024 if "MemTotal" in kib else None,
        "available": free_memory(),
        "limit": memory_limit(),
        "huge_pages": (re.search(r"\[(\w+)\]", read_text(HUGE_PAGES)) or [None, None])[1],
    }


def wall_facts() -> list[str]:
    """What confines the process that renders chat templates, and the one that tries grammars out."""
    sandbox = Sandbox()
    try:
        return sandbox.start()
    except CapacityError:
        return []
    finally:
        sandbox.close()


def torch_facts(gpus: Sequence[Mapping[str, str]]) -> Facts:
    """torch's build, read from its files; whether it finds a GPU is checked only if there seems to be one."""
    spec = find_spec("torch")
    root = Path(spec.origin).parent if spec is not None and spec.origin else None
    if root is None:
        return {"version": None, "cuda": None, "finds_gpu": None}
    built = re.search(r"^cuda[^=]*= *'([\d.]+)'", read_text(root / "version.py"), re.MULTILINE)
    cuda, finds_gpu = built[1] if built else None, None
    if cuda and gpus:
        import torch

        finds_gpu = torch.cuda.is_available()
    return {"version": find_version("torch"), "cuda": cuda, "finds_gpu": finds_gpu}


def kernel_facts(target: KernelTarget | None) -> Facts:
    """What kernels are compiled for, and what of them is kept."""
    if target is None:
        return {"target": None, "dot": None, "no_amx": None, "formats": [], "cache": None}
    return {
        "target": target.name,
        "dot": target.dot,
        "no_amx": target.no_amx,
        "formats": list(target.formats),
        "cache": cache_facts(target.room) if target.room is not None else None,
    }


def cache_facts(room: Path) -> Facts:
    """The folder of compiled kernels, and whether it is used."""
    kept = {one.path: one.nbytes for one in cached_kernels(room.parent.parent)}
    current = kept.pop(room, 0)
    return {
        "folder": str(room.parent),
        "writable": is_writable(room.parent),
        "refused": why_refused(room),
        "free": free_bytes(room.parent),
        "current": {"room": room.name, "nbytes": current},
        "old": {path.name: nbytes for path, nbytes in kept.items()},
    }


def packed_facts(cache_dir: str | None) -> Facts:
    """The packed weights that `plait warmup` keeps."""
    folder = default_folder(cache_dir)
    kept = list_packed(folder)
    return {
        "folder": str(folder) if folder is not None else None,
        "models": sorted({item.model for item in kept}),
        "nbytes": sum(item.nbytes for item in kept),
    }


def gpu_kernel_facts(cache_dir: str | None) -> list[Facts]:
    """What trials of GPU kernels found, on each GPU, with the versions that are installed now.

    What is behind `+` in a version is ignored: torch reports its CUDA there, and the metadata of PyPI's wheel
    does not have it.
    """
    torch, triton = ((find_version(name) or "").partition("+")[0] for name in ("torch", "triton"))
    mine = (torch, triton, hash_sources())
    return [
        {
            "chip": site.chip,
            "driver": site.driver,
            "tried": len(verdicts),
            "rejected": {key: why for key, why in sorted(verdicts.items()) if why},
        }
        for site, verdicts in list_verdicts(find_folder(cache_dir))
        if (site.torch.partition("+")[0], site.triton.partition("+")[0], site.sources) == mine
    ]


def check_packages(facts: Mapping[str, Any], asked: DoctorRequest) -> Iterator[Finding]:
    if missing := [name for name in NEEDED if facts["versions"][name] is None]:
        yield Finding("broken", f"not installed: {', '.join(missing)}", f"pip install {' '.join(missing)}")
    if facts["versions"]["numba"] is None:
        yield Finding(
            "warning", "Numba is not installed: models run on torch, many times slower", "pip install numba"
        )
    if facts["versions"]["huggingface-hub"] is None:
        yield Finding(
            "note",
            "models cannot be fetched by their Hub name",
            "pip install 'plait-engine[hub]', if you want to",
        )


def check_cpu(facts: Mapping[str, Any], asked: DoctorRequest) -> Iterator[Finding]:
    cpu, dot = facts["cpu"], facts["kernels"]["dot"]
    if dot == "generic" and facts["system"]["machine"].lower() in ("x86_64", "amd64"):
        why = "--isa generic is set" if asked.isa == "generic" else "this processor has no AVX2"
        yield Finding("warning", f"kernels use plain x86-64: {why}", "expect a fraction of the speed")
    elif dot == "generic" and dot is not None:
        yield Finding("note", "kernels are generic on this processor", "its own dot product is not used yet")
    elif dot == "avx2":
        reason = f"--isa {asked.isa}" if asked.isa != "native" else "this processor has no VNNI"
        yield Finding(
            "note", f"products of bytes use AVX2: {reason}", "nothing to do, if it is the processor"
        )
    threads = asked.threads or cpu["threads"]
    if asked.threads and asked.threads > cpu["logical"]:
        yield Finding(
            "warning",
            f"{asked.threads} threads on {cpu['logical']} logical CPUs: they wait for each other",
            f"--threads {cpu['threads']}",
        )
    if cpu["quota"] and threads > cpu["quota"]:
        count = f"{threads} thread{'s' * (threads > 1)}"
        yield Finding(
            "warning",
            f"a quota of {cpu['quota']:g} CPUs, and {count} would use it in bursts",
            f"--threads {cpu['threads']}" if threads > cpu["threads"] else "a quota of one CPU or more",
        )
    if cpu["load"] is not None and cpu["load"] > cpu["logical"]:
        yield Finding("note", f"the machine is busy (load {cpu['load']})", "speeds are lower meanwhile")


def check_memory(facts: Mapping[str, Any], asked: DoctorRequest) -> Iterator[Finding]:
    memory = facts["memory"]
    for name, text_of in (("available", "available"), ("limit", "the container's limit")):
        if memory[name] is not None and memory[name] < 2 * GIB:
            yield Finding(
                "warning",
                f"{memory[name] / GIB:.1f} GiB of memory {text_of}",
                "small models only: weights in blocks (--quantize q4_k, or GGUF) and a short --max-model-len",
            )
    if memory["huge_pages"] == "never":
        yield Finding(
            "note", "huge pages are off: large weights are read slower", f"echo madvise > {HUGE_PAGES}"
        )


def check_gpu(facts: Mapping[str, Any], asked: DoctorRequest) -> Iterator[Finding]:
    gpus, torch = facts["gpus"], facts["torch"]
    if torch["version"] is None:
        return
    if gpus and torch["cuda"] is None:
        yield Finding(
            "warning",
            f"{gpus[0]['name']} is not used: torch {torch['version']} has no CUDA",
            "install a CUDA build",
        )
    elif gpus and torch["finds_gpu"] is False:
        yield Finding(
            "warning",
            f"torch, built for CUDA {torch['cuda']}, finds no device with driver {gpus[0]['driver']}",
            "a newer driver, or a torch built for an older CUDA",
        )
    elif gpus and torch["finds_gpu"] and facts["versions"]["triton"] is None:
        what = "Triton is not installed: a GPU runs torch's operators alone, many times slower"
        yield Finding("warning", what, "pip install triton")
    elif (
        gpus
        and torch["finds_gpu"]
        and (lacks := [name for name, path in facts["compiler"].items() if not path])
    ):
        words = {"command": "no C compiler", "headers": "no Python.h"}
        what = f"GPU kernels cannot be launched, for there is {' and '.join(words[name] for name in lacks)}"
        yield Finding("warning", f"{what}: models run torch's operators alone", "install gcc and python3-dev")
    for gpu in gpus:
        number = re.fullmatch(r"\d+\.\d+", gpu.get("capability", ""))
        if number and float(number[0]) < OLDEST_GPU:
            yield Finding(
                "warning",
                f"{gpu['name']} is not used: compute capability {number[0]}, the least is {OLDEST_GPU}",
                "models run on the CPU; a Turing GPU or a newer one is served",
            )
        elif number and float(number[0]) < MATRIX_GPU:
            yield Finding(
                "note",
                f"{gpu['name']}: attention, linear layers and experts run torch's operators, not our kernels",
                f"Triton uses the matrix units of compute capability {MATRIX_GPU} and newer",
            )
    if not gpus and torch["cuda"] is not None:
        yield Finding(
            "note",
            f"torch is a CUDA {torch['cuda']} build, and there is no GPU",
            "its CPU build does the same in some gigabytes less",
        )


def check_gpu_kernels(facts: Mapping[str, Any], asked: DoctorRequest) -> Iterator[Finding]:
    for found in facts["gpu_kernels"]:
        for key, why in found["rejected"].items():
            what = f"on {found['chip']} the kernel {key} is not used: {why}"
            yield Finding("warning", what, "a newer driver or Triton, and please report it")


def check_disks(facts: Mapping[str, Any], asked: DoctorRequest) -> Iterator[Finding]:
    cache, hub = facts["kernels"]["cache"], facts["hub"]
    if cache is None and facts["kernels"]["target"] is not None:
        yield Finding("warning", "there is no home folder: kernels are compiled in every run", FOLDER)
    elif cache is not None and cache["refused"]:
        yield Finding("warning", f"compiled kernels are neither read nor kept: {cache['refused']}", FOLDER)
    elif cache is not None and not cache["writable"]:
        yield Finding(
            "warning",
            f"{cache['folder']} cannot be written: kernels that are not in it are compiled in every run",
            FOLDER,
        )
    if cache is not None and sum(cache["old"].values()) > GIB:
        old = f"{len(cache['old'])} old folders of kernels take {sum(cache['old'].values()) / GIB:.1f} GiB"
        yield Finding(
            "note", old, "the next run removes what was unused for 30 days; `plait cache clean` all"
        )
    for name, free in (("kernels", cache and cache["free"]), ("models of the Hub", hub["free"])):
        if free is not None and free < GIB:
            advice = "free some, or --cache-dir" if name == "kernels" else "`plait rm`, or set HF_HUB_CACHE"
            yield Finding("warning", f"{free / GIB:.2f} GiB of disk are left for {name}", advice)
    if hub.get("offline"):
        yield Finding("note", "HF_HUB_OFFLINE is set: nothing is fetched", "unset it to fetch models")


def check_walls(facts: Mapping[str, Any], asked: DoctorRequest) -> Iterator[Finding]:
    if not facts["walls"]:
        yield Finding(
            "warning", "the process that renders chat templates does not start", "look at limits of processes"
        )
    elif "seccomp" not in facts["walls"]:
        yield Finding(
            "note",
            "chat templates and grammars are kept from files and network by limits of the process alone",
            "Linux on x86-64 or ARM, in a container that allows seccomp, bounds their system calls, too",
        )


CHECKS = (check_packages, check_cpu, check_memory, check_gpu, check_gpu_kernels, check_disks, check_walls)
