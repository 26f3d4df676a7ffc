"""Noisy canvases by a GPU's kernels and its sampler, in Triton's interpreter: all requests in one batch."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs

from plait.memory import BlockGroup
from plait.model.decoder import Decoder
from plait.runner.host.static_batch import Capacity, StaticBatch
from plait.schedule.drafts.passes import Denoising
from plait.schedule.plan import Chunk, StepPlan
from tests.families import noisy_canvases
from tests.families.noisy_canvases import Oracle
from tests.runner.device_engine import Side, gpu_decoder, opaque_decoder, plain_decoder

PROMPTS = ([3, 5, 7], [*range(20, 34)])
DRAWN: tuple[dict[str, Any], ...] = (
    {"temperature": 1.0, "logprobs": 2},
    {"temperature": 0.7, "top_p": 0.8, "min_tokens": 3, "logit_bias": {9: 2.0}},
    {"temperature": 1.3, "presence_penalty": 0.9, "top_k": 9, "logprobs": 0},
)


def write_all(side: Side) -> Side:
    for i, prompt in enumerate(PROMPTS):
        side.submit(f"r{i}", prompt, max_tokens=6, temperature=0.0, seed=11)
    for i, params in enumerate(DRAWN):
        more = {"stop_token_ids": frozenset({9})} if "min_tokens" in params else {}
        side.submit(f"d{i}", PROMPTS[i % 2], more=more, max_tokens=5, **params)
    return side


@pytest.mark.parametrize(
    "decoder",
    [plain_decoder, pytest.param(gpu_decoder, marks=pytest.mark.slow)],
    ids=["sampler", "all kernels"],
)
def test_texts_are_those_of_the_published_loop_and_draws_those_of_a_cpu(
    decoder: Callable[..., Decoder], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Two layers and two passes: the interpreter is slow."""
    monkeypatch.setitem(noisy_canvases.SCHEDULE, "max_denoising_steps", 2)
    for key, value in {
        "num_hidden_layers": 2,
        "layer_types": ["sliding_attention", "full_attention"],
    }.items():
        monkeypatch.setitem(noisy_canvases.TEXT, key, value)
    memory: dict[str, Any] = {"blocks": 24, "budget": 96, "num_seqs": 5}
    device = write_all(Side(decoder("diffusion_gemma", tmp_path), True, **memory))
    assert device.runner.step_kind.startswith("passes over canvases are graphs")
    host = write_all(Side(plain_decoder("diffusion_gemma", tmp_path), False, **memory, chip=None))
    found = device.finish()
    assert found == host.finish()
    checks = device.replay.checks
    assert checks is not None
    is_captured = decoder is gpu_decoder  # references ask for values, and run op by op
    assert (bool(checks.graphs), bool(checks.refused)) == (is_captured, not is_captured)
    oracle = Oracle(tmp_path)
    assert [found["r0"], found["r1"]] == [oracle.write(prompt, 6, 11)[0] for prompt in PROMPTS]
    for name, count in (("d0", 2), ("d2", 0)):
        here, there = (
            [one for event in side.reader.events[name, 0] for one in event.logprobs or ()]
            for side in (device, host)
        )
        assert [one.token_id for one in here] == found[name]
        for one, other in zip(here, there, strict=True):
            assert one.logprob == pytest.approx(other.logprob, abs=1e-4)
            assert [token for token, _ in one.top] == [token for token, _ in other.top]
            assert len(one.top) >= count


def test_captured_passes_give_the_text_of_passes_op_by_op(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Requests join, end and are preempted in between; log-probabilities need the host."""
    monkeypatch.setitem(noisy_canvases.SCHEDULE, "max_denoising_steps", 4)
    model = opaque_decoder("diffusion_gemma", tmp_path)

    def run(has_graphs: bool, blocks: int, **more: Any) -> tuple[dict[str, list[int]], Side]:
        side = Side(model, has_graphs, num_seqs=3, budget=48, blocks=blocks, chip=None)
        for i, params in enumerate(({"temperature": 0.0}, {"temperature": 1.0, "top_k": 20}, DRAWN[2])):
            for j, prompt in enumerate((*PROMPTS, [*range(2, 21)])):
                given = {**params, "seed": 5 * i + j, "logprobs": None, **more}
                side.submit(f"{i}r{j}", prompt, max_tokens=7 + 4 * j, **given)
        return side.finish(), side

    plain, _ = run(has_graphs=False, blocks=24)
    found, side = run(has_graphs=True, blocks=24)
    assert found == plain
    checks = side.replay.checks
    assert checks is not None
    assert not checks.refused
    assert {key.size.seqs for key in checks.graphs} == {1, 2, 3}
    assert {key.form.is_drawn for key in checks.graphs} == {True, False}
    assert any(key.form.is_edited for key in checks.graphs)
    assert run(has_graphs=True, blocks=9)[0] == plain
    assert run(has_graphs=True, blocks=24, logprobs=1)[0] == plain


def test_no_recorded_step_fits_a_pass() -> None:
    static = StaticBatch(
        Capacity(tokens=16, logits=17, seqs=2, blocks=4), [BlockGroup("full", None, ("a",))], 8
    )
    chunk = Chunk(1, 3, (5, 6, 7, 8), ((1,),), 0, num_logits=4)
    assert static.fits(StepPlan(1, (chunk,)))
    assert not static.fits(StepPlan(1, (structs.replace(chunk, denoising=Denoising(0.8, True)),)))
