"""How each block format is kept for the CPU kernels, and the memory it is kept in.

A tile is sixteen outputs. Inside, K is cut into steps; a step is one record of whole cache lines: the codes
of its blocks of 32, then scales as vectors of sixteen. A *quad*, four neighbours in K of the sixteen outputs,
is 64 bytes (`byte[4n + j]` is number 4q + j of output n), so that one dot product with four activations
serves all sixteen and nothing is added across lanes. Codes are unsigned; what must be subtracted from them
(`zero`) is paid once per group with the sum of the group's activations, and a minimum likewise.

Of a code, the low `bits` are in one plane and the `high` ones in another. A vector of the low plane holds one
quad (8 bits), quads i and i + 4 (4 bits) or 4i … 4i + 3 (2 bits); one of the high plane holds eight quads
(1 bit) or four (2 bits), lowest bits first.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

TILE = 16  # outputs
BLOCK = 32  # activations that share a scale
LINE = 64  # bytes
Scales = Literal["half", "half, half", "byte", "byte, byte", "nibbles"]


@dataclass(frozen=True, slots=True)
class Layout:
    """The record of a step. `group`: weights under one scale; `zero`: what is subtracted from codes; None: a
    minimum is added instead.

    scales: "half" a float16 per group; "half, half" its minimum too; "byte" an int8 per group under one
    float16; "byte, byte" unsigned scale and minimum under two; "nibbles" both in one byte under two.
    """

    step: int
    bits: int
    high: int
    group: int
    zero: int | None
    scales: Scales

    @property
    def blocks(self) -> int:
        """Blocks of 32 in a step."""
        return self.step // BLOCK

    @property
    def groups(self) -> int:
        return self.step // self.group

    @property
    def low_bytes(self) -> int:
        """Bytes of a block's low plane."""
        return LINE * self.bits

    @property
    def plane_bytes(self) -> int:
        """Bytes of a block's codes: its low plane, then its high one."""
        return LINE * (self.bits + self.high)

    @property
    def scales_at(self) -> int:
        """Where scales start: behind the blocks. First all scales, then all minima, then the float16s."""
        return self.blocks * self.plane_bytes

    @property
    def scale_bytes(self) -> int:
        """Bytes of one vector of group scales."""
        return 2 * TILE if self.scales.startswith("half") else TILE

    @property
    def minima_at(self) -> int:
        return self.scales_at + self.groups * self.scale_bytes

    @property
    def outer_at(self) -> int:
        """Where the float16s above the group scales are; the minima's one is 32 bytes later."""
        return self.minima_at + (self.groups * self.scale_bytes if "," in self.scales else 0)

    @property
    def nbytes(self) -> int:
        outer = 0 if self.scales.startswith("half") else 2 * TILE * (1 if self.zero is not None else 2)
        return -(-(self.outer_at + outer) // LINE) * LINE

    def steps(self, n_in: int) -> int:
        return -(-n_in // self.step)

    def tile_bytes(self, n_in: int) -> int:
        return self.steps(n_in) * self.nbytes

    @property
    def rounded_block(self) -> int:
        """Bytes of 32 rounded activations: codes, their scale, a number per group for the zero or minimum."""
        return BLOCK + 4 + 4 * (BLOCK // self.group)

    def rounded_bytes(self, n_in: int) -> int:
        """Bytes of one row of codes."""
        return self.steps(n_in) * self.blocks * self.rounded_block


EIGHT = Layout(64, 8, 0, 32, 128, "half")
LAYOUTS: Mapping[str, Layout] = MappingProxyType(
    {
        "Q8_0": EIGHT,
        "IQ4_NL": EIGHT,  # its table's values are whole numbers
        "Q4_0": Layout(64, 4, 0, 32, 8, "half"),
        "Q4_1": Layout(64, 4, 0, 32, None, "half, half"),
        "Q5_0": Layout(64, 4, 1, 32, 16, "half"),
        "Q5_1": Layout(64, 4, 1, 32, None, "half, half"),
        "Q4_K": Layout(256, 4, 0, 32, None, "byte, byte"),
        "Q5_K": Layout(256, 4, 1, 32, None, "byte, byte"),
        "Q6_K": Layout(256, 4, 2, 16, 32, "byte"),
        "Q3_K": Layout(256, 2, 1, 16, 4, "byte"),
        "Q2_K": Layout(256, 2, 0, 16, None, "nibbles"),
        "IQ4_XS": Layout(256, 8, 0, 32, 128, "byte"),
    }
)
"""By the name of a GGUF block format."""
