"""A chat of ten turns: what was computed for one turn is not computed again for the next.

The prompt of turn k + 1 is that of turn k, its reply, and new tokens. The new ones have to be computed, and
the last token of the reply, because its state was not needed so far. Where state is kept by whole blocks,
less than one block is computed again.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from openai import OpenAI

from plait.config import EngineConfig
from plait.engine.flight import StepRunner
from plait.loading.build import Loaded, load
from plait.memory import has_slots
from plait.request import Request, SamplingParams
from plait.schedule.plan import SamplingBatch, StepPlan, Ticket
from tests.e2e.conftest import Server
from tests.families import tiny

# Grouped queries; windows; latents and experts; Mamba2 alone; Mamba2 with attention and experts.
KINDS = ("llama", "gemma3", "deepseek_v3", "mamba2", "bamba", "granite")
NUM_TURNS, BLOCK, LONGEST = 10, 16, 512
GREEDY = SamplingParams(temperature=0.0, top_p=1.0, top_k=0, min_p=0.0, repetition_penalty=1.0, max_tokens=7)


@dataclass
class CountingRunner:
    """Counts the tokens of the prompt that steps compute: those before position `prompt_len`."""

    inner: StepRunner
    prompt_len: int = 0
    num_tokens: int = 0

    def launch(self, plan: StepPlan, sampling: SamplingBatch) -> Ticket:
        self.num_tokens += sum(max(min(c.end, self.prompt_len) - c.start, 0) for c in plan.chunks)
        return self.inner.launch(plan, sampling)


@dataclass(frozen=True)
class Turn:
    """`num_prefilled`: tokens of the prompt that were computed, counted where they are."""

    prompt_len: int
    num_new: int
    num_cached: int
    num_prefilled: int
    reply: list[int]


def chat(loaded: Loaded, seed: int = 0) -> Iterator[Turn]:
    """Ten turns through the engine's thread, one after the other; from 3 to 40 new tokens in each."""
    luck = random.Random(seed)
    runner = loaded.front.loop.engine.runner = CountingRunner(loaded.runner)
    history: list[int] = []
    for turn in range(NUM_TURNS):
        new = [luck.randrange(3, loaded.front.spec.vocab_size) for _ in range(luck.randint(3, 40))]
        history += new
        before, runner.prompt_len = runner.num_tokens, len(history)
        stream = loaded.front.submit(Request(f"turn-{turn}", tuple(history), GREEDY))
        reply = [token_id for delta in stream for token_id in delta.token_ids]
        trace = stream.trace(0)
        assert trace is not None
        computed = runner.num_tokens - before
        yield Turn(len(history), len(new), trace.num_cached_tokens, computed, reply)
        history += reply


def opened(name: str, root: Path, **options: bool | int) -> Loaded:
    folder = root / name
    if not folder.exists():
        tiny.write(name, folder)
    longer = () if name == "mamba2" else (f"max_position_embeddings={LONGEST}",)
    config = EngineConfig(
        device="cpu",
        threads=1,
        max_num_seqs=2,
        max_model_len=LONGEST,
        block_size=BLOCK,
        set=longer,
        **options,
    )
    return load(str(folder), config)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", KINDS)
def test_a_turn_computes_what_is_new(name: str, tmp_path: Path) -> None:
    kept, alone = opened(name, tmp_path), opened(name, tmp_path, prefix_cache=False)
    try:
        turns, plain = [*chat(kept)], [*chat(alone)]
        by_slots = has_slots(kept.runner.decoder.states)
        evicted = kept.front.loop.engine.scheduler.cache_counts["evicted"]
    finally:
        kept.front.close()
        alone.front.close()
    assert [turn.reply for turn in turns] == [turn.reply for turn in plain]
    assert all(turn.num_prefilled == turn.prompt_len for turn in plain), "without a cache all is computed"
    assert turns[0].num_prefilled == turns[0].prompt_len
    for turn in turns[1:]:
        assert turn.num_prefilled == turn.prompt_len - turn.num_cached
        # Recurrent state is kept where a reply ended; blocks where they are full.
        spacing = 0 if by_slots else BLOCK - 1
        assert turn.num_prefilled <= turn.num_new + 1 + spacing, turn
    assert not evicted
    assert sum(turn.num_prefilled for turn in turns) < sum(turn.prompt_len for turn in plain) / 3


def test_a_reply_that_comes_back_changed_costs_the_reply_alone(tmp_path: Path) -> None:
    """A client that leaves out what a model thought sends another text back: the prompt before it is kept."""
    loaded = opened("bamba", tmp_path)
    runner = loaded.front.loop.engine.runner = CountingRunner(loaded.runner)
    luck = random.Random(1)
    prompt = tuple(luck.randrange(3, 97) for _ in range(100))
    changed = tuple(luck.randrange(3, 97) for _ in range(5))
    try:
        [*loaded.front.submit(Request("turn-0", prompt, GREEDY))]
        before, runner.prompt_len = runner.num_tokens, len(prompt + changed)
        [*loaded.front.submit(Request("turn-1", prompt + changed, GREEDY))]
    finally:
        loaded.front.close()
    assert runner.num_tokens - before == len(changed) + 1


def test_over_http_a_turn_computes_what_is_new(nano_server: Server) -> None:
    """Messages, the model's own template, and text that is tokenized again: as clients do it."""
    questions = [
        "Tell me of the king.", "And of his sons?", "Who built the house?", "What did the people say?",
        "Where did they go?", "How many were they?", "And the water?", "Who answered him?", "Why?", "Go on.",
    ]  # fmt: skip
    messages: list[dict[str, str]] = []
    prompt_len = reply_len = 0
    rows = []
    with OpenAI(base_url=nano_server.url + "/v1", api_key="none", max_retries=0) as client:
        for question in questions:
            messages.append({"role": "user", "content": question})
            answer = client.chat.completions.create(
                model="nano-hybrid",
                messages=messages,
                max_tokens=12,
                temperature=0,  # type: ignore[arg-type]
            )
            usage = answer.usage
            assert usage is not None
            assert usage.prompt_tokens_details is not None
            cached = usage.prompt_tokens_details.cached_tokens or 0
            new = usage.prompt_tokens - prompt_len - reply_len
            rows.append((usage.prompt_tokens, new, cached, usage.prompt_tokens - cached))
            prompt_len, reply_len = usage.prompt_tokens, usage.completion_tokens
            messages.append({"role": "assistant", "content": answer.choices[0].message.content or ""})
    assert len(rows) == NUM_TURNS
    assert rows[-1][0] > 100, "the chat is too short to show anything"
    for prompt_len, new, cached, prefilled in rows[1:]:
        assert 0 < cached < prompt_len
        assert prefilled <= new + 1 + BLOCK, rows
