"""Runs Plait's GPU path without a GPU, on a stand-in for CUDA.

    python tools/cuda_stand_in/run.py --lazy -- generate -m examples/nano-hybrid --device cuda -p "The sea is"

What follows `--` are arguments of `plait`. This Python needs PyTorch's CUDA build, and no NVIDIA driver.
docs/add-a-kernel.md says what a run shows. The exit code is 1 if host code did what CUDA does not allow, or
work on the device failed; each such complaint is printed at the end.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

FOLDER = Path(__file__).resolve().parent
ROOT = FOLDER.parents[1]
for _place in (FOLDER.parent, ROOT):
    sys.path.insert(0, str(_place))
from cuda_stand_in.build import DRIVER, PYTHON, Parts, StandInRefused, build, find_parts  # noqa: E402

CAPABILITIES = (75, 80, 86, 89, 90, 100, 120)
MEMORY = 2 << 30  # bytes; half of it must be there if a run uses it
LEAST_MEMORY = 64 << 20
END = "\0\n"  # of a complaint, which may have several lines


def parse(arguments: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    """Our options, and the arguments of plait behind `--`."""
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        usage="%(prog)s [options] -- ARGUMENTS OF PLAIT",
    )
    parser.add_argument(
        "--lazy",
        action="store_true",
        help="run work only when something waits for it: host code that forgets a wait reads old values",
    )
    parser.add_argument(
        "--memory", type=int, default=MEMORY, metavar="BYTES", help="of the device [default: %(default)s]"
    )
    parser.add_argument(
        "--capability",
        type=int,
        choices=CAPABILITIES,
        default=90,
        help="of the device [default: %(default)s]",
    )
    parser.add_argument(
        "--compile", action="store_true", help="also compile each kernel, and go through Triton's launcher"
    )
    parser.add_argument(
        "--compare", action="store_true", help="behind -- are models for compare.py, not arguments of plait"
    )
    given = list(arguments)
    at = given.index("--") if "--" in given else len(given)
    options = parser.parse_args(given[:at])
    if not given[at + 1 :]:
        parser.error("name a command of plait behind --, for example: -- generate -m MODEL --device cuda")
    if options.memory < LEAST_MEMORY:
        parser.error(f"--memory {options.memory}: a device has {LEAST_MEMORY} bytes or more")
    return options, given[at + 1 :]


def make_environment(
    environment: Mapping[str, str],
    options: argparse.Namespace,
    libraries: Path,
    runtime: str,
    complaints: Path,
) -> dict[str, str]:
    """The environment of every process of a run."""

    def prefix(name: str, *values: str) -> str:
        return os.pathsep.join([*values, *filter(None, [environment.get(name)])])

    made = {k: v for k, v in environment.items() if k not in ("TRITON_INTERPRET", "CUDA_VISIBLE_DEVICES")}
    return made | {
        # Libraries that are loaded first win over those that torch's own path names.
        "LD_PRELOAD": prefix("LD_PRELOAD", DRIVER, runtime),
        "LD_LIBRARY_PATH": prefix("LD_LIBRARY_PATH", str(libraries)),
        "TRITON_LIBCUDA_PATH": str(libraries),
        "PYTHONPATH": prefix("PYTHONPATH", str(ROOT)),
        "CUDA_STAND_IN_LAZY": str(int(options.lazy)),
        "CUDA_STAND_IN_MEMORY": str(options.memory),
        "CUDA_STAND_IN_CAPABILITY": str(options.capability),
        "CUDA_STAND_IN_COMPILE": str(int(options.compile)),
        "CUDA_STAND_IN_COMPLAINTS": str(complaints),
    }


def run_program(command: Sequence[str], environment: Mapping[str, str]) -> int:
    """The exit code of a program, to which signals go on."""
    process = subprocess.Popen(command, env=environment)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the terminal sends it to plait, too
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda received, _: process.send_signal(received))
    code = process.wait()
    return code if code >= 0 else 128 - code


def run_with(parts: Parts, options: argparse.Namespace, arguments: Sequence[str]) -> int:
    """Build, run, and print complaints. Raises StandInRefused."""
    libraries = build(parts)
    with tempfile.TemporaryDirectory(prefix="cuda_stand_in-") as folder:
        complaints = Path(folder) / "complaints"
        environment = make_environment(os.environ, options, libraries, parts.runtime.name, complaints)
        program = "cuda_stand_in.compare" if options.compare else "plait"
        code = run_program([str(libraries / PYTHON), "-m", program, *arguments], environment)
        text = complaints.read_text(errors="replace") if complaints.exists() else ""
    for line in describe(text):
        print(line, file=sys.stderr)
    return 1 if text else code


def describe(text: str) -> list[str]:
    """What is printed of a file of complaints: each once, with how often it came."""
    found = Counter(filter(None, text.split(END)))
    lines = ["", "the stand-in for CUDA complains:"] if found else []
    return lines + [f"{count} times: {one}" if count > 1 else one for one, count in found.items()]


def main() -> int:
    options, arguments = parse(sys.argv[1:])
    try:
        return run_with(find_parts(), options, arguments)
    except StandInRefused as refused:
        print(f"error: {refused}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
