"""Published models, read from the GGUF files that people have: the text of transformers, token by token."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from plait import LLM, SamplingParams

PROMPTS = [
    "The capital of France is",
    "def fibonacci(n):\n    ",
    "Once upon a time, in a small village by the sea,",
]
GREEDY = SamplingParams(max_tokens=64, temperature=0.0, ignore_eos=True)


@pytest.fixture(scope="module", params=["smollm2", "gemma3"])
def model(request: pytest.FixtureRequest) -> Path:
    path: Path = request.getfixturevalue(request.param)
    return path


@pytest.fixture(scope="module")
def llm(model: Path) -> Iterator[LLM]:
    with LLM(str(model), device="cpu", max_model_len=512) as loaded:
        yield loaded


def test_greedy_text_equals_transformers_reading_the_same_file(model: Path, llm: LLM) -> None:
    oracle = AutoModelForCausalLM.from_pretrained(
        model.parent, gguf_file=model.name, dtype=torch.float32
    ).eval()
    results = llm.generate(PROMPTS, GREEDY)
    for result in results:
        ids = torch.tensor([result.prompt_token_ids])
        with torch.inference_mode():
            want = oracle.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=64,
                min_new_tokens=64,
                do_sample=False,
            )[0, ids.shape[1] :]
        assert result.outputs[0].token_ids == want.tolist(), result.prompt


def test_chat_makes_sense(llm: LLM) -> None:
    question = [{"role": "user", "content": "What is the capital of France? Answer in one sentence."}]
    answer = llm.chat(question, SamplingParams(max_tokens=40, temperature=0.0))[0].outputs[0]
    assert "Paris" in answer.text
    assert answer.finish_reason == "stop"
    assert "<" not in answer.text  # no control token is shown
