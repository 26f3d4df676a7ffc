"""`plait verify` finds what is wrong: a broken op by its layer and name, other tokens, other bits."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from msgspec import structs
from torch import Tensor

from plait.config import EngineConfig
from plait.errors import ContextTooLong, EngineError
from plait.kernels.load import load_kernels
from plait.loading.build import Loaded, load
from plait.model.decoder import Decoder
from plait.ops.activation import combine
from plait.ops.attention import paged_attention
from plait.ops.chip import EXAMPLES
from plait.ops.linear import Packing, dense
from plait.ops.registry import Op, Variant
from plait.ops.ssm import mamba2_scan
from plait.request import SamplingParams, TokenLogprobs
from plait.schedule.drafts.turns import DraftRequest
from plait.schedule.plan import Chunk, Done, SamplingBatch, StepPlan, Ticket
from plait.state.store import StateStore
from plait.verify.matrix import FAILS_EVERY, PLAIN, Cell, FailingRunner, KnownReplies, cells, durable_cells
from plait.verify.prompts import default_prompts, first_turns, second_turns
from plait.verify.results import Arithmetic, CellResult, Difference, VerifyReply
from plait.verify.samplers import sampler_cells
from plait.verify.trace import Trace, digest, op_names, op_of, watch_ops
from plait.verify.verify import Verification
from tests.families import tiny

MAX_TOKENS = 4


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("verify") / "llama"
    tiny.write("llama", folder)
    return folder


@pytest.fixture(scope="module")
def bamba(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("verify") / "bamba"
    tiny.write("bamba", folder)
    return folder


@pytest.fixture
def opened() -> Iterator[Callable[..., Loaded]]:
    made: list[Loaded] = []

    def open_model(folder: Path, **options: Any) -> Loaded:
        config = EngineConfig(device="cpu", threads=1, max_num_seqs=1, max_model_len=96, **options)
        made.append(load(str(folder), config))
        return made[-1]

    yield open_model
    for loaded in made:
        loaded.front.close(drain=False)


def break_op(monkeypatch: pytest.MonkeyPatch, op: Op, wrong: Callable[[Tensor], Tensor]) -> None:
    """From now on models are built with a variant of this op; `wrong` changes its results."""

    def broken(*args: Any, **kwargs: Any) -> Tensor:
        return wrong(op.reference(*args, **kwargs))

    load_kernels()  # registers its own in front of those that are there
    variant = Variant("broken", "cpu", broken, lambda facts: None)
    monkeypatch.setattr(op, "variants", [variant, *op.variants])


def off_in_company(out: Tensor) -> Tensor:
    """Wrong only where a step has several rows."""
    return out + 1e-3 if out.shape[0] > 1 else out


def verified(loaded: Loaded, name: str, *, batch: int = 2, max_tokens: int = MAX_TOKENS) -> CellResult:
    """The result of one cell."""
    made = Verification(loaded, batch=batch, max_tokens=max_tokens)
    made.__class__ = type("Only", (Verification,), {"cells": [c for c in made.cells if c.name == name]})
    (result,) = made.results()
    return result


def test_a_broken_kernel_is_named_with_its_layer(
    llama: Path, opened: Callable[..., Loaded], monkeypatch: pytest.MonkeyPatch
) -> None:
    break_op(monkeypatch, paged_attention, off_in_company)
    result = verified(opened(llama), "batch of 2")
    assert result.num_different + result.num_rounded == result.num_replies
    places = [d.place for d in result.differences if d.place]
    assert places
    for place in places:
        assert (place.where, place.op, place.rows) == ("layer 0, attn", "paged_attention", 2)
        assert place.largest == pytest.approx(1e-3, rel=1e-2)


@pytest.mark.sampled(2, across="heavy")
def test_a_broken_scan_is_found_where_a_prompt_is_cut(
    bamba: Path, opened: Callable[..., Loaded], monkeypatch: pytest.MonkeyPatch
) -> None:
    break_op(monkeypatch, mamba2_scan, lambda out: out + 1e-3 if out.shape[0] == 7 else out)
    result = verified(opened(bamba), "chunks of 7")
    (place, *_) = [d.place for d in result.differences if d.place]
    assert (place.where, place.op, place.position) == ("layer 0, ssm", "mamba2_scan", 0)


def test_memory_that_comes_back_wrong_shows_in_the_op_that_reads_it(
    llama: Path, opened: Callable[..., Loaded], monkeypatch: pytest.MonkeyPatch
) -> None:
    sound = StateStore.load

    def broken(store: StateStore, handle: int, blocks: Sequence[Sequence[int]], slot: int) -> None:
        sound(store, handle, blocks, slot)
        store["layers.1.attn"]["v"][list(blocks[0])] *= 2

    monkeypatch.setattr(StateStore, "load", broken)
    result = verified(opened(llama), "preempted, swapped out and in", batch=3, max_tokens=8)
    assert result.counts["swaps"] > 0
    assert result.differences
    places = {(d.place.where, d.place.op) for d in result.differences if d.place}
    assert places == {("layer 1, attn", "paged_attention")}


def test_the_difference_says_what_was_expected_and_how_near_the_best_two_were(
    llama: Path, opened: Callable[..., Loaded], monkeypatch: pytest.MonkeyPatch
) -> None:
    break_op(monkeypatch, paged_attention, lambda out: -3 * out if out.shape[0] == 2 else out)
    result = verified(opened(llama), "batch of 2")
    assert result.num_different > 0
    (found, *_) = [d for d in result.differences if d.is_token]
    assert found.expected != found.found
    assert found.gap is not None
    assert found.gap >= 0
    assert (
        found.position == found.index + {d.name: d.prompt_len for d in _asked(opened(llama))}[found.request]
    )


def _asked(loaded: Loaded) -> list[Any]:
    return first_turns(loaded.front, default_prompts(loaded.front, MAX_TOKENS), MAX_TOKENS, 2)


def test_what_is_sound_has_no_difference(llama: Path, opened: Callable[..., Loaded]) -> None:
    made = Verification(opened(llama), batch=2, max_tokens=MAX_TOKENS)
    results = {result.cell: result for result in made.results()}
    known = [*cells(2, 16), *durable_cells(2, 16, has_slots=False)]
    known += sampler_cells(2, 16, made.asked.values())
    assert set(results) == {cell.name for cell in known}
    assert {result.proof for result in results.values() if not result.happened} <= {"drafted"}
    assert not [d for result in results.values() for d in result.differences]
    assert results["batch of 2"].num_tokens == len(_asked(made.loaded)) * MAX_TOKENS
    assert results["steps that fail"].counts["failed_steps"] > 0


def test_reference_ops_promise_nothing_and_say_which(llama: Path, opened: Callable[..., Loaded]) -> None:
    found = Verification(opened(llama, ops="reference"), batch=2, max_tokens=1).arithmetic
    assert not found.is_promised
    assert found.loose["linear"] == "reference"
    assert Arithmetic("cpu", "float32", "model", "recorded", {}).is_promised


def test_bound_ops_are_known_by_name(llama: Path, opened: Callable[..., Loaded]) -> None:
    names = op_names()
    seen: list[tuple[str, str]] = []
    decoder = opened(llama).runner.decoder
    before = _attributes(decoder)
    with watch_ops(decoder, lambda path, op, result: seen.append((path, op))):
        assert _attributes(decoder) != before
        decoder.embed(torch.tensor([1, 2]), torch.tensor([0, 1]))
        decoder.branches[1].mixer.forward(torch.zeros(2, 32))  # type: ignore[attr-defined]
    assert seen == [
        ("embed._embed", "embed"),
        ("layers.0.ffn.mixer._glu", "glu"),
        ("layers.0.ffn.mixer.down._parts", "linear"),
    ]
    assert _attributes(decoder) == before
    assert op_of(combine.reference, names) == "combine"
    assert op_of(dense.apply, names) == "linear"
    assert isinstance(dense, Packing)
    assert op_of(print, names) is None


def test_what_experts_call_is_one_op_whichever_are_chosen(
    nano_hybrid: Path, opened: Callable[..., Loaded]
) -> None:
    runner, seen = opened(nano_hybrid, ops="reference").runner, list[tuple[str, str]]()
    orders = []
    for prompt in ([5, 6, 7, 8, 9, 10, 11, 12], [900] * 8):  # several experts, and always the same two
        seen.clear()
        with watch_ops(runner.decoder, lambda path, op, result: seen.append((path, op))):
            runner.logits(prompt, 16)
        orders.append([*seen])
    assert "experts" in {op for _, op in orders[0]}
    assert orders[0] == orders[1]


def test_what_was_bound_is_back_also_after_a_failure(llama: Path, opened: Callable[..., Loaded]) -> None:
    decoder = opened(llama).runner.decoder
    before = _attributes(decoder)
    with pytest.raises(KeyboardInterrupt), watch_ops(decoder, lambda path, op, result: None):
        raise KeyboardInterrupt
    assert _attributes(decoder) == before


def _attributes(decoder: Decoder) -> list[Any]:
    """What the first layers and the ends hold, by identity."""
    parts = [decoder, decoder.embed, decoder.head.linear, decoder.norm, *decoder.branches]
    parts += [branch.mixer for branch in decoder.branches]
    found = [(name, value) for part in parts for name, value in vars(part).items()]
    return [(name, [id(item) for item in value] if name == "_parts" else id(value)) for name, value in found]


def test_rows_of_a_draft_that_was_not_accepted_are_left_out() -> None:
    seen: list[tuple[int, float]] = []
    trace = Trace([5, 6, 7], lambda key, path, op, row, rows: seen.append((key[0], float(row))), seq_id=1)
    other, own = _chunk(2, 0, (9,)), _chunk(1, 1, (6, 8, 7))
    trace.begin(StepPlan(1, (other, own)))
    trace.watch("layers.0.attn.mixer._attend", "paged_attention", torch.tensor([0.0, 1.0, 2.0, 3.0]))
    assert seen == [(1, 1.0)]


def test_rows_with_logits_are_the_last_of_their_chunk() -> None:
    seen: list[tuple[int, float]] = []
    trace = Trace([5, 6, 7], lambda key, path, op, row, rows: seen.append((key[0], float(row))), seq_id=1)
    trace.begin(StepPlan(1, (_chunk(2, 0, (9, 9)), _chunk(1, 0, (5, 6, 7)))))
    trace.watch("head.linear._parts", "linear", torch.tensor([10.0, 20.0]))
    assert seen == [(2, 20.0)]


def _chunk(seq_id: int, start: int, token_ids: tuple[int, ...]) -> Chunk:
    return Chunk(seq_id, start, token_ids, (), 0, 1)


def test_a_digest_is_of_bits() -> None:
    assert digest(torch.tensor([0.0])) != digest(torch.tensor([-0.0]))
    assert digest(torch.tensor([1.0, 2.0], dtype=torch.bfloat16)) == digest(
        torch.tensor([1.0, 5.0, 2.0], dtype=torch.bfloat16)[::2]
    )


def test_prompts_leave_space_for_two_replies(llama: Path, opened: Callable[..., Loaded]) -> None:
    front = opened(llama).front
    prompts = default_prompts(front, 40)
    assert max(map(len, prompts)) == 96 - 2 * 40 - min(map(len, prompts))
    asked = first_turns(front, prompts, 40, batch=9)
    assert len(asked) == 12
    assert len({one.name for one in asked}) == 12
    turns = second_turns(asked, [[1] * 40] * 12, front.max_model_len)
    assert {turn.turn for turn in turns} == {2}
    assert len(turns) == 12
    assert not second_turns(asked, [[1] * 40] * 12, 40)


def test_a_prompt_without_space_for_its_reply_is_refused(llama: Path, opened: Callable[..., Loaded]) -> None:
    with pytest.raises(ContextTooLong, match="do not fit into the context of 96"):
        first_turns(opened(llama).front, [[1] * 90], 8, batch=1)


def test_the_matrix_has_every_kind_of_cut_and_each_cell_differs_from_the_plain_run() -> None:
    found = [*cells(4, 16)]
    assert {f"chunks of {n}" for n in (1, 7, 15, 16, 17)} <= {cell.name for cell in found}
    assert {f"batch of {n}" for n in (2, 3, 4)} <= {cell.name for cell in found}
    assert PLAIN not in [replace(cell, name=PLAIN.name) for cell in found]
    same = Cell("", waves=(1,))
    assert [c.name for c in found if replace(c, name="", proof=None) == same] == ["alone, once more"]


def test_a_model_that_is_not_causal_is_only_batched() -> None:
    assert [cell.name for cell in cells(3, 16, causal=False)] == [
        "alone, once more",
        "batch of 2",
        "batch of 3",
    ]


def test_a_cell_in_which_nothing_happened_says_so() -> None:
    assert not CellResult("swapped", 1, 1, (), {"swaps": 0}, proof="swaps").happened
    assert CellResult("swapped", 1, 1, (), {"swaps": 2}, proof="swaps").happened
    assert CellResult("batch", 1, 1, (), {}).happened


def test_another_token_counts_for_more_than_other_bits_before_it() -> None:
    """A rounding at the first token used to hide another token behind it."""
    plain, other, rounded = VerifyReply(), VerifyReply(), VerifyReply()
    for reply, token_ids, first in ((plain, (1, 2), -0.5), (other, (1, 3), -0.6), (rounded, (1, 2), -0.6)):
        reply.token_ids += token_ids
        reply.logprobs += [TokenLogprobs(1, first), TokenLogprobs(token_ids[1], -0.5)]
    about: Any = SimpleNamespace(asked={"r": SimpleNamespace(prompt_len=4)}, plain={"r": plain})
    found = Verification._difference(about, Cell("c", ""), 0, "r", other)
    assert found is not None
    assert (found.index, found.expected, found.found) == (1, 2, 3)
    found = Verification._difference(about, Cell("c", ""), 0, "r", rounded)
    assert found is not None
    assert (found.index, found.expected, found.found) == (0, 1, 1)
    assert Verification._difference(about, Cell("c", ""), 0, "r", plain) is None


def test_other_bits_are_no_other_token() -> None:
    rounded = Difference("c", "r", 0, 0, 3, expected=5, found=5, off_by=1e-7)
    other = Difference("c", "r", 0, 0, 3, expected=5, found=6)
    result = CellResult("c", 2, 2, (rounded, other), {})
    assert (result.num_different, result.num_rounded) == (1, 1)


def test_known_replies_are_drafted_with_a_wrong_token_now_and_then() -> None:
    proposer = KnownReplies([[1, 2, 3, 4, 5, 6, 7]], vocab_size=10)
    wanted = DraftRequest(3, [1, 2], 9, SamplingParams(), 0)
    assert proposer.propose([wanted]) == {3: (3, 4, 6, 6, 7)}
    assert proposer.propose([structs.replace(wanted, token_ids=[2, 2])]) == {3: ()}


def test_only_steps_that_several_share_fail() -> None:
    class Runner:
        def launch(self, plan: StepPlan, sampling: SamplingBatch) -> Ticket:
            return Done([])

    def requests_in(plan: StepPlan) -> list[str]:
        return [str(chunk.seq_id) for chunk in plan.chunks]

    failing = FailingRunner(SimpleNamespace(runner=Runner(), requests_in=requests_in))  # type: ignore[arg-type]
    alone = StepPlan(1, (_chunk(1, 0, (5,)),))
    shared = StepPlan(1, (_chunk(1, 0, (5,)), _chunk(2, 0, (5,))))
    for _ in range(3 * FAILS_EVERY):
        assert failing.launch(alone, SamplingBatch(())).wait() == []
    for _ in range(FAILS_EVERY - 1):
        assert failing.launch(shared, SamplingBatch(())).wait() == []
    ticket = failing.launch(shared, SamplingBatch(()))
    with pytest.raises(EngineError, match="on purpose"):
        ticket.wait()
    assert failing.num_failed == 1


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")
def test_a_step_that_is_a_graph_of_a_gpu_has_no_difference_either(
    llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Through Triton's interpreter: one cell in which steps are launched ahead, and two are in a batch."""
    pytest.importorskip("triton", reason="Triton is not installed here")
    config = EngineConfig(device="cpu", max_num_seqs=1, prefix_cache=False, max_model_len=64)
    loaded = load(str(llama), config, example=EXAMPLES[90])
    try:
        result = verified(loaded, "launched ahead, together", batch=2, max_tokens=2)
    finally:
        loaded.front.close(drain=False)
    assert loaded.target.graphs is not None
    assert result.happened
    assert not result.differences
