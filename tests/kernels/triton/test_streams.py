"""Triton's kernels between branches: a token alone has the bits that it has in a batch."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="Triton is not installed here")

from plait.kernels.triton.pointwise import altup, sources, streams

TOKENS, STREAMS, SIZE = 35, 3, 520  # more than the lanes of a warp, and more numbers than a piece has
OF_ROWS: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "weigh_streams": lambda x, by, weights: streams.weigh_in_lanes(weights, STREAMS, 1e-6, 2.0, 0.0, 20),
    "mix_streams": lambda x, by, weights: streams.mix_in_pieces(x, by),
    "write_streams": lambda x, by, weights: streams.write_in_pieces(x, x[:, 1], by[:, :STREAMS], by),
    "match_size": lambda x, by, weights: streams.match_whole_rows(x[:, 0], x[:, 1], 1e-5),
    "keep_largest": lambda x, by, weights: streams.keep_in_rows(x[:, 0], 0.8),
    "activate_largest": lambda x, by, weights: altup.activate_kept_rows(x.flatten(1)[:, :SIZE], 0.8, "silu"),
    "mix_sources": lambda x, by, weights: sources.mix_in_two_launches(QUERIES, 1e-5, True, *x.unbind(1)),
}
QUERIES = torch.randn(2, SIZE, generator=torch.Generator().manual_seed(5)) / SIZE**0.5


@pytest.mark.parametrize("name", list(OF_ROWS))
def test_a_token_alone_has_the_bits_that_it_has_in_a_batch(name: str) -> None:
    torch.manual_seed(1)
    x, by = torch.randn(TOKENS, STREAMS, SIZE), torch.randn(TOKENS, STREAMS**2)
    given = x, by, 3 * torch.randn(TOKENS, (2 + STREAMS) * STREAMS)
    together = OF_ROWS[name](*given)
    for row in (0, TOKENS - 1):
        alone = OF_ROWS[name](*(t[row : row + 1] for t in given))
        assert torch.equal(alone[0], together[row])
