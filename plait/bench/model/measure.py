"""What is measured, on which prompts, in which unit, and how the numbers of several sides are compared."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any, Literal, Protocol
from zlib import crc32

from plait.bench.machine import Foreign
from plait.bench.model.bandwidth import Probe
from plait.bench.model.compare import Cannot, Side

Kind = Literal["decode", "prefill", "ttft", "batch", "requests"]
KINDS: tuple[Kind, ...] = ("decode", "prefill", "ttft", "batch", "requests")
SETTLE_S = 0.02  # threads of the side before stop spinning
PROMPT_OF_BATCH = 128
TEXT = (
    "The tide went out in the night and left the harbour dry. Boats lay on their sides in the mud, and the "
    "fishermen walked among them with lanterns, looking for what the sea had given back. A child found a "
    "bell that nobody had heard for forty years, and by noon the "
    "whole town knew which ship it had belonged to. "
)


@dataclass(frozen=True, slots=True)
class Measure:
    """One number to find. `size`: tokens before the first new one, or, for batch and requests, sequences."""

    kind: Kind
    level: Literal["runner", "llm"]
    size: int
    tokens: int = 0  # new ones of each sequence
    prompt: int = 0  # tokens of each prompt of a batch

    @property
    def unit(self) -> str:
        return "ms" if self.kind == "ttft" else "tok/s"

    @property
    def title(self) -> str:
        """In words, like 'decode, context 128'."""
        match self.kind:
            case "decode":
                return f"decode, context {self.size}"
            case "prefill":
                return f"prefill, {self.size} tokens"
            case "ttft":
                return f"first token, prompt of {self.size}"
            case "batch":
                return f"decode, batch {self.size}, context {self.prompt}"
            case "requests":
                return f"{self.size} requests at once, {self.prompt} + {self.tokens} tokens"

    @property
    def length(self) -> int:
        """Tokens of its longest sequence."""
        return (self.prompt or self.size) + self.tokens + 1


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasureSizes:
    """The sizes to try. What is longer than the model's context is cut to it, equal ones are tried once."""

    kinds: Sequence[Kind] = KINDS
    contexts: Sequence[int] = (20, 128, 512, 1000)
    lengths: Sequence[int] = (128, 512, 2048)
    prompts: Sequence[int] = (16, 512)
    batches: Sequence[int] = (1, 4, 16, 64)
    requests: int = 16
    tokens: int = 32
    repeats: int = 3

    def measures(self, max_len: int, canvas: int = 0) -> list[Measure]:
        """Everything to measure on a model of `max_len` tokens that writes whole canvases, if it does.

        A stream of canvases has no time per token: its decode is timed step by step only.
        """
        tokens = max(1, min(self.tokens, max_len // 4))
        if canvas:
            tokens = -(-tokens // canvas) * canvas
        room = max_len - tokens - 1
        half = max(1, min(PROMPT_OF_BATCH, (max_len - 1) // 2))
        found: dict[Kind, list[Measure]] = {
            "decode": [Measure("decode", "runner", n, tokens) for n in cap_sizes(self.contexts, room)]
            + [Measure("decode", "llm", n, tokens) for n in cap_sizes((128,), room) if not canvas],
            "prefill": [Measure("prefill", "runner", n) for n in cap_sizes(self.lengths, max_len - 1)],
            "ttft": [Measure("ttft", "llm", n) for n in cap_sizes(self.prompts, max_len - 1)],
            "batch": [Measure("batch", "runner", n, tokens, min(half, room)) for n in unique(self.batches)],
            "requests": [Measure("requests", "llm", self.requests, half, half)],
        }
        return [measure for kind in self.kinds for measure in found[kind]]


def cap_sizes(sizes: Sequence[int], most: int) -> list[int]:
    return unique([max(1, min(size, most)) for size in sizes])


def unique(sizes: Sequence[int]) -> list[int]:
    return list(dict.fromkeys(sizes))


@dataclass(slots=True)
class Row:
    """One measure on every side: the values of all turns, and what was observed meanwhile."""

    measure: Measure
    values: dict[str, list[float]] = field(default_factory=dict)
    cannot: dict[str, str] = field(default_factory=dict)
    probe_gb_s: list[float] = field(default_factory=list)
    foreign_cpu: float | None = None

    def ratio(self, ours: str, other: str) -> float | None:
        """How many times better `ours` is: the median over turns, each side by side; above 1 is better."""
        pairs = list(zip(self.values.get(ours, []), self.values.get(other, []), strict=False))
        if not pairs:
            return None
        is_time = self.measure.unit == "ms"
        return median(b / a if is_time else a / b for a, b in pairs)

    def best(self, name: str) -> float:
        return (min if self.measure.unit == "ms" else max)(self.values[name])

    def plain(self, ours: str, roofs: Mapping[str, float]) -> dict[str, Any]:
        """As JSON. `roofs`: bytes of weights a token reads, by side; decode of one sequence has a roof."""
        m, bandwidth = self.measure, median(self.probe_gb_s)
        sides: dict[str, dict[str, Any]] = {}
        for name, values in self.values.items():
            middle = median(values)
            sides[name] = {"median": round_number(middle), "best": round_number(self.best(name))}
            sides[name]["values"] = [round_number(value) for value in values]
            if m.kind == "decode" and name in roofs:
                sides[name]["roof_share"] = round_number(middle * roofs[name] / (bandwidth * 1e9))
        ratios = {name: self.ratio(ours, name) for name in self.values if name != ours}
        return {
            "measure": m.kind,
            "level": m.level,
            "size": m.size,
            "tokens": m.tokens,
            "prompt": m.prompt,
            "title": m.title,
            "unit": m.unit,
            "probe_gb_s": round_number(bandwidth),
            "foreign_cpu": self.foreign_cpu,
            "sides": sides,
            "cannot": self.cannot,
            "ratios": {name: round_number(ratio) for name, ratio in ratios.items() if ratio is not None},
        }


def round_number(value: float) -> float:
    """Four significant digits."""
    return float(f"{value:.4g}")


def take_turns(
    measure: Measure, sides: Sequence[Side], prompts: Prompts, repeats: int, probe: Probe | None = None
) -> Row:
    """Measure A B A B …, after one turn to warm up, with a probe of memory bandwidth next to each turn."""
    row, foreign = Row(measure), Foreign([os.getpid(), *(side.pid for side in sides)])
    for turn in range(repeats + 1):
        if probe is not None and turn:
            row.probe_gb_s.append(probe.read())
        for side in sides:
            if side.name in row.cannot:
                continue
            time.sleep(SETTLE_S)
            try:
                value = one(measure, side, prompts, turn)
            except Cannot as error:
                row.cannot[side.name] = str(error).removeprefix(f"{side.name}: ")
                continue
            if turn:
                row.values.setdefault(side.name, []).append(value)
    row.foreign_cpu = foreign.share()
    row.probe_gb_s = row.probe_gb_s or [0.0]
    return row


def one(measure: Measure, side: Side, prompts: Prompts, turn: int) -> float:
    """One number of one side. Every turn of every measure has its own text, so that no prefix is cached."""
    m, own = measure, crc32(f"{measure.kind}/{measure.level}/{measure.size}".encode()) % 90_000 * 1000
    if m.kind in ("decode", "prefill", "ttft"):
        given: dict[str, Any] = {"ids": prompts(m.size, own + turn), "level": m.level}
        if m.kind == "decode":
            return m.tokens / float(side.ask("decode", tokens=m.tokens, **given))
        seconds = float(side.ask("prefill", **given))
        return 1000 * seconds if m.kind == "ttft" else m.size / seconds
    many = [prompts(m.prompt, own + turn * m.size + i) for i in range(m.size)]
    done = side.ask("batch", prompts=many, tokens=m.tokens, level=m.level)
    if m.kind == "requests":
        return float(done["tokens"] / done["seconds"])
    if not done.get("decode_tokens"):
        raise Cannot(f"{side.name}: it never decodes {m.size} sequences at once; raise --max-num-seqs")
    return float(done["decode_tokens"] / done["decode_seconds"])


class Encodes(Protocol):
    def encode(self, text: str) -> list[int]: ...


class Prompts:
    """prompts(length, which): token ids; another `which` is another text. Random ids without a tokenizer."""

    def __init__(self, tokenizer: Encodes | None, vocab_size: int) -> None:
        self._tokenizer, self._vocab_size = tokenizer, vocab_size

    def __call__(self, length: int, which: int = 0) -> list[int]:
        if self._tokenizer is None:
            draw = random.Random(f"{length}/{which}")
            return [draw.randrange(self._vocab_size) for _ in range(length)]
        start = 7 * which % len(TEXT)
        text, ids = TEXT[start:], list[int]()
        while len(ids) < length:
            text += TEXT * (length // 48 + 1)
            ids = self._tokenizer.encode(f"{which}. {text}")
        return ids[:length]

    def several(self, count: int, longest: int) -> Sequence[list[int]]:
        """Prompts of different lengths up to `longest`, for checks."""
        return [self(max(1, min(longest, 8 + 3 * i)), i) for i in range(count)]
