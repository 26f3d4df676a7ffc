"""The router against the papers' rules, one token at a time."""

from __future__ import annotations

import torch

from plait.ops.moe import route
from plait.spec.model import RouterSpec


def test_softmax_then_renormalise_equals_softmax_over_the_chosen() -> None:
    """Mixtral and oxidizr state it the one way, Qwen the other; it is the same."""
    torch.manual_seed(0)
    logits = torch.randn(20, 8)
    weight, index = route(logits, None, 3, RouterSpec())
    top = logits.topk(3, -1)
    assert torch.equal(index, top.indices)
    torch.testing.assert_close(weight, top.values.softmax(-1))


def test_correction_bias_moves_the_choice_and_not_the_weight() -> None:
    """DeepSeek-V3, 2.1.2."""
    logits = torch.tensor([[2.0, 1.0, 0.0, -1.0]])
    bias = torch.tensor([0.0, 0.0, 0.0, 10.0])
    weight, index = route(logits, bias, 2, RouterSpec("sigmoid", renormalize=False, scale=2.0))
    assert index.tolist() == [[3, 0]]
    torch.testing.assert_close(weight, 2.0 * logits.sigmoid()[:, [3, 0]])


def test_group_mask_keeps_to_the_best_groups() -> None:
    logits = torch.tensor([[5.0, -9.0, 1.0, 1.1, 0.0, 0.0]])  # groups of two: best two by max: 0 and 1
    _, by_max = route(logits, None, 3, RouterSpec("softmax", groups=3, top_groups=2, group_by="max"))
    assert set(by_max[0].tolist()) == {0, 2, 3}
    _, by_sum = route(logits, None, 2, RouterSpec("sigmoid", groups=3, top_groups=1, group_by="top2"))
    assert set(by_sum[0].tolist()) == {2, 3}  # sigmoid(1) + sigmoid(1.1) is the largest sum of two
