"""A model in ten storages, all written by `plait convert`: perplexity in Plait and in llama.cpp.

python benchmarks/requantize.py MODEL --llama-cpp PYTHON --out benchmarks/results/requantized-NAME.json

Every file is converted from MODEL, and both engines read the same files and the same windows of token ids.
Plait runs with --precise, so that what is measured are the weights; llama.cpp runs as it does by default.
KL is of MODEL's next-token distribution (weights in float32, plain operators) from the row's, in nats.
"""

from __future__ import annotations

import argparse
import datetime
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from quality import REFERENCE, TEXT, WINDOW, Score, Setting, measured, peer, windows
from torch import Tensor

from plait.bench import machine
from plait.config import EngineConfig
from plait.convert.convert import Order, convert_model
from plait.kernels.load import load_kernels
from plait.loading.open_model import open_model

STORAGES = ("f16", "bf16", "q8_0", "q6_k", "q5_k", "q5_1", "q5_0", "q4_k", "q4_1", "q4_0")
PRECISE = Setting("--precise", activations="int8x2", kv_dtype="model")


def row_of(
    file: Path, ids: list[list[int]], wanted: list[Tensor], given: argparse.Namespace
) -> dict[str, Any]:
    """One file in both engines."""
    opened = open_model(str(file), EngineConfig(device="cpu"))
    run, _ = measured(opened, PRECISE, given)
    score = Score()
    for window, logits, reference in zip(ids, run(ids), wanted, strict=True):
        score.add(window, logits, reference)
    row = {"file_mib": round(file.stat().st_size / 2**20, 1), "plait": score.row()}
    if given.llama_cpp:
        score = Score()
        found = peer(given.llama_cpp, str(file), given.threads, ids)
        for window, logits, reference in zip(ids, found, wanted, strict=True):
            score.add(window, logits, reference)
        row["llama.cpp"] = score.row()
    return row


def measure(given: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """Every row, by storage; the source first."""
    source = open_model(given.model, EngineConfig(device="cpu"))
    ids = windows(source, given.text.read_text(encoding="utf-8"), given.tokens)
    run, _ = measured(source, REFERENCE, given)
    score = Score()
    wanted = [score.add(window, logits, None) for window, logits in zip(ids, run(ids), strict=True)]
    results: dict[str, dict[str, Any]] = {"source": {"plait": score.row(), "tokens": score.count}}
    with tempfile.TemporaryDirectory() as folder:
        for storage in given.storages:
            out = Path(folder) / "model.gguf"
            made = convert_model(
                Order(given.model, out, quantize=storage, force=True, threads=given.threads),
                lambda *_: None,
            )
            results[storage] = row_of(out, ids, wanted, given) | {"linear_maps": dict(made.storages)}
            print(f"{storage}: {json.dumps(results[storage])}", file=sys.stderr, flush=True)
    return results


def table(results: dict[str, dict[str, Any]]) -> str:
    """The results as a Markdown table."""
    lines = [
        "| | file MiB | perplexity: Plait | llama.cpp | mean KL: Plait | llama.cpp | linear layers |",
        "|---|---:|---:|---:|---:|---:|---|",
    ]
    for name, row in results.items():
        ours, theirs = row["plait"], row.get("llama.cpp", {})
        maps = ", ".join(f"{count} {kind}" for kind, count in row.get("linear_maps", {}).items())
        cells = [row.get("file_mib", "–"), f"{ours['perplexity']:.3f}", _shown(theirs.get("perplexity"))]
        cells += [ours.get("kl_mean", "–"), theirs.get("kl_mean", "–"), maps or "–"]
        lines.append(f"| {name} | " + " | ".join(map(str, cells)) + " |")
    return "\n".join(lines)


def _shown(value: float | None) -> str:
    return "–" if value is None else f"{value:.3f}"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model")
    parser.add_argument("--storages", nargs="+", default=list(STORAGES))
    parser.add_argument("--llama-cpp", metavar="PYTHON", help="a Python that has llama-cpp-python")
    parser.add_argument("--text", type=Path, default=TEXT)
    parser.add_argument("--tokens", type=int, default=1536, help="of the text, at most")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--out", type=Path, help="write the JSON here")
    given = parser.parse_args()
    given.dither = False
    load_kernels()
    results = measure(given)
    report = {
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "model": Path(given.model).stem,
        "text": given.text.name,
        "window": WINDOW,
        "machine": machine.describe(),
        "results": results,
    }
    print(table(results))
    if given.out:
        given.out.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
