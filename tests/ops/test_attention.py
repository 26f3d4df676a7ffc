"""Paged attention against a dense formula written out plainly."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from plait.ops.attention import paged_attention, paged_latent_attention, read_paged, write_paged

BLOCK = 4


def dense_attention(
    q: Tensor, k: Tensor, v: Tensor, scale: float, window: int | None, softcap: float | None
) -> Tensor:
    """One head at a time, one query at a time. q: [n, H, d] are the last n of k, v: [t, Hk, d]."""
    n, heads, _ = q.shape
    t, kv_heads, _ = k.shape
    out = torch.zeros(n, heads, v.shape[-1], dtype=torch.float64)
    for i in range(n):
        position = t - n + i
        first = 0 if window is None else max(0, position - window + 1)
        for h in range(heads):
            kv = h // (heads // kv_heads)
            scores = (k[first : position + 1, kv].double() @ q[i, h].double()) * scale
            if softcap is not None:
                scores = softcap * torch.tanh(scores / softcap)
            out[i, h] = scores.softmax(0) @ v[first : position + 1, kv].double()
    return out


@pytest.mark.parametrize("window", [None, 1, 3, 100])
@pytest.mark.parametrize("softcap", [None, 5.0])
def test_ragged_batch_over_shuffled_blocks(window: int | None, softcap: float | None) -> None:
    torch.manual_seed(1)
    lengths, new = [9, 1, 16, 6], [1, 1, 5, 6]
    k, v = (torch.full((20, BLOCK, 2, 8), math.nan) for _ in range(2))  # unwritten memory must not matter
    tables = torch.tensor([[7, 3, 12, 0], [1, 0, 0, 0], [2, 9, 4, 11], [5, 8, 0, 0]])
    keys, values = ([torch.randn(n, 2, 8) for n in lengths] for _ in range(2))
    fresh = []
    for table, ks, vs, n in zip(tables, keys, values, new, strict=True):
        at = torch.tensor([int(table[p // BLOCK]) * BLOCK + p % BLOCK for p in range(len(ks))])
        write_paged(k, ks[:-n], at[:-n])
        write_paged(v, vs[:-n], at[:-n])
        fresh.append((ks[-n:], vs[-n:], at[-n:]))
    q = torch.randn(sum(new), 4, 8)
    new_k, new_v, slots = (torch.cat(part) for part in zip(*fresh, strict=True))
    where = (tables, slots, torch.tensor([0, *new]).cumsum(0), torch.tensor(lengths))
    starts = where[2]
    got = paged_attention(q, new_k, new_v, k, v, *where, 0.3, window, softcap)
    want = [
        dense_attention(q[starts[s] : starts[s + 1]], keys[s], values[s], 0.3, window, softcap)
        for s in range(4)
    ]
    torch.testing.assert_close(got.double(), torch.cat(want), rtol=0, atol=1e-5)


def test_absorbed_latent_attention_equals_expanded_heads() -> None:
    """DeepSeek-V2, equation 10: scores of up-projected keys equal scores of latents with absorbed queries."""
    torch.manual_seed(2)
    heads, rank, rope, nope, v_dim, n = 3, 8, 4, 6, 5, 7
    latent, k_rope = torch.randn(n, rank), torch.randn(n, rope)
    k_up, v_up = torch.randn(heads, nope, rank), torch.randn(heads, v_dim, rank)
    q_nope, q_rope = torch.randn(n, heads, nope), torch.randn(n, heads, rope)
    k = torch.cat([torch.einsum("tr,hnr->thn", latent, k_up), k_rope[:, None].expand(n, heads, rope)], -1)
    want = dense_attention(
        torch.cat([q_nope, q_rope], -1), k, torch.einsum("tr,hvr->thv", latent, v_up), 0.4, None, None
    )
    cache = torch.full((5, BLOCK, rank + rope), math.nan)
    table = torch.tensor([[3, 1]])
    at = torch.tensor([int(table[0, p // BLOCK]) * BLOCK + p % BLOCK for p in range(n)])
    absorbed = torch.cat([torch.einsum("thn,hnr->thr", q_nope, k_up), q_rope], -1)
    where = (table, at, torch.tensor([0, n]), torch.tensor([n]))
    out = paged_latent_attention(absorbed, torch.cat([latent, k_rope], -1), cache, *where, 0.4, rank)
    got = torch.einsum("thr,hvr->thv", out, v_up)
    torch.testing.assert_close(got.double(), want, rtol=0, atol=1e-5)


def test_read_paged_returns_the_requested_tokens_only() -> None:
    cache = torch.arange(6 * BLOCK).float().view(6, BLOCK, 1)
    table = torch.tensor([5, 2, 0])
    assert read_paged(cache, table, 3, 6).flatten().tolist() == [23.0, 8.0, 9.0]
