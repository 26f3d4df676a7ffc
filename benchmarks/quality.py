"""What rounding does to a model: perplexity, and how far its next-token distributions are from float32's.

python benchmarks/quality.py MODEL                        the file as it is: default, --precise, float32
python benchmarks/quality.py MODEL --quantize all         and every format, from the weights in float32
python benchmarks/quality.py MODEL --window 8192          over texts of that length
python benchmarks/quality.py MODEL --llama-cpp PYTHON     and llama.cpp on the same GGUF file and tokens

The reference decodes the weights to float32 and rounds nothing else. Each row of the table feeds the same
windows of token ids; KL is of the reference's distribution from the row's, in nats, after every token.
"""

from __future__ import annotations

import argparse
import datetime
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, get_args

import numpy as np
import torch
from torch import Tensor

from plait.bench import machine
from plait.checkpoint.weights import Target, Weights
from plait.config import EngineConfig, Quantize
from plait.kernels.load import executor, load_kernels
from plait.loading.open_model import Opened, open_model
from plait.memory import block_groups, has_slots
from plait.model.decoder import Decoder
from plait.ops.linear import Activations
from plait.quant.gguf import Gguf
from plait.runner.runner import ModelRunner
from plait.runner.sampling.sampler import Sampler
from plait.state.store import StateStore

HERE = Path(__file__).resolve().parent
TEXT = HERE / "text" / "king-james.txt"
WINDOW = 512  # tokens; `--window` changes it
PEER = """
import json, sys
import numpy as np
from llama_cpp import Llama
given = json.load(sys.stdin)
llm = Llama(given["model"], n_ctx=given["size"], n_batch=given["size"], n_ubatch=given["size"],
            n_threads=given["threads"], n_threads_batch=given["threads"], logits_all=True, verbose=False)
for number, ids in enumerate(given["windows"]):
    llm.reset()
    llm.eval(ids)
    np.save(f"{given['folder']}/{number}.npy", llm.scores[: len(ids)].astype(np.float32))
"""


@dataclass(frozen=True)
class Setting:
    """One row of the table. `plain`: decode the file's blocks to float32 numbers first."""

    name: str
    plain: bool = False
    quantize: str | None = None
    activations: Activations = "int8"
    kv_dtype: str = "bfloat16"
    ops: str = "auto"
    state_dtype: str = "float32"


REFERENCE = Setting("float32, reference ops", True, None, "float32", "model", "reference")
AS_IT_IS = (
    Setting("default: int8 activations, bfloat16 KV"),
    Setting("--kv-dtype int8", kv_dtype="int8"),
    Setting("--kv-dtype float32", kv_dtype="model"),
    Setting("--precise: 16-bit activations, float32 KV", activations="int8x2", kv_dtype="model"),
    Setting("float32, but bfloat16 KV", plain=True, activations="float32"),
    Setting("float32, but bfloat16 KV, queries and attention weights", plain=True),
    Setting("float32, but int8 KV", True, activations="float32", kv_dtype="int8"),
    Setting(
        "float32, but bfloat16 state", True, activations="float32", kv_dtype="model", state_dtype="bfloat16"
    ),
    Setting("float32, but int8 state", True, activations="float32", kv_dtype="model", state_dtype="int8"),
    Setting("float32, but int7 KV", True, activations="float32", kv_dtype="int7"),
    Setting("float32, but int4 KV", True, activations="float32", kv_dtype="int4"),
    Setting("float32, fastest ops", True, activations="float32", kv_dtype="model"),
)


class Plain:
    """A checkpoint with blocks that are read as float32 numbers.

    dither: each number is moved at random within half a step of its grid. A file's numbers lie on the grid of
    its format, which an encoder finds again; moved, they are what a model before quantization looks like.
    """

    def __init__(self, checkpoint: Any, dither: bool) -> None:
        self._checkpoint, self._dither = checkpoint, dither

    def __contains__(self, name: object) -> bool:
        return name in self._checkpoint

    def __getattr__(self, name: str) -> Any:
        return getattr(self._checkpoint, name)

    def read(self, name: str) -> Any:
        value = self._checkpoint.read(name)
        if not isinstance(value, Gguf):
            return value
        numbers = value.dequantize(torch.float32)
        if not self._dither:
            return numbers
        groups = numbers.view(-1, 16)
        gaps = groups.sort(1).values.diff(dim=1)
        step = torch.where(gaps > 1e-9, gaps, torch.inf).amin(1, keepdim=True)
        step = torch.where(step.isfinite(), step, 0.0)
        draw = torch.Generator().manual_seed(sum(name.encode()))
        return (groups + step * (torch.rand(groups.shape, generator=draw) - 0.5)).view_as(numbers)


def build(opened: Opened, setting: Setting, threads: int, dither: bool) -> tuple[ModelRunner, Target]:
    """The model of one row, ready for `logits`."""
    spec = opened.resolved.spec
    target = Target(torch.device("cpu"), torch.float32, WINDOW, spec.hidden_size, setting.ops)
    target.activations, target.kv_dtype = setting.activations, setting.kv_dtype
    target.quantize, target.state_dtype = setting.quantize, setting.state_dtype
    target.executor = None if setting.ops == "reference" else executor(threads)
    checkpoint = Plain(opened.checkpoint, dither) if setting.plain else opened.checkpoint
    weights = Weights(checkpoint, opened.resolved.names, target)
    decoder = Decoder(spec, weights)
    weights.check_all_used()
    blocks = {group.name: 2 for group in block_groups(decoder.states)}
    slots = 2 if has_slots(decoder.states) else 0
    store = StateStore(decoder.states, blocks, slots, target.block_size, target.device, target.dtype)
    return ModelRunner(
        decoder, store, Sampler(spec.vocab_size), target.device, executor=target.executor
    ), target


def windows(opened: Opened, text: str, tokens: int) -> list[list[int]]:
    """The text's ids in windows, each with what the tokenizer puts before a text."""
    tokenizer = opened.tokenizer()
    if tokenizer is None:
        raise SystemExit("the model has no tokenizer: there is nothing to measure on")
    before = tokenizer.encode("")
    ids = tokenizer.encode(text, add_special=False)[:tokens]
    size = WINDOW - len(before)
    return [[*before, *ids[at : at + size]] for at in range(0, len(ids) - 1, size)]


@dataclass
class Score:
    """Sums over all scored tokens."""

    negative_log: float = 0.0
    count: int = 0
    agreed: int = 0

    def __post_init__(self) -> None:
        self.kl: list[Tensor] = []

    def add(self, ids: list[int], logits: Tensor, wanted: Tensor | None) -> Tensor:
        """Log-probabilities of `logits`; `wanted` are those of the reference. All are [tokens, vocab]."""
        found = logits.float().log_softmax(-1)
        targets = torch.tensor(ids[1:])
        self.negative_log -= float(found[:-1].gather(1, targets.unsqueeze(1)).double().sum())
        self.count += len(targets)
        if wanted is not None:
            self.agreed += int((found.argmax(-1) == wanted.argmax(-1))[:-1].sum())
            self.kl.append((wanted.exp() * (wanted - found)).sum(-1)[:-1].clamp(min=0))
        return found

    def row(self) -> dict[str, Any]:
        result: dict[str, Any] = {"perplexity": round(float(np.exp(self.negative_log / self.count)), 4)}
        if self.kl:
            kl = torch.cat(self.kl).double()
            result |= {
                "kl_mean": float(f"{kl.mean():.3g}"),
                "kl_p99": float(f"{kl.quantile(0.99):.3g}"),
                "top1_agreement": round(self.agreed / self.count, 4),
            }
        return result


def measured(opened: Opened, setting: Setting, given: argparse.Namespace) -> tuple[Any, dict[str, Any]]:
    """(a function from ids to logits, facts of the row)."""
    torch.set_num_threads(given.threads)
    started = time.perf_counter()
    runner, target = build(opened, setting, given.threads, given.dither)
    seconds = round(time.perf_counter() - started, 2)
    facts = {"weights_mib": round(target.weights_nbytes / 2**20, 1), "load_s": seconds}
    facts |= {"encoded": dict(target.encoded)} if target.encoded else {}

    def run(all_ids: list[list[int]]) -> Iterator[Tensor]:
        try:
            for ids in all_ids:
                yield runner.logits(ids, WINDOW)
        finally:
            runner.close()

    return run, facts


def peer(python: str, model: str, threads: int, all_ids: list[list[int]]) -> Iterator[Tensor]:
    """llama.cpp's logits, by the Python that has it."""
    with tempfile.TemporaryDirectory() as folder:
        sent = {"model": model, "size": WINDOW, "threads": threads, "windows": all_ids, "folder": folder}
        subprocess.run([python, "-c", PEER], input=json.dumps(sent), text=True, check=True)
        for number in range(len(all_ids)):
            yield torch.from_numpy(np.load(Path(folder) / f"{number}.npy"))


def compare(opened: Opened, given: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """Every row of the table, by name; the reference first."""
    all_ids = windows(opened, given.text.read_text(encoding="utf-8"), given.tokens)
    run, facts = measured(opened, REFERENCE, given)
    score = Score()
    wanted = [score.add(ids, logits, None) for ids, logits in zip(all_ids, run(all_ids), strict=True)]
    results = {REFERENCE.name: {**score.row(), **facts, "tokens": score.count}}
    say(REFERENCE.name, results)
    for name, prepare in rows(opened, given):
        run, facts = prepare()
        score = Score()
        for ids, logits, reference in zip(all_ids, run(all_ids), wanted, strict=True):
            score.add(ids, logits, reference)
        results[name] = {**score.row(), **facts}
        say(name, results)
    return results


def say(name: str, results: dict[str, dict[str, Any]]) -> None:
    print(f"{name}: {json.dumps(results[name])}", file=sys.stderr, flush=True)


def rows(opened: Opened, given: argparse.Namespace) -> Iterable[tuple[str, Callable[[], Any]]]:
    formats = get_args(Quantize) if "all" in given.quantize else given.quantize
    settings = [] if given.dither else [s for s in AS_IT_IS if not given.only or s.name in given.only]
    settings += [Setting(f"--quantize {name}", plain=True, quantize=name) for name in formats]
    if formats and given.dither:
        settings.append(replace(AS_IT_IS[-1]))
    for setting in settings:
        yield setting.name, partial(measured, opened, setting, given)
    if given.llama_cpp and not given.dither:
        run = partial(peer, given.llama_cpp, str(opened.files.weights[0]), given.threads)
        yield "llama.cpp", lambda: (run, {})


def table(results: dict[str, dict[str, Any]]) -> str:
    """The results as a Markdown table."""
    lines = [
        "| | weights MiB | perplexity | mean KL | 99th percentile KL | same first token |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    for name, row in results.items():
        agreement = f"{100 * row['top1_agreement']:.2f} %" if "top1_agreement" in row else "–"
        cells = [row.get("weights_mib", "–"), f"{row['perplexity']:.3f}", row.get("kl_mean", "–")]
        lines.append(
            f"| {name} | " + " | ".join(map(str, [*cells, row.get("kl_p99", "–"), agreement])) + " |"
        )
    return "\n".join(lines)


def main() -> None:
    global WINDOW
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model")
    parser.add_argument(
        "--quantize",
        action="append",
        default=[],
        choices=["all", *get_args(Quantize)],
        help="may be repeated",
    )
    parser.add_argument("--only", action="append", default=[], help="a row of the table; may be repeated")
    parser.add_argument("--dither", action="store_true", help="move the file's numbers off their grid first")
    parser.add_argument("--llama-cpp", metavar="PYTHON", help="a Python that has llama-cpp-python")
    parser.add_argument("--text", type=Path, default=TEXT)
    parser.add_argument("--tokens", type=int, default=4096, help="of the text, at most")
    parser.add_argument("--window", type=int, default=WINDOW, help="tokens of a text; default: %(default)s")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--out", type=Path, help="write the JSON here")
    given = parser.parse_args()
    load_kernels()
    WINDOW = given.window
    opened = open_model(given.model, EngineConfig(device="cpu", threads=given.threads))
    results = compare(opened, given)
    report = {
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "model": opened.files.name,
        "text": given.text.name,
        "window": WINDOW,
        "dither": given.dither,
        "machine": machine.describe(),
        "results": results,
    }
    print(table(results))
    if given.out:
        given.out.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
