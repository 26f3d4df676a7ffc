"""The benchmark for GPUs, dry: it finds what is wrong, does nothing twice, and names rows that were lost."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="Triton is not installed here")

from plait.ops.chip import EXAMPLES
from plait.ops.registry import REGISTRY, Op, Variant, op
from tools.compile_kernels import Compiled

BENCHMARKS = Path(__file__).resolve().parent.parent / "benchmarks"


@pytest.fixture
def part(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], ModuleType]:
    """Modules of the script, by name."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module


def call(part: Any, out: Path, *more: str) -> int:
    script = part("gpu")
    code: int = script.run(script.parse(["--dry", "--out", str(out), *more]))
    return code


def rows_of(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (out / "rows.jsonl").read_text(encoding="utf-8").splitlines()]


def test_rows_are_written_once_and_a_later_call_goes_on(
    part: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    few = ("--phases", "2,7", "--only", "rg_lru")
    assert call(part, tmp_path, *few) == 0
    (row,) = rows_of(tmp_path)
    assert set(part("gpu_phases.results").FIELDS) <= set(row)
    assert (row["op"], row["variant"], row["ok"]) == ("rg_lru", "triton", True)
    assert row["error"] < 1e-6
    assert "nothing is left" in capsys.readouterr().out
    assert call(part, tmp_path, *few) == 0
    assert len(rows_of(tmp_path)) == 1
    assert call(part, tmp_path, "--phases", "7", "--baseline", str(tmp_path / "rows.jsonl")) == 0
    found = rows_of(tmp_path)[-1]
    assert (found["op"], found["ok"]) == ("tensor parallelism", None)
    assert "ranks need several GPUs" in found["note"]


@pytest.mark.sampled(2, across="heavy")
def test_forms_of_kernels_are_compiled_for_the_chip(part: Any, tmp_path: Path) -> None:
    assert call(part, tmp_path, "--phases", "1") == 0
    (row,) = rows_of(tmp_path)
    assert (row["variant"], row["shape"], row["ok"]) == ("compiled", "sm_90", True)
    assert "registers" in row["note"]


def test_a_row_that_never_came_back_is_named_and_skipped(part: Any, tmp_path: Path) -> None:
    assert call(part, tmp_path, "--phases", "7") == 0
    (row,) = rows_of(tmp_path)
    key = {name: row[name] for name in part("gpu_phases.results").KEY} | {"op": "hangs", "phase": 2}
    (tmp_path / "running.json").write_text(json.dumps(key))
    assert call(part, tmp_path, "--phases", "7") == 1
    assert rows_of(tmp_path)[-1]["note"].startswith("it did not come back")
    assert not (tmp_path / "running.json").exists()


def test_a_phase_that_runs_out_of_time_counts_what_is_left(part: Any, tmp_path: Path) -> None:
    results = part("gpu_phases.results")
    bench = results.Bench(tmp_path, torch.device("cpu"), EXAMPLES[90], is_dry=True)
    bench.deadline = time.monotonic() + 60

    def items() -> Iterator[Any]:
        for name, needs in (("quick", 0.1), ("slow", 500.0), ("slower", 900.0)):
            yield results.Item(name, "", "", "", dict, needs_s=needs)

    assert bench.run_phase(3, items(), lambda text: None) == 2
    assert [row["op"] for row in bench.rows] == ["quick"]


def test_what_is_not_installed_is_no_fault_and_a_broken_kernel_is(part: Any, tmp_path: Path) -> None:
    results = part("gpu_phases.results")
    bench = results.Bench(tmp_path, torch.device("cpu"), EXAMPLES[90], is_dry=True)
    bench.deadline = time.monotonic() + 60

    def missing() -> dict[str, Any]:
        raise ImportError("no such peer")

    def broken() -> dict[str, Any]:
        raise RuntimeError("an illegal memory access was encountered")

    bench.run_phase(3, iter([results.Item("a", "", "", "", missing)]), lambda text: None)
    assert bench.rows[-1]["ok"] is None
    with pytest.raises(results.DeviceLost):
        bench.run_phase(3, iter([results.Item("b", "", "", "", broken)]), lambda text: None)
    assert bench.rows[-1]["ok"] is False, "the row is there, so that the next call goes on behind it"


def test_what_was_not_done_in_time_has_no_row_and_is_left_to_the_next_call(part: Any, tmp_path: Path) -> None:
    results = part("gpu_phases.results")
    bench = results.Bench(tmp_path, torch.device("cpu"), EXAMPLES[90], is_dry=True)
    bench.deadline = time.monotonic() + 60

    def late() -> dict[str, Any]:
        raise TimeoutError

    assert bench.run_phase(3, iter([results.Item("a", "", "", "", late)]), lambda text: None) == 1
    assert not bench.rows
    assert not (tmp_path / "running.json").exists()


def test_after_any_wrong_row_a_gpu_shows_that_it_still_works(
    part: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    results = part("gpu_phases.results")
    bench = results.Bench(tmp_path, torch.device("cuda", 0), EXAMPLES[90], is_dry=True)
    bench.deadline = time.monotonic() + 60

    def broken(*_: object) -> dict[str, Any]:
        raise RuntimeError("CUDA error: something new")

    monkeypatch.setattr(torch.cuda, "synchronize", broken)
    with pytest.raises(results.DeviceLost):
        bench.run_phase(3, iter([results.Item("a", "", "", "", broken)]), lambda text: None)


def test_a_kernel_runs_ahead_of_its_check_by_the_name_of_its_case(part: Any, tmp_path: Path) -> None:
    right, results = part("gpu_phases.right"), part("gpu_phases.results")
    bench = results.Bench(tmp_path, torch.device("cpu"), EXAMPLES[90], is_dry=True)
    check = next(c for c in right.find_checks(bench) if c.named[:2] == ("rg_lru", "triton"))
    assert check.op.cases[check.named[2]] is check.case
    right.run_once(*check.named, "cpu")
    with pytest.raises(StopIteration):
        right.run_once("rg_lru", "no such kernel", 0, "float32", "cpu")


@pytest.fixture
def doubled() -> Iterator[Op]:
    @op(cases=[dict(rows=6)])
    def doubled_rows(x: Tensor) -> Tensor:
        return 2 * x

    doubled_rows.inputs(lambda case, dtype, device: ((torch.randn(case["rows"], 4, dtype=dtype),), {}))
    yield doubled_rows
    del REGISTRY[doubled_rows.name]


def unwritten(x: Tensor) -> Tensor:
    out = torch.empty(x.shape)
    out[:-1] = 2 * x[:-1]
    return out


def never_the_same(x: Tensor) -> Tensor:
    return 2 * x + 1e-7 * torch.rand(1)


def by_company(x: Tensor) -> Tensor:
    return 2 * x * (1 + 3e-7 * len(x))


@pytest.mark.parametrize(
    ("fn", "why"),
    [
        (lambda x: 2.01 * x, "the limit is"),
        (lambda x: 2 * x[:-1], "a result is"),
        (unwritten, "not finite"),
        (never_the_same, "two runs differ"),
        (by_company, "a row alone has other bits"),
        (lambda x: x + x, ""),
    ],
)
def test_kernels_that_are_wrong_are_found(
    part: Any, tmp_path: Path, doubled: Op, fn: Callable[[Tensor], Tensor], why: str
) -> None:
    right, results = part("gpu_phases.right"), part("gpu_phases.results")
    bench = results.Bench(tmp_path, torch.device("cpu"), EXAMPLES[90], is_dry=True)
    fn.__module__ = "plait.kernels.triton.made_up"
    variant = Variant("made up", "cuda", fn, lambda facts: None)
    found = right.Check(doubled, variant, dict(rows=6), torch.float32, bench)()
    assert found["ok"] is (not why), found
    assert why in found["note"]


def test_every_peer_that_is_run_is_an_engine_that_bench_model_knows(part: Any) -> None:
    peers, compare = part("gpu_phases.peers"), importlib.import_module("plait.bench.model.compare")
    run = {name: what for name, what in peers.PEERS.items() if name not in peers.WHY_NOT}
    assert {"vllm", "sglang"} <= run.keys()
    assert all(compare.PEER.fullmatch(what.format(folder="/m"))[1] == name for name, what in run.items())


def test_random_models_have_the_bytes_of_published_ones(part: Any) -> None:
    shapes = part("gpu_phases.shapes")
    made = shapes.make_model("Llama-8B", "model", torch.device("meta"), EXAMPLES[90], 64, torch.bfloat16)
    assert made.nbytes_per_token == pytest.approx(15.0e9, rel=0.01)


def test_kernels_begin_early_on_a_gpu_that_was_right_in_it(part: Any, tmp_path: Path) -> None:
    machine, results = part("gpu_phases.machine"), part("gpu_phases.results")
    bench = results.Bench(tmp_path, torch.device("cpu"), EXAMPLES[90], is_dry=True)
    item = next(item for item in machine.list_machine(bench) if item.op == "early launches")
    for ok, is_early in ((None, False), (True, True), (False, False)):
        bench.emit(bench.key(0, item), {"ok": ok})
        assert machine.can_begin_early(bench) is is_early
    assert not machine.can_begin_early(
        results.Bench(tmp_path, torch.device("cpu"), EXAMPLES[80], is_dry=True)
    )
    assert item.run()["ok"] is None, "there is nothing to try without a GPU"


def test_a_package_that_lacks_is_named_with_what_to_install(tmp_path: Path) -> None:
    program = (
        "import runpy, sys; sys.modules['msgspec'] = None; "
        f"sys.argv = ['gpu.py', '--dry', '--out', {str(tmp_path)!r}]; "
        f"runpy.run_path({str(BENCHMARKS / 'gpu.py')!r}, run_name='__main__')"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert "msgspec" in line
    assert "pip install -e '.[cuda]'" in line


def test_what_overlaps_on_a_gpu_is_counted_once(part: Any) -> None:
    join = part("gpu_phases.models").join_ranges
    assert join([]) == 0.0
    assert join([(5.0, 7.0), (0.0, 2.0), (1.0, 4.0), (1.5, 3.0)]) == 6.0


@pytest.mark.slow
def test_a_random_model_runs_through_the_engine(part: Any, tmp_path: Path) -> None:
    assert call(part, tmp_path, "--phases", "8", "--only", "profile") == 0
    (row,) = rows_of(tmp_path)
    assert row["launches"] > 10
    models, results = part("gpu_phases.models"), part("gpu_phases.results")
    bench = results.Bench(tmp_path, torch.device("cpu"), EXAMPLES[90], is_dry=True)
    with models.opened(bench, "little Falcon-Mamba", "model", 2, 32) as it:
        assert it.runner.is_recorded, "its decodes are replays of a graph, as they are on a GPU"
        made = it.run(2, 2, 2)
    assert made.tokens == 4
    assert made.decode_step_s > 0


@pytest.mark.slow
def test_ranks_are_compared_with_one_rank_on_a_cpu_too(part: Any, tmp_path: Path) -> None:
    assert call(part, tmp_path, "--phases", "7", "--full", "--minutes", "9") == 0
    rows = {(row["variant"], row["shape"]): row for row in rows_of(tmp_path)}
    speed = "little Llama 1 sequence"
    assert rows.keys() == {
        ("2 ranks, tokens", "nano-hybrid"),
        ("2 ranks, bits", "nano-hybrid"),
        ("1 rank", speed),
        ("2 ranks", speed),
    }
    assert all(row["ok"] is True for row in rows.values())
    alone, both = rows["1 rank", speed], rows["2 ranks", speed]
    assert both["share_of_ideal"] == pytest.approx(both["tokens_s"] / alone["tokens_s"] / 2)


def test_a_form_that_only_spills_is_not_wrong(part: Callable[[str], ModuleType]) -> None:
    judge = part("gpu_phases.machine").judge_build
    spills = Compiled("f", 90, spills=8, faults=("spills: 8",), costs=("spills: 8",))
    assert judge(spills) == {"ok": True, "us": 0.0, "note": "spills: 8"}
    early = replace(spills, faults=("spills: 8", "it does not wait"))
    assert judge(early) == {"ok": False, "us": 0.0, "note": "spills: 8; it does not wait"}
