"""Compares models on the stand-in for CUDA with torch's references on a CPU: tokens and log-probabilities.

    python tools/cuda_stand_in/run.py --lazy --compare -- kv_dtype=int8 MODEL ...

Arguments with `=` are options of `plait.LLM`, for both. Kernels are bound untried. Prompts of several lengths
run together, in chunks, and then again, longer: from the prefix cache. They compute in float32, and keep
keys and values in it, unless an option says otherwise: then rounding may be a difference.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

import plait.loading.build as build
import plait.loading.draft_model as draft_model
from plait import LLM, SamplingParams
from plait.config import EngineConfig
from plait.errors import PlaitError
from plait.llm.outputs import RequestOutput, TokenLogprobs
from plait.option_fields import option_types

SMALL = {
    "dtype": "float32",
    "kv_dtype": "float32",  # auto rounds keys and values to bfloat16 if weights are stored in fewer bits
    "max_model_len": 64,
    "max_num_seqs": 2,
    "max_num_batched_tokens": 16,
    "swap_memory": 1 << 20,
}
REFERENCE = {"device": "cpu", "ops": "reference", "threads": 1}
LENGTHS, REPLY = (1, 21, 34), 4  # tokens of the prompts, and of each reply
NEAR = 1e-3  # of log-probabilities: what sums in another order leave in float32
GREEDY: dict[str, Any] = {
    "max_tokens": REPLY,
    "ignore_eos": True,
    "logprobs": 1,
    "seed": 5,
    "temperature": 0.0,
}
PARAMS = (
    SamplingParams(**GREEDY),
    SamplingParams(**GREEDY | {"repetition_penalty": 1.3, "prompt_logprobs": 1}),
    SamplingParams(**GREEDY | {"temperature": 0.8, "top_k": 20}),
)


def read_options(arguments: Sequence[str]) -> tuple[dict[str, Any], list[str]]:
    """Options of `plait.LLM`, and the models."""
    kinds, options, models = option_types(EngineConfig), {}, []
    for argument in arguments:
        name, is_option, value = argument.partition("=")
        if is_option and name in kinds:
            kind = kinds[name][0]
            options[name] = (
                value == "True" if kind is bool else kind(value) if kind in (int, float) else value
            )
        else:
            models.append(argument)
    return options, models


def generate(model: str, options: dict[str, Any]) -> list[RequestOutput]:
    """Replies to the prompts, and to each of them with what was replied."""
    with LLM(model, **options) as llm:
        draw = torch.Generator().manual_seed(3)
        most = llm.spec.vocab_size
        prompts = [torch.randint(3, most, (length,), generator=draw).tolist() for length in LENGTHS]
        first = llm.generate(prompts, PARAMS)
        longer = [prompt + out.outputs[0].token_ids for prompt, out in zip(prompts, first, strict=True)]
        return first + llm.generate(longer, PARAMS)


def find_differences(found: Sequence[RequestOutput], expected: Sequence[RequestOutput]) -> Iterator[str]:
    """What differs of replies, a line for each. A reply is compared up to its first other token."""
    for number, (one, two) in enumerate(zip(found, expected, strict=True)):
        if one.num_cached_tokens != two.num_cached_tokens:
            yield f"request {number}: {one.num_cached_tokens} tokens cached, not {two.num_cached_tokens}"
        ours, theirs = one.outputs[0], two.outputs[0]
        pairs = list(zip(one.prompt_logprobs or (), two.prompt_logprobs or (), strict=True))
        for at, (a, b) in enumerate(zip(ours.token_ids, theirs.token_ids, strict=True)):
            if a != b:
                yield f"request {number}, token {at}: {ours.token_ids}, not {theirs.token_ids}"
                break
            pairs.append(((ours.logprobs or ())[at], (theirs.logprobs or ())[at]))
        off = max((measure_distance(x, y) for x, y in pairs if x and y), default=0.0)
        if not off <= NEAR:
            yield f"request {number}: a log-probability is {off:.2g} off"


def measure_distance(one: TokenLogprobs, two: TokenLogprobs) -> float:
    """How far the log-probabilities of the same tokens are apart at most."""
    shared = one.keys() & two.keys()
    return max((abs(one[token].logprob - two[token].logprob) for token in shared), default=0.0)


def main() -> int:
    options, models = read_options(sys.argv[1:])
    build.try_kernels = draft_model.try_kernels = lambda target, *_: target.chip  # type: ignore[assignment]
    complaints, failed = Path(os.environ["CUDA_STAND_IN_COMPLAINTS"]), False
    for model in models:
        try:
            expected = generate(model, SMALL | options | REFERENCE)
            lines = list(find_differences(generate(model, SMALL | options | {"device": "cuda"}), expected))
        except PlaitError as error:
            lines = [str(error)]
        print(f"{model}: {'; '.join(lines) or 'equal'}", flush=True)
        failed |= bool(lines)
        if complaints.exists():
            break  # every later call of CUDA may fail
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
