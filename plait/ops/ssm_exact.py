"""oxidizr's chunked Mamba scan as its trainer computes it, to score with exactly its numbers.

Its chunked scan differs from the recurrence in two ways. Inside a chunk, the score of a query and a key is
the product of the sums of C and of B, both taken at the query. Between chunks, the decays are read in an
order that mixes heads and chunks, so that a head sees states of later chunks. So nothing here is causal:
a result depends on the chunk size and on the whole sequence, and there is no state. Arithmetic is float64.
"""

from __future__ import annotations

from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor

from plait.ops.case import Case
from plait.ops.mamba3 import rotate_pairs
from plait.ops.registry import Arguments, op

EXPONENT_LIMIT = 50.0
CASES: list[Case] = [
    dict(lens=[6], heads=4, dim=4, state=4, groups=1, chunk=4),
    dict(lens=[1, 9, 16], heads=4, dim=5, state=6, groups=2, chunk=4),
]


def _exp(exponent: Tensor) -> Tensor:
    return exponent.clamp(-EXPONENT_LIMIT, EXPONENT_LIMIT).exp()


def _chunks(m: Tensor, size: int) -> Tensor:
    """[T, H, …] -> [chunks, H, size, …], the last one padded with zeros."""
    padded: Tensor = F.pad(m, (*[0, 0] * (m.ndim - 1), 0, -len(m) % size))
    return padded.view(-1, size, *m.shape[1:]).transpose(1, 2)


def _chunk_start(states: Tensor, ends: Tensor) -> Tensor:
    """The state each chunk starts from. states: [c, H, P, N], ends: [c, H] (log decay of a whole chunk).

    Row h·(chunks+1) + c of the decays is read as if heads came last: it is head `row % heads`, and reaches up
    to chunk `row // heads`.
    """
    num_chunks, heads = ends.shape
    chunk, head = torch.arange(num_chunks)[:, None], torch.arange(heads)
    row = (head * (num_chunks + 1) + chunk).to(ends.device)
    last, read = row // heads, row % heads  # [c, H]
    prefix = F.pad(ends.cumsum(0), (0, 0, 1, 0))  # [c+1, H]
    gap = prefix[last, read][..., None] - prefix.T[read][..., 1:]  # [c, H, c]
    reached = torch.arange(1, num_chunks + 1, device=ends.device) <= last[..., None]
    return torch.einsum("chj,jhpn->chpn", _exp(gap) * reached, states)


def _trainer_scan(
    terms: list[tuple[Tensor, Tensor]], log_decay: Tensor, B: Tensor, C: Tensor, chunk_size: int
) -> Tensor:
    """terms: (values [T, H, P], the sum of the key of each [T, H]); B, C: [T, H, N] -> [T, H, P]."""
    total = _chunks(log_decay, chunk_size).cumsum(-1)  # [c, H, L]
    keys, queries = _chunks(B, chunk_size), _chunks(C, chunk_size)
    decay = _exp(total[..., :, None] - total[..., None, :]).tril()
    y = torch.zeros_like(_chunks(terms[0][0], chunk_size))
    for values, key_sum in terms:
        score = queries.sum(-1) * _chunks(key_sum, chunk_size)
        y = y + score[..., None] * (decay @ _chunks(values, chunk_size))
    values = _chunks(sum((v for v, _ in terms[1:]), start=terms[0][0]), chunk_size)
    left = _exp(total[..., -1:] - total)[..., None]
    states = (values * left).mT @ keys  # [c, H, P, N]
    y = y + _exp(total)[..., None] * (queries @ _chunk_start(states, total[..., -1]).mT)
    return y.transpose(1, 2).flatten(0, 1)[: len(log_decay)]


@op(cases=CASES)
def mamba2_exact(
    x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor, query_start: Tensor, chunk_size: int
) -> Tensor:
    """oxidizr's Mamba2 over whole sequences; arguments as for `mamba2_scan`, without state -> [T, H, P].

    Every exponent is clipped to ±50 first, as its trainer does.
    """
    u, dt = x.double(), dt.double()
    b, c = (m.double().repeat_interleave(x.shape[1] // m.shape[1], 1) for m in (B, C))
    v, log_decay, y = u * dt[..., None], dt * A.double(), torch.empty_like(u)
    for rows in _sequences(query_start):
        terms = [(v[rows], b[rows].sum(-1))]
        y[rows] = _trainer_scan(terms, log_decay[rows], b[rows], c[rows], chunk_size)
    return (y + D.double()[:, None] * u).to(x.dtype)


@op(cases=CASES)
def mamba3_exact(
    x: Tensor,
    dt: Tensor,
    blend: Tensor,
    theta: Tensor | None,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor,
    query_start: Tensor,
    chunk_size: int,
) -> Tensor:
    """oxidizr's Mamba3 over whole sequences; arguments as for `mamba3_scan`, without state -> [T, H, P]."""
    u, dt, blend, B, C = x.double(), dt.double(), blend.double(), B.double(), C.double()
    log_decay, y = dt * A.double(), torch.empty_like(u)
    for rows in _sequences(query_start):
        b, c = B[rows], C[rows]
        if theta is not None:
            angle = (theta[rows].double() * dt[rows, :, None]).cumsum(0)
            b, c = rotate_pairs(b, angle), rotate_pairs(c, angle)
        before_x, before_b = (F.pad(m[:-1], (0, 0, 0, 0, 1, 0)) for m in (u[rows], b))
        beta = (1 - blend[rows]) * dt[rows] * log_decay[rows].exp()
        now = (blend[rows] * dt[rows])[..., None] * u[rows]
        terms = [(now, b.sum(-1)), (beta[..., None] * before_x, before_b.sum(-1))]
        y[rows] = _trainer_scan(terms, log_decay[rows], b, c, chunk_size)
    return (y + D.double()[:, None] * u).to(x.dtype)


def _sequences(query_start: Tensor) -> list[slice]:
    starts = query_start.tolist()
    return [slice(*both) for both in pairwise(starts)]


@mamba2_exact.inputs
def _mamba2_inputs(case: Case, dtype: torch.dtype, device: str) -> Arguments:
    heads, size = case["heads"], case["state"]
    query_start = torch.tensor([0, *case["lens"]]).cumsum(0).to(device)
    total = int(query_start[-1])
    x = torch.randn(total, heads, case["dim"], dtype=dtype, device=device)
    B, C = (torch.randn(total, case["groups"], size, dtype=dtype, device=device) / size**0.5 for _ in "BC")
    dt, A = torch.rand(total, heads, device=device), -4 * torch.rand(heads, device=device)
    return (x, dt, A, B, C, torch.randn(heads, device=device), query_start, case["chunk"]), {}


@mamba3_exact.inputs
def _mamba3_inputs(case: Case, dtype: torch.dtype, device: str) -> Arguments:
    case = {**case, "groups": case["heads"]}
    (x, dt, A, B, C, D, query_start, chunk), _ = _mamba2_inputs(case, dtype, device)
    theta = torch.randn(*dt.shape, case["state"] // 2, device=device)
    return (x, dt, torch.rand_like(dt), theta, A, B, C, D, query_start, chunk), {}
