"""HRM-Text as it is published: each token of a prompt sees all of it, and a reply what is before it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
import transformers
from torch import Tensor

from plait.ops.full_attention import full_attention
from plait.runner.steps.inputs import build_batch
from plait.schedule.plan import Chunk, StepPlan
from plait.spec.model import AttentionSpec
from tests.families import tiny
from tests.families.parity import CPU, Memory, Session, decoder, resolved, whole, worst
from tests.families.test_served import random_prompts, streamed, watched

PREFIX = replace(tiny.VARIANTS["hrm_text"], changes={**tiny.VARIANTS["hrm_text"].changes, "prefix_lm": True})


def oracle_of(folder: Path) -> torch.nn.Module:
    model = transformers.AutoModelForCausalLM
    return model.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()


def with_prompt(oracle: torch.nn.Module, ids: Tensor, prompt: int) -> Tensor:
    kinds = (torch.arange(len(ids)) < prompt).long()
    with torch.inference_mode():
        logits: Tensor = oracle(ids[None], token_type_ids=kinds[None], use_cache=False).logits[0]
    return logits


@pytest.mark.slow
@pytest.mark.parametrize("prompt", [1, 9, 23])
def test_prompts_are_seen_as_a_whole_as_in_transformers(prompt: int, tmp_path: Path) -> None:
    tiny.write("hrm_prefix", tmp_path, PREFIX)
    config, tensors, found = tiny.read(tmp_path)
    memory, ids = Memory(tensors), found["ids"][0]
    built = resolved(memory, config)
    assert not built.spec.causal
    assert {m.both_ways for m in built.spec.mixers_of(AttentionSpec)} == {"prompt"}
    session = Session(decoder(built, memory))
    chunk = Chunk(0, 0, tuple(ids.tolist()), (), 0, len(ids), prompt=prompt)
    batch = build_batch(StepPlan(0, (chunk,)), session.groups, 4, CPU)
    with torch.inference_mode():
        got = session.model(batch, session.store)
    oracle = oracle_of(tmp_path)
    assert worst(got, with_prompt(oracle, ids, prompt)) <= 1e-4
    alone = whole(session.model, ids)  # a text without a prompt is read in its order
    with torch.inference_mode():
        assert worst(alone, oracle(ids[None], use_cache=False).logits[0]) <= 1e-4


@pytest.mark.slow
def test_replies_are_those_of_transformers_when_each_step_has_the_whole_sequence(tmp_path: Path) -> None:
    tiny.write("hrm_prefix", tmp_path, PREFIX)
    prompts = random_prompts(97)
    with watched(tmp_path, max_num_batched_tokens=96) as (seen, client):
        replies = streamed(client, prompts)
    starts = {chunk.start for plan in seen.plans for chunk in plan.chunks}
    assert starts == {0}
    oracle = oracle_of(tmp_path)
    for prompt, reply in zip(prompts, replies, strict=True):
        logits = with_prompt(oracle, torch.tensor(prompt + reply), len(prompt))[len(prompt) - 1 : -1]
        chosen = logits.gather(1, torch.tensor(reply)[:, None])[:, 0]
        assert float((logits.max(-1).values - chosen).max()) <= 1e-4


def test_tokens_behind_a_prompt_see_what_is_before_them() -> None:
    q, k = torch.randn(2, 7, 1, 8)
    v = torch.eye(7)[:, None]
    starts, prompts = torch.tensor([0, 5, 7]), torch.tensor([3, 0])
    weights = full_attention(q[..., :7], k[..., :7], v, starts, 1.0, prompts=prompts)[:, 0]
    seen = torch.tensor([[1, 1, 1, 0, 0], [1, 1, 1, 0, 0], [1, 1, 1, 0, 0], [1, 1, 1, 1, 0], [1] * 5])
    assert torch.equal((weights[:5, :5] > 0).long(), seen)
    assert torch.equal((weights[5:, 5:] > 0).long(), torch.tensor([[1, 0], [1, 1]]))
