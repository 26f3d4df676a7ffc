"""Published models, read from the GGUF files that people have: the text of transformers, token by token."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from plait import LLM, SamplingParams
from plait.errors import BadTemplate

PROMPTS = [
    "The capital of France is",
    "def fibonacci(n):\n    ",
    "Once upon a time, in a small village by the sea,",
]
GREEDY = SamplingParams(max_tokens=64, temperature=0.0, ignore_eos=True)


# transformers takes a minute to read Gemma's 262,144 rows.
@pytest.fixture(scope="module", params=["smollm2", pytest.param("gemma3", marks=pytest.mark.slow)])
def model(request: pytest.FixtureRequest) -> Path:
    path: Path = request.getfixturevalue(request.param)
    return path


@pytest.fixture(scope="module")
def llm(model: Path) -> Iterator[LLM]:
    """With `precise`: transformers does not round activations, and its text is the measure here."""
    with LLM(str(model), device="cpu", max_model_len=512, precise=True) as loaded:
        yield loaded


@pytest.mark.slow  # most of its time transformers reads the file
def test_greedy_text_equals_transformers_reading_the_same_file(model: Path, llm: LLM) -> None:
    """Token by token, and once by transformers' own `generate`; sixty-four tokens, whatever they are."""
    oracle = AutoModelForCausalLM.from_pretrained(
        model.parent, gguf_file=model.name, dtype=torch.float32
    ).eval()
    oracle.generation_config.eos_token_id = None
    for result in llm.generate(PROMPTS, GREEDY):
        prompt, reply = result.prompt_token_ids, result.outputs[0].token_ids
        assert len(reply) == 64
        with torch.inference_mode():
            logits = oracle(torch.tensor([prompt + reply[:-1]])).logits[0, len(prompt) - 1 :]
        assert reply == logits.argmax(-1).tolist(), result.prompt
    ids = torch.tensor([prompt])  # with its cache, which changes nothing but the time it takes: the last one
    with torch.inference_mode():
        want = oracle.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=64, do_sample=False)
    assert reply == want[0, len(prompt) :].tolist(), result.prompt


def test_chat_makes_sense(smollm2: Path) -> None:
    question = [{"role": "user", "content": "What is the capital of France? Answer in one sentence."}]
    with LLM(str(smollm2), device="cpu", max_model_len=512) as llm:
        answer = llm.chat(question, SamplingParams(max_tokens=40, temperature=0.0))[0].outputs[0]
    assert "Paris" in answer.text
    assert answer.finish_reason == "stop"
    assert "<" not in answer.text  # no control token is shown


@pytest.mark.sampled(2, across="heavy")
def test_a_model_without_a_chat_format_says_so(gemma3: Path) -> None:
    """The packaged Gemma 3 270M is the pretrained one: it continues text and has no chat template."""
    with LLM(str(gemma3), device="cpu", max_model_len=512) as llm:
        with pytest.raises(BadTemplate, match=r"has no chat template.*--chat-template"):
            llm.chat([{"role": "user", "content": "Hello"}])
        out = llm.generate("The capital of France is", SamplingParams(max_tokens=8, temperature=0.0))[0]
        assert "capital" in out.outputs[0].text
