"""Beam search and classifier-free guidance through `LLM`, compared with transformers on tiny models."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from plait import LLM, BeamSearchParams, SamplingParams
from plait.errors import InvalidField
from tests.families import tiny

PROMPTS = ([3, 14, 15, 92, 65, 35], [89, 79, 32, 38, 46, 26, 43, 38, 32, 79, 50, 28, 84], [7])
ENDS = (5, 9, 17, 40)
DRAWN = ("llama", "bamba")


@pytest.fixture(
    scope="module",
    params=[
        *(pytest.param(name, marks=pytest.mark.drawn(name, DRAWN)) for name in DRAWN),
        pytest.param("qwen3_next", marks=pytest.mark.slow),
    ],
)
def both(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[LLM, Any]]:
    """A tiny model here and there: attention alone, and two hybrids."""
    folder: Path = tmp_path_factory.mktemp(request.param)
    tiny.write(request.param, folder)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    options = {"dtype": "float32", "kv_dtype": "auto", "block_size": 4, "snapshot_interval": 8}
    with LLM(str(folder), device="cpu", max_num_seqs=8, max_num_batched_tokens=16, **options) as ours:
        yield ours, theirs


def their_beams(
    model: Any, prompt: list[int], width: int, count: int, **more: Any
) -> list[tuple[list[int], float]]:
    found = model.generate(
        torch.tensor([prompt]),
        num_beams=width,
        num_return_sequences=width,
        max_new_tokens=count,
        do_sample=False,
        use_cache=False,
        eos_token_id=list(ENDS),
        pad_token_id=96,
        output_scores=True,
        return_dict_in_generate=True,
        **more,
    )
    texts = []
    for ids, score in zip(found.sequences.tolist(), found.sequences_scores.tolist(), strict=True):
        text = ids[len(prompt) :]
        end = next((i for i, token in enumerate(text) if token in ENDS), len(text))
        texts.append((text[:end], score))
    return texts


@pytest.mark.parametrize(
    "more",
    [
        {},
        pytest.param({"early_stopping": True}, marks=pytest.mark.slow),
        {"early_stopping": "never", "length_penalty": 2.0},
        pytest.param({"length_penalty": 0.0}, marks=pytest.mark.slow),
        {"length_penalty": -1.5, "early_stopping": "never"},
    ],
)
def test_beams_are_those_of_transformers(both: tuple[LLM, Any], more: dict[str, Any]) -> None:
    ours, theirs = both
    params = BeamSearchParams(beam_width=4, max_tokens=12, stop_token_ids=ENDS, ignore_eos=True, **more)
    found = ours.beam_search(list(PROMPTS), params)  # together, so that their beams share steps
    for prompt, output in zip(PROMPTS, found, strict=True):
        expected = their_beams(theirs, prompt, 4, 12, **more)
        assert [one.tokens for one in output.sequences] == [[*prompt, *text] for text, _ in expected]
        for one, (text, score) in zip(output.sequences, expected, strict=True):
            if one.finish_reason == "length":
                assert math.isclose(one.cum_logprob / len(text) ** params.length_penalty, score, rel_tol=1e-3)
            assert len(one.logprobs) == len(text)


def test_a_beam_of_one_is_greedy(both: tuple[LLM, Any]) -> None:
    ours, _ = both
    greedy = SamplingParams(max_tokens=10, temperature=0.0, ignore_eos=True)
    beam = SamplingParams(max_tokens=10, use_beam_search=True, ignore_eos=True)
    for prompt in PROMPTS:
        texts = [ours.generate(prompt, params)[0].outputs[0].token_ids for params in (greedy, beam)]
        assert texts[0] == texts[1]


@pytest.mark.parametrize("negative", [None, [1, 2, 3, 4]])
@pytest.mark.parametrize("scale", [0.5, pytest.param(1.5, marks=pytest.mark.slow), 4.0])
def test_guidance_is_that_of_transformers(
    both: tuple[LLM, Any], scale: float, negative: list[int] | None
) -> None:
    ours, theirs = both
    for prompt in PROMPTS:
        expected = theirs.generate(
            torch.tensor([prompt]),
            guidance_scale=scale,
            negative_prompt_ids=None if negative is None else torch.tensor([negative]),
            max_new_tokens=10,
            do_sample=False,
            use_cache=False,
            eos_token_id=None,
            pad_token_id=96,
        )[0].tolist()
        params = SamplingParams(
            max_tokens=10, temperature=0.0, ignore_eos=True, guidance_scale=scale, negative_prompt=negative
        )
        assert ours.generate(prompt, params)[0].outputs[0].token_ids == expected[len(prompt) :]


def test_guided_choices_and_beams_are_the_same_alone_and_with_others(both: tuple[LLM, Any]) -> None:
    ours, _ = both
    drawn = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "seed": 5, "ignore_eos": True, "max_tokens": 14}
    given = [
        SamplingParams(**drawn, n=2, guidance_scale=2.0, negative_prompt=[1, 2]),
        SamplingParams(use_beam_search=True, beam_width=3, n=2, max_tokens=14, ignore_eos=True),
        SamplingParams(**drawn, mirostat=2, guidance_scale=1.5),
        SamplingParams(**drawn, presence_penalty=1.0, logprobs=2),
    ]
    alone = [ours.generate(PROMPTS[1], params)[0].outputs for params in given]
    together = ours.generate([PROMPTS[1]] * 8, [*given, *given])
    assert [one.outputs for one in together] == [*alone, *alone]


@pytest.mark.parametrize(
    ("more", "param"),
    [
        ({"use_beam_search": True, "temperature": 0.7}, "temperature"),
        ({"use_beam_search": True, "stop": "x"}, "stop"),
        ({"use_beam_search": True, "guidance_scale": 2.0}, "guidance_scale"),
        ({"use_beam_search": True, "min_tokens": 2}, "min_tokens"),
        ({"use_beam_search": True, "logit_bias": {1: 2.0}}, "logit_bias"),
        ({"use_beam_search": True, "xtc_probability": 0.5}, "xtc_probability"),
        ({"use_beam_search": True, "beam_width": 9}, "beam_width"),
        ({"use_beam_search": True, "n": 9}, "n"),
        ({"use_beam_search": True, "max_tokens": 0}, "max_tokens"),
        ({"beam_width": 2}, "beam_width"),
        ({"early_stopping": True}, "early_stopping"),
        ({"length_penalty": 2.0}, "length_penalty"),
        ({"negative_prompt": "no"}, "negative_prompt"),
        ({"negative_prompt": [1, -1], "guidance_scale": 2.0}, "negative_prompt"),
        ({"negative_prompt": "no", "guidance_scale": 2.0}, "negative_prompt"),
    ],
)
def test_fields_that_do_not_go_together_are_refused_by_name(
    both: tuple[LLM, Any], more: dict[str, Any], param: str
) -> None:
    with pytest.raises(InvalidField) as raised:
        both[0].generate([1, 2], SamplingParams(**more))
    assert raised.value.param == param
