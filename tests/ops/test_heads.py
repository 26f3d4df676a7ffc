"""`map_heads` with stored matrices: decoded some heads at a time, and never kept."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from plait.ops import heads as maps
from plait.ops.blocks import random_weight
from plait.ops.heads import HeadRows, map_heads


@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("kind", ["Q4_K", "fp8_b128", "int4_g64+zeros+order"])
def test_the_reference_decodes_some_heads_at_a_time(
    kind: str, turned: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    weight = random_weight(kind, 5 * 48, 256)
    stored = HeadRows(weight, 5, 16, 32, turned)
    numbers = weight.dequantize(torch.float32).view(5, 48, 256)[:, 16:]
    x, sizes = torch.randn(3, 5, stored.widths[0]), list[int]()
    gather = type(weight).gather

    def watched(self: Any, index: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        sizes.append(len(index))
        return gather(self, index, dtype)

    monkeypatch.setattr(type(weight), "gather", watched)
    monkeypatch.setattr(maps, "piece_of", lambda device: 2 * 32 * 256)
    want = map_heads(x, numbers.mT if turned else numbers)
    torch.testing.assert_close(map_heads(x, stored), want, rtol=1e-5, atol=1e-5)
    assert sizes == [64, 64, 32]
