"""Kernels of others behind our ops: bound only where they are installed, serve and passed their trial.

They are not installed here: modules of their names compute what theirs compute, and say what they were given.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="Triton is not installed here")

from plait.kernels.triton.attention import varlen
from plait.kernels.triton.ssm import fla
from plait.kernels.triton.ssm.delta import scan_from_gates
from plait.loading.kernel_trials import verdicts
from plait.loading.kernel_trials.plan import TrialNeeds, plan_trials
from plait.loading.kernel_trials.trials import find_site
from plait.ops.attention import paged_attention
from plait.ops.chip import EXAMPLES, Chip
from plait.ops.delta import delta_scan_from_gates, gated_delta_scan
from plait.ops.place import place_heads
from plait.ops.registry import Op, OpFacts

CHIP = EXAMPLES[90]
SIZES = {"key_dim": 128}
RAGGED = [(1, True), (3, True), (20, True), (18, False)]


def bound(op: Op, chip: Chip = CHIP, dtype: torch.dtype = torch.bfloat16, **sizes: Any) -> str:
    return op.bind(OpFacts("cuda", dtype, {**SIZES, **sizes}, chip=chip))[1].variant


@pytest.fixture
def given(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """`fla-core` with chunks that are the reference's; what they were called with."""
    seen: list[dict[str, Any]] = []

    def chunks(
        q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, *, scale: float,
        initial_state: Tensor, output_final_state: bool, use_qk_l2norm_in_kernel: bool, cu_seqlens: Tensor,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        assert output_final_state
        assert use_qk_l2norm_in_kernel
        assert scale == q.shape[-1] ** -0.5
        seen.append({"q": q, "cu_seqlens": cu_seqlens, "g": g})
        count, heads = len(initial_state), v.shape[2]
        state, ones = initial_state.clone(), torch.ones(heads)
        where = (torch.arange(count), cu_seqlens, torch.ones(count, dtype=torch.bool), 0)
        y = gated_delta_scan.reference(q[0], k[0], v[0], g[0], ones, beta[0], state, *where)
        return y[None], state

    fake = SimpleNamespace(chunk_kda=chunks, chunk_gated_delta_rule=chunks)
    for name in ("fla.ops.kda", "fla.ops.gated_delta_rule"):
        monkeypatch.setitem(sys.modules, name, fake)
    monkeypatch.setattr(fla, "_is_installed", lambda: True)
    return seen


def test_fla_is_bound_where_it_is_installed_and_serves(given: list[dict[str, Any]]) -> None:
    assert bound(delta_scan_from_gates) == "fla"
    assert bound(gated_delta_scan) == "fla"
    assert bound(delta_scan_from_gates, deterministic=True) == "triton"
    assert bound(delta_scan_from_gates, dtype=torch.float32) == "triton"
    assert bound(delta_scan_from_gates, EXAMPLES[75]) == "triton"


def test_without_it_our_own_chunks_serve_and_the_reason_is_reported() -> None:
    facts = OpFacts("cuda", torch.bfloat16, SIZES, chip=CHIP)
    _, row = delta_scan_from_gates.bind(facts)
    assert row.variant == "triton chunks"
    assert ("fla", "fla-core is not installed (pip install fla-core)") in row.skipped


def test_it_is_tried_and_not_bound_if_it_is_off(given: list[dict[str, Any]]) -> None:
    keys = {t.key for t in plan_trials(TrialNeeds(CHIP, [torch.bfloat16], ()))}
    assert "delta_scan_from_gates/fla//bfloat16" in keys
    tried = replace(
        CHIP, trials=dict.fromkeys(keys, "") | {"delta_scan_from_gates/fla//bfloat16": "it hangs"}
    )
    assert bound(delta_scan_from_gates, tried) == "triton chunks"
    assert bound(gated_delta_scan, tried) == "fla"


def test_verdicts_hold_for_one_version_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    before = find_site(CHIP)
    monkeypatch.setattr(verdicts, "version", lambda name: "0.6.1" if name == "fla-core" else "1")
    after = find_site(CHIP)
    assert "fla-core 0.6.1" in after.others
    assert before.digest != after.digest


@pytest.mark.parametrize(
    ("channel", "tiled", "beta"), [(False, True, 1.0), pytest.param(True, False, 2.0, marks=pytest.mark.slow)]
)
def test_prompts_come_from_it_and_short_sequences_from_the_walk(
    given: list[dict[str, Any]], channel: bool, tiled: bool, beta: float
) -> None:
    torch.manual_seed(0)
    case = dict(seqs=RAGGED, decodes=1, heads=4, keys=2, key_dim=4, dim=4)
    assert delta_scan_from_gates.make
    args, _ = delta_scan_from_gates.make(
        {**case, "channel": channel, "tiled": tiled, "beta": beta}, torch.float32, "cpu"
    )
    mine, theirs = ([a.clone() if isinstance(a, Tensor) else a for a in args] for _ in range(2))
    want = delta_scan_from_gates.reference(*theirs)
    torch.testing.assert_close(fla.scan_fla_from_gates(*mine), want, rtol=2e-5, atol=2e-5)
    torch.testing.assert_close(mine[7], theirs[7], rtol=2e-5, atol=2e-5)
    (call,) = given
    assert call["cu_seqlens"].tolist() == [0, 3, 23, 41], "counted from the first row that is no decode"
    assert call["q"].shape == (1, 41, 4, 4), "a key head for each head"


@pytest.mark.slow
def test_decodes_and_drafts_have_the_bits_that_they_have_without_it(given: list[dict[str, Any]]) -> None:
    case = dict(seqs=RAGGED, decodes=1, heads=4, keys=2, key_dim=4, dim=4)
    assert delta_scan_from_gates.make
    args, _ = delta_scan_from_gates.make(case, torch.float32, "cpu")
    mine, walked = ([a.clone() if isinstance(a, Tensor) else a for a in args] for _ in range(2))
    y, short = fla.scan_fla_from_gates(*mine), slice(0, 4)  # of a decode and a draft of three
    assert torch.equal(y[short], scan_from_gates(*walked)[short])
    assert torch.equal(mine[7][args[8][:2]], walked[7][args[8][:2]])
    assert given


HEADS = {"dim": 128, "window": None, "softcap": None, "sinks": False, "kv_dtype": "model"}


@pytest.fixture
def flash(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """FlashAttention 3 with a function over pages that is the reference's; what it was called with."""
    seen: list[dict[str, Any]] = []

    def varlen_attn(
        q: Tensor, k: Tensor, v: Tensor, starts: Tensor, k_starts: None, max_q: int, max_k: int, *,
        scale: float, window_size: tuple[int, int], enable_gqa: bool, seqused_k: Tensor, block_table: Tensor,
    ) -> Tensor:  # fmt: skip
        assert {t.dtype for t in (starts, seqused_k, block_table)} == {torch.int32}
        assert enable_gqa
        assert max_q >= int(starts.diff().max())
        assert max_k >= int(seqused_k.max())
        seen.append({"window_size": window_size})
        window = None if window_size[0] < 0 else window_size[0] + 1
        where = (block_table.long(), starts[:0].long(), starts.long(), seqused_k.long())
        found: Tensor = paged_attention.reference(q, None, None, k, v, *where, scale, window)
        return found

    monkeypatch.setattr(varlen, "_is_installed", lambda module: module == "flash_attn_interface")
    monkeypatch.setattr(varlen, "takes_pages", lambda: True)
    monkeypatch.setattr(varlen, "_capability", lambda device: 90)
    monkeypatch.setattr(varlen, "_load_function", lambda capability: varlen_attn)
    return seen


def test_varlen_is_bound_with_what_places_heads_where_it_serves(flash: list[dict[str, Any]]) -> None:
    assert bound(paged_attention, **HEADS) == bound(place_heads, **HEADS) == "varlen_attn"
    others: list[dict[str, Any]] = [
        {"softcap": 30.0}, {"sinks": True}, {"kv_dtype": "int8"}, {"dim": 512}, {"dim": 20},
        {"deterministic": True},
    ]  # fmt: skip
    for other in others:
        assert bound(paged_attention, **{**HEADS, **other}) == "triton", other
        assert bound(place_heads, **{**HEADS, **other}) == "triton", other
    assert bound(paged_attention, dtype=torch.float32, **HEADS) == "triton"
    assert bound(paged_attention, EXAMPLES[80], **HEADS) == "triton", "FlashAttention 3 is for sm_90"
    tried = {"varlen_attn": "it is 0.5 off the reference", "triton": ""}
    off = replace(CHIP, trials={f"paged_attention/{name}//bfloat16": why for name, why in tried.items()})
    assert bound(paged_attention, off, **HEADS) == "triton"
    assert "paged_attention/varlen_attn//bfloat16" in {
        t.key for t in plan_trials(TrialNeeds(CHIP, [torch.bfloat16], ()))
    }


@pytest.mark.parametrize("function", [None, lambda query, key, value, cu_seq_q: None])
def test_an_older_torch_takes_no_pages(
    monkeypatch: pytest.MonkeyPatch, function: Callable[..., None] | None
) -> None:
    module = SimpleNamespace(varlen_attn=function) if function else None
    monkeypatch.setitem(sys.modules, "torch.nn.attention.varlen", module)  # type: ignore[arg-type]
    monkeypatch.setattr(varlen, "_is_installed", lambda module: module == "flash_attn_interface")
    monkeypatch.setattr(varlen, "takes_pages", varlen.takes_pages.__wrapped__)  # without what it keeps
    _, row = paged_attention.bind(OpFacts("cuda", torch.bfloat16, HEADS, chip=CHIP))
    assert row.variant == "triton"
    assert "takes no pages: that of 2.12" in dict(row.skipped)["varlen_attn"]


def test_without_flash_attention_the_reason_is_reported() -> None:
    _, row = paged_attention.bind(OpFacts("cuda", torch.bfloat16, HEADS, chip=CHIP))
    assert row.variant == "triton"
    assert dict(row.skipped)["varlen_attn"].startswith("no FlashAttention with pages is installed")


@pytest.mark.parametrize("window", [None, 9])
def test_prompts_go_to_varlen_and_decodes_to_our_kernel(
    flash: list[dict[str, Any]], window: int | None
) -> None:
    for seqs, calls in (([5, 19], 1), ([1], 1)):
        case = dict(seqs=seqs, heads=4, kv_heads=2, dim=16, window=window, softcap=None)
        assert paged_attention.make
        args, _ = paged_attention.make(case, torch.float32, "cpu")
        mine, theirs = ([a.clone() if isinstance(a, Tensor) else a for a in args] for _ in range(2))
        want = paged_attention.reference(*theirs)
        torch.testing.assert_close(varlen.attend_varlen(*mine), want, rtol=2e-5, atol=2e-5)
        assert len(flash) == calls
    assert flash[0]["window_size"] == ((-1, 0) if window is None else (8, 0))


def test_tables_are_made_once_for_the_layers_of_a_step(flash: list[dict[str, Any]]) -> None:
    assert paged_attention.make
    case = dict(seqs=[3, 2], heads=2, kv_heads=1, dim=8, window=None, softcap=None)
    args, _ = paged_attention.make(case, torch.float32, "cpu")
    step: dict[Any, Any] = {}
    for _ in range(2):
        varlen.attend_varlen(*args, step)
    assert len(step) == 1
    assert len(flash) == 2
