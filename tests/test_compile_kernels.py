"""The gate that compiles GPU kernels on a machine without a GPU: a sample of it; `make gates` runs all."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton", reason="Triton is not installed here")

from plait.kernels.triton.forms import TARGETS, KernelForm
from plait.kernels.triton.linear import few_rows, plane_forms
from plait.ops.chip import EXAMPLES
from tools.compile_kernels import (
    PRODUCT,
    SHARED_KIB,
    Compiled,
    Report,
    check_report,
    count_instructions,
    count_loop,
    find_costs,
    find_early,
    judge,
    list_digests,
    load_forms,
    show_row,
)
from tools.kernel_sources import RowKey, digest_form, find_stale, is_dependent, list_constants, read_rows

ROOT = Path(__file__).resolve().parents[1]
REPORT = ROOT / "docs" / "gpu-kernels.md"
MODULE = """
class Kernel:
    def __init__(self, fn):
        self.fn = fn

SCALE = 4

@Kernel
def add(x, y):
    return x + y * SCALE

@Kernel
def outer(x, N):
    \"\"\"What it does.\"\"\"
    return add(x, N)  # once
"""


@pytest.mark.sampled(2, across="heavy")
def test_a_kernel_is_compiled_for_a_gpu_that_is_not_here() -> None:
    command = [sys.executable, "tools/compile_kernels.py", "--match", "count_items", "--targets", "90"]
    plain = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    made = subprocess.run(command, cwd=ROOT, env=plain, capture_output=True, text=True, check=False)
    assert made.returncode == 0, made.stderr
    assert "registers, ok" in made.stdout


def test_a_form_is_judged_by_the_shared_memory_that_kernels_are_bound_by() -> None:
    assert {capability: chip.shared_nbytes >> 10 for capability, chip in EXAMPLES.items()} == {
        capability: SHARED_KIB[capability] for capability in EXAMPLES
    }


@pytest.mark.parametrize(("target", "kib", "fits"), [(80, 99, True), (80, 100, False), (90, 227, True)])
def test_a_form_for_an_a100_fits_into_consumer_gpus_of_its_generation(
    target: int, kib: int, fits: bool
) -> None:
    """sm_86 and sm_89 get the same tiles, and have 99 KiB for a block, where an sm_80 has 163."""
    faults = judge(KernelForm("f", None, {}, {}), Compiled("f", target, shared=kib << 10))
    assert faults == ([] if fits else [f"shared memory: {kib << 10} bytes, a block has 99 KiB"])


def test_every_row_of_the_report_fits_into_the_gpus_that_run_it() -> None:
    for key, (_, line) in read_rows(REPORT).items():
        shared = int(line.split(" | ")[4].removesuffix(" KiB"))
        assert shared <= (227 if key.target == 90 else 99), line


def test_faults_of_a_form_are_named() -> None:
    form = KernelForm("f", None, {}, {}, demands=(("HMMA", "HGMMA"), ("LDG.128",)), max_registers=128)
    made = Compiled("f", 120, 200, 8, 120 << 10, instructions={"HMMA": 1})
    slow = ["spills: 8", "registers: 200, at most 128", "it has no LDG.128"]
    assert find_costs(form, made) == slow
    assert judge(form, made) == [*slow, "shared memory: 122880 bytes, a block has 99 KiB"]
    assert judge(form, Compiled("f", 90, 128, 0, 120 << 10, instructions={"HGMMA": 1, "LDG.128": 1})) == []


def test_rows_that_warps_divide_among_them_are_a_fault_where_tiles_share_an_order() -> None:
    layout = "#mma = #ttg.nvidia_mma<{versionMajor = 2, versionMinor = 0, warpsPerCTA = [4, 1]}>"
    assert PRODUCT.findall(layout) == ["4"]
    divided = Compiled("f", 90, warps_of_rows=4)
    assert judge(KernelForm("f", None, {}, {}), divided) == []
    assert judge(KernelForm("f", None, {}, {}, shares_rows=True), divided) == [
        "rows are divided among 4 warps: sums have the order of this tile"
    ]


def test_instructions_for_each_weight_are_those_of_the_longest_loop() -> None:
    code = """
    .L_x_1:
        /*0000*/ MOV R1, R2 ;
        /*0010*/ @P0 BRA `(.L_x_1) ;
    .L_x_2:
        /*0020*/ LOP3.LUT R1, R2, R3 ;
        /*0030*/ @!P1 SHF.R.U32 R1, R2, R3 ;
        /*0040*/ HMMA.16816.F32.BF16 R4, R8, R10, R4 ;
        /*0050*/ @P0 BRA `(.L_x_2) ;
        /*0060*/ EXIT ;
    """
    assert count_loop(code) == 4
    form = KernelForm("f", None, {}, {}, weights=64, max_per_weight=3.5)
    assert judge(form, Compiled("f", 90, per_weight=3.5)) == []
    assert judge(form, Compiled("f", 90, per_weight=4.0)) == [
        "4.00 instructions for each weight, at most 3.5"
    ]


def listing(*instructions: str) -> str:
    return "\n".join(f"        /*{16 * i:04x}*/    {text} ;" for i, text in enumerate(instructions))


def test_what_is_read_before_the_kernels_before_have_ended_is_a_fault() -> None:
    start = ("LDC R1, c[0x0][0x28]", "S2R R9, SR_TID.X", "CCTL.E.PF2 [R2]")
    assert find_early(listing(*start, "ACQBULK", "@P0 BRA `(.L_x_0)", "LDG.E R0, [R4]")) == []
    assert find_early(listing(*start, "STL.64 [R1], R2", "LDL R2, [R1]", "ACQBULK")) == []
    for text, name in (
        ("LDG.E R0, [R4]", "LDG"),
        ("@!P0 LDGSTS.E [R3], [R4]", "LDGSTS"),
        ("STG.E [R4], R0", "STG"),
        ("ATOMG.E.ADD R0, [R4]", "ATOMG"),
        ("@P0 EXIT", "EXIT"),
        ("@P0 BRA `(.L_x_0)", "BRA"),
    ):
        found = find_early(listing(*start, text, "ACQBULK"))
        assert found == [f"it has {name} before it waits for the kernels before it"]
    assert find_early(listing(*start, "LDG.E R0, [R4]")) != []
    assert "LDG.CONSTANT" in find_early(listing("ACQBULK", "LDG.E.128.CONSTANT R0, [R4]"))[0]
    assert find_early(listing(*start)) == ["it does not wait for the kernels before it"]


def test_every_kernel_waits_for_those_before_it() -> None:
    """Else it is launched when they have ended, which takes a microsecond more; `find_early` has the rest."""
    forms = [form for _, form in load_forms()]
    assert {form.kernel.fn.__name__ for form in forms if not is_dependent(form, 90)} == set()
    assert not any(is_dependent(form, 80) for form in forms)


def test_loads_are_counted_by_their_width() -> None:
    code = "LDG.E.128 R4, [R2]; LDG.E.64 R4; LDG.E.U8 R4; LDG.E R1; STG.E.128 ; HMMA.16816.F32.BF16 R4"
    found = count_instructions(code)
    assert found == {"LDG.128": 1, "LDG.64": 1, "LDG.8": 1, "LDG.32": 1, "STG.128": 1, "HMMA": 1}


@pytest.mark.skipif(
    f"Rows are of Triton {version('triton')}," not in REPORT.read_text(encoding="utf-8"),
    reason="the report is of another Triton, which `make check` refuses",
)
def test_the_committed_report_is_of_todays_kernels() -> None:
    assert check_report(REPORT, list(TARGETS)) == 0


def test_a_report_of_another_triton_is_refused_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = tmp_path / "report.md"
    other.write_text(
        re.sub(r"of Triton [\d.]+,", "of Triton 1.2.3,", REPORT.read_text("utf-8"), count=1), "utf-8"
    )
    assert check_report(other, list(TARGETS)) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert f"its rows are not of Triton {version('triton')}" in line


def test_every_load_of_quantized_weights_is_16_bytes_wide() -> None:
    """Codes and rows of x alone are copied ahead, once for each stage: the bytes say how wide loads are."""
    rows, seen = read_rows(REPORT), 0
    for form in plane_forms.forms():
        if form.kernel is not few_rows.few_planes:
            continue
        sizes = {name: int(str(form.constants[name])) for name in ("BITS", "HIGH", "BM", "BN", "UNITS")}
        nbytes = form.num_warps * 32 * 16  # of a load of 16 bytes by every thread
        codes = form.weights * (sizes["BITS"] + sizes["HIGH"]) // 8 // nbytes
        x = form.weights // sizes["BN"] * sizes["BM"] * 2 // nbytes
        for target in TARGETS:
            found = dict(re.findall(r"(LDGSTS\.\d+):(\d+)", rows[RowKey(form.name, target)][1]))
            wide, narrow = int(found["LDGSTS.128"]), int(found.get("LDGSTS.64", 0))
            if sizes["BM"] == 8:  # 8 numbers of x that lie together are loaded by two threads
                assert (wide, narrow) == (form.num_stages * codes, form.num_stages * 2 * x), form.name
            else:
                assert (wide, narrow) == (form.num_stages * (codes + x), 0), form.name
            seen += 1
    assert seen > 50


@pytest.mark.parametrize(("rows", "most"), [(8, 3.5), (16, 4.5)])
def test_four_bit_weights_cost_few_instructions_on_sm_90(rows: int, most: float) -> None:
    """Memory leaves 4.4 issue slots for a weight there: more would be the limit, not memory."""
    found = read_rows(REPORT)
    layouts = {name: given[0] for name, given in plane_forms.LAYOUTS.items()}
    names = [name for name, layout in layouts.items() if layout.bits == 4 and not layout.high]
    assert len(names) == 7
    for name in names:
        cells = found[RowKey(f"few rows, {name}, {rows}", 90)][1].split(" | ")
        assert 1 < float(cells[5]) <= most, name


def load_form(text: str, folder: Path, **changes: Any) -> KernelForm:
    """A form of the kernel `outer` in a module with this text."""
    file = folder / f"kernels_{len(list(folder.iterdir()))}.py"
    file.write_text(text)
    spec = importlib.util.spec_from_file_location("kernels_of_a_test", file)
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return KernelForm("outer", module.outer, **{"types": {"x": "bf16*"}, "constants": {"N": 3}, **changes})


def test_a_digest_is_of_what_machine_code_follows_from(tmp_path: Path) -> None:
    own = digest_form(load_form(MODULE, tmp_path), 90)
    for same in (
        MODULE.replace("What it does.", "Something else."),
        MODULE.replace("# once", "# again and again"),
        MODULE.replace("class Kernel", "\n\nclass Kernel"),
        MODULE.replace("return add(x, N)", "return add(\n        x, N\n    )"),
    ):
        assert digest_form(load_form(same, tmp_path), 90) == own
    for other in (
        MODULE.replace("x + y", "x - y"),
        MODULE.replace("SCALE = 4", "SCALE = 5"),
        MODULE.replace("add(x, N)", "add(N, x)"),
    ):
        assert digest_form(load_form(other, tmp_path), 90) != own
    assert digest_form(load_form(MODULE, tmp_path), 80) != own
    early = MODULE.replace(
        "    return add(", "    await_previous()\n    if is_dependent() and N:\n        pass\n    return add("
    )
    assert digest_form(load_form(early, tmp_path), 90) != own
    older = digest_form(load_form(MODULE, tmp_path), 80)
    assert digest_form(load_form(early, tmp_path), 80) == older, "nothing of it is compiled there"
    for changes in (
        {"num_warps": 8},
        {"constants": {"N": 4}},
        {"types": {"x": "fp32*"}},
        {"options": {"maxnreg": 128}},
    ):
        assert digest_form(load_form(MODULE, tmp_path, **changes), 90) != own


def test_constants_that_a_launch_leaves_out_are_those_of_the_kernel(tmp_path: Path) -> None:
    """As numbers that a launch gives they would be read when the kernel runs: other machine code."""
    form = load_form(MODULE.replace("outer(x, N)", "outer(x, N, WIDE=False)"), tmp_path)
    assert list_constants(form) == {"N": 3, "WIDE": False}
    other = load_form(MODULE.replace("outer(x, N)", "outer(x, N, WIDE=True)"), tmp_path)
    assert digest_form(other, 90) != digest_form(form, 90)


def test_rows_of_another_source_are_named_and_compiled_again(tmp_path: Path) -> None:
    (key, digest), (other, newer), *_ = list_digests([90]).items()
    path = tmp_path / "report.md"
    assert f"{key.form}, sm_90: there is no row" in list(find_stale({key: digest}, path))
    report = Report(path, [90], is_kept=False)
    report.add(Compiled(key.form, 90, 128, 0, 9 << 10, instructions={"HMMA": 3}))
    report.add(Compiled(other.form, 90, faults=("spills: 8",)))
    assert list(read_rows(path)) == [key]
    assert read_rows(path)[key][0] == digest
    assert not list(find_stale({key: digest}, path))
    assert list(find_stale({key: "changed", RowKey("gone", 90): "x"}, path)) == [
        f"{key.form}, sm_90: the row is of the source {digest}, which is now changed",
        "gone, sm_90: there is no row",
    ]
    assert list(find_stale({}, path)) == [f"{key.form}, sm_90: there is no such form"]
    kept = Report(path, [90], is_kept=True)
    assert kept.has(key)
    assert not kept.has(other)
    path.write_text(path.read_text().replace(digest, newer))
    assert not Report(path, [90], is_kept=True).has(key)
    assert show_row(Compiled("f", 90), "abc").endswith("| abc |")
