"""Separates errors after which a GPU computes nothing more in this process from those that a request causes.

After a fault on the device (an illegal address, a launch that failed, a bus that is gone) every later call of
the process fails, too, until it ends. So such a step is not tried again one sequence at a time: the engine's
process ends, and its supervisor starts another, which replays the streams.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from plait.errors import DeviceLost, clip_text
from plait.schedule.plan import Sampled, Ticket

# How errors of CUDA's runtime, of its libraries and of Triton's launcher begin.
WORDS = ("CUDA error", "Triton Error [CUDA]", "CUBLAS_STATUS", "CUDNN_STATUS", "cuSOLVER error", "NCCL error")


def check_lost(error: Exception, device: torch.device, where: str = "a step") -> None:
    """Raises DeviceLost if an error is the device's, and the device answers no more. where: it came."""
    if isinstance(error, torch.OutOfMemoryError):
        return
    text = " ".join(str(error).split("\n\n")[0].split())
    is_of_device = isinstance(error, torch.AcceleratorError) or any(word in text for word in WORDS)
    if is_of_device and not _answers(device):
        raise DeviceLost(f"the GPU {device} was lost in {where}: {clip_text(text, 200)}") from error


def _answers(device: torch.device) -> bool:
    """Whether the device still works: a lost one returns its error at every call."""
    if device.type != "cuda":
        return False
    try:
        torch.cuda.synchronize(device)
    except RuntimeError:
        return False
    return True


@dataclass(frozen=True, slots=True)
class CheckedTicket:
    """A ticket that reports the loss of the device as what it is."""

    ticket: Ticket
    device: torch.device

    @property
    def can_be_followed(self) -> bool:
        return self.ticket.can_be_followed

    def wait(self) -> list[Sampled]:
        """The answers. Raises DeviceLost, and what the ticket raises."""
        try:
            return self.ticket.wait()
        except RuntimeError as error:
            check_lost(error, self.device)
            raise
