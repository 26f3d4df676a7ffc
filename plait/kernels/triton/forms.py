"""The compiled forms of Triton kernels: what each is compiled with. A machine without a GPU can try them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

TARGETS = (80, 90, 120)  # compute capabilities: A100, H100 and H200, RTX 5090


@dataclass(frozen=True, slots=True)
class KernelForm:
    """A kernel with its constants, as one step launches it.

    types: of arguments that are no constants. "bf16*" is a pointer that 16 divides, "i32!" an integer that 16
    divides, "i32" any integer; an argument without an entry is an "i32". `demands`: instructions that the
    machine code must have, each a tuple of which one is enough. `max_registers`: of a thread. weights:
    numbers of a weight matrix that a program multiplies in one pass of its longest loop, 0 for other kernels;
    `max_per_weight`: instructions of one lane for each of them.
    """

    name: str
    kernel: object
    types: Mapping[str, str]
    constants: Mapping[str, object]
    num_warps: int = 4
    num_stages: int = 2
    targets: tuple[int, ...] = TARGETS
    demands: tuple[tuple[str, ...], ...] = ()
    max_registers: int = 255
    options: Mapping[str, object] = field(default_factory=dict)
    weights: int = 0
    max_per_weight: float = 0.0
