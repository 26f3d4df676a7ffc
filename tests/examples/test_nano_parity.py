"""Plait computes the nano hybrid as the model that was trained does; the two share no code."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from nano_hybrid import checkpoint
from tokenizers import Tokenizer

from plait import LLM, SamplingParams

VERSE = "And it came to pass in those days, that there went out a decree from Caesar Augustus, that all"
ASKED = "<|user|>Tell me of David.<|assistant|>"


@pytest.mark.parametrize("prompt", [VERSE, ASKED], ids=["text", "chat"])
def test_logits_agree_with_the_trained_model(nano_hybrid: Path, prompt: str) -> None:
    ids = Tokenizer.from_file(str(nano_hybrid / "tokenizer.json")).encode(prompt).ids
    expected = checkpoint.load_model(nano_hybrid).logits(ids)
    with LLM(str(nano_hybrid), dtype="float32", device="cpu", precise=True) as llm:
        found = llm.logits(ids)
    assert found.shape == expected.shape
    torch.testing.assert_close(found, expected, rtol=2e-4, atol=2e-4)


def test_logits_agree_over_many_chunks(nano_hybrid: Path) -> None:
    """200 ids cross several chunks of the recurrence; any ids will do."""
    ids = torch.randint(4, 4000, (200,)).tolist()
    expected = checkpoint.load_model(nano_hybrid).logits(ids)
    with LLM(str(nano_hybrid), dtype="float32", device="cpu", precise=True) as llm:
        torch.testing.assert_close(llm.logits(ids), expected, rtol=2e-4, atol=2e-4)


def test_greedy_generation_follows_the_trained_model(nano_hybrid: Path) -> None:
    """Token by token, through cached state, Plait picks what the trained model ranks first."""
    model = checkpoint.load_model(nano_hybrid)
    ids = Tokenizer.from_file(str(nano_hybrid / "tokenizer.json")).encode(VERSE).ids
    with LLM(str(nano_hybrid), dtype="float32", device="cpu", precise=True) as llm:
        output = llm.generate([ids], SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True))[0]
    drawn = list(output.outputs[0].token_ids)
    assert len(drawn) == 24
    logits = model.logits(ids + drawn)[len(ids) - 1 : -1]
    chosen = logits.gather(1, torch.tensor(drawn)[:, None])[:, 0]
    torch.testing.assert_close(chosen, logits.max(-1).values, rtol=1e-3, atol=1e-3)
