"""A GPU as kernels are chosen for it: read from the driver, or made up to see the choice without one."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

OLDEST = 75  # compute capability: Turing is the oldest that current builds of torch and Triton serve
BFLOAT16 = 80  # the first with bfloat16 in its matrix units
PRODUCTS = 80  # the first of which Triton uses the matrix units; before it, products spill


@dataclass(frozen=True, slots=True)
class Chip:
    """What a choice may depend on. capability: 90 for sm_90; shared_nbytes: that one block may have.

    `trials`: of kernels that were tried on it, "" or why one is not bound (`registry.why_rejected`).
    """

    name: str
    capability: int
    processors: int
    shared_nbytes: int
    memory_nbytes: int
    trials: Mapping[str, str] = field(default_factory=dict, compare=False)


EXAMPLES = {
    chip.capability: chip
    for chip in (
        Chip("an sm_75 as T4", 75, 40, 64 << 10, 16 << 30),
        Chip("an sm_80 as A100", 80, 108, 163 << 10, 80 << 30),
        Chip("an sm_86 as RTX 3090", 86, 82, 99 << 10, 24 << 30),
        Chip("an sm_89 as RTX 4090", 89, 128, 99 << 10, 24 << 30),
        Chip("an sm_90 as H200", 90, 132, 227 << 10, 141 << 30),
        Chip("an sm_120 as RTX 5090", 120, 170, 99 << 10, 32 << 30),
    )
}


def read_chip(device: torch.device) -> Chip | None:
    """The GPU that `device` is; None for a CPU."""
    if device.type != "cuda":
        return None
    found = torch.cuda.get_device_properties(device)
    capability = 10 * int(found.major) + int(found.minor)
    shared = int(getattr(found, "shared_memory_per_block_optin", 48 << 10))
    return Chip(
        str(found.name), capability, int(found.multi_processor_count), shared, int(found.total_memory)
    )


def example_chip(text: str) -> Chip | None:
    """The chip that `cuda:sm_90` names; None for any other text, or for a capability without an example."""
    named = re.fullmatch(r"cuda:sm_(\d+)a?", text)
    return EXAMPLES.get(int(named[1])) if named else None
