"""A matrix for each head: of plain numbers, or rows of one weight in any storage."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from plait.errors import ShapeMismatch
from plait.ops.blocks import random_weight
from plait.ops.case import Case
from plait.ops.registry import Arguments, Bind, op
from plait.ops.rows import CASES
from plait.quant.gguf import BLOCK_TYPES
from plait.quant.weight import Dense, Weight, piece_of

STORED: list[Case] = [
    *(Case(kind=kind, size=100) for kind in ("bfloat16", "float16")),
    *(Case(kind=kind.name, size=2 * kind.elements) for kind in BLOCK_TYPES.values()),
    *(Case(kind=kind, size=288) for kind in ("int4_g32", "int8", "fp8", "fp8_b128", "mxfp4", "nvfp4")),
    dict(kind="int4_g64", more="+zeros+order", size=320),
    dict(kind="int3_g128", more="+zeros+bfloat16", size=320),
    dict(kind="bnb_nf4", size=320),
]


@dataclass(frozen=True, slots=True, eq=False)
class HeadRows:
    """Each head's matrix as rows of one weight, in its storage: `count` from its row `first` on.

    A head maps `in` numbers to `count`; `turned`, by the transposed matrix, `count` numbers to `in`.
    """

    weight: Weight  # (heads * rows of a head, in)
    heads: int
    first: int
    count: int
    turned: bool = False

    def __post_init__(self) -> None:
        rows = self.weight.shape[0]
        if rows % self.heads or not 0 <= self.first <= self.first + self.count <= self.each:
            raise ShapeMismatch(
                f"rows {self.first}..{self.first + self.count} of each of {self.heads} heads are no part of "
                f"a {self.weight.format} weight of {list(self.weight.shape)}"
            )

    @property
    def each(self) -> int:
        """Rows of a head."""
        return self.weight.shape[0] // self.heads

    @property
    def widths(self) -> tuple[int, int]:
        """Numbers of a head that go in, and that come out."""
        cols = self.weight.shape[1]
        return (self.count, cols) if self.turned else (cols, self.count)

    def pick_own(self) -> Weight:
        """Its rows alone, head after head, in the same storage: (heads * count, in)."""
        heads = torch.arange(self.heads)[:, None] * self.each
        rows = heads + torch.arange(self.first, self.first + self.count)
        return self.weight.pick(rows.flatten())

    def numbers(self, start: int, stop: int, like: Tensor) -> Tensor:
        """The matrices of some heads as numbers, [stop - start, count, in], where and what `like` is."""
        heads = torch.arange(start, stop, device=like.device)[:, None] * self.each
        rows = heads + torch.arange(self.first, self.first + self.count, device=like.device)
        found: Tensor = self.weight.gather(rows.flatten(), like.dtype).unflatten(0, (stop - start, -1))
        return found


def facts_of(weight: Tensor | HeadRows) -> dict[str, object]:
    """What a choice between variants may depend on."""
    if isinstance(weight, Tensor):
        return {"heads": weight.shape[0]}
    return {"heads": weight.heads, "kind": weight.weight.format, "turned": weight.turned}


@op(
    cases=[*CASES, *(case | Case(rows=9, turned=t) for case in STORED for t in (False, True))],
    is_product=True,
)
def map_heads(x: Tensor, weight: Tensor | HeadRows) -> Tensor:
    """Each head through a matrix of its own: x: [T, H, n], weight: [H, m, n] -> [T, H, m].

    What is stored is decoded some heads at a time, and not kept.
    """
    if isinstance(weight, Tensor):
        whole: Tensor = torch.einsum("thn,hmn->thm", x, weight)
        return whole
    step = max(1, piece_of(x.device) // max(1, weight.count * weight.weight.shape[1]))
    how = "thn,hnm->thm" if weight.turned else "thn,hmn->thm"
    parts = [
        torch.einsum(how, x[:, at : at + step], weight.numbers(at, min(at + step, weight.heads), x))
        for at in range(0, weight.heads, step)
    ]
    out: Tensor = torch.cat(parts, 1)
    return out


@dataclass(frozen=True, slots=True)
class HeadPacking:
    """A variant of `map_heads` that lays matrices out once: `pack` at construction, `apply` at every step."""

    pack: Callable[[Tensor | HeadRows], object]
    apply: Callable[[Tensor, Any], Tensor]  # (x, packed) -> y

    def __call__(self, x: Tensor, weight: Tensor | HeadRows) -> Tensor:
        return self.apply(x, self.pack(weight))


def bind_heads(bind: Bind, weight: Tensor | HeadRows) -> tuple[Callable[..., Tensor], object]:
    """(what is bound for `map_heads`, the matrices as it keeps them). bind: `Weights.bind`."""
    fn = bind(map_heads, **facts_of(weight))
    return (fn.apply, fn.pack(weight)) if isinstance(fn, HeadPacking) else (fn, weight)


@map_heads.inputs
def _inputs(case: Case, dtype: torch.dtype, device: str) -> Arguments:
    heads, rows, size = 3, case["rows"], case["size"]
    if "kind" not in case:
        x = torch.randn(rows, heads, size, dtype=dtype, device=device)
        return (x, torch.randn(heads, 24, size, dtype=dtype, device=device) / size**0.5), {}
    name, turned = case["kind"], case["turned"]
    if name in ("bfloat16", "float16"):
        weight: Weight = Dense(torch.randn(heads * 40, size).to(getattr(torch, name)) / size**0.5)
    else:
        weight = random_weight(name + case.get("more", ""), heads * 40, size)
    first, count = (0, 21) if turned else (21, 19)
    maps = HeadRows(weight.to(torch.device(device)), heads, first, count, turned)
    return (torch.randn(rows, heads, maps.widths[0], dtype=dtype, device=device), maps), {}
