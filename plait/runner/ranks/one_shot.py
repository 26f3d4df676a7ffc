"""Small sums over GPUs in one launch: each rank reads what all wrote to memory that every GPU can address.

`torch.distributed._symmetric_memory` has that memory and the kernel: of 2, 4 and 8 ranks it adds in the order
of ranks on each of them, so all have the same bits. Of other numbers it begins with a rank's own, and those
are refused here: ranks that have other logits draw other tokens.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any, Protocol

import torch
from torch import Tensor

from plait.errors import ConfigError
from plait.partition import Rank

SMALL_NBYTES = 512 << 10  # of a sum: up to here one launch is faster than NCCL's, by published measurements
ALIGNMENT = 16  # bytes that the kernel reads at a time
SIZES = (2, 4, 8)
DTYPES = (torch.float32, torch.bfloat16)  # the kernel has no others
GROUP = "plait-ranks"


class SymmetricBackend(Protocol):
    """What `OneShot` needs of torch. Each call raises RuntimeError where there is no such memory."""

    def open_group(self, name: str, rank: Rank, store: Any) -> None:
        """Tell the allocator who the ranks are. store: where they exchange handles."""
        ...

    def empty(self, count: int, device: torch.device, name: str) -> Tensor:
        """[count] bytes that other ranks will address."""
        ...

    def meet(self, memory: Tensor, name: str) -> object:
        """Exchange addresses with all ranks; memory lives as long as what is returned."""
        ...

    def add(self, part: Tensor, name: str) -> Tensor:
        """The sum over ranks of the same part of that memory, a new tensor."""
        ...


class TorchSymmetric:
    """torch's own. The process group needs not be known to `torch.distributed`: an allocator knows a name.

    Its kernel runs on the stream of the device that a thread has selected, whichever has the memory. So that
    one is selected here: another GPU can neither read the memory nor wait for what was written there.
    """

    def open_group(self, name: str, rank: Rank, store: Any) -> None:
        self._memory().set_group_info(name, rank.index, rank.size, store)

    def empty(self, count: int, device: torch.device, name: str) -> Tensor:
        with torch.cuda.device(device):
            made: Tensor = self._memory().empty_strided_p2p((count,), (1,), torch.uint8, device, name)
        return made

    def meet(self, memory: Tensor, name: str) -> object:
        with torch.cuda.device(memory.device):
            found: object = self._memory().rendezvous(memory, name)
        return found

    def add(self, part: Tensor, name: str) -> Tensor:
        with torch.cuda.device(part.device):
            total: Tensor = torch.ops.symm_mem.one_shot_all_reduce(part, "sum", name)
        return total

    @staticmethod
    def _memory() -> Any:
        return import_module("torch.distributed._symmetric_memory")._SymmetricMemory  # also defines the op


class OneShot:
    """Sums of up to `SMALL_NBYTES`. Its memory is allocated and met here, before any graph is captured.

    Raises ConfigError for a number of ranks that it cannot serve, and what the backend raises.
    """

    def __init__(self, rank: Rank, store: Any, device: torch.device, backend: SymmetricBackend) -> None:
        if rank.size not in SIZES:
            raise ConfigError(f"{rank.size} ranks: sums in one launch are of 2, 4 or 8")
        self._backend = backend
        backend.open_group(GROUP, rank, store)
        self._memory = backend.empty(SMALL_NBYTES, device, GROUP)
        self._handle: object = None

    def meet(self) -> None:
        """Exchange addresses: every rank must have its memory."""
        self._handle = self._backend.meet(self._memory, GROUP)

    def takes(self, x: Tensor) -> bool:
        """Whether it sums x: by the size of its bucket, which no count of live tokens within it changes."""
        return x.dtype in DTYPES and bucket_nbytes(x) <= SMALL_NBYTES

    def sum(self, x: Tensor) -> Tensor:
        """The sum over ranks, like x; x is left as it was."""
        count = x.numel()
        each = ALIGNMENT // x.element_size()
        whole = -(-count // each) * each
        part = self._memory[: whole * x.element_size()].view(x.dtype)
        part[:count].copy_(x.reshape(-1))  # the last launch ended when all ranks had read their parts
        return self._backend.add(part, GROUP)[:count].view(x.shape)


def bucket_nbytes(x: Tensor) -> int:
    """Bytes of [rows, …] with as many rows as the power of two from there on."""
    rows = len(x) if x.dim() > 1 else 1
    bucket = 1 << max(0, rows - 1).bit_length()
    return x.numel() // max(1, rows) * bucket * x.element_size()
