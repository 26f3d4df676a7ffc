"""What kernels share that attend from one token at a time: a row's sequence, a tile of keys, fixed parts."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from plait.kernels.triton.attention.layout import SEQS

PART = 128  # keys that share a softmax: parts are joined in the order of keys
MOST_SLOTS = 4096  # partial results; with more, a program walks all parts of its rows
BUSY = 512  # programs that keep a device busy


def row_size(tokens: int, num_seqs: int) -> int:
    """`S` of `find_row`: 1 in a step of decodes, else the sequences that a form is compiled for."""
    if tokens == num_seqs:
        return 1
    return next((size for size in SEQS if num_seqs <= size), triton.next_power_of_2(num_seqs))


def count_apart(tiles: int, parts: int) -> int:
    """Programs of each of `tiles` tiles of rows: one for each of its parts, or one that walks them all.

    Both add in one order. Shapes decide, and never lengths: a captured step has one grid.
    """
    return parts if tiles < BUSY and tiles * parts <= MOST_SLOTS else 1


def find_counters(step: dict[object, object] | None, tiles: int, parts: int, device: torch.device) -> Tensor:
    """Zeros, [tiles] int32, for `join_splits`, which leaves zeros again: all layers of a step share them."""
    if parts == 1:
        return torch.empty(1, dtype=torch.int32, device=device)  # not read
    step, key = {} if step is None else step, ("counters of parts", tiles)
    if key not in step:
        step[key] = torch.zeros(tiles, dtype=torch.int32, device=device)
    found = step[key]
    assert isinstance(found, Tensor)
    return found


@triton.jit
def find_row(query_start, seq_lens, token, num_seqs, S: tl.constexpr):
    """(the sequence of a token, its position). S: 1 where each sequence has one token."""
    if S == 1:
        seq = token
        position = tl.load(seq_lens + token).to(tl.int32) - 1
    else:
        s = tl.arange(0, S)
        ends = tl.load(query_start + s + 1, mask=s < num_seqs, other=0x7FFFFFFF).to(tl.int32)
        seq = tl.sum((ends <= token).to(tl.int32), 0)
        behind = tl.load(query_start + seq + 1).to(tl.int32) - token
        position = tl.load(seq_lens + seq).to(tl.int32) - behind
    return seq, position


@triton.jit
def add_keys(q, k, v, seen, scale, top, mass, values):
    """A softmax so far (largest score, sum, weighted values) and a tile of keys that all rows see, or none.

    q: [rows, d], k: [keys, d], v: [keys, e]; scale: of scores of base 2.
    """
    scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
    scores = tl.where(seen[None, :], scores, -float("inf"))
    new = tl.maximum(top, tl.max(scores, 1))
    base = tl.where(new == -float("inf"), 0.0, new)
    p = tl.exp2(scores - base[:, None])
    old = tl.exp2(top - base)
    mass = mass * old + tl.sum(p, 1)
    values = tl.dot(p.to(q.dtype), v, values * old[:, None], input_precision="ieee")
    return new, mass, values
