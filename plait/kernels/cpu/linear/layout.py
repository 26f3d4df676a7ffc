"""How each block format is kept for the CPU kernels, and the memory it is kept in.

A tile is sixteen outputs. Inside, K is cut into steps; a step is one record of whole cache lines: scales as
vectors of sixteen, then the codes of its blocks of 32. In that order they are needed, and a processor that
fetches memory ahead goes through it upwards. A *quad*, four neighbours in K of the sixteen outputs,
is 64 bytes: `byte[4n + j]` is number 4q + j of output n. So one dot product with four activations serves all
sixteen, and nothing is added across lanes. Codes are unsigned; what must be subtracted from them
(`zero`) is paid once per group with the sum of the group's activations, and a minimum likewise.

Where a code is a place in a table, the table's number is unsigned too, and `zero` makes up for that.

Of a code, the low `bits` are in one plane and the `high` ones in another. A vector of the low plane holds one
quad (8 bits), quads i and i + 4 (4 bits) or 4i … 4i + 3 (2 bits). One of the high plane holds eight quads
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
Scales = Literal[
    "half", "half, half", "byte", "six, six", "nibbles", "level", "small",
    "brain", "float", "half, zero", "brain, zero", "float, zero",
]  # fmt: skip
_BYTES: Mapping[str, tuple[int, int, int]] = {
    "half": (32, 0, 0), "brain": (32, 0, 0), "float": (64, 0, 0),
    "half, half": (32, 32, 0), "half, zero": (32, 16, 0), "brain, zero": (32, 16, 0),
    "float, zero": (64, 16, 0), "byte": (16, 0, 32), "six, six": (16, 8, 64), "nibbles": (16, 0, 64),
    "level": (16, 0, 64), "small": (16, 0, 64),
}  # fmt: skip
"""Of a vector of sixteen scales, of minima or zero points behind them, and of what is above all of a step."""


@dataclass(frozen=True, slots=True)
class Layout:
    """The record of a step. `group`: weights under one scale, 16, 32 or a whole step; `zero`: what is
    subtracted from codes, with "zero" times the group's byte; None: a minimum is added instead. `table`: one
    of `codebooks.TABLES`, in which codes are places.

    scales: "half", "brain", "float" a float16, bfloat16 or float32 per group; "half, half" its minimum too;
    "…, zero" an unsigned byte that is its zero point; "byte" an int8 per group under one float16; "six, six"
    unsigned scale and minimum of six bits under two: the byte of the scale has the minimum's lower two above
    it, the other four lie as half bytes, output n's below that of n + 8; "nibbles" both in one byte under
    two; "level" an int8 and "small" an unsigned E4M3 per group under one float32.
    """

    step: int
    bits: int
    high: int
    group: int
    zero: int | None
    scales: Scales
    table: str = ""

    @property
    def blocks(self) -> int:
        """Blocks of 32 in a step."""
        return self.step // BLOCK

    @property
    def groups(self) -> int:
        return self.step // self.group

    @property
    def has_plain_nibbles(self) -> bool:
        """Whether codes are four bits and nothing else."""
        return self.bits == 4 and not (self.high or self.table)

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
        """Where scales start: before the blocks. First all scales, then all minima, then the float16s."""
        return 0

    @property
    def scale_bytes(self) -> int:
        """Bytes of one vector of group scales."""
        return _BYTES[self.scales][0]

    @property
    def minimum_bytes(self) -> int:
        """Bytes of one vector of minima, or what scales have no bits for of them, or zero points."""
        return _BYTES[self.scales][1]

    @property
    def zeros(self) -> bool:
        """Whether groups have zero points of their own."""
        return self.scales.endswith(", zero")

    @property
    def minima_at(self) -> int:
        return self.scales_at + self.groups * self.scale_bytes

    @property
    def outer_at(self) -> int:
        """Where the float16s above the group scales are; the minima's one is 32 bytes later."""
        return self.minima_at + self.groups * self.minimum_bytes

    @property
    def outer_bytes(self) -> int:
        """Bytes of what is above the group scales."""
        return _BYTES[self.scales][2]

    @property
    def codes_at(self) -> int:
        """Where the blocks start: on a line of their own."""
        return -(-(self.outer_at + self.outer_bytes) // LINE) * LINE

    @property
    def nbytes(self) -> int:
        return self.codes_at + self.blocks * self.plane_bytes

    def steps(self, n_in: int) -> int:
        return -(-n_in // self.step)

    def tile_bytes(self, n_in: int) -> int:
        return self.steps(n_in) * self.nbytes

    @property
    def rounded_block(self) -> int:
        """Bytes of 32 rounded activations: codes, a scale, what it makes of the base of sums, and a number
        per group for the zero or minimum."""
        return BLOCK + 8 + 4 * self.parts

    @property
    def parts(self) -> int:
        """Groups, or pieces of one, in a block."""
        return max(1, BLOCK // self.group)


LAYOUTS: Mapping[str, Layout] = MappingProxyType(
    {
        "Q8_0": Layout(64, 8, 0, 32, 128, "half"),
        "Q4_0": Layout(64, 4, 0, 32, 8, "half"),
        "Q4_1": Layout(64, 4, 0, 32, None, "half, half"),
        "Q5_0": Layout(64, 4, 1, 32, 16, "half"),
        "Q5_1": Layout(64, 4, 1, 32, None, "half, half"),
        "Q4_K": Layout(256, 4, 0, 32, None, "six, six"),
        "Q5_K": Layout(256, 4, 1, 32, None, "six, six"),
        "Q6_K": Layout(256, 4, 2, 16, 32, "byte"),
        "Q3_K": Layout(256, 2, 1, 16, 4, "byte"),
        "Q2_K": Layout(256, 2, 0, 16, None, "nibbles"),
        "IQ4_NL": Layout(64, 4, 0, 32, 127, "half", "iq4"),
        "IQ4_XS": Layout(256, 4, 0, 32, 127, "byte", "iq4"),
        "IQ3_S": Layout(256, 4, 0, 32, 15, "level", "iq3_s"),
        "IQ3_XXS": Layout(256, 4, 0, 32, 62, "level", "iq3_xxs"),
        "IQ2_XXS": Layout(256, 4, 0, 32, 43, "level", "iq2"),
        "IQ2_XS": Layout(256, 4, 0, 16, 43, "level", "iq2"),
        "IQ2_S": Layout(256, 4, 0, 16, 43, "level", "iq2"),
        "IQ1_S": Layout(256, 4, 0, 32, 9, "level", "iq1"),
        "IQ1_M": Layout(256, 4, 0, 16, 9, "level", "iq1"),
        "TQ1_0": Layout(256, 2, 0, 256, 1, "half"),
        "TQ2_0": Layout(256, 2, 0, 256, 1, "half"),
        "Q1_0": Layout(128, 2, 0, 128, 1, "half"),
        "Q2_0": Layout(64, 2, 0, 64, 1, "half"),
        "MXFP4": Layout(64, 4, 0, 32, 12, "brain", "e2m1"),
        "NVFP4": Layout(256, 4, 0, 16, 12, "small", "e2m1"),
    }
)
"""By the name of a GGUF block format."""


def grouped_layout(bits: int, group: int, scale: str, zeros: bool) -> Layout | None:
    """The layout of unsigned integers of so many bits under a scale for `group` columns; None: there is none.

    scale: "half", "brain" or "float"; zeros: whether groups have zero points of their own.
    """
    planes = {2: (2, 0), 3: (2, 1), 4: (4, 0), 5: (4, 1), 6: (4, 2), 8: (8, 0)}.get(bits)
    each = next((size for size in (128, 64, 32, 16) if group % size == 0), None)
    if planes is None or each is None:
        return None
    zero = 1 if zeros else 1 << (bits - 1)
    return Layout(max(each, 64), *planes, each, zero, f"{scale}, zero" if zeros else scale)  # type: ignore[arg-type]
