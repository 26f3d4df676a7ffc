"""Phases 0 and 1: what the machine is and what its roofs are; how long its kernels take to compile."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import multiprocessing
import os
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from typing import TYPE_CHECKING, Any

import torch
import triton
import triton.language as tl

from gpu_phases.results import Bench, Item
from gpu_phases.timing import time_us
from plait.bench.machine import describe
from plait.loading.kernel_trials.child import try_variant
from plait.loading.torch_preload import die_with
from plait.ops.launch_chain import FIRST, chain_launches

if TYPE_CHECKING:
    from tools.compile_kernels import Compiled

ACCELERATORS = (
    *("fla", "flashinfer", "flash_attn", "flash_attn_interface", "gemlite", "deep_gemm", "vllm", "sglang"),
    *("llama_cpp", "transformers"),
)
GIB = 1 << 30
CHAIN = 200  # launches in a graph that measures the gap between two
SIDE = 8192  # of the square product


@triton.jit
def add_one(x, PDL: tl.constexpr):
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    i = tl.arange(0, 128)
    tl.store(x + i, tl.load(x + i) + 1.0)


@triton.jit
def read_all(x, out, n, BLOCK: tl.constexpr):
    """Reads and writes next to nothing: a maximum for each program."""
    most = tl.full([BLOCK], -float("inf"), tl.float32)
    for start in range(tl.program_id(0) * BLOCK, n, tl.num_programs(0) * BLOCK):
        at = start + tl.arange(0, BLOCK)
        most = tl.maximum(most, tl.load(x + at, mask=at < n, other=0.0))
    tl.store(out + tl.program_id(0), tl.max(most, 0))


def list_machine(bench: Bench) -> Iterator[Item]:
    """Versions, roofs, and what graphs and optional packages can do."""
    yield Item("machine", "versions", "", "", lambda: {"note": str(_versions(bench))})
    n = (4096 if bench.is_dry else GIB) // 4
    x = torch.randn(n, device=bench.device)
    y, programs = torch.empty_like(x), 16 * bench.chip.processors if not bench.is_dry else 2
    peaks = torch.empty(programs, device=bench.device)

    def moved(call: Any, nbytes: int) -> dict[str, Any]:
        us = time_us(bench, [call])
        return {"us": us, "bytes": nbytes, "gb_s": nbytes / us / 1e3}

    def read() -> None:
        read_all[(programs,)](x, peaks, n, BLOCK=2048)

    yield Item("bandwidth", "copy", f"{n * 4}", "float32", lambda: moved(lambda: y.copy_(x), 2 * x.nbytes))
    yield Item("read bandwidth", "read", f"{n * 4}", "float32", lambda: moved(read, x.nbytes))
    yield Item("bandwidth", "fill", f"{n * 4}", "float32", lambda: moved(lambda: y.fill_(1.0), y.nbytes))
    side = 64 if bench.is_dry else SIDE
    yield Item("product", "cuBLAS", f"{side}³", "bfloat16", lambda: _product(bench, side))
    for pdl in (False, True):
        how = "programmatic launch" if pdl else "plain"
        yield Item("launch gap", how, f"{CHAIN} launches", "", lambda pdl=pdl: _gap(bench, pdl))
    yield Item("early launches", "chain", "", "float32", lambda: _chain(bench))
    yield Item("varlen_attn", "pages", "", "", _varlen)
    for name in ACCELERATORS:
        there = importlib.util.find_spec(name) is not None
        yield Item(
            "accelerator", name, "", "", lambda there=there: {"note": "there" if there else "not here"}
        )


def read_gb_s(bench: Bench) -> float:
    """The roof of phase 0, measured there if that phase has not run."""
    if (row := bench.find(0, "read bandwidth")) is None or not row.get("gb_s"):
        item = next(item for item in list_machine(bench) if item.op == "read bandwidth")
        row = bench.emit(bench.key(0, item), {"ok": True, **item.run()})
    return float(row["gb_s"])


def tflop_s(bench: Bench) -> float:
    """As `read_gb_s`, of products in bfloat16."""
    if (row := bench.find(0, "product")) is None or not row.get("tflop_s"):
        item = next(item for item in list_machine(bench) if item.op == "product")
        row = bench.emit(bench.key(0, item), {"ok": True, **item.run()})
    return float(row["tflop_s"])


def can_begin_early(bench: Bench) -> bool:
    """Whether kernels may begin before those before them have ended: if phase 0 has found that right."""
    row = bench.find(0, "early launches")
    return row is not None and row["ok"] is True


def _versions(bench: Bench) -> dict[str, Any]:
    chip, cuda = bench.chip, torch.version.cuda
    found = {"chip": chip.name, "capability": chip.capability, "processors": chip.processors}
    return {**found, "memory": chip.memory_nbytes, "cuda": cuda, "triton": triton.__version__, **describe()}


def _product(bench: Bench, side: int) -> dict[str, Any]:
    a, b = (torch.randn(side, side, device=bench.device).mul_(0.02).bfloat16() for _ in range(2))
    us = time_us(bench, [lambda: a @ b])
    return {"us": us, "flops": 2 * side**3, "tflop_s": 2 * side**3 / us / 1e6}


def _gap(bench: Bench, pdl: bool) -> dict[str, Any]:
    """Microseconds from one launch to the next in a graph; edges that capture drops show as no gain."""
    if bench.is_dry and pdl:
        return {"ok": None, "note": "the interpreter has no such launches"}
    if pdl and bench.chip.capability < FIRST:
        return {"ok": None, "note": f"programmatic launches begin with sm_{FIRST}"}
    x = torch.zeros(128, device=bench.device)
    more = {"launch_pdl": True} if pdl else {}
    count = 2 if bench.is_dry else CHAIN

    def call() -> None:
        for _ in range(count):
            add_one[(1,)](x, PDL=pdl, num_warps=4, **more)

    return {"us": time_us(bench, [call]) / count}


def _chain(bench: Bench) -> dict[str, Any]:
    """The trial of programmatic dependent launch that a startup makes, too."""
    if bench.is_dry or bench.chip.capability < FIRST:
        return {"ok": None, "note": f"programmatic launches begin with sm_{FIRST}, on a GPU"}
    variant = next(variant for variant in chain_launches.variants if variant.on == "cuda")
    cases = chain_launches.cases
    tried = (try_variant(chain_launches, variant, case, torch.float32, str(bench.device)) for case in cases)
    why = next(filter(None, tried), "")
    return {"ok": not why, "note": why}


def _varlen() -> dict[str, Any]:
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError as error:
        return {"ok": None, "note": f"not here: {error}"}
    names = list(inspect.signature(varlen_attn).parameters)
    return {"note": f"{'takes' if 'block_table' in names else 'does not take'} pages: {', '.join(names)}"}


def list_builds(bench: Bench) -> Iterator[Item]:
    """Every form of every kernel, compiled for this chip in a pool of processes."""
    from tools.compile_kernels import compile_form, list_forms

    forms = list_forms([bench.chip.capability])[: 1 if bench.is_dry else None]
    items = [
        form for form in forms if bench.only in form[1] and not bench.is_done(_build_key(bench, form[1]))
    ]
    context, workers = multiprocessing.get_context("spawn"), max(1, min(len(items), os.cpu_count() or 1))
    plain = {name: value for name, value in os.environ.items() if name == "TRITON_INTERPRET"}
    os.environ.pop("TRITON_INTERPRET", None)  # the interpreter compiles nothing
    pool = ProcessPoolExecutor(workers, mp_context=context, initializer=die_with, initargs=(os.getpid(),))
    try:
        jobs = {form: pool.submit(compile_form, *form) for form in items}
        for (_, name, _), job in jobs.items():
            yield _build_item(bench, name, lambda job=job: _built(job, bench))
    finally:
        pool.shutdown(cancel_futures=True)  # what the time was too short for
        os.environ.update(plain)


def _build_item(bench: Bench, name: str, run: Callable[[], dict[str, Any]]) -> Item:
    return Item(name, "compiled", f"sm_{bench.chip.capability}", "", run)


def _build_key(bench: Bench, name: str) -> dict[str, Any]:
    return bench.key(1, _build_item(bench, name, dict))


def _built(job: Future[Any], bench: Bench) -> dict[str, Any]:
    return judge_build(job.result(max(bench.seconds_left, 1.0)))


def judge_build(made: Compiled) -> dict[str, Any]:
    """What a row has of a form. One that only costs time is right: other versions of Triton spill more."""
    is_right = set(made.faults) <= set(made.costs)
    note = "; ".join(made.faults) or f"{made.registers} registers"
    return {"ok": is_right, "us": made.seconds * 1e6, "note": note}
