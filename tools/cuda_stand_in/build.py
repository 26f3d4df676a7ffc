"""Builds the two libraries of the stand-in against torch and Triton of this Python, and a Python for them.

That is a virtual environment over the one that runs this: all of its packages, and our hook, which isolated
processes (`python -I`) load, too. All lie in the user's cache folder, by a digest of their sources and of
what they are built against. Nothing that is installed changes. A function of CUDA that some library of torch
needs and `library/` lacks becomes a stub that returns "not supported" and complains.
"""

from __future__ import annotations

import hashlib
import os
import platform
import re
import runpy
import shutil
import site
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from importlib.machinery import PathFinder
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from plait.cache_folder import cache_base, make_folder

FOLDER = Path(__file__).resolve().parent
SOURCES = FOLDER / "library"
RUNTIME = ("state", "device", "memory", "streams", "graphs", "kernels")
DRIVER = "libcuda.so.1"
PYTHON = "bin/python"
TRITON = "3.7"  # its interpreter is changed from inside
NOT_SUPPORTED = 801  # of the runtime, and of the driver
FLAGS = ("-std=c++17", "-fPIC", "-Wall", "-Wextra")
SIGNS_OF_A_GPU = ("/proc/driver/nvidia/version", "/dev/nvidiactl", "/dev/dxg")
NO_CUDA = (
    "the torch of this Python ({found}) is built without CUDA, so it has no GPU path to run; make a virtual "
    "environment with PyTorch's CUDA build, as docs/add-a-kernel.md says, and call this tool with its Python"
)


class StandInRefused(Exception):
    """Why the stand-in cannot be built or run here, and what to do."""


@dataclass(frozen=True, slots=True)
class Parts:
    """What the libraries are built against.

    runtime: torch's own libcudart, of which the name and the functions count. libraries: those that may call
    it. headers: a folder with cuda.h and cuda_runtime_api.h. versions: of torch, Triton and the compiler.
    """

    compiler: str
    runtime: Path
    libraries: tuple[Path, ...]
    headers: Path
    versions: str


def why_unusable(signs: Iterable[str] = SIGNS_OF_A_GPU) -> str | None:
    """What of the system forbids the stand-in; None: nothing does."""
    if platform.system() != "Linux":
        return f"the stand-in for CUDA runs on Linux alone, and this is {platform.system()}"
    for sign in signs:
        if os.path.exists(sign):
            return (
                f"this machine has an NVIDIA driver ({sign}), so run plait with --device cuda itself; the "
                "stand-in would hide the GPU"
            )
    return None


def find_compiler() -> str:
    """The C++ compiler: CXX, or the usual names. Raises StandInRefused."""
    names = [os.environ["CXX"]] if os.environ.get("CXX") else ["c++", "g++", "clang++"]
    found = next(filter(None, map(shutil.which, names)), None)
    if found is None or shutil.which("nm") is None:
        raise StandInRefused(
            f"no C++ compiler with its tools was found ({', '.join(names)} and nm); install one, for example "
            "`apt-get install g++`, or name the compiler in CXX"
        )
    return found


def find_package(name: str) -> Path:
    """The folder of an installed package, which is not imported. Raises StandInRefused."""
    spec = PathFinder.find_spec(name)
    if spec is None or not spec.submodule_search_locations:
        raise StandInRefused(f"{name} is not installed for this Python")
    return Path(next(iter(spec.submodule_search_locations)))


def find_runtime(torch: Path) -> Path:
    """The libcudart that this torch loads. Raises StandInRefused."""
    facts = runpy.run_path(str(torch / "version.py"))
    if not facts.get("cuda"):
        raise StandInRefused(NO_CUDA.format(found=facts["__version__"]))
    major = str(facts["cuda"]).partition(".")[0]
    places = [torch / "lib", *sorted(torch.parent.glob("nvidia/*/lib"))]
    found = next((p for place in places for p in place.glob(f"libcudart.so.{major}")), None)
    if found is None:
        raise StandInRefused(
            f"no libcudart.so.{major} lies next to torch {facts['__version__']}; install torch from PyPI, "
            "with the packages that it names"
        )
    return found


def find_headers(triton: Path, runtime: Path) -> Path:
    """The folder with CUDA's headers that Triton brings; StandInRefused if they are of another CUDA."""
    folder = triton / "backends" / "nvidia" / "include"
    path = folder / "cuda_runtime_api.h"
    found = re.search(r"#define CUDART_VERSION\s+(\d+)", path.read_text() if path.exists() else "")
    major = int(found[1]) // 1000 if found else None
    if not runtime.name.endswith(f".so.{major}"):
        what = f"those of CUDA {major}" if major else "no header"
        raise StandInRefused(
            f"torch loads {runtime.name}, and Triton brings {what}; install the Triton that torch names"
        )
    return folder


def find_parts() -> Parts:
    """All that a build needs. Raises StandInRefused."""
    if (why := why_unusable()) is not None:
        raise StandInRefused(why)
    torch, runtime = find_package("torch"), find_runtime(find_package("torch"))
    triton = find_package("triton")
    try:
        versions = [version("torch"), version("triton")]
    except PackageNotFoundError as error:
        raise StandInRefused(f"{error} has no metadata; install it again") from error
    if not versions[1].startswith(f"{TRITON}."):
        raise StandInRefused(f"the stand-in is written for Triton {TRITON}, and this is {versions[1]}")
    compiler = find_compiler()
    versions += run([compiler, "--version"]).splitlines()[:1]
    places = [torch / "lib", *sorted(torch.parent.glob("nvidia/*/lib"))]
    libraries = tuple(path for place in places for path in sorted(place.glob("*.so*")))
    return Parts(compiler, runtime, libraries, find_headers(triton, runtime), ", ".join(versions))


def run(command: list[str]) -> str:
    """What a program writes. Raises StandInRefused with its errors."""
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise StandInRefused(f"`{' '.join(command)}` failed:\n{done.stderr.strip()}")
    return done.stdout


def digest(parts: Parts) -> str:
    """Names a build: of its sources, this file, and what it is built against."""
    total = hashlib.sha256("\0".join([parts.versions, str(parts.runtime), str(FOLDER), sys.prefix]).encode())
    for path in (Path(__file__), *sorted(SOURCES.iterdir())):
        total.update(path.read_bytes())
    return total.hexdigest()[:16]


def needed_functions(parts: Parts) -> set[str]:
    """The functions of libcudart that libraries of torch's call."""
    if not parts.libraries:
        return set()
    listed = run(["nm", "-D", "--undefined-only", *map(str, parts.libraries)])
    return set(re.findall(rf" U (\w+)@{re.escape(parts.runtime.name)}$", listed, re.MULTILINE))


def driver_functions(headers: Path) -> set[str]:
    """The functions of the driver that Triton's launcher may load."""
    text = (headers.parent / "driver.c").read_text()
    return set(re.findall(r"\bcu[A-Z][A-Za-z0-9]*\b", text)) - set(re.findall(r"\b(cu\w+)Handle\b", text))


def compile_sources(parts: Parts, names: Iterable[str], target: Path) -> str:
    """Compile files of `library/` as one, which takes a third of the time. Raises StandInRefused."""
    source = target.with_suffix(".cpp")
    source.write_text("".join(f'#include "{SOURCES / name}.cpp"\n' for name in names))
    run([parts.compiler, *FLAGS, f"-I{parts.headers}", "-c", str(source), "-o", str(target)])
    return str(target)


def compile_stubs(parts: Parts, names: Iterable[str], target: Path) -> str:
    """An object with functions that complain and return "not supported". Raises StandInRefused."""
    source = target.with_suffix(".c")
    lines = ["void stand_in_unimplemented(const char *call);"]
    for name in sorted(names):
        body = f'stand_in_unimplemented("{name}"); return {NOT_SUPPORTED};'
        lines.append(f"int {name}(void) {{ {body} }}")
    source.write_text("\n".join([*lines, ""]))
    run([parts.compiler, "-x", "c", "-fPIC", "-fno-builtin", "-c", str(source), "-o", str(target)])
    return str(target)


def defined_functions(path: str) -> set[str]:
    return set(re.findall(r" T (\w+)$", run(["nm", path]), re.MULTILINE))


def link_library(parts: Parts, target: Path, inputs: Iterable[str]) -> None:
    """Link a shared library. Raises StandInRefused."""
    run([parts.compiler, "-shared", *inputs, f"-Wl,-soname,{target.name}", "-o", str(target)])


def build_runtime(parts: Parts, folder: Path) -> Path:
    """CUDA's runtime, in a folder. Raises StandInRefused."""
    target, versions = folder / parts.runtime.name, folder / "versions"
    made = compile_sources(parts, RUNTIME, folder / "runtime.o")
    missing = needed_functions(parts) - defined_functions(made)
    stubs = compile_stubs(parts, missing, folder / "runtime_stubs.o")
    versions.write_text(f"{target.name} {{ global: *; }};\n")  # torch demands names of this version
    link_library(parts, target, [made, stubs, f"-Wl,--version-script={versions}", "-ldl", "-lpthread"])
    return target


def build_driver(parts: Parts, folder: Path, runtime: Path) -> Path:
    """CUDA's driver, in a folder, over our runtime. Raises StandInRefused."""
    made = compile_sources(parts, ["driver"], folder / "driver.o")
    missing = driver_functions(parts.headers) - defined_functions(made)
    stubs = compile_stubs(parts, missing, folder / "driver_stubs.o")
    link_library(parts, folder / DRIVER, [made, stubs, str(runtime)])
    return folder / DRIVER


def build_python(folder: Path) -> None:
    """A virtual environment in a folder: the packages of this Python, and our hook."""
    places = site.getsitepackages() + ([site.getusersitepackages()] if site.ENABLE_USER_SITE else [])
    packages = Path(
        sysconfig.get_path("purelib", "venv", vars={"base": str(folder), "platbase": str(folder)})
    )
    packages.mkdir(parents=True)
    lines = [f"import site; site.addsitedir({place!r})" for place in places]
    lines += [str(FOLDER / "in_children"), "import stand_in_hook"]
    (packages / "stand_in.pth").write_text("\n".join([*lines, ""]))
    base = Path(getattr(sys, "_base_executable", sys.executable))
    python = folder / PYTHON
    python.parent.mkdir()
    python.symlink_to(base)
    facts = {
        "home": base.parent,
        "include-system-site-packages": "false",
        "version": platform.python_version(),
    }
    (folder / "pyvenv.cfg").write_text("".join(f"{name} = {value}\n" for name, value in facts.items()))


def build(parts: Parts) -> Path:
    """The folder with the libraries and PYTHON, made if they are not there. Raises StandInRefused."""
    base = cache_base(None) or Path(tempfile.gettempdir()) / f"plait-{os.getuid()}"
    folder = base / "cuda_stand_in" / digest(parts)
    if folder.is_dir():
        return folder
    make_folder(folder.parent)
    with tempfile.TemporaryDirectory(dir=folder.parent) as made:
        part = Path(made) / "part"
        part.mkdir(0o755)
        build_driver(parts, part, build_runtime(parts, part))
        build_python(part)
        try:
            part.rename(folder)
        except OSError:  # another run was first
            if not folder.is_dir():
                raise
    return folder
