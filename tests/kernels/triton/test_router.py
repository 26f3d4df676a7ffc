"""The router's kernel: ties, NaN, groups that close experts, and a token's independence of its batch."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed here")

from plait.kernels.triton.moe.router import route_in_one_launch
from plait.ops.moe import route
from plait.spec.model import RouterSpec

V3 = RouterSpec("sigmoid", True, 1e-20, 2.5, 4, 2, "top2")
SPARSE = RouterSpec(renormalize=False, margin=0.02)  # Phi-3.5-MoE


def test_of_equal_scores_the_lower_expert_is_chosen() -> None:
    logits = torch.tensor([[1.0, 3.0, 3.0, 0.0, 3.0, 1.0], [0.0] * 6])
    weight, index = route_in_one_launch(logits, None, 4, RouterSpec(renormalize=False))
    assert index.tolist() == [[1, 2, 4, 0], [0, 1, 2, 3]]
    want, _ = route(logits, None, 4, RouterSpec(renormalize=False))
    torch.testing.assert_close(weight, want)


def test_of_equal_groups_the_lower_one_is_kept() -> None:
    logits = torch.zeros(1, 8)
    router = RouterSpec("sigmoid", groups=4, top_groups=2, group_by="top2")
    _, index = route_in_one_launch(logits, None, 3, router)
    assert index.tolist() == [[0, 1, 2]]


def test_more_experts_than_the_kept_groups_have_are_found_outside_of_them() -> None:
    logits = torch.tensor([[0.0, 1.0, 5.0, 4.0, 2.0, 3.0]])
    router = RouterSpec("softmax", groups=3, top_groups=1)
    weight, index = route_in_one_launch(logits, None, 4, router)
    assert index.tolist()[0][:2] == [2, 3]
    assert len(set(index.tolist()[0])) == 4
    assert torch.equal(weight.isfinite(), torch.ones(1, 4, dtype=torch.bool))


@pytest.mark.parametrize("router", [RouterSpec(), V3, SPARSE])
def test_nan_gives_nan_weights_and_experts_that_are_there(router: RouterSpec) -> None:
    logits = torch.randn(3, 12)
    logits[1] = float("nan")
    weight, index = route_in_one_launch(logits, torch.randn(12), 4, router)
    assert weight[1].isnan().all()
    assert weight[[0, 2]].isfinite().all()
    assert int(index.min()) >= 0
    assert int(index.max()) < 12
    assert all(len(set(row)) == 4 for row in index.tolist())


@pytest.mark.sampled(2)
@pytest.mark.parametrize("router", [RouterSpec(), V3, SPARSE])
def test_a_token_alone_has_the_bits_that_it_has_in_a_batch(router: RouterSpec) -> None:
    logits, bias = torch.randn(5, 20), torch.randn(20)
    weight, index = route_in_one_launch(logits, bias, 3, router)
    want_weight, want_index = route(logits, bias, 3, router)
    torch.testing.assert_close(weight, want_weight)
    assert torch.equal(index, want_index)
    for t in range(5):
        alone = route_in_one_launch(logits[t : t + 1], bias, 3, router)
        assert torch.equal(alone[0], weight[t : t + 1])
        assert torch.equal(alone[1], index[t : t + 1])


def test_five_hundred_and_twelve_experts_of_rows_that_lie_apart() -> None:
    logits = torch.randn(2, 600)[:, :512]
    weight, index = route_in_one_launch(logits, None, 10, RouterSpec())
    want_weight, want_index = route(logits, None, 10, RouterSpec())
    torch.testing.assert_close(weight, want_weight)
    assert torch.equal(index, want_index)


def test_logits_that_lie_apart_are_read_where_they_are() -> None:
    logits = torch.randn(12, 3).T
    weight, index = route_in_one_launch(logits, None, 4, RouterSpec())
    want = route_in_one_launch(logits.contiguous(), None, 4, RouterSpec())
    assert torch.equal(weight, want[0])
    assert torch.equal(index, want[1])
