"""What share of the speed of plain reads a decode step reaches, and where the rest of its time goes.

python benchmarks/roof.py MODEL --format Q4_K Q6_K [--turns 40] [--context 20] [--threads 2] [--above]

One sequence, all weights in the formats that are named. Tables of launches run in turns and in random
order, so each share compares what memory gave in the same moment: the recorded step; its products alone; all
but these; as many empty launches; loops that read the products' bytes, one for each product, and one over
all. `--above` runs each turn above other processes (SCHED_FIFO), which takes rights, and pauses after. JSON.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import random
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

from plait import LLM, SamplingParams  # noqa: E402
from plait.kernels.cpu.codegen.kernel import Kernel, kernel  # noqa: E402
from plait.kernels.cpu.codegen.vec import add_i32, load_i32, store_i32, word, zero_i32  # noqa: E402
from plait.kernels.cpu.linear.blocks_source import linear_kernel  # noqa: E402
from plait.kernels.cpu.linear.layout import LAYOUTS  # noqa: E402
from plait.kernels.cpu.runtime.frame_words import SEQS, TOKENS  # noqa: E402
from plait.kernels.cpu.runtime.threads import LaunchTable  # noqa: E402

PRODUCT = "linear_rows"
STEPS = 3  # of a turn
PAUSE_S = 0.1


@kernel
def read_share(frame: int, args: int, thread: int, threads: int) -> None:
    """Address, bytes, where each thread leaves a line. Reads its share of all, four lines at a time."""
    start, size, out = word(args, 2), word(args, 3), word(args, 4)
    lines = size // 64
    first, last = lines * thread // threads, lines * (thread + 1) // threads
    a, b, c, d = zero_i32(), zero_i32(), zero_i32(), zero_i32()
    full = first + (last - first) // 4 * 4
    for k in range(first, full, 4):
        at = start + 64 * k
        a, b = add_i32(a, load_i32(at)), add_i32(b, load_i32(at + 64))
        c, d = add_i32(c, load_i32(at + 128)), add_i32(d, load_i32(at + 192))
    for k in range(full, last):
        a = add_i32(a, load_i32(start + 64 * k))
    store_i32(out + 64 * thread, add_i32(add_i32(a, b), add_i32(c, d)))


@kernel
def nothing(frame: int, args: int, thread: int, threads: int) -> None:
    """Compute nothing: what is left are barriers."""


class Step:
    """The recorded step of a loaded model, and tables made of it."""

    def __init__(self, llm: LLM, kinds: Sequence[str], threads: int) -> None:
        replay: Any = llm._loaded.runner.replay
        self.program, self.names = replay.program, list(replay.launches)
        self.threads, self.table = self.program.threads, self.program.table
        self._out = np.zeros(64 * threads, np.uint8)
        layouts = {linear_kernel(LAYOUTS[kind]).address: LAYOUTS[kind] for kind in kinds}
        self.products = []  # (address, bytes) of each
        for i, name in enumerate(self.names):
            if name == PRODUCT:
                made, where = self.table.entries[2 * i : 2 * i + 2]
                words = (ctypes.c_int64 * 7).from_address(where)
                n_in, address, n_out = words[4], words[5], words[6]
                if made not in layouts:
                    raise SystemExit(f"a product {n_in} -> {n_out} has weights in none of {', '.join(kinds)}")
                self.products.append((address, -(-n_out // 16) * layouts[made].tile_bytes(n_in)))

    def select(self, keep: Callable[[str], bool]) -> LaunchTable:
        """The launches of some kernels."""
        entries = self.table.entries
        kept = [entries[2 * i : 2 * i + 2] for i, name in enumerate(self.names) if keep(name)]
        return self._table([word for pair in kept for word in pair])

    def repeat(self, made: Kernel, places: Iterable[tuple[int, int]]) -> LaunchTable:
        """One launch of a kernel for each place."""
        words = [np.array([0, 0, *place, self._out.ctypes.data], np.int64) for place in places]
        table = self._table([part for one in words for part in (made.address, one.ctypes.data)])
        table.kept += words
        return table

    def _table(self, entries: list[int]) -> LaunchTable:
        table = LaunchTable(entries, self.table.scratch, self.table.shared)
        table.seal()
        return table

    def time(self, table: LaunchTable) -> float:
        """Seconds of a table, as the last decode step has left the frame."""
        started = time.perf_counter()
        for _ in range(STEPS):
            self.threads.run(table, tokens=1, logits=1, seqs=1)
        return (time.perf_counter() - started) / STEPS


def schedule(policy: int, priority: int) -> None:
    """Let the system run all threads of this process so."""
    for tid in os.listdir("/proc/self/task"):
        os.sched_setscheduler(int(tid), policy, os.sched_param(priority))


@contextmanager
def above(wanted: bool) -> Iterator[None]:
    """Run this process above others."""
    if not wanted:
        yield
        return
    try:
        schedule(os.SCHED_FIFO, 5)
        yield
    finally:
        schedule(os.SCHED_OTHER, 0)


def join_places(places: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """(address, bytes) of memory without its gaps below a page."""
    found: list[tuple[int, int]] = []
    for start, nbytes in sorted(places):
        if found and start - sum(found[-1]) <= 4096:
            found[-1] = found[-1][0], start + nbytes - found[-1][0]
        else:
            found.append((start, nbytes))
    return found


def measure(step: Step, turns: int, is_above: bool) -> dict[str, dict[str, float]]:
    """Of each table, the median milliseconds, GB/s of the products' bytes, and its share of one loop."""
    tables = {
        "step": step.table,
        "products": step.select(lambda name: name == PRODUCT),
        "all but products": step.select(lambda name: name != PRODUCT),
        "empty launches": step.repeat(nothing, [(0, 0)] * len(step.names)),
        "reads by product": step.repeat(read_share, step.products),
        "one loop": step.repeat(read_share, join_places(step.products)),
    }
    found: dict[str, list[float]] = {name: [] for name in tables}
    for _ in range(turns):
        with above(is_above):
            step.time(tables["one loop"])
            for name in random.sample(sorted(tables), len(tables)):
                found[name].append(step.time(tables[name]))
        time.sleep(PAUSE_S if is_above else 0)
    nbytes, roof = sum(size for _, size in step.products), found["one loop"]
    return {
        name: {
            "ms": round(median(times) * 1e3, 3),
            "gb_s": round(nbytes / median(times) / 1e9, 1),
            "share": round(median(r / t for r, t in zip(roof, times, strict=True)), 3),
        }
        for name, times in found.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("model")
    parser.add_argument(
        "--format", required=True, nargs="+", choices=sorted(LAYOUTS), help="of products: all there are"
    )
    parser.add_argument("--turns", type=int, default=40)
    parser.add_argument("--context", type=int, default=20)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--above", action="store_true")
    given = parser.parse_args()
    settings: dict[str, Any] = {"threads": given.threads, "max_num_seqs": 1, "max_model_len": 2048}
    # Kernels from an image have other addresses than those by which formats are found.
    with LLM(given.model, device="cpu", startup_image="off", **settings) as llm:
        vocabulary = llm._loaded.front.spec.vocab_size
        ids = [random.Random(1).randrange(vocabulary // 2) for _ in range(given.context)]
        llm.generate([ids], SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True))
        step = Step(llm, given.format, given.threads)
        step.threads._frame[TOKENS : SEQS + 1] = 1, 1, 1
        rows = measure(step, given.turns, given.above)
        nbytes = sum(size for _, size in step.products)
    print(json.dumps({"model": given.model, "products_nbytes": nbytes, "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
