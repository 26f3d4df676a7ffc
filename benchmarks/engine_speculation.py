"""Tokens per second of one stream: no drafts, prompt lookup, a draft model. The text must be the same.

The modes answer in turns. The first answer to every text warms up and does not count.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, closing
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from plait.config import EngineConfig
from plait.loading.build import Loaded, load
from plait.request import Event, Request, SamplingParams

CODE = """def mean(values):
    total = 0
    for value in values:
        total += value
    return total / len(value)

def variance(values):
    middle = mean(values)
    total = 0
    for value in values:
        total += (value - middle) ** 2
    return total / len(values)

def deviation(values):
    return variance(values) ** 0.5
"""
VERSE = "And God said, Let there be light: and there was light. And God saw the light, that it was good. "
TEXTS = {
    "code edit": ("Rename `total` to `amount` in this code, and print all of it again:\n\n" + CODE, ""),
    "chat": ("Tell me a story about a lighthouse and the two people who kept it.", ""),
}
# What a model that only knows one book can say.
BOOK = {
    "repetitive": ("", VERSE * 4),
    "plain": ("", "And it came to pass in those days, that the king"),
}


def rows(
    models: Mapping[str, Path], drafts: Mapping[str, str], *, threads: int, repeats: int, max_tokens: int
) -> list[dict[str, Any]]:
    """One row per model and text."""
    found = []
    for name, path in models.items():
        modes = ["off", "ngram", *([drafts[name]] if name in drafts else [])]
        with ExitStack() as stack:
            sides: dict[str, Loaded] = {}
            for mode in modes:
                config = EngineConfig(
                    device="cpu", threads=threads, max_num_seqs=2, prefix_cache=False, speculate=mode
                )
                loaded = load(str(path), config)
                stack.enter_context(closing(loaded.front))
                sides[mode if mode in ("off", "ngram") else "draft"] = loaded
            for text, prompt in prompts(name, sides["off"]).items():
                found.append(compared(name, text, sides, prompt, repeats, max_tokens))
    return found


def prompts(name: str, loaded: Loaded) -> dict[str, tuple[int, ...]]:
    """Token ids by kind of text; the last one is random ids in no language."""
    front, found = loaded.front, {}
    greedy = SamplingParams(max_tokens=1)
    for kind, (question, text) in (BOOK if name.startswith("nano") else TEXTS).items():
        if question and front.chat_template:
            asked = front.prepare_chat([{"role": "user", "content": question}], greedy)
        else:
            asked = front.prepare(text or question, greedy)
        found[kind] = asked.prompt_token_ids
    luck = random.Random(0)
    found["random"] = tuple(luck.randrange(3, front.spec.vocab_size) for _ in range(64))
    return found


def compared(
    name: str,
    text: str,
    sides: Mapping[str, Loaded],
    prompt: Sequence[int],
    repeats: int,
    max_tokens: int,
) -> dict[str, Any]:
    """All modes on one text; greedy, but random text is drawn from the whole distribution."""
    speeds: dict[str, list[float]] = {mode: [] for mode in sides}
    counts = {mode: _counts(side) for mode, side in sides.items()}
    first = next(iter(sides.values())).front
    max_tokens = min(max_tokens, first.max_model_len - len(prompt) - 1)
    for number in range(repeats + 1):
        replies = {}
        for mode in [*sides] if number % 2 else [*sides][::-1]:
            replies[mode], speed = answer(sides[mode], prompt, max_tokens, hot=text == "random")
            speeds[mode].append(speed)
        if any(reply != replies["off"] for reply in replies.values()):
            raise SystemExit(f"{name}, {text}: drafts changed the text, so nothing is measured")
    row: dict[str, Any] = {"model": name, "text": text, "tokens": max_tokens}
    plain = speeds["off"][1:]
    for mode in ("off", "ngram", "draft"):
        if mode not in sides:
            row |= {f"{mode} tok/s": None, f"{mode} ratio": None, f"{mode} accepted": None}
            continue
        own = speeds[mode][1:]
        row[f"{mode} tok/s"] = round(statistics.median(own), 1)
        if mode != "off":
            drafted, accepted = (a - b for a, b in zip(_counts(sides[mode]), counts[mode], strict=True))
            row[f"{mode} ratio"] = round(statistics.median(a / b for a, b in zip(own, plain, strict=True)), 2)
            row[f"{mode} accepted"] = f"{accepted} of {drafted}"
    return row


def answer(loaded: Loaded, prompt: Sequence[int], max_tokens: int, *, hot: bool) -> tuple[list[int], float]:
    """(reply, tokens per second after the first)."""
    params = SamplingParams(
        **dict(top_p=1.0, top_k=0, min_p=0.0, repetition_penalty=1.0, seed=1, ignore_eos=True),
        temperature=1.0 if hot else 0.0,
        max_tokens=max_tokens,
    )
    events: SimpleQueue[tuple[float, Event]] = SimpleQueue()
    loaded.front.loop.submit(
        Request("answer", tuple(prompt), params), lambda event: events.put((time.perf_counter(), event))
    )
    reply, first = list[int](), 0.0
    while True:
        at, event = events.get()
        if event.error:
            raise event.error
        if not reply:
            first, begun = at, len(event.token_ids)
        reply += event.token_ids
        if event.finish_reason:
            return reply, (len(reply) - begun) / (at - first)


def _counts(loaded: Loaded) -> tuple[int, int]:
    metrics = loaded.front.loop.engine.metrics
    return metrics.num_drafted_tokens, metrics.num_accepted_tokens
