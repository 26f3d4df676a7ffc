"""Phase 6: other engines on the same random model, in turns with ours, by `plait bench model`."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from gpu_phases.results import ROOT, Bench, Item
from gpu_phases.shapes import MODELS, RandomWeights
from plait.checkpoint.weights import Target
from plait.families.common.registry import build_spec
from plait.kernels.load import load_for_gpu
from plait.model.decoder import Decoder

MODEL = "Qwen3-0.6B"  # small enough to be written as a file in seconds
PEERS = {
    "vllm": "vllm={folder}",
    "sglang": "sglang={folder}",
    "transformers": "transformers",
    "llama_cpp": "",
}
WHY_NOT = {"llama_cpp": "it reads GGUF alone, and random models are written as safetensors"}
MOST_S = 420


class WrittenWeights(RandomWeights):
    """As `RandomWeights`; what is made up is also kept under the names that a file has."""

    def _numbers(self, name: str, value: Tensor, *args: Any, **more: Any) -> Tensor:
        made = super()._numbers(name, value, *args, **more)
        return self._note(name, made)

    def _random(self, name: str, shape: tuple[int, int]) -> Any:
        weight = super()._random(name, shape)
        self._note(name, weight.tensor)
        return weight

    def _note(self, name: str, made: Tensor) -> Tensor:
        source, _ = self.names.resolve(self._full(name))
        assert isinstance(source, str), f"{name} is made of several tensors of a file"
        kept = self._made.setdefault("written", {})
        kept.setdefault(source, made.to("cpu", torch.bfloat16))
        return made


def write_model(name: str, folder: Path) -> Path:
    """A folder with config.json and random weights that any engine can load. Kept if it is there."""
    if (folder / "config.json").exists():
        return folder
    load_for_gpu()
    torch.manual_seed(0)
    config = dict(MODELS[name])
    spec, names = build_spec(config)
    weights = WrittenWeights({}, names, Target(torch.device("cpu"), torch.bfloat16, 64, spec.hidden_size))
    Decoder(spec, weights)
    folder.mkdir(parents=True, exist_ok=True)
    save_file(weights._made["written"], folder / "model.safetensors", {"format": "pt"})
    config["torch_dtype"] = "bfloat16"
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def list_peers(bench: Bench) -> Iterator[Item]:
    """An item for each engine, there or not."""
    name = "little Llama" if bench.is_dry else MODEL
    for peer in PEERS:
        if importlib.util.find_spec(peer) is None:
            note = "not installed here"
        else:
            note = WHY_NOT.get(peer, "a dry run compares no speed" if bench.is_dry else "")
        if note:
            yield Item("decode", "peer", name, "model", lambda note=note: {"ok": None, "note": note}, peer)
        else:
            run = lambda peer=peer: _compare(bench, name, peer)  # noqa: E731
            yield Item("decode", "peer", name, "model", run, peer, needs_s=45)


def _compare(bench: Bench, name: str, peer: str) -> dict[str, Any]:
    """Tokens a second of ours and theirs, in turns, each in a process of its own."""
    folder = write_model(name, bench.out / name)
    result = bench.out / f"peer-{peer}.json"
    few = ["--contexts", "128", "--lengths", "1024", "--batches", "1,16", "--repeats", "2", "--tokens", "64"]
    command = [sys.executable, "-m", "plait", "bench", "model", str(folder), *few]
    command += ["--compare", PEERS[peer].format(folder=folder), "--json", "--check-tokens", "0"]
    seconds = max(10.0, min(MOST_S, bench.seconds_left))
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=seconds, check=False)
    except subprocess.TimeoutExpired:
        raise TimeoutError(f"not done in {seconds:.0f} s; give it more with --phases 6") from None
    if done.returncode:
        raise RuntimeError(done.stderr[-300:])
    result.write_text(done.stdout, encoding="utf-8")
    rows = json.loads(done.stdout)["rows"]
    shown = [f"{row['title']}: {row['ratios']}" for row in rows]
    return {"note": f"{'; '.join(shown)}; all of it in {result.name}"}
