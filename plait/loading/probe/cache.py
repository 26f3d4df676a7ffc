"""What a probe found about a model, in a file beside the weights: later runs use it at once.

The file is JSON, `plait.json` (beside one of several files of weights, `NAME.plait.json`). It lies under the
cache folder where the model's own cannot be written. It is bound to the names, shapes and formats of the
model's tensors. Next to another model it is ignored, with a line in the log. A damaged one is an error,
because a model's replies must not change in silence.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import secrets
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Protocol

from plait.cache_folder import cache_base, make_folder
from plait.checkpoint.find_files import ModelFiles
from plait.checkpoint.readers.mmap_json import read_json
from plait.errors import BadFile

log = logging.getLogger("plait")
KIND, VERSION = "plait probe", 1
ADVICE = "delete it, or run `plait info MODEL --probe`"


class TensorHeaders(Protocol):
    """What a checkpoint says of its tensors without reading them."""

    def names(self) -> Iterable[str]: ...
    def shape(self, name: str) -> tuple[int, ...]: ...
    def format_of(self, name: str) -> str: ...


@dataclass(frozen=True, slots=True)
class Findings:
    """`values`: keys of a config; `margins`: for each, by how many nats the next best value is worse.

    A margin of 0: the text does not show it. `loss`: nats per token with all of them, on `tokens` tokens.
    """

    values: Mapping[str, object]
    margins: Mapping[str, float]
    loss: float
    tokens: int

    def source(self, key: str) -> str:
        """Where a value came from, as `plait info` shows it."""
        margin = self.margins[key]
        return f"probed (margin {margin:.2g} nats)" if margin else "probed (no other is better beyond chance)"


def fingerprint(tensors: TensorHeaders) -> str:
    """Names, shapes and formats of all tensors, hashed. The numbers in them are not looked at."""
    rows = sorted((name, tensors.shape(name), tensors.format_of(name)) for name in tensors.names())
    return hashlib.sha256(json.dumps(rows).encode()).hexdigest()


def places(files: ModelFiles, bound_to: str, cache_dir: str | None) -> tuple[Path, ...]:
    """Paths of the findings: next to the model, and in the cache if there is a folder for one."""
    first = files.weights[0]
    is_only = first.name == "model.safetensors" or len(files.weights) > 1
    base = cache_base(cache_dir)
    own = files.directory / ("plait.json" if is_only else f"{first.stem}.plait.json")
    return (own, base / "probes" / f"{bound_to[:32]}.json") if base is not None else (own,)


def read_findings(files: ModelFiles, tensors: TensorHeaders, cache_dir: str | None) -> Findings | None:
    """What an earlier probe found about just this model. Raises BadFile for a damaged file."""
    bound_to = fingerprint(tensors)
    for path in places(files, bound_to, cache_dir):
        if os.path.exists(path) and (found := _read(path, bound_to)) is not None:
            log.info("what a probe found is read from %s", path)
            return found
    return None


def _read(path: Path, bound_to: str) -> Findings | None:
    """The findings in a file; None if they are another model's. Raises BadFile."""
    try:
        record = read_json(path, "what a probe found")
    except BadFile as error:
        raise BadFile(f"{error}; {ADVICE}") from error
    try:
        if record["kind"] != KIND or record["version"] != VERSION:
            raise ValueError(f"it is {record['kind']!r}, version {record['version']!r}")
        if record["tensors"] != bound_to:
            log.warning(
                "%s is about other tensors than the model has, and is not used; --probe renews it", path
            )
            return None
        values, margins = dict(record["values"]), dict(record["margins"])
        numbers = {key: float(margins[key]) for key in values}
        return Findings(values, numbers, float(record["loss"]), int(record["tokens_read"]))
    except (KeyError, TypeError, ValueError) as error:
        told = f"{type(error).__name__}: {error}"[:160]
        raise BadFile(f"{path}: cannot be what a probe found ({told}); {ADVICE}") from error


def write_findings(
    files: ModelFiles, tensors: TensorHeaders, cache_dir: str | None, found: Findings
) -> Path | None:
    """Write the findings to a file. Returns its path, or None if neither folder can be written."""
    bound_to = fingerprint(tensors)
    record = {"kind": KIND, "version": VERSION, "tensors": bound_to, **asdict(found)}
    record["tokens_read"] = record.pop("tokens")
    for path in places(files, bound_to, cache_dir):
        try:
            make_folder(path.parent)
            # A name of its own: another process may probe the same model.
            part = path.with_name(f".{path.name}.{secrets.token_hex(4)}.part")
            try:
                part.write_text(json.dumps(record, indent=2) + "\n", "utf-8")
                part.replace(path)
            finally:
                part.unlink(missing_ok=True)  # what a full disk left of it
        except OSError as error:
            log.info("%s cannot be written: %s", path, error.strerror)
        else:
            return path
    log.warning("what was probed cannot be kept: no folder can be written; see --cache-dir")
    return None
