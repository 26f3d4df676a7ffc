"""bfloat16 states: rounded once per token, wherever a prompt is cut, by one rule for all kernels."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from plait.errors import ShapeMismatch
from plait.kernels.cpu.ssm.rounding import rounds_columns
from plait.kernels.load import executor, load_kernels
from plait.ops.delta import gated_delta_scan
from plait.ops.mamba3 import mamba3_scan
from plait.ops.registry import Op, OpFacts
from plait.ops.rg_lru import rg_lru
from plait.ops.ssm import mamba1_scan, mamba2_scan
from plait.ops.state_rounding import decode_state, encode_state, row_nbytes

TOKENS, START, SLOT = 33, 70_000, 2
PER_TOKEN = {"x", "dt", "B", "C", "q", "k", "v", "step", "beta", "gates", "blend", "theta"}
SLOTTED = {"state", "angle", "prev_b", "prev_x"}
CASES: list[tuple[Op, dict[str, Any]]] = [
    (mamba2_scan, dict(heads=2, dim=20, state=64, groups=2)),
    (gated_delta_scan, dict(heads=4, keys=2, key_dim=7, dim=48)),
    (mamba1_scan, dict(heads=9, dim=8, state=16, groups=2)),
    (rg_lru, dict(heads=2, dim=48)),
    (mamba3_scan, dict(heads=2, dim=5, state=32, groups=1)),
]
QUICK = 2  # cases with kernels that the quick suite compiles
Given = dict[str, Any]


def inputs(op: Op, sizes: dict[str, Any]) -> Given:
    """Arguments of one sequence of TOKENS tokens, by name; its slots hold bfloat16 numbers."""
    torch.manual_seed(3)
    assert op.make is not None
    made, more = op.make({"seqs": [(TOKENS, True)], "decodes": 0, **sizes}, torch.float32, "cpu")
    found = inspect.signature(op.reference).bind(*made, **more)
    found.apply_defaults()
    given = dict(found.arguments)
    for name in SLOTTED & given.keys():
        given[name] = torch.randn(4, *given[name].shape[1:])
    given["state"] = given["state"].bfloat16()
    return given | {"slots": torch.tensor([SLOT]), "positions": torch.arange(START, START + TOKENS)}


def run(fn: Callable[..., Tensor], given: Given, cuts: list[int], between: bool = False) -> list[Tensor]:
    """What a sequence in these chunks gives, then its slot's tensors as float32.

    `between`: the kernel's own state is float32, and it is rounded here after every chunk.
    """
    given = {name: x.clone() if name in SLOTTED and x is not None else x for name, x in given.items()}
    if between:
        given["state"] = given["state"].float()
    outs, at = [], 0
    for size in cuts:
        rows = slice(at, at + size)
        now = {name: x[rows] if name in PER_TOKEN else x for name, x in given.items()}
        now |= {"query_start": torch.tensor([0, size]), "has_history": torch.tensor([True])}
        now |= {"positions": given["positions"][rows], "num_decodes": int(size == 1)}
        outs.append(fn(*now.values()).clone())
        at += size
        if between:
            last = given["positions"][at - 1]
            kept = encode_state(given["state"][SLOT], last, torch.bfloat16)
            given["state"][SLOT] = decode_state(kept)
    return [torch.cat(outs), *(given[name][SLOT].float() for name in sorted(SLOTTED & given.keys()))]


def check(fn: Callable[..., Tensor], given: Given) -> None:
    whole = run(fn, given, [TOKENS])
    for cuts in ([1] * TOKENS, [13, 1, 19]):
        for found, wanted in zip(run(fn, given, cuts), whole, strict=True):
            assert torch.equal(found, wanted)
    for found, wanted in zip(run(fn, given, [1] * TOKENS, between=True), whole, strict=True):
        assert torch.equal(found, wanted)


@pytest.mark.parametrize(("op", "sizes"), [pytest.param(*case, id=case[0].name) for case in CASES])
def test_reference_rounds_after_every_token(op: Op, sizes: dict[str, Any]) -> None:
    given = inputs(op, sizes)
    for found, wanted in zip(
        run(op.reference, given, [1] * TOKENS, between=True), run(op.reference, given, [TOKENS]), strict=True
    ):
        torch.testing.assert_close(found, wanted, atol=2e-5, rtol=2**-7)
    whole = run(op.reference, given, [TOKENS])
    for found, wanted in zip(run(op.reference, given, [13, 20]), whole, strict=True):
        torch.testing.assert_close(found, wanted, atol=2e-5, rtol=2**-7)


@pytest.mark.parametrize(
    ("op", "sizes"),
    [
        pytest.param(*case, id=case[0].name, marks=[] if i < QUICK else [pytest.mark.slow])
        for i, case in enumerate(CASES)
    ],
)
def test_kernel_rounds_as_float32_kernel_with_rounding_between_tokens(op: Op, sizes: dict[str, Any]) -> None:
    load_kernels()
    cpu = executor(2)
    variant = next(v for v in op.variants if v.name == "native")
    given = inputs(op, sizes)
    try:
        check(variant.bind(cpu), given)
        with pytest.raises(ShapeMismatch, match="positions"):
            run(lambda *args: variant.bind(cpu)(*args[:-1], None), given, [TOKENS])
    finally:
        cpu.close()


@pytest.mark.parametrize("size", [32, pytest.param(144, marks=pytest.mark.slow)])
def test_int8_kernel_has_the_reference_s_codes_in_any_chunk(size: int) -> None:
    load_kernels()
    cpu = executor(2)
    variant = next(v for v in mamba2_scan.variants if v.name == "native-int8")
    given = inputs(mamba2_scan, dict(heads=2, dim=20, state=size, groups=2))
    given["state"] = encode_state(given["state"].float(), torch.arange(4), torch.int8)
    try:
        whole = run(variant.bind(cpu), given, [TOKENS])
        for cuts in ([1] * TOKENS, [13, 1, 19]):
            for found, wanted in zip(run(variant.bind(cpu), given, cuts), whole, strict=True):
                assert torch.equal(found, wanted)
        out, codes = run(mamba2_scan.reference, given, [TOKENS])
        torch.testing.assert_close(whole[0], out, atol=2e-4, rtol=1e-4)
        assert (whole[1] - codes).abs().max() <= 1  # where the last bit of a number decides
        assert (whole[1] == codes).float().mean() > 0.99
        with pytest.raises(ShapeMismatch, match="positions"):
            run(lambda *args: variant.bind(cpu)(*args[:-1], None), given, [TOKENS])
    finally:
        cpu.close()


def test_int8_rounding_has_no_bias_and_cuts_nothing_off() -> None:
    torch.manual_seed(2)
    h = torch.randn(3, 128) * torch.tensor([1e-3, 1.0, 1e4])[:, None]
    kept = encode_state(h.expand(4096, 3, 128), torch.arange(4096), torch.int8)
    assert row_nbytes(128) == 132
    assert kept.shape == (4096, 3, 132)
    found = decode_state(kept)
    step = h.unflatten(-1, (2, 64)).abs().amax(-1, keepdim=True) / 127
    errors = (found.mean(0) - h).unflatten(-1, (2, 64)) / step
    assert errors.abs().max() < 0.02  # steps: of the largest numbers, too
    assert ((found - h).unflatten(-1, (2, 64)).abs() <= 1.02 * step).all()


@pytest.mark.parametrize("columns", [1, 16, 63, 64, 65, 144])
def test_int8_rows_of_any_width_come_back(columns: int) -> None:
    h = torch.randn(5, 2, columns)
    h[0], h[1, 0, 0] = 0.0, float("nan")
    found = decode_state(encode_state(h, torch.arange(5), torch.int8))
    assert found.shape == h.shape
    assert not found[0].any()
    assert found[1, 0, 0].isnan()
    assert found[2:].isfinite().all()


def test_thresholds_are_even_over_positions_and_columns() -> None:
    h = torch.full((4096, 2, 16), 1.0 + 2**-10)  # an eighth of the way to the next bfloat16
    kept = encode_state(h, torch.arange(4096), torch.bfloat16).float()
    assert set(kept.unique().tolist()) == {1.0, 1.0 + 2**-7}
    assert torch.equal(encode_state(kept, torch.arange(4096) + 9, torch.bfloat16).float(), kept)
    share = (kept > 1).float()
    assert (share.mean((1, 2)) - 1 / 8).abs().max() < 0.15
    assert (share.mean(0) - 1 / 8).abs().max() < 0.02


def test_encode_keeps_signs_zeros_infinities_and_nan() -> None:
    h = torch.tensor([[-1.0, 0.0, -0.0, torch.inf, -torch.inf, torch.nan]])
    kept = encode_state(h, torch.tensor(5), torch.bfloat16)
    assert torch.equal(kept.view(torch.int16), h.bfloat16().view(torch.int16))


def test_kernels_refuse_other_state_dtypes_and_odd_columns() -> None:
    def refusal(**sizes: object) -> str | None:
        return rounds_columns("state")(OpFacts("cpu", torch.float32, sizes))

    assert refusal(state=7) is None
    assert refusal(state=16, state_dtype="bfloat16") is None
    assert "multiple of 16" in (refusal(state=7, state_dtype="bfloat16") or "")
    assert "not in int8" in (refusal(state=16, state_dtype="int8") or "")
