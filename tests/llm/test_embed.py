"""Requests for hidden states: what the decoder makes of a prompt, however it was cut, cached or shared."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from plait import LLM, SamplingParams
from plait.request import Pooling
from plait.runner.steps.inputs import build_batch
from plait.schedule.plan import Chunk, StepPlan
from plait.state.store import StateStore

NOTHING = SamplingParams(max_tokens=0)
SHORT, LONG = "Fear not", "And the king said unto them, " * 9


@pytest.fixture(scope="module", params=["auto", "reference"])
def llm(nano_hybrid: Path, request: pytest.FixtureRequest) -> Iterator[LLM]:
    options = dict(device="cpu", max_num_batched_tokens=48, max_num_seqs=4, ops=request.param)
    with LLM(str(nano_hybrid), **options) as loaded:
        yield loaded


def embedded(llm: LLM, prompts: list[str], pooling: Pooling) -> list[Tensor]:
    front = llm.front
    streams = [front.submit(replace(front.prepare(p, NOTHING), pooling=pooling)) for p in prompts]
    found = []
    for stream in streams:
        (delta,) = list(stream)
        assert delta.embedding is not None
        assert (delta.finish_reason, delta.text, delta.num_tokens) == ("length", "", 0)
        found.append(torch.tensor(delta.embedding, dtype=torch.float64))
    return found


def hidden(llm: LLM, prompt: str) -> Tensor:
    """[tokens, hidden] float64, by the decoder alone: the whole prompt in one piece."""
    runner = llm._loaded.runner
    ids = llm.front.prepare(prompt, NOTHING).prompt_token_ids
    size = runner.store.block_size
    table = tuple(range(1, -(-len(ids) // size) + 1))
    blocks = {group.name: len(table) + 1 for group in runner.groups}
    states, dtype = runner.decoder.states, runner.decoder.embed.dtype
    store = StateStore(states, blocks, 2, size, runner.device, dtype)
    plan = StepPlan(0, (Chunk(0, 0, ids, tuple(table for _ in runner.groups), 1, 0),), fresh=(1,))
    store.zero_slots((1,))
    with torch.inference_mode():
        return runner.decoder.hidden(build_batch(plan, runner.groups, size, runner.device), store).double()


@pytest.mark.parametrize("prompt", [SHORT, LONG])
def test_the_last_token_or_the_mean_of_all_is_what_the_decoder_computes(llm: LLM, prompt: str) -> None:
    want = hidden(llm, prompt)
    (last,) = embedded(llm, [prompt], "last")
    (mean,) = embedded(llm, [prompt], "mean")
    torch.testing.assert_close(last, want[-1], rtol=0, atol=1e-3)
    torch.testing.assert_close(mean, want.mean(0), rtol=0, atol=1e-3)
    assert not torch.allclose(last, mean, atol=1e-2)


@pytest.mark.parametrize("pooling", ["last", "mean"])
def test_prompts_embedded_together_or_again_give_what_each_gives_alone(llm: LLM, pooling: Pooling) -> None:
    prompts = [LONG, SHORT, LONG + "Behold.", "x", LONG, "Let there be light " * 7]
    alone = [embedded(llm, [prompt], pooling)[0] for prompt in prompts]
    together = embedded(llm, prompts, pooling)
    # Native kernels: neighbours change no bit. Else a token between two experts may go to either.
    is_native = llm._loaded.runner.is_recorded
    for one, other in zip([*alone, together[0]], [*together, together[4]], strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-9 if is_native else 1e-2)


def test_the_python_api_gives_unit_vectors(llm: LLM) -> None:
    short, long = llm.embed([SHORT, LONG])
    (want,) = embedded(llm, [SHORT], "last")
    torch.testing.assert_close(torch.tensor(short).double(), want / want.norm(), rtol=0, atol=1e-4)
    assert sum(value * value for value in long) == pytest.approx(1)
    assert llm.embed(SHORT, "mean", normalize=False)[0] != short


def test_text_is_generated_next_to_embeddings_as_ever(llm: LLM) -> None:
    params = SamplingParams(max_tokens=20, temperature=0.0)
    want = llm.generate(SHORT, params)[0].outputs[0].text
    stream = llm.front.submit(llm.front.prepare(SHORT, params))
    embedded(llm, [LONG, SHORT], "mean")
    assert "".join(delta.text for delta in stream) == want


def test_nothing_is_left_behind_and_cancelling_ends_it(llm: LLM) -> None:
    front = llm.front
    stream = front.submit(replace(front.prepare(LONG * 3, NOTHING), pooling="mean"))
    stream.cancel()
    assert [delta.finish_reason for delta in stream][-1] in {"cancelled", "length"}
    assert front.stats()["num_running"] == front.stats()["num_waiting"] == 0
