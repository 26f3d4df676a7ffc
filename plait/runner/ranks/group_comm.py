"""How ranks reach each other: gloo between CPUs, NCCL between GPUs, in one process group of their own.

A sum is an all-reduce. Between GPUs those of small buckets are one launch over symmetric memory, where all
ranks have it. Which of the two is chosen by the bucket of a step, never by the number of live tokens.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor

from plait.errors import ConfigError
from plait.ops.registry import Binding
from plait.partition import Rank
from plait.runner.ranks.one_shot import SMALL_NBYTES, OneShot, SymmetricBackend, TorchSymmetric

log = logging.getLogger("plait")
LONGEST = timedelta(seconds=300)  # one rank may compile kernels while the others wait for it
MEETING = timedelta(seconds=60)  # for the exchange of addresses
LOOPBACK = "127.0.0.1"


class GroupComm:
    """A rank's place in a process group. `meeting`: a file that all ranks can open, in a private folder.

    `symmetric`: has the memory of small sums; None: torch's on GPUs, none on CPUs. Raises ConfigError if this
    torch has no backend for the device, and RuntimeError if a rank does not come.
    """

    def __init__(
        self, rank: Rank, meeting: str, device: torch.device, symmetric: SymmetricBackend | None = None
    ) -> None:
        self.rank = rank
        # The default group of torch.distributed is the program's, in which an `LLM` may run.
        self._group = _open_group(rank, meeting, device)
        self._name = "NCCL" if device.type == "cuda" else "gloo"
        self._one_shot: OneShot | None = None
        self.why_not = "ranks on CPUs share no GPU's memory"
        if rank.shares:
            self.why_not = "--deterministic adds in the tree's order"
        elif symmetric is not None or device.type == "cuda":
            self._open_one_shot(meeting + ".addresses", device, symmetric or TorchSymmetric())

    def bind(self) -> Binding:
        """What sums over ranks, and why small ones take no shorter way."""
        if self.rank.shares:
            name = f"gathered over {self._name}"
        elif self._one_shot:
            return Binding("sum over ranks", f"symmetric memory, {self._name}", "every layer", ())
        else:
            name = self._name
        return Binding("sum over ranks", name, "every layer", (("symmetric memory", self.why_not),))

    def gather(self, x: Tensor) -> Sequence[Tensor]:
        """What every rank passed, in the order of ranks. Raises RuntimeError if a rank has gone."""
        x = x.contiguous()
        found = [torch.empty_like(x) for _ in range(self.rank.size)]
        self._group.allgather([found], [x]).wait()
        return found

    def sum(self, x: Tensor) -> Tensor:
        """The sum of what every rank passed, like x. All ranks get the same bits. Raises as `gather`."""
        if self._one_shot is not None and self._one_shot.takes(x):
            return self._one_shot.sum(x)
        total = x.clone(memory_format=torch.contiguous_format)
        self._group.allreduce([total]).wait()
        return total

    def abort(self) -> None:
        """Break off sums that wait for other ranks, from any thread. Nothing can be summed any more.

        gloo's fail by themselves when another rank's process has ended.
        """
        try:
            self._group.abort()
        except Exception as error:  # of a part of torch that is not public: it may raise anything
            log.debug("ranks: sums cannot be broken off: %s", error)

    def _open_one_shot(self, meeting: str, device: torch.device, backend: SymmetricBackend) -> None:
        """Small sums over symmetric memory, if all ranks can: each step is taken by all of them, or by none.

        A rank that fails alone would leave the others waiting, so they agree before each step that waits.
        """
        import torch.distributed as dist

        stores: Any = dist
        store, found = stores.FileStore(meeting, self.rank.size), list[OneShot]()
        store.set_timeout(MEETING)
        steps: tuple[Callable[[], object], ...] = (
            lambda: found.append(OneShot(self.rank, store, device, backend)),
            lambda: found[0].meet(),
            lambda: self._try_sum(found[0], device),
        )
        for step in steps:
            if (why := self._take_together(step, device)) is not None:
                self.why_not = why
                log.info("ranks: small sums take %s, without symmetric memory: %s", self._name, why)
                return
        self._one_shot, self.why_not = found[0], ""
        log.info("ranks: sums of up to %d KiB over symmetric memory", SMALL_NBYTES >> 10)

    def _take_together(self, step: Callable[[], object], device: torch.device) -> str | None:
        """Why not all ranks could take a step, or None: the number of ranks that can is the same for all."""
        why = None
        try:
            step()
        except Exception as error:  # of a part of torch that is not public: it may raise anything
            why = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
        oks = self.gather(torch.tensor([why is None], dtype=torch.int32, device=device))
        failed = [index for index, ok in enumerate(oks) if not int(ok)]
        return why or (f"rank {failed[0]} could not" if failed else None)

    def _try_sum(self, one_shot: OneShot, device: torch.device) -> None:
        """Sum numbers with a known result. Raises RuntimeError if it is another."""
        numbers, size = torch.arange(33, dtype=torch.float32, device=device) % 8, self.rank.size
        x, wanted = numbers + self.rank.index, numbers * size + size * (size - 1) // 2
        for dtype in (torch.float32, torch.bfloat16):
            if not torch.equal(one_shot.sum(x.to(dtype)).float(), wanted):
                raise RuntimeError(f"a trial sum of {dtype} is wrong")


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
