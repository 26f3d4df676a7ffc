"""One model, measured in a process of its own; prints one JSON object.

Nothing is printed before the output is checked: the greedy text with the fastest ops must be the text of the
reference ops, and sixteen requests at once must each get what they get alone. Run by `run.py`.
"""

from __future__ import annotations

import argparse
import json
import resource
import sys
import time
from collections.abc import Callable
from statistics import median
from typing import Any

from plait import LLM, SamplingParams

MANY, REPEATS = 16, 3
TEXT = (
    "The tide went out in the night and left the harbour dry. Boats lay on their sides in the mud, and the "
    "fishermen walked among them with lanterns, looking for what the sea had given back. "
)


class WrongOutput(Exception):
    """Numbers of a model that says something else would mean nothing."""


def greedy(max_tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)


def prompt_ids(llm: LLM, length: int, offset: int = 0) -> list[int]:
    """A prompt of exactly `length` tokens of English; `offset` makes it another one."""
    if llm.front.tokenizer is None:
        raise WrongOutput("a benchmark needs a tokenizer")
    return llm.front.tokenizer.encode(TEXT[offset:] + TEXT * (length // 8 + 1))[:length]


def texts(llm: LLM, prompts: list[list[int]], max_tokens: int) -> list[list[int]]:
    return [out.outputs[0].token_ids for out in llm.generate(prompts, greedy(max_tokens))]


def check(llm: LLM, model: str, options: dict[str, Any]) -> dict[str, bool]:
    """Compare with the reference ops, and sixteen at once with one at a time. Raises WrongOutput."""
    prompts = [prompt_ids(llm, 8 + 3 * i, i) for i in range(MANY)]
    alone = [texts(llm, [prompt], 24)[0] for prompt in prompts]
    if texts(llm, prompts, 24) != alone:
        raise WrongOutput(f"{model}: requests that share a batch get another text than alone")
    with LLM(model, **{**options, "ops": "reference"}) as reference:
        if texts(reference, prompts[:4], 24) != alone[:4]:
            raise WrongOutput(f"{model}: the fastest ops write another text than the reference ops")
    return {"batch_equals_single": True, "fastest_equals_reference": True}


def timed(llm: LLM, prompt: list[int], max_tokens: int) -> tuple[float, float, int]:
    """(seconds to the first token, seconds from there to the last, output tokens)."""
    started, first, last, count = time.perf_counter(), 0.0, 0.0, 0
    for delta in llm.stream(prompt, greedy(max_tokens)):
        if delta.num_tokens > count:
            count, last = delta.num_tokens, time.perf_counter()
            first = first or last
    return first - started, last - first, count


def best(measure: Callable[[], float]) -> float:
    """The median of a few runs, after one to warm up."""
    measure()
    return median(measure() for _ in range(REPEATS))


def speeds(llm: LLM, prefill: int, decode: int) -> dict[str, Any]:
    long, short = prompt_ids(llm, prefill), prompt_ids(llm, 16)

    def decode_rate() -> float:
        _, seconds, count = timed(llm, short, decode)
        return (count - 1) / seconds

    def throughput() -> float:
        prompts = [prompt_ids(llm, 32, i) for i in range(MANY)]
        started = time.perf_counter()
        count = sum(len(ids) for ids in texts(llm, prompts, 32))
        return count / (time.perf_counter() - started)

    ttft = best(lambda: timed(llm, long, 1)[0])
    return {
        "prefill_tok_s": round(prefill / ttft, 1),
        "ttft_ms": round(1000 * best(lambda: timed(llm, short, 1)[0]), 1),
        f"ttft_{prefill}_ms": round(1000 * ttft, 1),
        "decode_tok_s": round(best(decode_rate), 1),
        f"throughput_{MANY}_tok_s": round(best(throughput), 1),
    }


def rss_mib() -> float:
    """The most memory this process has held so far."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return round(peak / (2**20 if sys.platform == "darwin" else 2**10), 0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument(
        "--started", type=float, required=True, help="time.time() when this process was started"
    )
    parser.add_argument("--prefill", type=int, default=256)
    parser.add_argument("--decode", type=int, default=64)
    parser.add_argument("--threads", type=int)
    given = parser.parse_args()
    options = {"device": "cpu", "threads": given.threads}
    with LLM(given.model, **options) as llm:
        startup_s = time.time() - given.started
        result = {"startup_s": round(startup_s, 2), "loaded_rss_mib": rss_mib()}
        result |= speeds(llm, given.prefill, given.decode)
        result["peak_rss_mib"] = rss_mib()
        result["checks"] = check(llm, given.model, options)
    print(json.dumps(result))


if __name__ == "__main__":
    main()
