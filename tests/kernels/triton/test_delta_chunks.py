"""Triton's delta rule over prompts in chunks: right in any batch, the same bits for cuts between chunks."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="Triton is not installed here")

from plait.kernels.triton.ssm.delta import prepare_delta
from plait.kernels.triton.ssm.delta_chunks import WALKED, scan_prompts
from plait.ops.chip import EXAMPLES
from plait.ops.delta import delta_scan_from_gates
from plait.ops.registry import OpFacts
from tests.kernels.triton.ragged import SLOTS, RecurrentLayer, Where

HEADS, KEY_HEADS = 2, 1


def layers(
    tokens: int, size: int, dim: int, *, channels: bool, rate: float = 1.0, same_keys: bool = False
) -> tuple[RecurrentLayer, RecurrentLayer]:
    """The kernels and the reference. The last input is positions, from 0 on unless they are set."""
    torch.manual_seed(1)
    q, k = (torch.randn(tokens, KEY_HEADS, size) for _ in "qk")
    k = k[:1].expand(tokens, -1, -1).contiguous() if same_keys else k
    v, beta = torch.randn(tokens, HEADS, dim), torch.randn(tokens, HEADS)
    steps = HEADS * (size if channels else 1)
    decay, bias, A = torch.randn(tokens, steps), torch.randn(steps), -rate * torch.rand(HEADS)

    def run(rows: tuple[Tensor, ...], state: Tensor, where: Where) -> Tensor:
        q, k, v, decay, beta, positions = rows
        made = prepare_delta((q, k, v, decay, beta), bias, A, state, where, 2.0, False, True)
        return scan_prompts(made, count_decodes(where), positions)

    def reference(rows: tuple[Tensor, ...], state: Tensor, where: Where) -> Tensor:
        q, k, v, decay, beta, _ = rows
        made: Tensor = delta_scan_from_gates.reference(
            q, k, v, decay, bias, A, beta, state, *where, 0, 2.0, False
        )
        return made

    inputs, state = (q, k, v, decay, beta, torch.arange(tokens)), torch.randn(SLOTS, HEADS, size, dim)
    return RecurrentLayer(inputs, state, run), RecurrentLayer(inputs, state, reference)


def count_decodes(where: Where) -> int:
    """Sequences of one row with history, in front of all others."""
    decoding = (where[1].diff() == 1) & where[2]
    return int(decoding.int().cumprod(0).sum())


def check(
    made: RecurrentLayer,
    reference: RecurrentLayer,
    seqs: Sequence[tuple[int, slice, bool]],
    dtype: torch.dtype = torch.float32,
) -> None:
    """Rows and states agree as the op's tolerance for numbers of that type has it."""
    near = delta_scan_from_gates.tolerance[dtype]
    got_state, want_state = made.state.clone(), made.state.clone()
    want = torch.cat(reference.step(want_state, seqs))
    torch.testing.assert_close(torch.cat(made.step(got_state, seqs)), want, rtol=near, atol=near)
    torch.testing.assert_close(got_state, want_state, rtol=near, atol=near)


MIXED = [
    (1, slice(0, 1), True),  # a decode
    (4, slice(1, 41), False),  # a prompt from its beginning
    (2, slice(41, 46), True),  # a draft
    (5, slice(46, 96), True),  # a chunk from the middle of a prompt
]
# Odd lengths, an empty one, the shortest that is taken in chunks, and a draft: entries of each are its own.
RAGGED = [(1, 18), (2, WALKED + 1), (3, 0), (4, 33), (5, 3)]


@pytest.mark.sampled(2)
@pytest.mark.slow
@pytest.mark.parametrize(("size", "dim", "channels"), [(5, 7, True), (20, 40, False)])
def test_mixed_step_agrees_with_the_reference(size: int, dim: int, channels: bool) -> None:
    made, reference = layers(96, size, dim, channels=channels)
    made.inputs[-1][1:41] = torch.arange(40)
    check(made, reference, MIXED)


@pytest.mark.parametrize("channels", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_sequences_of_any_length_have_chunks_of_their_own(channels: bool) -> None:
    made, reference = layers(71, 4, 4, channels=channels)
    seqs, at = [], 0
    for slot, count in RAGGED:
        seqs.append((slot, slice(at, at + count), slot % 2 == 1))
        at += count
    check(made, reference, seqs)


LARGE = dict(rate=400.0)  # no factor of such a decay is a float32
SAME = dict(same_keys=True, rate=0.0)  # the inverse's numbers are largest


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("channels", "extreme"),
    [
        (True, LARGE),
        (False, SAME),
        *(pytest.param(*more, marks=pytest.mark.slow) for more in ((False, LARGE), (True, SAME))),
    ],
)
def test_extremes_overflow_nothing(channels: bool, extreme: dict[str, float]) -> None:
    """Sums of such decays have few digits behind the point, so the tolerance is that of the 16-bit numbers
    that chunks are for."""
    made, reference = layers(40, 4, 4, channels=channels, **extreme)  # type: ignore[arg-type]
    check(made, reference, [(3, slice(0, 40), True)], torch.float16)


@pytest.mark.sampled(2)
@pytest.mark.slow
@pytest.mark.parametrize("channels", [False, True])
def test_batch_composition_changes_no_bit(channels: bool) -> None:
    made, _ = layers(96, 4, 4, channels=channels)
    state = made.state.clone()
    together = made.step(state, MIXED)
    for seq, rows in zip(MIXED, together, strict=True):
        alone = made.state.clone()
        assert torch.equal(made.step(alone, [seq])[0], rows)
        assert torch.equal(alone[seq[0]], state[seq[0]])
    assert torch.equal(state[[0, 3]], made.state[[0, 3]])


@pytest.mark.sampled(2)
@pytest.mark.slow
@pytest.mark.parametrize("channels", [False, True])
def test_cuts_between_chunks_change_no_bit_and_others_little(channels: bool) -> None:
    """The state is compared, too: a snapshot at the end of a chunk is that of the whole prompt."""
    made, _ = layers(85, 4, 4, channels=channels)
    state = torch.full_like(made.state, float("nan"))
    want = made.walk(state, 2, [85])
    for cut in ([32, 53], [32, 32, 21]):
        again = torch.full_like(state, float("nan"))
        assert torch.equal(made.walk(again, 3, cut), want), cut
        assert torch.equal(again[3], state[2]), cut
    for cut in ([1, 84], [40, 45], [80, 5]):
        again = torch.full_like(state, float("nan"))
        torch.testing.assert_close(made.walk(again, 3, cut), want, rtol=2e-5, atol=2e-5)
        torch.testing.assert_close(again[3], state[2], rtol=2e-5, atol=2e-5)


@pytest.mark.slow
def test_decodes_and_drafts_have_the_bits_of_the_walk() -> None:
    made, _ = layers(WALKED, 4, 4, channels=False)
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
        ({"key_dim": 256}, "triton"),
        ({"dtype": torch.float32}, "triton"),
        ({"chip": EXAMPLES[75]}, "triton"),
    ],
)
def test_chunks_serve_where_they_may(changed: dict[str, object], variant: str) -> None:
    facts = {"dtype": torch.bfloat16, "chip": EXAMPLES[90], "key_dim": 128} | changed
    dtype, chip = facts.pop("dtype"), facts.pop("chip")
    _, row = delta_scan_from_gates.bind(OpFacts("cuda", dtype, facts, chip=chip))  # type: ignore[arg-type]
    assert row.variant == variant
