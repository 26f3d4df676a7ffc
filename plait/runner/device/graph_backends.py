"""What captures a step and runs it again: a graph of CUDA, or torch's operators one by one on a CPU."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cached_property
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from plait.errors import CannotRecord, ConfigError, KernelFailed, RankLost, clip_text
from plait.kernels.load import load_for_gpu
from plait.ops.chip import Chip
from plait.ops.launch import capture_launches, watch_launches
from plait.runner.device.capture import StepCapture

Step = Callable[[], Tensor]
OUT_OF_MEMORY = "out of memory"  # of the driver's errors, which have no class of their own
log = logging.getLogger("plait")


class CaptureRefusals:
    """Logs what cannot be captured: each cause once, however many sizes and kinds of steps it has.

    `counts`: of refusals, by kind of step, its sequences ("any" at startup) and cause.
    """

    def __init__(self, num_ranks: int = 1) -> None:
        self._num_ranks, self._named = num_ranks, set[str]()
        self.counts: Counter[tuple[str, str, str]] = Counter()

    def refuse(self, what: str, error: Exception, kind: str, num_seqs: int | None = None) -> str:
        """Log that such steps run op by op, count that, and return why.

        Raises RankLost for a lack of memory where there are several ranks: the others have captured the step,
        and would wait for what this one does not run.
        """
        why = clip_text(" ".join(str(error).split()), 300)
        if self._num_ranks > 1 and is_lack(error):
            raise RankLost(f"{what} cannot be captured, and other ranks wait for them: {why}") from error
        self.counts[kind, "any" if num_seqs is None else str(num_seqs), _cause_of(error)] += 1
        if why not in self._named:
            self._named.add(why)
            log.warning("%s are not captured, and run op by op, as all others with this cause: %s", what, why)
        return why


def is_lack(error: Exception) -> bool:
    """Whether a device had too little memory."""
    return isinstance(error, torch.OutOfMemoryError) or OUT_OF_MEMORY in str(error).lower()


def _cause_of(error: Exception) -> str:
    """The kind of refusal, as metrics have it."""
    if is_lack(error):
        return "memory"
    causes = {CannotRecord: "unsupported", KernelFailed: "kernel"}
    return next((cause for kind, cause in causes.items() if isinstance(error, kind)), "driver")


class CapturedStep(Protocol):
    """A step over static memory. `result`: what it returned, which each replay overwrites."""

    result: Tensor

    @property
    def launches(self) -> Sequence[str]: ...
    def replay(self) -> None: ...


@runtime_checkable
class GraphBackend(Protocol):
    """Captures steps. `device`: where their memory is; `chip`: the GPU that kernels are chosen for.

    `captures_at_start`: whether a capture is worth its time before there is a request. `refusals`: names what
    cannot be captured.

    A step runs once or twice while it is captured, so its rows must be padding then. Raises CannotRecord, or
    RuntimeError of the driver, where a step cannot be captured.
    """

    device: torch.device
    chip: Chip | None
    captures_at_start: bool
    refusals: CaptureRefusals

    def select(self) -> AbstractContextManager[object]:
        """Inside, this thread launches on the device."""

    def capture(self, step: Step, inputs: Sequence[Tensor]) -> CapturedStep:
        """Capture what `step` launches. `inputs`: all memory that is neither made nor freed in it."""

    def read(self, found: Tensor) -> Callable[[], Tensor]:
        """Copy to the host behind all that was launched; what is returned waits for the copy."""

    def free_nbytes(self) -> int | None:
        """Bytes that the device has left; None where captures take no memory of their own."""


class TorchGraphs(GraphBackend):
    """Graphs of a CPU: what the capture saw runs again over the same memory. For tests of what a GPU does."""

    captures_at_start = False

    def __init__(self, chip: Chip | None) -> None:
        """Raises ConfigError if this GPU's kernels cannot run here."""
        if chip is not None and not _is_interpreted():
            raise ConfigError(
                "a GPU's kernels run on a CPU in Triton's interpreter alone: set TRITON_INTERPRET=1"
            )
        load_for_gpu()
        self.refusals = CaptureRefusals()
        self.device, self.chip = torch.device("cpu"), chip

    def select(self) -> AbstractContextManager[object]:
        return nullcontext()

    def capture(self, step: Step, inputs: Sequence[Tensor]) -> TorchGraph:
        with torch.inference_mode(), capture_launches(), StepCapture(inputs) as capture:
            result = step()
        return TorchGraph(capture, result)

    def read(self, found: Tensor) -> Callable[[], Tensor]:
        copy = found.clone()
        return lambda: copy

    def free_nbytes(self) -> None:
        return None


class TorchGraph:
    """A step as `StepCapture` has it."""

    def __init__(self, capture: StepCapture, result: Tensor) -> None:
        self._capture, self.result = capture, result

    @property
    def launches(self) -> Sequence[str]:
        return tuple(self._capture.launches)

    def replay(self) -> None:
        self._capture.replay()


class CudaGraphs(GraphBackend):
    """Graphs of a GPU, which share one pool of memory: a replay may overwrite what another one returned.

    The pool grows where a capture finds no free block that is large enough, and gives nothing back while one
    of its graphs lives. So it has the memory of the largest graph if that is captured first, and is kept.
    """

    captures_at_start = True

    def __init__(self, device: torch.device, chip: Chip | None, num_ranks: int = 1) -> None:
        self.device, self.chip, self.refusals = device, chip, CaptureRefusals(num_ranks)
        self._pool = torch.cuda.graph_pool_handle()

    @cached_property
    def _side(self) -> torch.cuda.Stream:
        """The stream of captures, made at the first one: a stream opens the device, and trials of kernels in
        child processes come before that (`engine.device`).

        torch's own stream for captures is one for the process, of the device that was captured on first: on
        another device it would catch nothing of what a step launches.
        """
        return torch.cuda.Stream(self.device)

    def select(self) -> AbstractContextManager[object]:
        return torch.cuda.device(self.device)

    def capture(self, step: Step, inputs: Sequence[Tensor]) -> CudaGraph:
        with torch.inference_mode(), capture_launches():
            here = torch.cuda.current_stream(self.device)
            self._side.wait_stream(here)
            # This run compiles kernels, which a capture must not. It also sees what a capture would refuse:
            # torch's allocator does not leave a capture that the driver has broken off.
            try:
                with torch.cuda.stream(self._side), StepCapture(inputs, is_kept=False):
                    step()
            finally:  # what restores the batch after a refusal comes behind all that was launched
                here.wait_stream(self._side)
            graph, names = torch.cuda.CUDAGraph(), _Names()
            # Other threads may allocate and copy meanwhile: they do not break off what this one captures.
            # Of a capture that fails at its end torch leaves the stream of captures current.
            with (
                watch_launches(names),
                torch.cuda.stream(here),
                torch.cuda.graph(graph, self._pool, self._side, capture_error_mode="thread_local"),
            ):
                result = step()
        return CudaGraph(graph, result, names.seen)

    def read(self, found: Tensor) -> Callable[[], Tensor]:
        host = torch.empty(found.shape, dtype=found.dtype, pin_memory=True)
        host.copy_(found, non_blocking=True)
        done = torch.cuda.Event()
        done.record(torch.cuda.current_stream(self.device))

        def wait() -> Tensor:
            done.synchronize()
            return host

        return wait

    def free_nbytes(self) -> int:
        torch.cuda.empty_cache()  # torch keeps what was freed, and the driver counts that as taken
        return int(torch.cuda.mem_get_info(self.device)[0])


class CudaGraph:
    """A step as CUDA has it. `launches`: those of our own kernels."""

    def __init__(self, graph: torch.cuda.CUDAGraph, result: Tensor, launches: Sequence[str]) -> None:
        self._graph, self.result, self.launches = graph, result, tuple(launches)

    def replay(self) -> None:
        self._graph.replay()


def _is_interpreted() -> bool:
    """Whether kernels that are made from now on run on the CPU."""
    try:
        import triton
    except ImportError:
        return False
    return bool(triton.knobs.runtime.interpret)


class _Names:
    """Notes the names of launches, and lets them run."""

    def __init__(self) -> None:
        self.seen: list[str] = []

    def record_launch(
        self, name: str, run: Callable[[], None], tensors: Sequence[Tensor], rest: tuple[object, ...]
    ) -> None:
        self.seen.append(name)
        run()
