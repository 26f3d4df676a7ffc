"""Where sums of experts begin and where they go: both kernels that add a token's experts share this.

A sum goes to a tensor, or it is added to the residual and begins the norm behind it (`SumEnds`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import triton
import triton.language as tl
from torch import Tensor

from plait.kernels.triton.maths import sigmoid
from plait.ops.folded_experts import OWN_GROUP

SUM: tl.constexpr = tl.constexpr(OWN_GROUP)


@triton.jit
def load_start(
    shared, gate, token, cols, ok, shared_row, SHARED: tl.constexpr, CLOSED: tl.constexpr, BN: tl.constexpr
):  # fmt: skip
    """What a token's sum starts from, [BN] float32: shared [T, hidden], times sigmoid(gate [T]) if CLOSED."""
    total = tl.zeros([BN], tl.float32)
    if SHARED:
        total += tl.load(shared + token * shared_row + cols, mask=ok, other=0.0).to(tl.float32)
        if CLOSED:
            total *= sigmoid(tl.load(gate + token).to(tl.float32))
    return total


@triton.jit
def write_sum(
    total, token, cols, ok, block, out, squares, residual, added, norm, hidden, scale,
    ADDS: tl.constexpr, SCALED: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """total [BN], columns of a token's sum, -> out [T, hidden].

    ADDS: residual + scale · total -> added, times norm -> out, the sums of its squares -> squares.
    """
    place = token * hidden + cols
    if ADDS:
        kept = added.dtype.element_ty
        delta = total.to(kept).to(tl.float32)  # rounded where the ops that this replaces round
        if SCALED:
            delta = (delta * scale).to(kept).to(tl.float32)
        x = (tl.load(residual + place, mask=ok, other=0.0).to(tl.float32) + delta).to(kept)
        tl.store(added + place, x, mask=ok)
        wide = tl.where(ok, x.to(tl.float32), 0.0)
        weight = tl.load(norm + cols, mask=ok, other=0.0)
        tl.store(out + place, (wide * weight).to(out.dtype.element_ty), mask=ok)
        group = block * (BN // SUM) + tl.arange(0, BN // SUM)
        found = tl.sum(tl.reshape(wide * wide, [BN // SUM, SUM]), 1)
        tl.store(squares + token * (hidden // SUM) + group, found, mask=group < hidden // SUM)
    else:
        tl.store(out + place, total.to(out.dtype.element_ty), mask=ok)


@dataclass(frozen=True, slots=True)
class SumEnds:
    """What sums of experts start from, and where they go.

    out: [T, hidden], like what experts read or float32. shared: the shared expert's output [T, hidden], its
    rows anywhere; gate: what closes it, [T, 1]. norm: of a sum that is added to a residual, (squares,
    residual, added, weight) as `write_sum` has them; `out` is then rows of half a norm. scale: what the sum
    is multiplied by, there.
    """

    out: Tensor
    shared: Tensor | None = None
    gate: Tensor | None = None
    norm: tuple[Tensor, Tensor, Tensor, Tensor] | None = None
    scale: float = 1.0

    @classmethod
    def of(cls, out: Tensor, shared: Tensor | None, gate: Tensor | None) -> SumEnds:
        """As kernels read them: gates next to each other, numbers of a row next to each other."""
        if shared is None:
            return cls(out)
        shared = shared if shared.stride(1) == 1 else shared.contiguous()
        return cls(out, shared, None if gate is None else gate.contiguous())

    def before_norm(self, x: Tensor, scale: float, weight: Tensor) -> SumEnds:
        """The same behind a residual x [T, n]; weight: of the norm, [n] float32."""
        squares = torch.empty(len(x), x.shape[1] // OWN_GROUP, dtype=torch.float32, device=x.device)
        return replace(self, norm=(squares, x.contiguous(), torch.empty_like(x), weight), scale=scale)

    def rows(self, some: slice) -> SumEnds:
        """Of some tokens."""
        shared, gate = (None if t is None else t[some] for t in (self.shared, self.gate))
        if self.norm is None:
            return SumEnds(self.out[some], shared, gate)
        squares, residual, added, weight = self.norm
        norm = (squares[some], residual[some], added[some], weight)
        return SumEnds(self.out[some], shared, gate, norm, self.scale)

    @property
    def results(self) -> tuple[Tensor, Tensor, Tensor]:
        """Of a sum that begins a norm: (x', rows, squares), as `add_experts` gives them."""
        assert self.norm
        squares, _, added, _ = self.norm
        return added, self.out, squares

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """(shared, gate, out, squares, residual, added, norm) as kernels take them.

        What is not there is `out`, and not read.
        """
        shared, gate = (self.out if t is None else t for t in (self.shared, self.gate))
        return shared, gate, self.out, *(self.norm or (self.out,) * 4)

    @property
    def row(self) -> int:
        return 0 if self.shared is None else self.shared.stride(0)

    @property
    def constants(self) -> dict[str, bool]:
        start = {"SHARED": self.shared is not None, "CLOSED": self.gate is not None}
        return {**start, "ADDS": self.norm is not None, "SCALED": self.scale != 1.0}


def end_constants(**flags: bool) -> dict[str, bool]:
    """Those of a form; flags: the ones that are set."""
    return {**dict.fromkeys(("SHARED", "CLOSED", "ADDS", "SCALED"), False), **flags}


END_TYPES = {"squares": "fp32*", "residual": "bf16*", "added": "bf16*", "norm": "fp32*", "scale": "fp32"}
