"""Phase 2: every kernel on the cases of its op: right, and the same each time, whatever memory held."""

from __future__ import annotations

import inspect
import multiprocessing
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch import Tensor

from gpu_phases.machine import can_begin_early
from gpu_phases.results import Bench, Item
from gpu_phases.timing import copied
from plait.bench.ops.run import case_text, tensors
from plait.kernels.load import load_for_gpu
from plait.loading.torch_preload import die_with
from plait.model.mixers.registry import list_mixers
from plait.ops.attention import BLOCK
from plait.ops.chip import read_chip
from plait.ops.launch import permit_dependent
from plait.ops.linear import Linear, bind_layers
from plait.ops.registry import REGISTRY, Op, OpFacts, Variant

STANDARD = {"block_size": BLOCK, "kv_dtype": "model"}
LIMITS = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 1e-2}  # of |a - b| / |b|
OF_SEQUENCES = ("slots", "has_history", "block_table", "seq_lens", "state_slots")  # one for each sequence
OF_ROWS = ("x", "y", "delta", "gate", "by", "dt", "positions")  # one for each row
PICKS = {"index", "tokens"}  # numbers of rows of x, which all have to be there
MOST_ROWS = 8  # rows of a matrix product that have one form: a row alone has the same bits as in them
WARMERS = 8  # processes that run kernels ahead of their checks, at most: most of a check is compiling
AHEAD_S = 60.0  # that a check waits for one of them
DTYPES = (torch.bfloat16, torch.float32, torch.float16)
MAKERS = ("empty", "empty_like", "empty_strided")


def gpu_variants() -> Iterator[tuple[Op, Variant]]:
    """Every variant that a GPU may bind."""
    load_for_gpu()
    list_mixers()
    for op in REGISTRY.values():
        for variant in op.variants:
            if variant.on == "cuda":
                yield op, variant


def list_checks(bench: Bench) -> Iterator[Item]:
    """An item for each variant, case and dtype that it serves. On a GPU others compile ahead meanwhile."""
    checks = [check for check in find_checks(bench) if bench.only in check.op.name]
    if bench.is_dry:
        yield from (check.item(check) for check in checks)
        return
    checks = [check for check in checks if not bench.is_done(bench.key(2, check.item(check)))]
    workers = max(1, min(WARMERS, (os.cpu_count() or 2) // 2))
    pool = ProcessPoolExecutor(
        workers,
        mp_context=multiprocessing.get_context("spawn"),
        initializer=start_warmer,
        initargs=(os.getpid(), str(bench.device), can_begin_early(bench)),
    )
    try:
        jobs = [pool.submit(run_once, *check.named, str(bench.device)) for check in checks]
        for check, job in zip(checks, jobs, strict=True):
            yield check.item(lambda check=check, job=job: _after(job, check))
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
        for child in multiprocessing.active_children():  # in one of them a kernel may never end
            child.kill()


def start_warmer(parent: int, device: str, is_early: bool) -> None:
    """A process that ends with its parent, and launches kernels as it does."""
    die_with(parent)
    permit_dependent(torch.device(device), is_early)


def _after(job: Future[None], check: Check) -> dict[str, Any]:
    """A check with its kernels compiled by now. What went wrong ahead of it, it meets itself."""
    with suppress(Exception):
        job.result(AHEAD_S)
    return check()


def run_once(op_name: str, variant_name: str, number: int, dtype_name: str, device: str) -> None:
    """Run a kernel on a case of its op in this process, so that its code is in the cache on disk."""
    op, variant = next((o, v) for o, v in gpu_variants() if (o.name, v.name) == (op_name, variant_name))
    assert op.make is not None
    torch.manual_seed(0)
    with torch.inference_mode():
        facts = OpFacts("cuda", getattr(torch, dtype_name), chip=read_chip(torch.device(device)))
        args, kwargs = op.make(op.cases[number], facts.dtype, device)
        variant.fn(*bind_layers(args, facts), **kwargs)
        if torch.device(device).type == "cuda":
            torch.cuda.synchronize(device)


def find_checks(bench: Bench) -> Iterator[Check]:
    """What is to be checked: in the short form the first and the last case of each storage, in one dtype."""
    for op, variant in gpu_variants():
        served = [check for dtype in DTYPES for check in _served(bench, op, variant, dtype)]
        if bench.is_full:
            yield from served
            continue
        if bench.is_dry:
            served = [check for check in served if check.dtype is torch.float32]
            yield from [check for check in served if check.named[2] == 1] or served[:1]
            continue
        groups: dict[object, list[Check]] = {}
        for check in served:
            if check.dtype is served[0].dtype:
                groups.setdefault(check.case.get("kind", check.case.get("stored")), []).append(check)
        for some in groups.values():
            yield some[-1]  # of most ops the one with many rows
            yield from some[:-1][:1]


def _served(bench: Bench, op: Op, variant: Variant, dtype: torch.dtype) -> Iterator[Check]:
    """The cases of an op that a variant serves."""
    for number, case in enumerate(op.cases if dtype in op.tolerance else ()):
        facts = OpFacts("cuda", dtype, {**STANDARD, **case}, chip=bench.chip)
        if variant.refusal(facts) is None:
            yield Check(op, variant, case, dtype, bench, number)


class Check:
    """What is checked of one variant, case and dtype."""

    def __init__(
        self,
        op: Op,
        variant: Variant,
        case: Mapping[str, Any],
        dtype: torch.dtype,
        bench: Bench,
        number: int = 0,
    ) -> None:
        """number: of the case in its op."""
        self.op, self.variant, self.case, self.dtype, self.bench = op, variant, case, dtype, bench
        self.names = list(inspect.signature(op.reference).parameters)
        self.named = (op.name, variant.name, number, str(dtype).removeprefix("torch."))

    def item(self, run: Callable[[], dict[str, Any]]) -> Item:
        """The row that `run` finds."""
        return Item(self.op.name, self.variant.name, case_text(self.case), self.named[3], run)

    @torch.inference_mode()
    def __call__(self) -> dict[str, Any]:
        torch.manual_seed(0)
        assert self.op.make is not None
        args, kwargs = self.op.make(self.case, self.dtype, str(self.bench.device))
        want = self._outcome(self.op.reference, [self._widened(a) for a in args], kwargs)
        first = self._run(args, kwargs)
        again = self._run(args, kwargs)
        faults = []
        if not all(map(_same_bits, first, again)):
            faults.append("two runs differ in bits")
        error = max((self._error(a, b, faults) for a, b in zip(first, want, strict=True)), default=0.0)
        if (limit := LIMITS[self.dtype]) < error:
            faults.append(f"the limit is {limit:g}")
        alone = self._alone(args, kwargs, first)
        if alone and ".triton." in self.variant.module:  # torch's own choose a form by the number of rows
            faults.append(alone)
        return {"ok": not faults, "error": error, "note": "; ".join(faults) or alone}

    def _run(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Tensor]:
        bound = bind_layers(args, OpFacts("cuda", self.dtype, chip=self.bench.chip))
        with poisoned_memory():
            return self._outcome(self.variant.fn, bound, kwargs)

    def _outcome(
        self, fn: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> list[Tensor]:
        """What it returns, and the state that all variants must agree on, over copies of the arguments."""
        own = [copied(a) if isinstance(a, Tensor) else a for a in args]
        out = tensors(fn(*own, **kwargs))
        shared = [a for n, a in zip(self.names, own, strict=False) if n not in self.op.private]
        return [t.clone() for t in (*out, *tensors(shared))]

    def _widened(self, value: Any) -> Any:
        """An input of the compute dtype in float32: the reference then rounds nothing on its way."""
        is_low = isinstance(value, Tensor) and value.dtype is self.dtype
        return value.float() if is_low and value.is_floating_point() else value

    def _error(self, got: Tensor, want: Tensor, faults: list[str]) -> float:
        """The norm of the difference over that of the reference; whole numbers must be equal."""
        if got.shape != want.shape:
            faults.append(f"a result is {list(got.shape)}, not {list(want.shape)}")
            return 0.0
        if not got.is_floating_point():
            off = int((got.long() - want.long()).abs().max()) if got.numel() else 0
            if off > int(got.dtype is torch.int8):  # codes may round another way
                faults.append(f"whole numbers differ by {off}")
            return 0.0
        known = want.isfinite() | (want.isnan() & ~got.isnan())
        a, b = (torch.where(known, t.double(), 0.0) for t in (got, want))
        if not bool((got.isfinite() | ~known).all()):
            faults.append("a result has numbers that are not finite")
        return float((a - b).nan_to_num().norm() / b.norm().clamp_min(1e-30)) if b.numel() else 0.0

    def _alone(self, args: Sequence[Any], kwargs: Mapping[str, Any], whole: list[Tensor]) -> str:
        """Whether the first sequence, or row, has the same bits alone; what differs, or nothing.

        Not of an op that gets a linear layer: `linear` itself is checked so.
        """
        if any(isinstance(value, Linear) for value in args):
            return ""
        given, count = self._first_alone(list(args))
        if given is None:
            return ""
        out = self._run(given, kwargs)[0]
        many = whole[0]
        if "query_start" not in self.names and len(args[0]) > MOST_ROWS:
            some, _ = self._rows(list(args), MOST_ROWS)
            many = self._run(some, kwargs)[0] if some else many
        return "" if _same_bits(out[:count], many[:count]) else "a row alone has other bits"

    def _first_alone(self, args: list[Any]) -> tuple[list[Any] | None, int]:
        """The arguments of the first sequence alone and its rows; None where there is no other one."""
        if "query_start" not in self.names:
            return self._rows(args, 1)
        starts = args[self.names.index("query_start")].tolist()
        if len(starts) < 3:
            return None, 0
        total, count = starts[-1], starts[1]
        for i, (name, value) in enumerate(zip(self.names, args, strict=False)):
            if name == "query_start":
                args[i] = value[:2].clone()
            elif name == "num_decodes":
                args[i] = min(1, value)
            elif name in OF_SEQUENCES:
                args[i] = value[:1].clone()
            elif isinstance(value, Tensor) and value.dim() and value.shape[0] == total:
                args[i] = value[:count].clone()
        return args, count

    def _rows(self, args: list[Any], count: int) -> tuple[list[Any] | None, int]:
        """The arguments of the first rows; None where it is not plain which of them have rows."""
        x = args[0]
        if not isinstance(x, Tensor) or x.dim() < 2 or len(x) <= count or self.names[0] not in OF_ROWS:
            return None, 0
        if not PICKS.isdisjoint(self.names):
            return None, 0
        for i, (name, value) in enumerate(zip(self.names, args, strict=False)):
            if not isinstance(value, Tensor) or not value.dim() or len(value) != len(x):
                continue
            if name not in OF_ROWS:
                return None, 0
            args[i] = value[:count].clone()
        return args, count


def _same_bits(a: Tensor, b: Tensor) -> bool:
    """NaN of garbage slots included."""
    return a.shape == b.shape and bool(torch.equal(_bits(a), _bits(b)))


def _bits(t: Tensor) -> Tensor:
    return t.contiguous().view(torch.uint8) if t.dim() else t.view(1).view(torch.uint8)


@contextmanager
def poisoned_memory() -> Iterator[None]:
    """Memory that is not initialised holds NaN meanwhile: what a kernel never wrote cannot look right."""
    kept = {name: getattr(torch, name) for name in MAKERS}
    kept_new = Tensor.new_empty

    def fill(made: Tensor) -> Tensor:
        return made.fill_(float("nan")) if made.is_floating_point() and made.dtype.itemsize > 1 else made

    def wrapped(make: Callable[..., Tensor]) -> Callable[..., Tensor]:
        return lambda *args, **kwargs: fill(make(*args, **kwargs))

    try:
        for name, make in kept.items():
            setattr(torch, name, wrapped(make))
        Tensor.new_empty = wrapped(kept_new)  # type: ignore[method-assign]
        yield
    finally:
        for name, make in kept.items():
            setattr(torch, name, make)
        Tensor.new_empty = kept_new  # type: ignore[method-assign]
