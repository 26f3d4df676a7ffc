"""Memory of one rank, and of each of several, over a random model of about 1 GB that this script writes.

    python benchmarks/rank_memory.py [--storage Q8_0] [--ranks 1,2,4] [--folder DIR] [--json]

Every count of ranks is an engine in a process of its own, as `plait serve` has it: it loads, answers two
requests, and waits. Then `/proc/PID/pagemap` of all its processes is read (Linux, root): their pages.
Other programs may have the same libraries open, and change nothing.

    resident    pages that the process has
    private     pages that it has and the engine's other processes do not
    own part    each page divided by the number of the engine's processes that have it. All parts together
                are the engine's memory. The kernel's Pss also divides by other programs
    peak        the most that was resident since the start, loading included
    file        pages of the model's file, which the kernel may take back at any time; the rest has them, too
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import queue
import re
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import gguf
import numpy as np
import torch

from plait.config import EngineConfig
from plait.ops.blocks import random_blocks
from plait.request import Event, Request, SamplingParams
from plait.worker.client import EngineProcess

HIDDEN, LAYERS, FFN, VOCAB, HEADS, KV_HEADS, HEAD_DIM = 2048, 15, 7168, 32768, 32, 8, 64
IDLE_S = 4.0  # by then an engine without work has given back what steps have freed
PEAK = re.compile(r"^VmHWM:\s+(\d+) kB", re.M)
PAGE = os.sysconf("SC_PAGE_SIZE")


@dataclass(frozen=True, slots=True)
class ProcessMemory:
    """Of one process, in bytes."""

    rank: int
    resident: int
    private: int
    own_part: int
    peak: int
    file: int
    largest: dict[str, int]  # own part, by what is mapped


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


def measure(model: Path, count: int) -> tuple[list[ProcessMemory], str]:
    """Every rank of an engine with so many, and a hash of the tokens of two requests."""
    config = EngineConfig(
        device="cpu", tensor_parallel_size=count, max_num_seqs=4, max_model_len=512, prefix_cache=False,
        startup_image="off",  # an engine that starts from an image has no torch, and several ranks have none
    )  # fmt: skip
    engine = EngineProcess(str(model), config)
    try:
        engine.ready(lambda *_: None)
        replies = [Reply() for _ in range(2)]
        for seed, reply in enumerate(replies, 1):
            prompt = tuple((seed * 7919 * i) % VOCAB for i in range(1, 200))
            params = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True)
            engine.submit(Request(str(seed), prompt, params), reply.take)
        tokens = [reply.wait() for reply in replies]
        time.sleep(IDLE_S)
        pids = [engine.pid, *children_of(engine.pid)] if engine.pid else []
        found = read_memory(pids, model) if len(pids) == count else []
    finally:
        engine.close(drain=False)
    if len(pids) != count:
        raise SystemExit(f"{count} ranks were expected, and there are {len(pids)} processes")
    return found, hashlib.sha256(repr(tokens).encode()).hexdigest()[:16]


class Reply:
    """The events of one request, until the last."""

    def __init__(self) -> None:
        self._events: queue.SimpleQueue[Event] = queue.SimpleQueue()

    def take(self, event: Event) -> None:
        self._events.put(event)

    def wait(self) -> list[int]:
        """Its tokens. Raises what the request ended with."""
        tokens: list[int] = []
        while True:
            event = self._events.get(timeout=600)
            tokens += event.token_ids
            if event.error:
                raise event.error
            if event.finish_reason is not None:
                return tokens


def children_of(pid: int) -> list[int]:
    """The ranks of an engine, in order."""
    tasks = Path(f"/proc/{pid}/task").iterdir()
    return sorted(int(child) for task in tasks for child in (task / "children").read_text().split())


def read_memory(pids: Sequence[int], model: Path) -> list[ProcessMemory]:
    """What the processes of an engine have in memory."""
    pages = [read_pages(pid) for pid in pids]
    numbers, counts = np.unique(np.concatenate([found.numbers for found in pages]), return_counts=True)
    if not numbers.any():
        raise SystemExit("the system shows the numbers of pages to root alone: run this as root")
    return [
        memory_of(rank, pid, found, counts[np.searchsorted(numbers, found.numbers)], model)
        for rank, (pid, found) in enumerate(zip(pids, pages, strict=True))
    ]


def memory_of(rank: int, pid: int, pages: MappedPages, counts: np.ndarray, model: Path) -> ProcessMemory:
    """`counts`: how many of the engine's processes have each page."""
    peak = PEAK.search(Path(f"/proc/{pid}/status").read_text())
    assert peak is not None
    own, whole = Counter[str](), Counter[str]()
    for place, name in enumerate(pages.names):
        found = counts[pages.places == place]
        own[name] += round(float((PAGE / found).sum()))
        whole[name] += PAGE * len(found)
    return ProcessMemory(
        rank, sum(whole.values()), PAGE * int(np.count_nonzero(counts == 1)), sum(own.values()),
        int(peak[1]) << 10, whole[model.name], dict(own.most_common(12)),
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class MappedPages:
    """Pages of a process that are in memory, each once. `places`: for each, the index of its mapping."""

    numbers: np.ndarray
    places: np.ndarray
    names: Sequence[str]


def read_pages(pid: int) -> MappedPages:
    numbers, places, names = [], [], list[str]()
    with Path(f"/proc/{pid}/pagemap").open("rb", buffering=0) as pagemap:
        for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
            start, stop = (int(number, 16) // PAGE for number in line.split()[0].split("-"))
            if start >= 1 << 51:  # the kernel's own page
                continue
            pagemap.seek(8 * start)
            entries = np.frombuffer(pagemap.read(8 * (stop - start)), np.uint64)
            present = entries[entries >> np.uint64(63) == 1] & np.uint64((1 << 55) - 1)
            numbers.append(present)
            places.append(np.full(len(present), len(names)))
            name = " ".join(line.split()[5:]) or "(anonymous)"
            names.append(Path(name).name or name)
    unique, first = np.unique(np.concatenate(numbers), return_index=True)
    return MappedPages(unique, np.concatenate(places)[first], names)


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
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        where = options.folder or Path(folder)
        where.mkdir(parents=True, exist_ok=True)
        model = where / f"random-{options.storage}.gguf"
        if not model.exists():
            write_model(model, options.storage)
        print(f"{model.name}: {model.stat().st_size / 1e9:.2f} GB", file=sys.stderr)
        alone = None
        for count in map(int, options.ranks.split(",")):
            ranks, tokens = measure(model, count)
            for found in ranks:
                alone = alone or found
                print_row(count, found, alone, tokens, as_json=options.json)


def print_row(count: int, found: ProcessMemory, alone: ProcessMemory, tokens: str, *, as_json: bool) -> None:
    if as_json:
        print(json.dumps({"ranks": count, "tokens": tokens, **asdict(found)}), flush=True)
        return
    cells = [
        f"{what.replace('_', ' ')} {getattr(found, what) / 2**20:7.0f} MiB {share:5.1%}"
        for what in ("resident", "private", "own_part", "peak")
        for share in [getattr(found, what) / getattr(alone, what)]
    ]
    print(
        f"{count} ranks, rank {found.rank}: {', '.join(cells)}, file {found.file / 2**20:.0f} MiB, "
        f"tokens {tokens}",
        flush=True,
    )


if __name__ == "__main__":
    main()
