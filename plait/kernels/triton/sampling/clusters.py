"""Logits of chosen clusters of tokens, and -inf of all others, in one launch.

A program writes the tokens of one cluster in one row: what was computed if the cluster was chosen, else -inf.
So each number is written once, and none has to be filled in before.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import triton
import triton.language as tl
from torch import Tensor

from plait.kernels.triton.dependent_launch import await_previous
from plait.kernels.triton.forms import KernelForm, with_float16, with_float32
from plait.ops.launch import launch
from plait.ops.rows import scatter_logits

MOST = 512  # tokens that a program writes together


@triton.jit
def scatter_clusters(
    x, index, tokens, out, n, vocab, K: tl.constexpr, KP: tl.constexpr, TILE: tl.constexpr
):  # fmt: skip
    """x: [T, K, n], index: [T, K], tokens: [clusters, n] int64 -> out [T, vocab]. Grid: (clusters, T)."""
    await_previous()
    cluster, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    k, lane = tl.arange(0, KP), tl.arange(0, TILE)
    chosen = tl.load(index + row * K + k, mask=k < K, other=-1).to(tl.int32)
    place = tl.max(tl.where(chosen == cluster, k, -1), 0)  # below 0: not chosen
    line = x + (row * K + tl.maximum(place, 0)) * n
    own = tokens + cluster.to(tl.int64) * n
    for at in range(0, n, TILE):
        there = at + lane < n
        value = tl.load(line + at + lane, mask=there & (place >= 0), other=-float("inf")).to(tl.float32)
        token = tl.load(own + at + lane, mask=there, other=0)
        tl.store(out + row * vocab + token, value, mask=there)


@scatter_logits.variant("triton", on="cuda")
def scatter(x: Tensor, index: Tensor, tokens: Tensor) -> Tensor:
    """`scatter_logits`: the same arguments and result."""
    (rows, k, n), count = x.shape, len(tokens)
    out = torch.empty(rows, count * n, dtype=torch.float32, device=x.device)
    if rows:
        launch(
            scatter_clusters, (count, rows), x.contiguous(), index.contiguous(), tokens, out, n, count * n,
            **_tile(k, n),
        )  # fmt: skip
    return out


def _tile(k: int, n: int) -> dict[str, int]:
    """Constants and warps: four numbers of a thread at a time."""
    tile = min(MOST, max(32, triton.next_power_of_2(n)))
    return {"K": k, "KP": triton.next_power_of_2(k), "TILE": tile, "num_warps": max(1, tile // 128)}


POINTERS = {"x": "bf16*", "index": "i64*", "tokens": "i64*", "out": "fp32*", "n": "i32!", "vocab": "i32!"}


@with_float16
@with_float32
def forms() -> Iterator[KernelForm]:
    """32 clusters of 128 tokens, as Gemma 4's assistants choose them."""
    constants = _tile(32, 128)
    warps = constants.pop("num_warps")
    yield KernelForm("scatter_clusters, gemma 4", scatter_clusters, POINTERS, constants, num_warps=warps)
