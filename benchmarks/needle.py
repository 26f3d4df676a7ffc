"""Whether a model still finds a name that stood far behind, in each dtype of its caches: prints JSON.

python benchmarks/needle.py examples/nano-hybrid
python benchmarks/needle.py MODEL.gguf --window 4096 --text benchmarks/text/esther-ruth-jonah.txt

A sentence with one of sixteen names stands near, halfway or far behind, other text in between. Then comes a
sentence that goes on with a name. Names that are likely anyway are not what is tested: of each prompt, a
name's log-probability counts by how far it is above its mean over all sixteen prompts. The name that is
farthest above is what the model found, and chance is one in sixteen. `lift` is how far the right one is.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import quality
import torch
from quality import TEXT, Setting, build
from torch import Tensor

from plait.bench import machine
from plait.config import EngineConfig
from plait.errors import ConfigError
from plait.kernels.load import load_kernels
from plait.loading.open_model import Opened, open_model

MODES = (
    Setting("exact: float32", activations="float32", kv_dtype="model"),
    Setting("default"),
    Setting("bfloat16 state", state_dtype="bfloat16"),
    Setting("int8 state", state_dtype="int8"),
    Setting("int8 KV", kv_dtype="int8"),
    Setting("int7 KV", kv_dtype="int7"),
    Setting("int4 KV", kv_dtype="int4"),
    Setting("int8 state, int8 KV", kv_dtype="int8", state_dtype="int8"),
    Setting("int8 state, int7 KV", kv_dtype="int7", state_dtype="int8"),
)
NAMES = [
    "David",
    "Moses",
    "Abraham",
    "Jacob",
    "Joseph",
    "Saul",
    "Solomon",
    "Daniel",
    "Samuel",
    "Joshua",
    "Isaac",
    "Aaron",
    "Elijah",
    "Judah",
    "Jonathan",
    "Esau",
]
NEEDLE = "Now there was a man whose name was {name}, and the king loved {name}.\n"
CUE = "\nAnd the king answered and said unto"
PLACES = {"near": 0.05, "halfway": 0.5, "far": 1.0}  # of the window, between needle and cue


def make_prompts(tokenizer: Any, text: str, window: int, share: float, turn: int) -> list[list[int]]:
    """The prompts of one place, one for each name. turn: which part of the text comes between."""
    before, cue = tokenizer.encode(""), tokenizer.encode(CUE, add_special=False)
    needles = [tokenizer.encode(NEEDLE.format(name=name), add_special=False) for name in NAMES]
    ids = tokenizer.encode(text, add_special=False)
    most = window - len(before) - len(cue) - max(map(len, needles))
    if most < 1 or len(ids) < (turn + 1) * most:
        raise SystemExit(
            f"the text has {len(ids)} tokens, too few for {turn + 1} of {most}: give a longer one"
        )
    between = ids[turn * most : turn * most + int(share * most)]
    return [[*before, *needle, *between, *cue] for needle in needles]


def find_names(runner: Any, prompts: list[list[int]], first: list[int]) -> Tensor:
    """[prompts, names]: how far each name is above its mean, in nats. first: the first token of each name."""
    rows = [runner.logits(ids, quality.WINDOW)[-1].float().log_softmax(-1)[first] for ids in prompts]
    found = torch.stack(rows)
    return found - found.mean(0)


def measure(opened: Opened, text: str, window: int, count: int, threads: int) -> dict[str, dict[str, Any]]:
    """Every mode by name; one that the model refuses has the reason."""
    tokenizer = opened.tokenizer()
    if tokenizer is None:
        raise SystemExit("the model has no tokenizer: there is nothing to measure on")
    first = [tokenizer.encode(f" {name}", add_special=False)[0] for name in NAMES]
    if len(set(first)) < len(NAMES):
        raise SystemExit("two of the names begin with the same token of this model: it cannot be tested so")
    quality.WINDOW = window
    places = {
        place: [make_prompts(tokenizer, text, window, share, turn) for turn in range(count)]
        for place, share in PLACES.items()
    }
    results: dict[str, dict[str, Any]] = {}
    for setting in MODES:
        try:
            runner, _ = build(opened, setting, threads, dither=False)
        except ConfigError as error:
            results[setting.name] = {"refused": str(error)}
            continue
        try:
            found = {
                place: torch.stack([find_names(runner, prompts, first) for prompts in sets])
                for place, sets in places.items()
            }
        finally:
            runner.close()
        results[setting.name] = summarize(found)
        print(f"{setting.name}: {json.dumps(results[setting.name])}", file=sys.stderr, flush=True)
    return results


def summarize(found: dict[str, Tensor]) -> dict[str, Any]:
    """Of [turns, prompts, names] by place: the share of names that were found, and the lift in nats."""
    rows: dict[str, Any] = {}
    for place, table in {**found, "all": torch.cat(list(found.values()))}.items():
        right = table.argmax(-1) == torch.arange(table.shape[1])
        lift = table.diagonal(dim1=1, dim2=2).mean()
        rows[place] = {"found": round(float(right.float().mean()), 4), "lift": round(float(lift), 4)}
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model")
    parser.add_argument("--text", type=Path, default=TEXT)
    parser.add_argument("--window", type=int, default=512, help="tokens of the longest prompt")
    parser.add_argument("--count", type=int, default=4, help="texts between needle and cue")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    given = parser.parse_args()
    load_kernels()
    opened = open_model(given.model, EngineConfig(device="cpu", threads=given.threads))
    text = given.text.read_text(encoding="utf-8")
    results = measure(opened, text, given.window, given.count, given.threads)
    report = {
        "model": opened.files.name,
        "text": given.text.name,
        "window": given.window,
        "prompts": given.count * len(PLACES) * len(NAMES),
        "machine": machine.describe(),
        "results": results,
    }
    print(json.dumps(report, indent=2))


if __name__ == "__main__":
    main()
