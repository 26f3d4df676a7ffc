"""An output head with centroids, with a GPU's kernels in Triton's interpreter, next to the references."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed here")

from plait.ops.chip import EXAMPLES
from plait.ops.expert_stack import ExpertStack
from tests.model.test_centroids import HIDDEN, SPEC, VOCAB, build


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_1", "bfloat16"])
@pytest.mark.parametrize("rows", [1, 70])
def test_head_of_kernels_gives_the_logits_of_the_references(kind: str, rows: int) -> None:
    """By slots, and with more than 128 pairs by groups. What is not chosen is the same."""
    made = []
    options: list[dict[str, Any]] = [{"ops": "reference"}, {"chip": EXAMPLES[90]}]
    for words in options:
        torch.manual_seed(rows)
        head, _ = build(kind, **words)
        assert isinstance(head.clusters, ExpertStack) == ("chip" in words)
        made.append(head(torch.randn(rows, HIDDEN)))
    wanted, found = made
    assert wanted.isfinite().sum() == rows * SPEC.chosen * SPEC.size < rows * VOCAB
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-4)
