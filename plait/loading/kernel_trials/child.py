"""The process that tries GPU kernels: one trial a line, one answer a line. A kernel may hang or crash it.

It ends with the process that began it, even while a kernel hangs: it would have the GPU for itself for ever.
"""

from __future__ import annotations

import inspect
import json
import os
import select
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from copy import deepcopy
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from plait.engine.device import BUSY, why_unavailable
from plait.errors import clip_text
from plait.kernels.load import load_for_gpu
from plait.loading.kernel_trials.attempts import EARLY, TrialCase
from plait.loading.kernel_trials.verdicts import MAX_REASON
from plait.ops.chip import read_chip
from plait.ops.launch import permit_dependent
from plait.ops.linear import bind_layers
from plait.ops.registry import REGISTRY, Op, OpFacts, Variant
from plait.text.isolation.child_process import is_foreign

SEED = 0
# What says nothing of a kernel: memory that others have, a folder, a disk, a compiler that does not start.
NO_VERDICT = (torch.OutOfMemoryError, MemoryError, OSError, subprocess.SubprocessError)
# The driver's lack of memory, or of the device, has no class of its own; nor has what a compiler lacked.
LACKS = (
    "out of memory",
    "not enough memory",
    "allocate memory",
    "alloc_failed",
    "no space left",
    "quota exceeded",
    BUSY,
)
DEVICE_ERROR = "cuda error"  # one that may stay with the process


class ReferenceFailed(Exception):
    """A reference or its inputs raised: nothing is known of the kernel."""


def try_variant(op: Op, variant: Variant, case: Mapping[str, object], dtype: torch.dtype, device: str) -> str:
    """Why a variant is not right on one case of its op; empty: it is. Raises what the kernel raises, and
    ReferenceFailed.

    It runs twice on the same input: a race shows as different bits.
    """
    assert op.make is not None
    torch.manual_seed(SEED)
    try:
        args, kwargs = op.make(case, dtype, device)
        wanted = _outputs(op, op.reference, deepcopy(args), kwargs)
    except Exception as error:
        raise ReferenceFailed(f"its reference does not run: {_describe(error)}") from error
    facts = OpFacts("cuda", dtype, chip=read_chip(torch.device(device)))
    found = _outputs(op, variant.bind(None), bind_layers(deepcopy(args), facts), kwargs)
    again = _outputs(op, variant.bind(None), bind_layers(deepcopy(args), facts), kwargs)
    if len(found) != len(wanted):
        return f"it returns {len(found)} tensors, and the reference {len(wanted)}"
    near = op.find_tolerance(variant, dtype)
    for a, b, twin in zip(found, wanted, again, strict=True):
        if a.shape != b.shape:
            return f"it returns {list(a.shape)}, and the reference {list(b.shape)}"
        x, y = a.double(), b.double()
        if not torch.allclose(x, y, rtol=near, atol=near, equal_nan=True):
            off = float(((x - y).abs() / (1 + y.abs())).max())
            return f"it is {off:.2g} off the reference (allowed: {near:g})"
        if not torch.equal(_plain(a), _plain(twin)):
            return "two runs on the same input give different bits"
    return ""


def _plain(value: Tensor) -> Tensor:
    """Without NaN, which equals nothing."""
    return value.nan_to_num() if value.is_floating_point() else value


def _outputs(op: Op, fn: Any, args: tuple[object, ...], kwargs: dict[str, object]) -> list[Tensor]:
    """What a call returns, and the state that it leaves and that has one layout for all variants."""
    out = fn(*args, **kwargs)
    names = inspect.signature(op.reference).parameters
    state = [arg for name, arg in zip(names, args, strict=False) if name not in op.private]
    found = [t for value in (out, state) for t in _tensors(value)]
    if (on_gpu := next((t for t in found if t.is_cuda), None)) is not None:
        torch.cuda.synchronize(on_gpu.device)
    return found


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _tensors(item)
    elif isinstance(getattr(value, "tensor", None), Tensor):
        yield value.tensor


def answer(request: Mapping[str, Any], device: str) -> dict[str, Any]:
    """{"verdict": text} of a kernel that was tried, {"failed": text} of a trial that is no kernel's fault.

    "over", next to "failed": whether this process is of no use any more.
    """
    op = REGISTRY.get(request["op"])
    variants = op.variants if op else ()
    variant = next((v for v in variants if (v.name, v.on) == (request["variant"], "cuda")), None)
    if op is None or variant is None:
        return {"failed": f"the trial's process knows no {request['op']} ({request['variant']})"}
    try:
        dtype = getattr(torch, request["dtype"])
        cases = [TrialCase(number, changes).apply(op.cases) for number, changes in request["cases"]]
        tried = (try_variant(op, variant, case, dtype, device) for case in cases)
        return {"verdict": clip_text(next(filter(None, tried), ""), MAX_REASON)}
    except ReferenceFailed as error:
        text = str(error)
        return {"failed": clip_text(text, MAX_REASON), "over": DEVICE_ERROR in text.lower()}
    except Exception as error:
        if (lack := find_lack(error)) is not None:
            return {"failed": clip_text(_describe(lack), MAX_REASON)}
        return {"verdict": clip_text(f"it does not run: {_describe(error)}", MAX_REASON)}


def find_lack(error: BaseException) -> BaseException | None:
    """What the machine lacked, of an error and those that it came from; None: the error is the kernel's own.

    A compiler without space to write, or that was killed, is an error of Triton's, with the cause behind it.
    """
    if isinstance(error, NO_VERDICT):
        return error
    behind: BaseException | None = error
    while behind is not None:
        killed = isinstance(behind, subprocess.CalledProcessError) and is_foreign(behind.returncode)
        if killed or isinstance(behind, MemoryError) or any(lack in str(behind).lower() for lack in LACKS):
            return behind
        behind = behind.__cause__ or behind.__context__
    return None


def _describe(error: BaseException) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())


def find_obstacle(device: str) -> str:
    """Why no kernel at all can be tried on this device; empty: they can be.

    Triton compiles its launcher with a C compiler, so without one every kernel fails, and none is at fault.
    """
    try:
        torch.empty(1, device=device)
    except Exception as error:
        if (why := why_unavailable(error, torch.device(device))) is not None:
            return f"{why} (that process may be the engine itself, which has to open the device before this)"
        return f"the device does not start: {_describe(error)}"
    if torch.device(device).type != "cuda" or find_spec("triton") is None:
        return ""
    try:
        start_launcher()
    except Exception as error:
        return (
            "Triton launches nothing here, for which it needs a C compiler and Python's headers (gcc and "
            f"python3-dev): {_describe(error)}"
        )
    return ""


def start_launcher() -> None:
    """Load what Triton launches kernels with; the first process compiles it. Raises what Triton raises."""
    from triton.runtime import driver

    driver.active.get_current_target()


def end_with(pipe: int) -> None:
    """End this process when the other side of a pipe is closed, whatever its other threads do."""
    poll = select.poll()
    poll.register(pipe, 0)  # its end alone: others read what is in it
    poll.poll()
    os._exit(0)


def main() -> None:
    """Answer trials until standard input ends. Arguments: the device, how kernels are launched, modules."""
    device, how, modules = sys.argv[2], sys.argv[3], sys.argv[4:]
    threading.Thread(target=end_with, args=(0,), name="plait-parent", daemon=True).start()
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what a library prints is no answer
    load_for_gpu()
    for module in modules:
        import_module(module)
    obstacle = find_obstacle(device)
    if how == EARLY and not obstacle:
        permit_dependent(torch.device(device), True)
    answers.write(json.dumps({"failed": clip_text(obstacle, MAX_REASON)} if obstacle else {}) + "\n")
    answers.flush()
    for line in sys.stdin:
        answers.write(json.dumps(answer(json.loads(line), device)) + "\n")
        answers.flush()
