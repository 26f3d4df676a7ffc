"""The work in an op's case, bytes and float operations, and cases of the sizes that real models have."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

KINDS = ("Q4_0", "Q4_1", "Q8_0", "Q4_K", "Q6_K")
SHAPES = ((1536, 576), (4096, 4096))  # (out, in): a gate of SmolLM2-135M, an output of a 7B model
Arguments = tuple[Any, ...]
Case = Mapping[str, Any]

REALISTIC: Mapping[str, tuple[Case, ...]] = {
    "linear": tuple(
        dict(rows=rows, n_in=n_in, n_out=n_out, kind=kind, activations="int8", bias=False)
        for n_out, n_in in SHAPES
        for kind in KINDS
        for rows in (1, 4, 16, 128)
        if n_in % 256 == 0 or not kind.endswith("_K")
    )
    + tuple(
        dict(rows=rows, n_in=n_in, n_out=n_out, bias=False) for n_out, n_in in SHAPES for rows in (1, 16, 128)
    ),
    "paged_attention": tuple(
        dict(seqs=seqs, heads=heads, kv_heads=kv, dim=dim, window=None, softcap=None, **more)
        for heads, kv, dim in ((9, 3, 64), (32, 8, 128))
        for seqs, more in (
            ([512], {}),
            ([129], {"decode": True}),
            ([1025], {"decode": True}),
            ([257] * 16, {"decode": True}),
        )
    ),
    "paged_latent_attention": (
        dict(seqs=[512], heads=16, kv_rank=512, rope_dim=64),
        dict(seqs=[1025], heads=16, kv_rank=512, rope_dim=64, decode=True),
    ),
    "mamba2_scan": tuple(
        dict(seqs=seqs, decodes=decodes, heads=24, dim=64, state=128, groups=1)
        for seqs, decodes in (([(1, True)], 1), ([(1, True)] * 16, 16), ([(512, False)], 0))
    ),
    "gated_delta_scan": tuple(
        dict(seqs=seqs, decodes=decodes, heads=16, keys=16, key_dim=128, dim=128)
        for seqs, decodes in (([(1, True)], 1), ([(1, True)] * 16, 16), ([(128, False)], 0))
    ),
}


@dataclass(frozen=True, slots=True)
class Work:
    """`nbytes` that must be read and written at least, `flops` (a multiplication and an addition are two)."""

    nbytes: int
    flops: int


def work_of(op: str, case: Case, args: Arguments) -> Work | None:
    """The work of one call with these arguments, for ops with known work."""
    count = _COUNTS.get(op)
    return count(case, args) if count else None


def decode_step(op: str, args: Arguments) -> Arguments:
    """Arguments of whole sequences -> of a step in which each gets its last token again, history present."""
    given = list(args)
    table_at = _TABLE_AT[op]
    last = given[table_at + 2][1:] - 1
    for i in _ROWS_AT[op]:
        given[i] = given[i][last]
    given[table_at + 1] = given[table_at + 1][last]
    given[table_at + 2] = torch.arange(len(last) + 1, device=last.device)
    return tuple(given)


_TABLE_AT = {  # block_table; slots and query_start follow
    "paged_attention": 5,
    "paged_latent_attention": 3,
    "choose_keys": 4,
    "sparse_latent_attention": 4,
}
_ROWS_AT = {
    "paged_attention": (0, 1, 2),
    "paged_latent_attention": (0, 1),
    "choose_keys": (0, 1, 2),
    "sparse_latent_attention": (0, 1, 3),
}


def _linear(case: Case, args: Arguments) -> Work:
    x, weight = args[0], args[1]
    rows, n_out = x.shape[0], weight.shape[0]
    moved = (x.numel() + rows * n_out) * x.element_size()
    return Work(weight.nbytes + moved, 2 * rows * x.shape[1] * n_out)


def _pairs(case: Case) -> tuple[int, int]:
    """(pairs of query and key, keys) of a causal case; a decode step asks once for each sequence.

    Keys that an indexer chooses are a window by their count.
    """
    seqs, window = case["seqs"], case.get("window") or case.get("top_k")
    if case.get("decode"):
        seen = sum(min(n, window or n) for n in seqs)
        return seen, seen
    return sum(min(i + 1, window or n) for n in seqs for i in range(n)), sum(seqs)


def _attention(case: Case, args: Arguments) -> Work:
    (pairs, keys), size = _pairs(case), args[0].element_size()
    heads, dim = case["heads"], case["dim"]
    rows = len(case["seqs"]) if case.get("decode") else sum(case["seqs"])
    entry = sum(cache[0, 0].nbytes for cache in args[3:5])
    return Work(keys * entry + 2 * rows * heads * dim * size, 4 * pairs * heads * dim)


def _latent(case: Case, args: Arguments) -> Work:
    (pairs, keys), size = _pairs(case), args[0].element_size()
    heads, rank, width = case["heads"], case["kv_rank"], case["kv_rank"] + case["rope_dim"]
    rows = len(case["seqs"]) if case.get("decode") else sum(case["seqs"])
    moved = keys * args[2][0, 0].nbytes + rows * heads * (width + rank) * size
    return Work(moved, 2 * pairs * heads * (width + rank))


def _choice(case: Case, args: Arguments) -> Work:
    (pairs, keys), size = _pairs({**case, "top_k": None}), args[0].element_size()
    heads, dim, rows = case["heads"], case["index_dim"], args[0].shape[0]
    moved = keys * args[3][0, 0].nbytes + rows * (heads * (dim + 1) * size + 4 * case["top_k"])
    return Work(moved, 2 * pairs * heads * (dim + 1))


def _mamba2(case: Case, args: Arguments) -> Work:
    tokens, states = args[0].shape[0], len(case["seqs"])
    cells = case["heads"] * case["dim"] * case["state"]
    moved = 2 * args[0].numel() + 2 * tokens * case["groups"] * case["state"]
    return Work(8 * states * cells + moved * args[0].element_size(), 5 * tokens * cells)


def _delta(case: Case, args: Arguments) -> Work:
    tokens, states = args[2].shape[0], len(case["seqs"])
    cells = case["heads"] * case["key_dim"] * case["dim"]
    moved = sum(m.numel() for m in args[:3]) + args[2].numel()
    return Work(8 * states * cells + moved * args[2].element_size(), 7 * tokens * cells)


_COUNTS: Mapping[str, Callable[[Case, Arguments], Work]] = {
    "linear": _linear,
    "paged_attention": _attention,
    "paged_latent_attention": _latent,
    "sparse_latent_attention": _latent,
    "choose_keys": _choice,
    "mamba2_scan": _mamba2,
    "gated_delta_scan": _delta,
}
