"""`--deterministic` on a GPU: what is bound decides, and the refusal names it."""

from __future__ import annotations

import pytest
import torch

from plait.checkpoint.weights import Target
from plait.errors import ConfigError
from plait.loading.target import check_deterministic, loose_ops
from plait.ops.chip import EXAMPLES
from plait.ops.registry import Binding


def test_deterministic_on_a_gpu_is_decided_by_what_is_bound() -> None:
    target = Target(torch.device("cpu"), torch.float32, 64, 32)
    target.chip = EXAMPLES[90]
    target.bound.append(Binding("paged_attention", "triton", "layers.0.attn", ()))
    target.bound.append(Binding("add_expert_low_rank", "triton", "layers.0.ffn.experts", ()))
    assert loose_ops(target) == {}, "a row's bits do not depend on what shares its step"
    check_deterministic(target)
    target.bound.append(Binding("linear", "reference", "layers.0.mlp", ()))
    target.bound.append(Binding("paged_attention", "sdpa", "layers.1.attn", ()))
    assert loose_ops(target) == {"linear": "reference", "paged_attention": "sdpa"}
    text = r"on an sm_90 as H200 this model runs linear \(reference\), paged_attention \(sdpa\), .*\(--cpu\)"
    with pytest.raises(ConfigError, match=text):
        check_deterministic(target)
    target.bound[2:] = [Binding("add_stacked_low_rank", "reference", "layers.0.mlp", ())]
    with pytest.raises(ConfigError, match=r"add_stacked_low_rank \(reference\)"):
        check_deterministic(target)
