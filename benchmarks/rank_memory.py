"""Memory of one rank, and of each of several, over a random model of about 1 GB that this script writes.

    python benchmarks/rank_memory.py [--storage Q8_0] [--ranks 1,2,4] [--folder DIR] [--json]

Every count of ranks is an engine of its own, in a process of its own: it loads, answers two requests, and
waits. Then `/proc/PID/smaps` of all its processes is read (Linux).

    resident    every page that the process has mapped and that is in memory
    private     pages of this process alone; with `resident` the two ends between which a reader may choose
    own part    private, and of shared pages this process's part (the kernel's Pss)
    peak        the most that was resident since the start, loading included
    file        pages of the model's file, which the kernel may take back at any time; the rest has them, too
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path

import gguf
import numpy as np
import torch

from plait.config import EngineConfig
from plait.loading.build import build
from plait.ops.blocks import random_blocks
from plait.request import Event, Request, SamplingParams

HIDDEN, LAYERS, FFN, VOCAB, HEADS, KV_HEADS, HEAD_DIM = 2048, 15, 7168, 32768, 32, 8, 64
FIELD = re.compile(r"^(Rss|Pss|Private_Clean|Private_Dirty|Shared_Clean|Shared_Dirty): +(\d+) kB", re.M)
PEAK = re.compile(r"^VmHWM:\s+(\d+) kB", re.M)
MAPPING = re.compile(r"^[0-9a-f]+-[0-9a-f]+ \S+ \S+ \S+ \d+ *(.*)$")


@dataclass(frozen=True, slots=True)
class ProcessMemory:
    """Of one process, in bytes."""

    rank: int
    resident: int
    private: int
    own_part: int
    peak: int
    file: int
    largest: dict[str, int]  # resident, by what is mapped


def write_model(path: Path, storage: str) -> None:
    """A Llama of random blocks without a tokenizer: 1.0 GB in Q8_0, less in smaller storages."""
    torch.manual_seed(0)
    writer, kind = gguf.GGUFWriter(str(path), "llama"), gguf.GGMLQuantizationType[storage]
    writer.add_block_count(LAYERS)
    writer.add_context_length(2048)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(FFN)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_dimension_count(HEAD_DIM)
    writer.add_vocab_size(VOCAB)

    def add(name: str, rows: int, columns: int) -> None:
        blocks = random_blocks(storage, rows, columns).data.numpy()
        writer.add_tensor(f"{name}.weight", blocks, raw_dtype=kind)

    def add_norm(name: str) -> None:
        writer.add_tensor(f"{name}.weight", np.ones(HIDDEN, np.float32))

    add("token_embd", VOCAB, HIDDEN)
    for layer in range(LAYERS):
        at = f"blk.{layer}"
        for name, rows, columns in (
            ("attn_q", HEADS * HEAD_DIM, HIDDEN), ("attn_k", KV_HEADS * HEAD_DIM, HIDDEN),
            ("attn_v", KV_HEADS * HEAD_DIM, HIDDEN), ("attn_output", HIDDEN, HEADS * HEAD_DIM),
            ("ffn_gate", FFN, HIDDEN), ("ffn_up", FFN, HIDDEN), ("ffn_down", HIDDEN, FFN),
        ):  # fmt: skip
            add(f"{at}.{name}", rows, columns)
        add_norm(f"{at}.attn_norm")
        add_norm(f"{at}.ffn_norm")
    add_norm("output_norm")
    add("output", VOCAB, HIDDEN)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def serve(model: str, count: int) -> None:
    """Be the engine of a measurement: load, answer, report the processes, wait for the end of the input."""
    config = EngineConfig(
        device="cpu", tensor_parallel_size=count, max_num_seqs=4, max_model_len=512, prefix_cache=False
    )
    built = build(model, config, lambda *_: None, lambda opened: None)
    try:
        events = list[Event]()
        for seed in (1, 2):
            prompt = tuple((seed * 7919 * i) % VOCAB for i in range(1, 200))
            params = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True)
            built.engine.submit(Request(str(seed), prompt, params), events.append)
        while built.engine.step():
            pass
        if failed := [event.error for event in events if event.error]:
            raise failed[0]
        pids = [os.getpid(), *(built.target.ranks.pids if built.target.ranks else ())]
        print(json.dumps(pids), flush=True)
        sys.stdin.read()
    finally:
        built.close()


def measure(model: Path, count: int) -> list[ProcessMemory]:
    """Every rank of an engine with so many."""
    command = [sys.executable, __file__, "--serve", str(count), str(model)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdin is not None
        line = process.stdout.readline()
        if not line:
            raise SystemExit(f"the engine with {count} ranks has failed")
        found = [read_memory(rank, pid, model) for rank, pid in enumerate(json.loads(line))]
        process.stdin.close()
    return found


def read_memory(rank: int, pid: int, model: Path) -> ProcessMemory:
    """What the kernel counts for a process."""
    total, by_name, name = Counter[str](), Counter[str](), ""
    for line in Path(f"/proc/{pid}/smaps").read_text().splitlines():
        if found := MAPPING.match(line):
            name = found[1] or "(anonymous)"
        elif found := FIELD.match(line):
            total[found[1]] += int(found[2]) << 10
            if found[1] == "Rss":
                by_name[Path(name).name or name] += int(found[2]) << 10
    peak = PEAK.search(Path(f"/proc/{pid}/status").read_text())
    assert peak is not None
    return ProcessMemory(
        rank, total["Rss"], total["Private_Clean"] + total["Private_Dirty"], total["Pss"],
        int(peak[1]) << 10, by_name[model.name], dict(by_name.most_common(8)),
    )  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--storage", default="Q8_0", help="what weights are stored in")
    parser.add_argument(
        "--ranks", default="1,2", help="counts of ranks; the first is what others are shares of"
    )
    parser.add_argument("--folder", type=Path, help="where the model is written, and kept; else it goes")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--serve", type=int, help=argparse.SUPPRESS)
    parser.add_argument("model", nargs="?", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        serve(options.model, options.serve)
        return
    with tempfile.TemporaryDirectory() as folder:
        where = options.folder or Path(folder)
        where.mkdir(parents=True, exist_ok=True)
        model = where / f"random-{options.storage}.gguf"
        if not model.exists():
            write_model(model, options.storage)
        print(f"{model.name}: {model.stat().st_size / 1e9:.2f} GB", file=sys.stderr)
        alone = None
        for count in map(int, options.ranks.split(",")):
            for found in measure(model, count):
                alone = alone or found
                print_row(count, found, alone, as_json=options.json)


def print_row(count: int, found: ProcessMemory, alone: ProcessMemory, *, as_json: bool) -> None:
    if as_json:
        print(json.dumps({"ranks": count, **asdict(found)}), flush=True)
        return
    cells = [
        f"{what.replace('_', ' ')} {getattr(found, what) / 2**20:7.0f} MiB {share:5.1%}"
        for what in ("resident", "private", "own_part", "peak")
        for share in [getattr(found, what) / getattr(alone, what)]
    ]
    print(
        f"{count} ranks, rank {found.rank}: {', '.join(cells)}, file {found.file / 2**20:.0f} MiB", flush=True
    )


if __name__ == "__main__":
    main()
