"""Rows of results on disk, and what every phase is given: the device, the time it has, what is known yet."""

from __future__ import annotations

import faulthandler
import json
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from plait.ops.chip import EXAMPLES, Chip, read_chip

ROOT = Path(__file__).resolve().parents[2]
FIELDS = (
    *("phase", "op", "variant", "shape", "dtype", "us", "bytes", "flops", "share_of_roof", "error", "ok"),
    *("peer", "revision", "chip", "note"),
)
KEY = ("phase", "op", "variant", "shape", "dtype", "peer", "revision", "chip")
LOST = (  # nothing runs in this process after these
    *("illegal memory access", "unspecified launch failure", "device-side assert", "misaligned address"),
    *("illegal instruction", "launch timed out", "hardware stack error"),
)
HANGS_S = 120.0  # a row that takes longer, and ten times what it should, never comes back


class DeviceLost(Exception):
    """A kernel broke the device's context; the row says which, and the next call goes on behind it."""


@dataclass(frozen=True, slots=True)
class Item:
    """One row to find. `run` returns its values; an exception is a row that is not ok.

    needs_s: seconds that it takes at most, as far as one knows: with less left it is not begun.
    """

    op: str
    variant: str
    shape: str
    dtype: str
    run: Callable[[], dict[str, Any]]
    peer: str = ""
    needs_s: float = 2.0


@dataclass(slots=True)
class Bench:
    """What phases share. `deadline`: of the phase, on the monotonic clock."""

    out: Path
    device: torch.device
    chip: Chip
    is_full: bool = False
    is_dry: bool = False
    only: str = ""
    deadline: float = 0.0
    rows: list[dict[str, Any]] = field(default_factory=list)
    revision: str = ""

    @classmethod
    def at(cls, out: Path, *, is_full: bool, is_dry: bool, only: str) -> Bench:
        """On this machine's GPU, or, dry, on a CPU as an example of one. Raises SystemExit without a GPU."""
        if is_dry:
            device, chip = torch.device("cpu"), replace(EXAMPLES[90], name="no GPU: interpreted")
        else:
            if not torch.cuda.is_available():
                raise SystemExit("torch finds no GPU here; --dry runs a part in Triton's interpreter")
            device = torch.device("cuda", torch.cuda.current_device())
            found = read_chip(device)
            assert found is not None
            chip = found
        out.mkdir(parents=True, exist_ok=True)
        made = cls(out, device, chip, is_full, is_dry, only, revision=_revision())
        made.rows = made._read()
        return made

    @property
    def file(self) -> Path:
        return self.out / "rows.jsonl"

    @property
    def _marker(self) -> Path:
        return self.out / "running.json"

    @property
    def seconds_left(self) -> float:
        return self.deadline - time.monotonic()

    def key(self, phase: int, item: Item) -> dict[str, Any]:
        """The fields by which a row is found again."""
        names = {"op": item.op, "variant": item.variant, "shape": item.shape, "dtype": item.dtype}
        return {"phase": phase, **names, "peer": item.peer, "revision": self.revision, "chip": self.chip.name}

    def is_done(self, key: dict[str, Any]) -> bool:
        return any(all(row.get(name) == key[name] for name in KEY) for row in self.rows)

    def emit(self, key: dict[str, Any], values: dict[str, Any]) -> dict[str, Any]:
        """Write a row, so that it survives whatever comes next."""
        row = {**dict.fromkeys(FIELDS), **key, **values}
        self.rows.append(row)
        with self.file.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")
        return row

    def find(self, phase: int, op: str) -> dict[str, Any] | None:
        """The last row of an op in a phase, on this chip."""
        found = [r for r in self.rows if (r["phase"], r["op"], r["chip"]) == (phase, op, self.chip.name)]
        return found[-1] if found else None

    def run_phase(self, phase: int, items: Iterator[Item], say: Callable[[str], None]) -> int:
        """Run the items that have no row yet, while there is time. How many are left.

        Raises DeviceLost.
        """
        left = 0
        for item in items:
            key = self.key(phase, item)
            if (self.only and self.only not in item.op) or self.is_done(key):
                continue
            if self.seconds_left < item.needs_s:
                left += 1
                continue
            with self._marked(key), self._watched(item):
                values = self._values(item)
            if values is None:
                left += 1
                continue
            row = self.emit(key, values)
            say(describe_row(row))
            if any(word in str(row["note"]) for word in LOST) or not (row["ok"] or self._answers()):
                raise DeviceLost(str(row["note"]))
        return left

    def _answers(self) -> bool:
        """Whether the device still works: a lost one returns its error at every call."""
        if self.device.type != "cuda":
            return True
        try:
            torch.cuda.synchronize(self.device)
        except RuntimeError:
            return False
        return True

    def recover(self) -> dict[str, Any] | None:
        """The row that a call before this one never came back from, written as not ok."""
        if not self._marker.exists():
            return None
        key = json.loads(self._marker.read_text(encoding="utf-8"))
        self._marker.unlink()
        if self.is_done(key):
            return None
        return self.emit(key, {"ok": False, "note": "it did not come back: a crash, or a kernel without end"})

    def _values(self, item: Item) -> dict[str, Any] | None:
        """What a row found; None: it was not done in time, and is left to the next call."""
        try:
            return {"ok": True, **item.run()}
        except TimeoutError:
            return None
        except (ImportError, NotImplementedError) as error:
            return {"ok": None, "note": f"not here: {' '.join(str(error).split())[:300]}"}
        except Exception as error:  # whatever a kernel or a peer does is a result
            text = " ".join(str(error).split())[:300]
            return {"ok": False, "note": f"{type(error).__name__}: {text}"}

    @contextmanager
    def _marked(self, key: dict[str, Any]) -> Iterator[None]:
        self._marker.write_text(json.dumps(key), encoding="utf-8")
        yield
        self._marker.unlink()

    @contextmanager
    def _watched(self, item: Item) -> Iterator[None]:
        """End this process if the row never comes back; the next call goes on behind it."""
        if not self.is_dry:
            faulthandler.dump_traceback_later(max(HANGS_S, 10 * item.needs_s), exit=True)
        try:
            yield
        finally:
            if not self.is_dry:
                faulthandler.cancel_dump_traceback_later()

    def _read(self) -> list[dict[str, Any]]:
        if not self.file.exists():
            return []
        lines = self.file.read_text(encoding="utf-8").splitlines()
        return [json.loads(line) for line in lines if line.strip()]


def describe_row(row: dict[str, Any]) -> str:
    """A row in one line."""
    parts = [f"{row['phase']} {row['op']}", row["variant"], row["shape"], row["dtype"], row["peer"]]
    if row["us"] is not None:
        parts.append(f"{row['us']:.1f} us")
    if row["share_of_roof"] is not None:
        parts.append(f"{100 * row['share_of_roof']:.0f} % of the roof")
    if row["error"] is not None:
        parts.append(f"off by {row['error']:.1e}")
    parts += [f"{name} {row[name]:.4g}" for name in ("tokens_s", "launches", "host_us") if name in row]
    verdict = {True: "ok", False: "WRONG", None: ""}[row["ok"]]
    return " ".join(str(part) for part in (*parts, verdict, row["note"]) if part)


def compare_rows(rows: list[dict[str, Any]], baseline: Path) -> list[str]:
    """Lines of what is 3 % slower or faster than in another file of rows, by everything but the revision."""
    names = [name for name in KEY if name != "revision"]
    before = {}
    for line in baseline.read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        before[tuple(row.get(name) for name in names)] = row
    lines = []
    for row in rows:
        old = before.get(tuple(row[name] for name in names))
        if old and old.get("us") and row["us"] and abs(row["us"] / old["us"] - 1) > 0.03:
            lines.append(f"{describe_row(row)}: {row['us'] / old['us']:.2f} times the baseline's time")
    return lines


def _revision() -> str:
    done = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    return done.stdout.strip() or "unknown"
