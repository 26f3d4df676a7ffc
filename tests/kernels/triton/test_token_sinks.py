"""What each token's query makes of a learned key, into attention: in steps of any length, in float32."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="Triton is not installed here")

from plait.checkpoint.names import NameMap
from plait.checkpoint.weights import Target, Weights
from plait.errors import ShapeMismatch
from plait.kernels.triton.attention.attention import attend_paged
from plait.kernels.triton.linear.heads import MOST
from plait.model.layers.sinks import Sinks
from plait.ops.attention import paged_attention
from plait.ops.case import Case
from plait.ops.chip import EXAMPLES
from plait.spec.model import AttentionSpec
from tests.families.parity import CPU, Memory

HEADS, KV_HEADS, DIM = 4, 2, 16
ATTEND: Callable[..., Tensor] = attend_paged
SCALE = 0.37  # no power of two


def make_sinks(keys: Tensor, *, deterministic: bool) -> Sinks:
    """The layer as a GPU binds it, its tensors being here."""
    spec = AttentionSpec(HEADS, KV_HEADS, DIM, SCALE, sink_keys=True)
    target = Target(CPU, keys.dtype, 128, 64, chip=EXAMPLES[90], deterministic=deterministic)
    names = NameMap({"attn.sink_keys": "keys"})
    return Sinks(spec, Weights(Memory({"keys": keys}), names, target, "attn"))


def dot(q: Tensor, keys: Tensor) -> Tensor:
    """[T, heads] float64."""
    return (q.double() * keys.double().repeat_interleave(HEADS // KV_HEADS, 0)).sum(-1) * SCALE


@pytest.mark.parametrize("rows", [3, MOST + 6])
@pytest.mark.parametrize("deterministic", [False, True])
def test_sinks_of_any_number_of_tokens_are_those_of_the_description(rows: int, deterministic: bool) -> None:
    torch.manual_seed(6)
    assert paged_attention.make
    case = Case(seqs=[rows - 2, 2], heads=HEADS, kv_heads=KV_HEADS, dim=DIM, window=None, softcap=None)
    (q, *rest), _ = paged_attention.make(case, torch.float32, "cpu")
    where, keys = rest[: len(rest) - 1], 2 * torch.randn(KV_HEADS, DIM)
    found = make_sinks(keys, deterministic=deterministic)(q)
    wanted = paged_attention.reference(q, *deepcopy(where), dot(q, keys))
    torch.testing.assert_close(ATTEND(q, *where, sinks=found), wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("rows", [3, MOST + 6])
def test_sinks_are_not_rounded_to_the_dtype_of_queries(rows: int) -> None:
    torch.manual_seed(6)
    q, keys = torch.randn(rows, HEADS, DIM).bfloat16(), (8 * torch.randn(KV_HEADS, DIM)).bfloat16()
    found = make_sinks(keys, deterministic=False)(q)
    torch.testing.assert_close(found, dot(q, keys).float(), rtol=1e-5, atol=1e-5)


def test_sinks_that_are_not_dense_are_refused() -> None:
    case = Case(seqs=[3], heads=HEADS, kv_heads=KV_HEADS, dim=DIM, window=None, softcap=None)
    assert paged_attention.make
    (q, *rest), _ = paged_attention.make(case, torch.float32, "cpu")
    for sinks in (torch.randn(HEADS, 3).T, torch.randn(2, HEADS), torch.randn(2 * HEADS)[::2]):
        with pytest.raises(ShapeMismatch, match="sinks must be dense"):
            ATTEND(q, *rest[: len(rest) - 1], sinks=sinks)
