"""What LoRA costs a decode step: rows with adapters next to rows without, on one engine, in turns.

python benchmarks/adapters.py model.gguf [--adapters 4] [--rank 16] [--rows 16] [--threads 1] [--turns 9]

The adapters are random and change every linear layer of a GGUF model. In each turn all rows have none
(`none`), all have the first (`one`), they have all adapters in equal shares (`all`), and an engine without
`--lora` runs them (`plain`). Steps in which all rows decode count: milliseconds, and milliseconds of the
processor, which are the better ones next to other processes. Ratios are medians of the turns' own. Before,
each row's tokens in a batch must be those that it gets alone, and adapters must change them. JSON.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import Any

import gguf
import numpy as np

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

from plait import LLM, SamplingParams  # noqa: E402
from plait.bench import machine  # noqa: E402
from plait.engine.admission import ServiceOptions  # noqa: E402
from plait.schedule.plan import Done  # noqa: E402

LINEAR = re.compile(
    r"blk\.\d+\.(?:attn_(?:q|k|v|qkv|output|gate)|ffn_(?:gate|up|down)|ssm_(?:in|out))\.weight"
)
PROMPT, CHECKED = 8, 8  # tokens of each prompt; tokens of each text that are compared
UP = 0.1  # how large the second factor is: texts change, and stay apart from noise


def write_adapter(model: Path, path: Path, rank: int, seed: int) -> int:
    """A random adapter of all linear layers, as llama.cpp's; how many these are."""
    reader, rng, count = gguf.GGUFReader(model), np.random.default_rng(seed), 0
    writer = gguf.GGUFWriter(path, str(reader.fields["general.architecture"].contents()))
    writer.add_string("general.type", "adapter")
    writer.add_string("adapter.type", "lora")
    writer.add_float32("adapter.lora.alpha", float(rank))
    for tensor in reader.tensors:
        if LINEAR.fullmatch(tensor.name):
            inputs, outputs = map(int, tensor.shape)
            down = rng.standard_normal((rank, inputs), np.float32) / inputs**0.5
            up = rng.standard_normal((outputs, rank), np.float32) * UP / rank**0.5
            writer.add_tensor(f"{tensor.name}.lora_a", down.astype(np.float32))
            writer.add_tensor(f"{tensor.name}.lora_b", up.astype(np.float32))
            count += 1
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    if not count:
        raise SystemExit(f"{model.name} has no linear layer that this script knows")
    return count


class StepTimer:
    """A runner that records its steps: (rows, tokens, steps of the plan, seconds, those of the processor)."""

    def __init__(self, runner: Any) -> None:
        self._runner, self.steps = runner, list[tuple[int, int, int, float, float]]()

    def launch(self, plan: Any, sampling: Any) -> Any:
        """Run the steps of a plan to their end, so that their time is their own."""
        began, used = time.perf_counter(), time.process_time()
        done = self._runner.launch(plan, sampling).wait()
        took = time.perf_counter() - began, time.process_time() - used
        self.steps.append((len(plan.chunks), plan.num_tokens, plan.num_steps, *took))
        return Done(done)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._runner, name)


class TimedModel:
    """A loaded model of which the steps are timed."""

    def __init__(self, model: str, **options: Any) -> None:
        self.llm = LLM(model, device="cpu", startup_image="off", max_model_len=256, **options)
        engine = self.llm.front.loop.engine  # type: ignore[attr-defined]
        engine.runner = self.timer = StepTimer(engine.runner)

    def generate(
        self, prompts: Sequence[Sequence[int]], adapters: Sequence[str], tokens: int
    ) -> list[list[int]]:
        """The new ids of each prompt with its adapter, all at once."""
        params = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True, repetition_penalty=1.0)
        front, streams = self.llm.front, []
        for ids, adapter in zip(prompts, adapters, strict=True):
            terms = ServiceOptions(adapter=adapter)
            streams.append(front.submit(front.prepare(list(ids), params, terms=terms)))
        found = []
        for stream in streams:
            found.append(list[int]())
            for delta in stream:
                if delta.error:
                    raise delta.error
                found[-1] += delta.token_ids
        return found

    def time_steps(
        self, prompts: Sequence[Sequence[int]], adapters: Sequence[str], tokens: int
    ) -> tuple[float, float]:
        """(milliseconds, those of the processor) of a step in which all rows decode."""
        self.timer.steps.clear()
        self.generate(prompts, adapters, tokens)
        full = [step for step in self.timer.steps if step[0] == step[1] == len(prompts)]
        count = sum(step[2] for step in full)
        if not count:
            raise SystemExit("all rows never decode in one step")
        return 1000 * sum(step[3] for step in full) / count, 1000 * sum(step[4] for step in full) / count


def draw_prompts(vocab_size: int, rows: int, seed: int) -> list[list[int]]:
    """Random prompts, others in every turn, so that no prefix is cached."""
    drawn = np.random.default_rng(seed).integers(vocab_size // 4, vocab_size // 2, (rows, PROMPT))
    return [[int(token) for token in row] for row in drawn]


def check_texts(model: TimedModel, rows: Sequence[str]) -> None:
    """Exit unless each row gets in a batch what it gets alone, and something else than without an adapter."""
    prompts = draw_prompts(model.llm.spec.vocab_size, len(rows), 0)
    together = model.generate(prompts, rows, CHECKED)
    plain = model.generate(prompts, [""] * len(rows), CHECKED)
    for row, (ids, adapter) in enumerate(zip(prompts, rows, strict=True)):
        (alone,) = model.generate([ids], [adapter], CHECKED)
        if alone != together[row]:
            raise SystemExit(f"row {row} with {adapter} gets {together[row]}, and alone {alone}")
    if together == plain:
        raise SystemExit("the adapters change no token, so nothing would be measured")


def measure(given: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """All numbers of one model."""
    names = [f"a{i}" for i in range(given.adapters)]
    layers = [write_adapter(given.model, folder / f"{n}.gguf", given.rank, i) for i, n in enumerate(names)]
    lora = tuple(f"{name}={folder / name}.gguf" for name in names)
    options: dict[str, Any] = {"max_num_seqs": given.rows, "threads": given.threads}
    with ExitStack() as stack:
        model = TimedModel(str(given.model), lora=lora, **options)
        stack.callback(model.llm.close)
        plain = TimedModel(str(given.model), **options)
        stack.callback(plain.llm.close)
        shares = [names[row * len(names) // given.rows] for row in range(given.rows)]
        check_texts(model, shares)
        sides = {
            "plain": (plain, [""] * given.rows),
            "none": (model, [""] * given.rows),
            "one": (model, names[:1] * given.rows),
            "all": (model, shares),
        }
        found: dict[str, list[tuple[float, float]]] = {name: [] for name in sides}
        for turn in range(given.turns + 1):
            prompts = draw_prompts(model.llm.spec.vocab_size, given.rows, 1 + turn)
            for name in [*sides][:: 1 if turn % 2 else -1]:
                side, rows = sides[name]
                times = side.time_steps(prompts, rows, given.tokens)
                if turn:  # the first warms up
                    found[name].append(times)
    return {"layers": layers[0], **summarize(found)}


def summarize(found: dict[str, list[tuple[float, float]]]) -> dict[str, Any]:
    """Medians, and the median ratios of turns: `over_none` is what adapters add to rows that have none."""
    result: dict[str, Any] = {}
    for place, unit in enumerate(("step_ms", "step_cpu_ms")):
        result[unit] = {name: round(median(t[place] for t in times), 3) for name, times in found.items()}
        for base in ("none", "plain"):
            result[f"{unit.removesuffix('_ms')}_over_{base}"] = {
                name: round(median(a[place] / b[place] for a, b in zip(times, found[base], strict=True)), 4)
                for name, times in found.items()
                if name not in ("plain", base)
            }
    return result


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", type=Path, help="a GGUF file")
    parser.add_argument("--adapters", type=int, default=4)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--rows", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=33, help="new ones of each row in a turn")
    parser.add_argument("--threads", type=int, default=None)
    parser.add_argument("--turns", type=int, default=9)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        found = measure(given, Path(folder))
    names = ("adapters", "rank", "rows", "tokens", "threads", "turns")
    about = {"model": given.model.name, **{name: getattr(given, name) for name in names}}
    print(json.dumps({"machine": machine.describe(), **about, **found}, indent=2))


if __name__ == "__main__":
    main()
