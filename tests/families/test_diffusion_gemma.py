"""DiffusionGemma: what a whole engine writes is what the published loop writes, with the same noise."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from plait.llm.llm import LLM
from plait.request import SamplingParams
from tests.families import noisy_canvases
from tests.families.noisy_canvases import Oracle

PROMPTS = [[3, 4, 5], [*range(2, 40)], [7] * 16, [*range(50, 71)]]
OPTIONS: dict[str, Any] = dict(
    device="cpu", dtype="float32", max_model_len=128, startup_image="off", packed_cache="off"
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("diffusion_gemma")
    noisy_canvases.write(found)
    return found


@pytest.fixture(scope="module")
def model(folder: Path) -> Iterator[LLM]:
    with LLM(str(folder), **OPTIONS, max_num_seqs=4) as loaded:
        yield loaded


def likeliest(**more: Any) -> SamplingParams:
    return SamplingParams(**{"temperature": 0.0, "max_tokens": 21, "seed": 11, **more})


def test_texts_are_those_of_the_published_loop(folder: Path, model: LLM) -> None:
    oracle = Oracle(folder)
    wanted = [oracle.write(prompt, 21, 11) for prompt in PROMPTS]
    found = model.generate(PROMPTS, likeliest())
    assert [one.outputs[0].token_ids for one in found] == [tokens for tokens, _ in wanted]
    passes = [one.outputs[0].trace.num_steps for one in found]
    assert passes == [count for _, count in wanted]
    assert min(passes) < 18 <= max(passes), "some canvases end before the last pass, and some do not"
