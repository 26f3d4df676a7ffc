"""Moving rows about: embedding, choosing, joining. No arithmetic but a scale."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from plait.ops.blocks import random_weight
from plait.ops.case import Case
from plait.ops.registry import Arguments, Bind, op
from plait.quant.gguf import BLOCK_TYPES
from plait.quant.weight import Dense, Weight

FLOATS = ("bfloat16", "float16")
CASES: list[Case] = [
    dict(rows=1, size=64),
    dict(rows=33, size=100),
    dict(rows=5, size=7),
]
ROWS_AT_ONCE = 1 << 14  # of a table, as numbers
STORED: list[Case] = [
    Case(rows=3, size=288, parts=5),
    *(Case(rows=3, size=288, kind=kind, parts=5) for kind in ("bfloat16", "Q8_0", "int4_g32")),
    *(Case(rows=9, size=100, kind=kind) for kind in FLOATS),
    *(Case(rows=9, size=2 * kind.elements, kind=kind.name) for kind in BLOCK_TYPES.values()),
    *(
        Case(rows=9, size=288, kind=kind)
        for kind in ("int4_g32", "int8", "fp8", "fp8_b128", "mxfp4", "nvfp4")
    ),
]


@op(cases=[*CASES, *STORED])
def embed(token_ids: Tensor, table: Weight, scale: float, dtype: torch.dtype) -> Tensor:
    """Rows of a table in any format, as numbers, times `scale`; several of a token one behind the other.

    token_ids: [T] int64 -> [T, n] in `dtype`; [T, k] -> [T, k n].
    """
    x = table.gather(token_ids.flatten(), dtype).view(*token_ids.shape, table.shape[1]).flatten(1)
    return x if scale == 1.0 else x * torch.full((), scale, dtype=dtype, device=x.device)


@dataclass(frozen=True, slots=True)
class TablePacking:
    """A variant of `embed` that lays its table out once: `pack` at construction, `apply` at every step."""

    pack: Callable[[Weight], object]
    apply: Callable[[Tensor, Any, float, torch.dtype], Tensor]  # (token ids, packed, scale, dtype) -> rows

    def __call__(self, token_ids: Tensor, table: Weight, scale: float, dtype: torch.dtype) -> Tensor:
        return self.apply(token_ids, self.pack(table), scale, dtype)


def bind_table(bind: Bind, table: Weight) -> tuple[Callable[..., Tensor], object]:
    """(what is bound for `embed`, the table as it keeps it). bind: `Weights.bind`."""
    fn = bind(embed, kind=table.format)
    return (fn.apply, fn.pack(table)) if isinstance(fn, TablePacking) else (fn, table)


@embed.inputs
def _embed_inputs(case: Case, dtype: torch.dtype, device: str) -> Arguments:
    table = _table(case, dtype, device)
    each = (case["parts"],) if case.get("parts") else ()
    ids = torch.randint(0, 50, (case["rows"], *each), device=device)
    return (ids, table, 1.0 if case["rows"] == 1 else 3.5, dtype), {}


def _table(case: Case, dtype: torch.dtype, device: str) -> Weight:
    """50 rows of `size` random numbers, stored as the case says."""
    name, size = case.get("kind"), case["size"]
    if name and name not in FLOATS:
        return random_weight(name + case.get("more", ""), 50, size).to(torch.device(device))
    stored: torch.dtype = getattr(torch, name) if name else dtype
    return Dense(torch.randn(50, size, dtype=stored, device=device))


@op(cases=CASES)
def take_rows(x: Tensor, index: Tensor) -> Tensor:
    """x: [T, n], index: [L] int64 -> [L, n]."""
    return x[index]


@take_rows.inputs
def _take_rows_inputs(case: Case, dtype: torch.dtype, device: str) -> Arguments:
    x = torch.randn(case["rows"], case["size"], dtype=dtype, device=device)
    return (x, torch.randint(0, case["rows"], (case["rows"] + 1,), device=device)), {}


@op(cases=STORED)
def mix_rows(shares: Tensor, table: Weight, scale: float, dtype: torch.dtype) -> Tensor:
    """Sums of all rows of a table in any format, each by its share, times `scale`.

    shares: [L, rows] float32, rounded to `dtype` -> [L, n] in `dtype`. Some rows are read at a time.
    """
    out = shares.new_zeros(len(shares), table.shape[1])
    for first in range(0, table.shape[0], ROWS_AT_ONCE):
        ids = torch.arange(first, min(first + ROWS_AT_ONCE, table.shape[0]), device=shares.device)
        some = shares[:, first : first + len(ids)].to(dtype)
        out += (some @ table.gather(ids, dtype)).float()
    return (out * scale).to(dtype)


@mix_rows.inputs
def _mix_rows_inputs(case: Case, dtype: torch.dtype, device: str) -> Arguments:
    shares = torch.randn(case["rows"], 50, device=device).softmax(-1)
    return (shares, _table(case, dtype, device), 3.5, dtype), {}


@op(cases=CASES)
def put_rows(x: Tensor, index: Tensor, out: Tensor) -> Tensor:
    """Writes rows of x [T, n] to the first of `out` [at least L, n], by index [L] int64. Returns these."""
    out[: len(index)] = x[index]
    return out[: len(index)]


@put_rows.inputs
def _put_rows_inputs(case: Case, dtype: torch.dtype, device: str) -> Arguments:
    (x, index), _ = _take_rows_inputs(case, dtype, device)
    return (x, index, torch.zeros(case["rows"] + 3, case["size"], dtype=dtype, device=device)), {}


@op(cases=CASES)
def join(a: Tensor, b: Tensor) -> Tensor:
    """The last dimensions one behind the other: a: [T, …, n], b: [T, …, m] -> [T, …, n + m]."""
    return torch.cat([a, b], -1)


@join.inputs
def _join_inputs(case: Case, dtype: torch.dtype, device: str) -> Arguments:
    shape = (case["rows"],) if case["rows"] == 1 else (case["rows"], 3)
    a = torch.randn(*shape, case["size"], dtype=dtype, device=device)
    return (a, torch.randn(*shape, 8, dtype=dtype, device=device)), {}


@op(cases=CASES)
def pick_columns(x: Tensor, columns: Tensor) -> Tensor:
    """Numbers of each row by column, -inf where that is below 0: x: [T, n], columns: [m] int64 -> [T, m]."""
    return x[:, columns.clamp(min=0)].masked_fill(columns < 0, float("-inf"))


@pick_columns.inputs
def _pick_columns_inputs(case: Case, dtype: torch.dtype, device: str) -> Arguments:
    x = torch.randn(case["rows"], case["size"], dtype=dtype, device=device)
    return (x, torch.randint(-1, case["size"], (3 * case["size"] + 1,), device=device)), {}


@op(
    cases=[
        dict(tokens=1, experts=4, top_k=2, size=3),
        dict(tokens=9, experts=19, top_k=5, size=17),
        dict(tokens=3, experts=6, top_k=6, size=1),
    ]
)
def scatter_logits(x: Tensor, index: Tensor, tokens: Tensor) -> Tensor:
    """Logits of the tokens of chosen clusters, and -inf of all others (Gemma 4's assistants).

    x: [T, k, n], index: [T, k] int64, different clusters of each row, tokens: [clusters, n] int64, in which
    each token of the vocabulary is once -> [T, clusters n] float32.
    """
    out = torch.full((len(x), tokens.numel()), float("-inf"), device=x.device)
    return out.scatter_(1, tokens[index].flatten(1), x.float().flatten(1))


@scatter_logits.inputs
def _scatter_logits_inputs(case: Case, dtype: torch.dtype, device: str) -> Arguments:
    rows, count, size = case["tokens"], case["experts"], case["size"]
    x = torch.randn(rows, case["top_k"], size, dtype=dtype, device=device)
    index = torch.rand(rows, count, device=device).topk(case["top_k"], -1).indices
    return (x, index, torch.randperm(count * size, device=device).view(count, size)), {}
