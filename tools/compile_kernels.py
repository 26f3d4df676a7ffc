"""Compile every form of the Triton kernels for GPUs that are not here, and read what became of it.

    python tools/compile_kernels.py [--match TEXT] [--targets 80,90,120] [--report docs/gpu-kernels.md]
    python tools/compile_kernels.py --report docs/gpu-kernels.md --stale     only rows of another source
    python tools/compile_kernels.py --check docs/gpu-kernels.md              compile nothing: which are they?

A form passes if it compiles, spills nothing, fits into the shared memory that a block of that GPU may have,
has the instructions that it demands (wide loads, products of matrices), and takes no more of them for each
weight than it may: decoding costs instructions, of which a fast memory leaves few. No address may be made of
32 bits that may not hold it (`narrow_addresses`). From sm_90 on forms are compiled for programmatic dependent
launch, and have to wait before they read or write. Each row of the report has the digest of its source
(`kernel_sources`), and is written as soon as it is known. Needs `triton`, no GPU.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from plait.kernels.load import load_for_gpu, triton_kernels
from plait.kernels.triton.forms import TARGETS, KernelForm
from plait.ops.launch import LAUNCH_OPTIONS
from tools.kernel_sources import RowKey, digest_form, find_stale, is_dependent, list_constants, read_rows
from tools.narrow_addresses import find_narrow

SHARED_KIB = {
    75: 64,
    80: 163,
    86: 99,
    89: 99,
    90: 227,
    100: 227,
    120: 99,
}  # that a block may have: CUDA's guide, table 30
LEAST_SHARED_KIB = 99  # of chips that the table does not have
LIKE = {80: (86, 89)}  # GPUs for which the compiler makes the same, with less shared memory
SEEN = re.compile(r"\b((?:LDG|LDGSTS|STG|HGMMA|HMMA|QGMMA|IMMA|LDL|STL|BAR|MUFU|LDSM|SHFL)[.\w]*)")
WIDE = ("LDG", "LDGSTS", "STG")
LABEL = re.compile(r"\s*(\.L_\w+):")
INSTRUCTION = re.compile(r"/\*[0-9a-f]+\*/\s+(?:@!?U?P\w+\s+)?[A-Z][A-Z0-9_]+")
NAMED = re.compile(r"/\*[0-9a-f]+\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_]+)")
WAIT = "ACQBULK"  # for the kernels before this one
BEFORE = ("LDC", "ULDC", "LDCU", "LDL", "STL")  # constants, and what spills: a thread's own memory
NOT_BEFORE = ("LD", "ST", "ATOM", "RED", "UBLK", "UTMA", "BRA", "BRX", "JMP", "CALL", "EXIT", "RET")
CONSTANT = re.compile(r"\bLDG[.\w]*\.CONSTANT\b")
JUMP = re.compile(r"BRA\S*\s.*\((\.L_\w+)\)")
PRODUCT = re.compile(r"nvidia_mma<\{[^}]*warpsPerCTA = \[(\d+),")  # Triton's layout of a product's result


@dataclass(frozen=True, slots=True)
class Compiled:
    """What one form became on one target."""

    form: str
    target: int
    registers: int = 0
    spills: int = 0  # bytes of the stack, and loads and stores of local memory
    shared: int = 0  # bytes
    seconds: float = 0.0
    per_weight: float = 0.0  # instructions of a lane in the longest loop
    instructions: dict[str, int] = field(default_factory=dict)
    warps_of_rows: int = 1  # that the rows of its products are divided among
    faults: tuple[str, ...] = ()
    costs: tuple[str, ...] = ()  # the faults that cost time alone: results are right


def load_forms() -> list[tuple[str, KernelForm]]:
    """(module, form) of every form."""
    load_for_gpu()  # in its order, which decides what this process binds
    modules = [(name, importlib.import_module(name)) for name in triton_kernels()]
    return [(name, form) for name, module in modules if hasattr(module, "forms") for form in module.forms()]


def list_forms(targets: list[int]) -> list[tuple[str, str, int]]:
    """(module, name, target) of every form."""
    return [
        (module, form.name, target)
        for module, form in load_forms()
        for target in targets
        if is_for(form, target)
    ]


def list_digests(targets: list[int]) -> dict[RowKey, str]:
    """Of which source every row of a whole report would be."""
    return {
        RowKey(form.name, target): digest_form(form, target)
        for _, form in load_forms()
        for target in targets
        if is_for(form, target)
    }


def is_for(form: KernelForm, target: int) -> bool:
    """Whether a form is compiled for a target: for those it names, and for any that is in no table."""
    return target in form.targets or target not in TARGETS


def compile_form(module: str, name: str, target: int) -> Compiled:
    """Compile a form of a module in this process, as `measure_form` does."""
    form = next(form for form in importlib.import_module(module).forms() if form.name == name)
    return measure_form(form, target)


def measure_form(form: KernelForm, target: int) -> Compiled:
    """Compile a form in this process. Never raises: what went wrong is a fault of the result."""
    started, name = time.monotonic(), form.name
    try:
        made = _compile(form, target)
        usage, code = _disassemble(made.asm["cubin"])
    except Exception as error:  # compilers fail in ways of their own
        return Compiled(
            name, target, faults=(f"{type(error).__name__}: {' '.join(str(error).split())[-300:]}",)
        )
    seconds, shared = time.monotonic() - started, int(made.metadata.shared)
    found = re.search(r"REG:(\d+) STACK:(\d+)", usage)
    registers, stack = (int(found[1]), int(found[2])) if found else (0, 0)
    seen = count_instructions(code)
    spills = stack + seen.pop("LDL", 0) + seen.pop("STL", 0)
    per_weight = count_loop(code) * 32 * form.num_warps / form.weights if form.weights else 0.0
    warps = max((int(count) for count in PRODUCT.findall(made.asm["ttgir"])), default=1)
    made_of = Compiled(
        name, target, registers, spills, shared, seconds, per_weight, dict(sorted(seen.items())), warps
    )
    faults = judge(form, made_of) + (find_early(code) if is_dependent(form, target) else [])
    faults += [f"32 bits may not hold an address: {place}" for place in find_narrow(made.asm["ttir"])]
    return replace(made_of, faults=tuple(faults), costs=tuple(find_costs(form, made_of)))


def find_costs(form: KernelForm, made: Compiled) -> list[str]:
    """What makes the machine code of a form slower than it is to be."""
    costs = [f"spills: {made.spills}"] if made.spills else []
    if made.registers > form.max_registers:
        costs.append(f"registers: {made.registers}, at most {form.max_registers}")
    for wanted in form.demands:
        if wanted and not any(made.instructions.get(name) for name in wanted):
            costs.append(f"it has no {' or '.join(wanted)}")
    if made.per_weight > form.max_per_weight:
        costs.append(f"{made.per_weight:.2f} instructions for each weight, at most {form.max_per_weight:g}")
    return costs


def judge(form: KernelForm, made: Compiled) -> list[str]:
    """What is wrong with the machine code of a form, or slow."""
    faults, shared = find_costs(form, made), made.shared
    most = min(SHARED_KIB.get(one, LEAST_SHARED_KIB) for one in (made.target, *LIKE.get(made.target, ())))
    if shared > most << 10:
        faults.append(f"shared memory: {shared} bytes, a block has {most} KiB")
    if form.shares_rows and made.warps_of_rows > 1:
        faults.append(f"rows are divided among {made.warps_of_rows} warps: sums have the order of this tile")
    return faults


def find_early(code: str) -> list[str]:
    """What machine code does too early if the kernels before it may still run: it has to wait first.

    Loads that other kernels' writes may not reach (of constants) would be too early at any place.
    """
    if CONSTANT.search(code):
        return ["it has loads of constants (LDG.CONSTANT), which may be older than what is written"]
    for name in NAMED.findall(code):
        if name == WAIT:
            return []
        if name.startswith(NOT_BEFORE) and name not in BEFORE:
            return [f"it has {name} before it waits for the kernels before it"]
    return ["it does not wait for the kernels before it"]


def count_loop(code: str) -> int:
    """Instructions of the longest loop: from a label to a jump back to it."""
    labels: dict[str, int] = {}
    count = longest = 0
    for line in code.splitlines():
        if label := LABEL.match(line):
            labels[label[1]] = count
        if not INSTRUCTION.search(line):
            continue
        count += 1
        if (jump := JUMP.search(line)) and jump[1] in labels and labels[jump[1]] < count - 1:
            longest = max(longest, count - labels[jump[1]])
    return longest


def count_instructions(code: str) -> Counter[str]:
    """Instructions of the machine code, by name; loads and stores of memory with their width in bits."""
    seen: Counter[str] = Counter()
    for word in SEEN.findall(code):
        head, *parts = word.split(".")
        if head in WIDE:
            narrow = next((part[1:] for part in parts if part in ("U8", "S8", "U16", "S16")), "32")
            head = f"{head}.{next((part for part in parts if part in ('128', '64')), narrow)}"
        seen[head] += 1
    return seen


def _compile(form: KernelForm, target: int) -> Any:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    names, signature, attributes = form.kernel.arg_names, {}, {}
    given = list_constants(form)
    for i, name in enumerate(names):
        kind = form.types.get(name, "i32")
        if name in given:
            signature[name] = "constexpr"
            continue
        signature[name] = "*" + kind[:-1] if kind.endswith("*") else kind.rstrip("!")
        if kind[-1] in "*!":
            attributes[(i,)] = [["tt.divisibility", 16]]
    constants = {(names.index(name),): value for name, value in given.items()}
    source = ASTSource(form.kernel, signature=signature, constexprs=constants, attrs=attributes)
    early = {"launch_pdl": is_dependent(form, target)}
    sizes = {"num_warps": form.num_warps, "num_stages": form.num_stages}
    options = {**LAUNCH_OPTIONS, **early, **sizes, **form.options}
    return triton.compile(source, target=GPUTarget("cuda", target, 32), options=options)


def _disassemble(cubin: bytes) -> tuple[str, str]:
    """(resources, machine code) by the tools that come with Triton."""
    import triton

    tools = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        commands = (["cuobjdump", "-res-usage"], ["nvdisasm", "-c"])
        usage, code = (
            subprocess.run([str(tools / tool), *more, file.name], capture_output=True, text=True, check=True)
            for tool, *more in commands
        )
    return usage.stdout, code.stdout


HEAD = """# GPU kernels

What `tools/compile_kernels.py` found: every form of the Triton kernels, compiled for
GPUs of three generations. Nothing here has run on a GPU. `source` is the digest of what a row was
compiled from; `make check` fails where a kernel has changed since. Forms in float16 have the tiles of
bfloat16, which has a form for each flag. So one in float16 stands for all flags of its kernel and layout.
Forms for sm_90 and sm_120 are compiled for programmatic dependent launch. Their machine code was searched:
it waits for the kernels before it ahead of all that it reads and writes.
Rows are of Triton {version}, which PyTorch's CUDA build brings.

| form | target | registers | spills | shared memory | for each weight | instructions | source |
|---|---|---:|---:|---:|---:|---|---|
"""


def show_row(made: Compiled, digest: str) -> str:
    """A line of the report."""
    seen = " ".join(f"{name}:{count}" for name, count in made.instructions.items())
    each = f"{made.per_weight:.2f}" if made.per_weight else ""
    numbers = f"{made.registers} | {made.spills} | {made.shared >> 10} KiB | {each}"
    return f"| {made.form} | sm_{made.target} | {numbers} | {seen} | {digest} |"


class Report:
    """The table of results, as Markdown, in the order of the forms. `path` None: it is written nowhere."""

    def __init__(self, path: Path | None, targets: list[int], is_kept: bool) -> None:
        """is_kept: rows that the file has of today's sources stay."""
        self._path = path
        self._digests = list_digests(targets) if path else {}
        old = read_rows(path) if path and is_kept else {}
        self._lines = {key: line for key, (digest, line) in old.items() if self._digests.get(key) == digest}

    def has(self, key: RowKey) -> bool:
        return key in self._lines

    def add(self, made: Compiled) -> None:
        """Write a result, unless it has faults: those are no row."""
        key = RowKey(made.form, made.target)
        if self._path is None or made.faults:
            return
        self._lines[key] = show_row(made, self._digests[key])
        self.write()

    def write(self) -> None:
        """Write all rows that there are; a row without a form is none of them."""
        if self._path is None:
            return
        lines = [self._lines[key] for key in self._digests if key in self._lines]
        self._path.write_text(
            HEAD.format(version=version("triton")) + "\n".join(lines) + "\n", encoding="utf-8"
        )


def check_report(path: Path, targets: list[int]) -> int:
    """1, and what is wrong on stderr, if a report is not that of today's kernels. Without Triton 0."""
    if importlib.util.find_spec("triton") is None:
        print(f"{path}: not checked, Triton is not installed here", file=sys.stderr)
        return 0
    compiler = f"Triton {version('triton')}"
    if path.exists() and f"Rows are of {compiler}," not in path.read_text(encoding="utf-8"):
        print(f"{path}: its rows are not of {compiler}, which is installed here", file=sys.stderr)
        return 1
    stale = list(find_stale(list_digests(targets), path))
    for line in stale[:20]:
        print(f"{path}: {line}", file=sys.stderr)
    if stale:
        print(
            f"{path}: {len(stale)} rows are not those of today's kernels; to compile them: "
            f"python tools/compile_kernels.py --stale --report {path}",
            file=sys.stderr,
        )
    return 1 if stale else 0


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--match", default="", help="only forms with this text in their names")
    parser.add_argument("--targets", default="80,90,120", help="compute capabilities, times ten")
    parser.add_argument("--report", type=Path, help="write the table of results there")
    parser.add_argument("--stale", action="store_true", help="keep rows of the report that are current")
    parser.add_argument("--check", type=Path, metavar="REPORT", help="only find rows that are not current")
    parser.add_argument("--json", action="store_true", help="print JSON, one line for a form and target")
    options = parser.parse_args()
    os.environ.pop("TRITON_INTERPRET", None)  # the interpreter compiles nothing
    targets = [int(target) for target in options.targets.split(",")]
    if options.check:
        return check_report(options.check, targets)
    report = Report(options.report, targets, options.stale)
    wanted = [
        (module, name, target)
        for module, name, target in list_forms(targets)
        if options.match in name and not report.has(RowKey(name, target))
    ]
    if options.stale and not wanted:
        report.write()
    done, faulty = 0, 0
    with ProcessPoolExecutor(os.cpu_count()) as pool:
        for made in pool.map(compile_form, *zip(*wanted, strict=True)) if wanted else ():
            report.add(made)
            done, faulty = done + 1, faulty + bool(made.faults)
            print(show_json(made) if options.json else show_result(made), flush=True)
    print(f"{done} compiled, {faulty} with faults", file=sys.stderr)
    return 1 if faulty else 0


def show_json(made: Compiled) -> str:
    return json.dumps({name: getattr(made, name) for name in made.__slots__})


def show_result(made: Compiled) -> str:
    """A line for the terminal."""
    each = f", {made.per_weight:.2f} a weight" if made.per_weight else ""
    said = "; ".join(made.faults) or "ok"
    return f"sm_{made.target:3} {made.form:44} {made.registers:4} registers{each}, {said}"


if __name__ == "__main__":
    sys.exit(main())
