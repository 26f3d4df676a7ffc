"""How much faster many sequences decode with recurrent state in fewer bits: prints JSON.

python benchmarks/states.py MODEL --state-dtype bfloat16
python benchmarks/states.py MODEL --state-dtype int8 --quantize q8_0 --kv-dtype int8

The model is loaded with float32 state and with the other one, in one process. Both decode the same prompts,
in turns of a few steps, so that what else runs on the machine meets both alike. Times are processor time of
the thread that computes (`--threads 1`), else of the process, and wall time. The ratio is the median of all
pairs of turns next to each other.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from typing import TypeAlias

from plait.bench import machine
from plait.config import EngineConfig
from plait.loading.build import Built, build
from plait.request import Request, SamplingParams

PROMPT = 8  # tokens of each prompt
Times: TypeAlias = tuple[float, float]  # of processor and wall, in seconds a step


class Side:
    """A loaded model with `sequences` replies that never end while it is measured."""

    def __init__(self, model: str, config: EngineConfig, tokens: int) -> None:
        self.built: Built = build(model, config, lambda *_: None, lambda _: None)
        engine, vocab_size = self.built.engine, self.built.spec.vocab_size
        for n in range(config.max_num_seqs):
            ids = tuple((17 * n + 5 * i + 1) % vocab_size for i in range(PROMPT))
            params = SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True)
            engine.submit(Request(f"{n}", ids, params), lambda event: None)

    def run(self, steps: int, clock: Callable[[], float]) -> Times:
        """Decode that many steps of all sequences."""
        engine, metrics = self.built.engine, self.built.engine.metrics
        before, processor, wall = metrics.num_output_tokens, clock(), time.perf_counter()
        for _ in range(steps):
            engine.step_or_wait()
        processor, wall = clock() - processor, time.perf_counter() - wall
        made = (metrics.num_output_tokens - before) / engine.scheduler.limits.max_num_seqs
        return processor / made, wall / made


def measure(sides: tuple[Side, Side], given: argparse.Namespace) -> dict[str, object]:
    """Medians of both, and of the ratios of neighbours."""
    clock = time.thread_time if given.threads == 1 else time.process_time
    for side in sides:
        side.run(given.warm, clock)
    turns: list[tuple[Times, Times]] = []
    for n in range(given.turns):
        pair = [sides[i].run(given.steps, clock) for i in ((0, 1) if n % 2 else (1, 0))]
        turns.append((pair[0], pair[1]) if n % 2 else (pair[1], pair[0]))
    found: dict[str, object] = {}
    for i, name in enumerate(("processor", "wall")):
        ratios = sorted(one[i] / other[i] for one, other in turns)
        found[f"{name}_ms"] = [
            round(1e3 * statistics.median(turn[side][i] for turn in turns), 2) for side in (0, 1)
        ]
        found[f"{name}_ratio"] = round(statistics.median(ratios), 3)
        quarter = len(ratios) // 4
        found[f"{name}_quartiles"] = [round(ratios[quarter], 3), round(ratios[-1 - quarter], 3)]
    return found


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model")
    parser.add_argument("--state-dtype", default="bfloat16")
    parser.add_argument("--kv-dtype", default="auto")
    parser.add_argument("--quantize")
    parser.add_argument("--sequences", type=int, default=16)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--steps", type=int, default=4, help="of a turn")
    parser.add_argument("--turns", type=int, default=15)
    parser.add_argument("--warm", type=int, default=24, help="steps that do not count")
    return parser.parse_args()


def main() -> None:
    given = arguments()
    tokens = given.warm + 2 * given.steps * (given.turns + 8)
    usual = EngineConfig(
        device="cpu",
        threads=given.threads,
        max_num_seqs=given.sequences,
        max_model_len=PROMPT + tokens,
        prefix_cache=False,
        startup_image="off",
        quantize=given.quantize,
    )
    other = {"state_dtype": given.state_dtype, "kv_dtype": given.kv_dtype}
    print(f"{given.model} …", file=sys.stderr, flush=True)
    sides = Side(given.model, usual, tokens), Side(given.model, replace(usual, **other), tokens)
    facts = {"sequences": given.sequences, "threads": given.threads, "quantize": given.quantize, **other}
    print(json.dumps({**facts, "machine": machine.describe(), **measure(sides, given)}, indent=1))


if __name__ == "__main__":
    main()
