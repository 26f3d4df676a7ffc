"""Phase 7: a model on 2, 4 and 8 ranks next to one: tokens and bits, tokens a second, share of ideal."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from gpu_phases.models import BUILD_S, run_requests
from gpu_phases.peers import write_model
from gpu_phases.results import ROOT, Bench, Item
from plait.config import EngineConfig
from plait.errors import ConfigError
from plait.loading.build import build
from plait.verify.ranks import check_ranks

NANO = ROOT / "examples" / "nano-hybrid"
RANKS = (2, 4, 8)
SIZES = (("1 sequence", 1), ("16 sequences", 16))
MODEL, LARGE, LITTLE = "Qwen3-0.6B", "Llama-8B", "little Llama"
OP = "tensor parallelism"


def list_parallel(bench: Bench) -> Iterator[Item]:
    """Right or wrong first, then speed: one rank before all, because shares of ideal are of its speed."""
    if bench.is_dry:
        counts: list[int] = [2] if bench.is_full else []
    else:
        counts = [n for n in RANKS if n <= torch.cuda.device_count()]
    if not counts:
        note = "ranks need several GPUs; --dry --full runs two ranks on the CPU"
        yield Item(OP, "", "", "", lambda: {"ok": None, "note": note})
        return
    for n in counts:
        for name, is_exact in (("tokens", False), ("bits", True)):
            run = lambda n=n, is_exact=is_exact: check_right(bench, n, is_exact=is_exact)  # noqa: E731
            yield Item(OP, f"{n} ranks, {name}", NANO.name, "float32", run, needs_s=BUILD_S)
    models = [LITTLE] if bench.is_dry else [MODEL, LARGE] if bench.is_full else [MODEL]
    for model in models:
        for n in (1, *counts):
            for size, seqs in SIZES[: 1 if bench.is_dry else 2]:
                run = lambda m=model, n=n, s=seqs: measure_speed(bench, m, n, s)  # noqa: E731
                yield Item(OP, describe(n), f"{model} {size}", "model", run, needs_s=2 * BUILD_S)


def describe(count: int) -> str:
    return "1 rank" if count == 1 else f"{count} ranks"


def check_right(bench: Bench, count: int, *, is_exact: bool) -> dict[str, Any]:
    """The trained hybrid on so many ranks and on one. What is refused by name is neither right nor wrong."""
    config = EngineConfig(
        device=bench.device.type, tensor_parallel_size=count, max_num_seqs=1, dtype="float32",
        deterministic=is_exact,
    )  # fmt: skip
    try:
        found = check_ranks(str(NANO), config, max_tokens=8, prompts=["In the"], say=lambda text: None)
    except ConfigError as error:
        return {"ok": None, "note": str(error)}
    note = f"logits off by {found.largest:.2g} of the largest, {found.num_tokens} tokens"
    return {"ok": found.is_right, "note": note}


def measure_speed(bench: Bench, name: str, count: int, seqs: int) -> dict[str, Any]:
    """Tokens a second of a decode step, and what part they are of N times those of one rank."""
    folder = write_model(name, bench.out / name)
    prompt, tokens = (3, 5) if bench.is_dry else (128, 128)
    try:
        us = decode_us(folder, bench.device.type, count, seqs, prompt, tokens)
    except ConfigError as error:
        return {"ok": None, "note": str(error)}
    rate = 1e6 * seqs / us
    if count == 1:
        return {"us": us, "tokens_s": rate}
    shape = next(f"{name} {size}" for size, number in SIZES if number == seqs)
    alone = [row for row in bench.rows if row["op"] == OP and row["variant"] == describe(1)]
    alone = [row for row in alone if (row["shape"], row["chip"]) == (shape, bench.chip.name) and row["us"]]
    if not alone:
        return {"us": us, "tokens_s": rate, "note": "one rank was not measured"}
    share = alone[-1]["us"] / us / count
    return {"us": us, "tokens_s": rate, "share_of_ideal": share, "note": f"{100 * share:.0f} % of ideal"}


def decode_us(folder: Path, device: str, count: int, seqs: int, prompt: int, tokens: int) -> float:
    """Microseconds of a decode step of so many sequences, through an engine and its ranks."""
    config = EngineConfig(
        device=device, tensor_parallel_size=count, max_num_seqs=max(2, seqs), prefix_cache=False,
        max_model_len=prompt + tokens + 64,
    )  # fmt: skip
    built = build(str(folder), config, lambda *_: None, lambda opened: None)
    try:
        vocab_size = built.runner.decoder.spec.vocab_size
        run_requests(built.engine, vocab_size, seqs, prompt, min(tokens, 16))  # warms up
        return 1e6 * run_requests(built.engine, vocab_size, seqs, prompt, tokens).decode_step_s
    finally:
        built.close()
