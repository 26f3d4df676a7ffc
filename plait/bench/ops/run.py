"""`plait bench op`: every variant this machine can run, checked against its reference, then timed."""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

import torch
from torch import Tensor

from plait.bench import machine
from plait.bench.model.bandwidth import arithmetic, bandwidth
from plait.bench.model.measure import round_number
from plait.bench.ops.roofline import REALISTIC, Work, decode_step, work_of
from plait.config import EngineConfig
from plait.errors import ConfigError
from plait.kernels.load import executor, load_kernels
from plait.loading.plugins import load_plugins
from plait.ops.attention import BLOCK
from plait.ops.linear import Linear, Packing, bind_layers
from plait.ops.registry import REGISTRY, Op, OpFacts, Variant
from plait.resource_limits import default_threads

STANDARD = {"block_size": BLOCK, "kv_dtype": "model"}  # what every mixer adds to an op's own sizes
SECONDS, FEWEST = 0.05, 5  # of timing: at least so long, and so many calls
IN_CACHE, IN_MEMORY = 8 << 20, 512 << 20  # bytes; a machine's last level of cache lies between
Case = Mapping[str, object]
Call = Callable[[], object]


@dataclass(frozen=True, slots=True)
class Roofs:
    """GB/s of reading what is in cache and what is not, TFLOP/s of torch's float32 product."""

    gb_s: float
    cache_gb_s: float
    tflop_s: float

    def seconds(self, work: Work) -> float:
        """The least time for it. What a call reads is still in cache from the call before, if it fits."""
        rate = self.cache_gb_s if work.nbytes <= 4 * IN_CACHE else self.gb_s
        return max(work.nbytes / (rate * 1e9), work.flops / (self.tflop_s * 1e12))


@dataclass(frozen=True, slots=True)
class Ground:
    """Where ops are timed."""

    device: str
    dtype: torch.dtype
    executor: Any
    roofs: Roofs


def bench_ops(
    name: str | None = None,
    *,
    threads: int | None = None,
    dtype: str = "float32",
    device: str = "cpu",
    large: bool = True,
    plugins: tuple[str, ...] = (),
    say: Callable[[str], None] = lambda text: None,
) -> dict[str, Any]:
    """Everything `plait bench op` says, as plain values. Raises PluginError; ConfigError: no such op."""
    from plait.model.mixers.registry import list_mixers

    list_mixers()  # registers every op that a model can use
    load_kernels()
    load_plugins(EngineConfig(plugins=plugins))
    if name is not None and name not in REGISTRY:
        raise ConfigError(f"bench op: there is no op {name!r}; there are {', '.join(sorted(REGISTRY))}")
    if device == "cuda" and not torch.cuda.is_available():
        raise ConfigError("bench op: torch finds no CUDA device; leave --device away")
    threads = threads or default_threads()[0]
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    say("measuring the roofs")
    near, far = bandwidth(IN_CACHE, threads), bandwidth(IN_MEMORY, threads, 3)
    roofs = Roofs(far["all_gb_s"], near["all_gb_s"], arithmetic(threads))
    made = executor(threads)
    try:
        ground = Ground(device, getattr(torch, dtype), made, roofs)
        rows = []
        for op in [REGISTRY[name]] if name else REGISTRY.values():
            for case in cases(op, large=large):
                say(f"{op.name} {case_text(case)}")
                rows += bench_case(op, case, ground)
    finally:
        torch.set_num_threads(before)
        if made is not None:
            made.close()
    return {
        "machine": machine.describe(),
        "threads": threads,
        "roofs": {"gb_s": roofs.gb_s, "cache_gb_s": roofs.cache_gb_s, "tflop_s": roofs.tflop_s},
        "rows": rows,
    }


def cases(op: Op, *, large: bool) -> list[Case]:
    return [*op.cases, *(REALISTIC.get(op.name, ()) if large else ())]


def case_text(case: Case) -> str:
    """`rows=1 n_in=64`; long lists of sequences are written as their number."""

    def short(value: object) -> str:
        if not isinstance(value, list):
            return str(value)
        text = ",".join(map(str, value)) if len(value) <= 4 else f"{len(value)}×{value[0]}…"
        return text.replace(" ", "")

    return " ".join(f"{key}={short(value)}" for key, value in case.items() if value is not None)


@torch.inference_mode()
def bench_case(op: Op, case: Case, ground: Ground) -> list[dict[str, object]]:
    """The reference's row, then one for each variant of this device; none for a dtype it does not have."""
    return list(_rows(op, case, ground)) if ground.dtype in op.tolerance else []


def _rows(op: Op, case: Case, ground: Ground) -> Iterator[dict[str, object]]:
    call, want, work = prepare_case(op, None, case, ground)
    slow = time_call(call)
    blank: dict[str, Any] = {
        "op": op.name,
        "case": case_text(case),
        "dtype": str(ground.dtype).removeprefix("torch."),
        "refusal": None,
        "wrong": None,
        "seconds": None,
        "error": None,
        "speedup": None,
        "nbytes": work.nbytes if work else None,
        "flops": work.flops if work else None,
        "rate": None,
        "rate_unit": None,
        "roof_share": None,
    }
    yield {**blank, "variant": "reference", **rates(slow, work, ground.roofs)}
    facts = _describe(op, case, ground)
    for variant in (*op.variants, *_composition(op, facts)):
        if variant.on != ground.device:
            continue
        row = {**blank, "variant": variant.name}
        if reason := variant.refusal(facts):
            yield {**row, "refusal": reason}
            continue
        call, got, _ = prepare_case(op, variant, case, ground)
        error = difference(got, want)
        tolerance = op.find_tolerance(variant, ground.dtype)
        if not error <= tolerance:
            wrong = f"off by {error:.2g}, the tolerance is {tolerance:g}"
            yield {**row, "error": round_number(error), "wrong": wrong, "refusal": f"WRONG: {wrong}"}
            continue
        seconds = time_call(call)
        yield {
            **row,
            "error": round_number(error),
            "speedup": round_number(slow / seconds),
            **rates(seconds, work, ground.roofs),
        }


def _describe(op: Op, case: Case, ground: Ground) -> OpFacts:
    """What a variant is chosen by: of linear layers, which a model passes as they are, too."""
    sizes = {**STANDARD, **case}
    facts = OpFacts(ground.device, ground.dtype, sizes, ground.executor)
    args = bind_layers(op.make(case, ground.dtype, ground.device)[0], facts) if op.make else ()
    named = zip(inspect.signature(op.reference).parameters, args, strict=False)
    return replace(facts, sizes={**sizes, **{key: one for key, one in named if isinstance(one, Linear)}})


def _composition(op: Op, facts: OpFacts) -> Iterator[Variant]:
    """What a fused op replaces, as a variant of it: the difference is what fusing is worth."""
    if op.composition:
        fn, _ = op.bind_parts(facts, no_fuse=[op.name])
        yield Variant("composition", facts.device, fn, lambda facts: None)


def prepare_case(
    op: Op, variant: Variant | None, case: Case, ground: Ground
) -> tuple[Call, Any, Work | None]:
    """(what is timed, the tensors it gives first, the work in it); every variant gets the same numbers."""
    torch.manual_seed(0)
    if op.make is None:
        raise ConfigError(f"bench op: {op.name} has no inputs for its cases")
    args, kwargs = op.make(case, ground.dtype, ground.device)
    work = work_of(op.name, case, args)
    fn: Callable[..., Any] = variant.bind(ground.executor) if variant else op.reference
    if variant:
        args = bind_layers(args, OpFacts(ground.device, ground.dtype, executor=ground.executor))
    if case.get("decode"):
        fn(*args, **kwargs)  # history lies in a layout of the variant's own: it writes it itself
        args = decode_step(op.name, args)
    if isinstance(fn, Packing):
        packed, apply = fn.pack(args[1], args[0].dtype), fn.apply
        args, fn = (args[0], packed, *args[2:]), apply
    first = [t.clone() for t in tensors(fn(*args, **kwargs))]

    def call() -> object:
        return fn(*args, **kwargs)

    return call, first, work


def time_call(call: Call) -> float:
    """Seconds of one call: the median of several, called in groups long enough for a clock."""
    started = time.perf_counter()
    call()
    once = max(time.perf_counter() - started, 1e-7)
    group = max(1, int(2e-4 / once))
    times: list[float] = []
    begun = time.perf_counter()
    while len(times) < FEWEST or (time.perf_counter() - begun < SECONDS and len(times) < 200):
        started = time.perf_counter()
        for _ in range(group):
            call()
        times.append((time.perf_counter() - started) / group)
        if once > 1.0:
            break
    return median(times)


def rates(seconds: float, work: Work | None, roofs: Roofs) -> dict[str, Any]:
    """The time, and, where the work is known, its rate in the unit of whichever roof is lower for it."""
    found: dict[str, Any] = {"seconds": float(f"{seconds:.4g}")}
    if work is None:
        return found
    by_memory = work.flops / (roofs.tflop_s * 1e12) < roofs.seconds(work)
    rate = work.nbytes / seconds / 1e9 if by_memory else work.flops / seconds / 1e12
    found |= {"rate": round_number(rate), "rate_unit": "GB/s" if by_memory else "TFLOP/s"}
    return {**found, "roof_share": round_number(roofs.seconds(work) / seconds)}


def difference(got: list[Tensor], want: list[Tensor]) -> float:
    """The largest |a - b| / (1 + |b|): what is compared with a tolerance, absolute and relative alike."""
    worst = 0.0
    for a, b in zip(got, want, strict=True):
        if a.shape != b.shape:
            return float("inf")
        if a.numel():
            gap = (a.double() - b.double()).abs() / (1 + b.double().abs())
            worst = max(worst, float(torch.where(a == b, 0.0, gap).nan_to_num(float("inf")).max()))
    return worst


def tensors(out: Any) -> list[Tensor]:
    """The tensors of a result."""
    if isinstance(out, Tensor):
        return [out]
    if hasattr(out, "tensor"):
        return [out.tensor]
    return [t for t in out if isinstance(t, Tensor)]
