"""How ranks reach each other: gloo between CPUs, NCCL between GPUs, in one process group of their own."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor

from plait.errors import ConfigError
from plait.partition import Rank

LONGEST = timedelta(seconds=300)  # one rank may compile kernels while the others wait for it
LOOPBACK = "127.0.0.1"


class GroupComm:
    """A rank's place in a process group. `meeting`: a file that all ranks can open, in a private folder.

    Raises ConfigError if this torch has no backend for the device, and RuntimeError if a rank does not come.
    """

    def __init__(self, rank: Rank, meeting: str, device: torch.device) -> None:
        self.rank = rank
        # The default group of torch.distributed is the program's, in which an `LLM` may run.
        self._group = _open_group(rank, meeting, device)

    def gather(self, x: Tensor) -> Sequence[Tensor]:
        """What every rank passed, in the order of ranks. Raises RuntimeError if a rank has gone."""
        x = x.contiguous()
        found = [torch.empty_like(x) for _ in range(self.rank.size)]
        self._group.allgather([found], [x]).wait()
        return found


def _open_group(rank: Rank, meeting: str, device: torch.device) -> Any:
    import torch.distributed as dist  # a tenth of a second that one rank need not wait for

    if not dist.is_available():
        raise ConfigError("tensor_parallel_size: this build of torch has no torch.distributed")
    backends: Any = dist  # which names it exports depends on how torch was built
    place = (backends.FileStore(meeting, rank.size), rank.index, rank.size)
    if device.type == "cuda":
        if not dist.is_nccl_available():
            raise ConfigError(
                "tensor_parallel_size: this build of torch has no NCCL; --cpu runs ranks on CPUs"
            )
        options = backends.ProcessGroupNCCL.Options()
        options._timeout = LONGEST
        return backends.ProcessGroupNCCL(*place, options)
    options = backends.ProcessGroupGloo._Options()
    options._timeout = LONGEST
    options._devices = [backends.ProcessGroupGloo.create_device(hostname=LOOPBACK)]  # not to be reached from
    return backends.ProcessGroupGloo(*place, options)  # other machines
