"""Triton's Mamba2 scan of prompts in chunks: right in any batch, the same bits for cuts between chunks."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="Triton is not installed here")

from plait.kernels.triton.ssm.mamba2 import prepare_scan
from plait.kernels.triton.ssm.mamba2_chunks import WALKED, scan_prompts
from plait.ops.chip import EXAMPLES
from plait.ops.registry import OpFacts
from plait.ops.ssm import mamba2_scan_from_dt
from tests.kernels.triton.ragged import SLOTS, RecurrentLayer, Where

HEADS, LIMIT = 2, (0.001, math.inf)


def layers(tokens: int, dim: int, size: int, groups: int) -> tuple[RecurrentLayer, RecurrentLayer]:
    """The kernels and the reference. The last input is positions, from 0 on unless they are set."""
    torch.manual_seed(1)
    x, dt = torch.randn(tokens, HEADS, dim), torch.randn(tokens, HEADS)
    B, C = (torch.randn(tokens, groups, size) / size**0.5 for _ in "BC")
    A, D, bias = -torch.rand(HEADS), torch.randn(HEADS), torch.randn(HEADS)

    def run(rows: tuple[Tensor, ...], state: Tensor, where: Where) -> Tensor:
        x, dt, B, C, positions = rows
        return scan_prompts(prepare_scan(x, dt, bias, LIMIT, A, B, C, D, state, *where), positions)

    def reference(rows: tuple[Tensor, ...], state: Tensor, where: Where) -> Tensor:
        x, dt, B, C, _ = rows
        made: Tensor = mamba2_scan_from_dt.reference(x, dt, bias, LIMIT, A, B, C, D, state, *where, 0)
        return made

    inputs, state = (x, dt, B, C, torch.arange(tokens)), torch.randn(SLOTS, HEADS, dim, size)
    return RecurrentLayer(inputs, state, run), RecurrentLayer(inputs, state, reference)


MIXED = [
    (1, slice(0, 1), True),  # a decode
    (4, slice(1, 41), False),  # a prompt from its beginning
    (2, slice(41, 46), True),  # a draft
    (5, slice(46, 96), True),  # a chunk from the middle of a prompt
]


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("dim", "size", "groups"), [(5, 7, 1), (40, 16, 2)])
def test_mixed_step_agrees_with_the_reference(dim: int, size: int, groups: int) -> None:
    made, reference = layers(96, dim, size, groups)
    made.inputs[-1][1:41] = torch.arange(40)
    got_state, want_state = made.state.clone(), made.state.clone()
    want = torch.cat(reference.step(want_state, MIXED))
    torch.testing.assert_close(torch.cat(made.step(got_state, MIXED)), want, rtol=2e-5, atol=2e-5)
    torch.testing.assert_close(got_state, want_state, rtol=2e-5, atol=2e-5)


def test_batch_composition_changes_no_bit() -> None:
    made, _ = layers(96, 4, 8, 1)
    state = made.state.clone()
    together = made.step(state, MIXED)
    for seq, rows in zip(MIXED, together, strict=True):
        alone = made.state.clone()
        assert torch.equal(made.step(alone, [seq])[0], rows)
        assert torch.equal(alone[seq[0]], state[seq[0]])
    assert torch.equal(state[[0, 3]], made.state[[0, 3]])


def test_cuts_between_chunks_change_no_bit_and_others_little() -> None:
    made, _ = layers(85, 4, 8, 1)
    state = torch.full_like(made.state, float("nan"))
    want = made.walk(state, 2, [85])
    for cut in ([32, 53], [64, 21], [32, 32, 21]):
        again = torch.full_like(state, float("nan"))
        assert torch.equal(made.walk(again, 3, cut), want), cut
        assert torch.equal(again[3], state[2]), cut
    for cut in ([1, 84], [40, 45], [80, 5]):
        again = torch.full_like(state, float("nan"))
        torch.testing.assert_close(made.walk(again, 3, cut), want, rtol=2e-5, atol=2e-5)
        torch.testing.assert_close(again[3], state[2], rtol=2e-5, atol=2e-5)


def test_decodes_and_drafts_have_the_bits_of_the_walk() -> None:
    made, _ = layers(WALKED, 4, 8, 1)
    state, alone = made.state.clone(), made.state.clone()
    drafts = made.step(state, [(3, slice(0, WALKED), True)])[0]
    singles = [made.step(alone, [(3, slice(i, i + 1), True)])[0] for i in range(WALKED)]
    assert torch.equal(torch.cat(singles), drafts)
    assert torch.equal(alone, state)


@pytest.mark.parametrize(
    ("changed", "variant"),
    [
        ({}, "triton chunks"),
        ({"deterministic": True}, "triton"),
        ({"state": 512}, "triton"),
        ({"dtype": torch.float32}, "triton"),
        ({"chip": EXAMPLES[75]}, "triton"),
    ],
)
def test_chunks_serve_where_they_may(changed: dict[str, object], variant: str) -> None:
    facts = {"dtype": torch.bfloat16, "chip": EXAMPLES[90], "state": 128} | changed
    dtype, chip = facts.pop("dtype"), facts.pop("chip")
    _, row = mamba2_scan_from_dt.bind(OpFacts("cuda", dtype, facts, chip=chip))  # type: ignore[arg-type]
    assert row.variant == variant
