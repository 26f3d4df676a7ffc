"""The certificate: small models with every mixer, in every cell of `plait verify`, over a million tokens.

A file says what came of it. It is written anew behind each cell, whole or not at all, so a run that was
interrupted goes on where it ended. Rounds go over all models and cells, each with prompts of its own, until
there are enough tokens.
"""

from __future__ import annotations

import hashlib
import json
import platform
import re
import secrets
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, replace
from importlib.metadata import version
from pathlib import Path

import msgspec
from msgspec import Struct

from plait.config import EngineConfig
from plait.errors import ConfigError, PlaitError
from plait.kernels.load import host_target
from plait.loading.build import load
from plait.loading.draft_model import open_draft
from plait.loading.identity.fingerprint import fingerprint
from plait.loading.identity.source_code import PACKAGE
from plait.verify.matrix import Cell
from plait.verify.prompts import make_up_prompts
from plait.verify.results import CellResult
from plait.verify.tiny.models import NAMES, write_named
from plait.verify.verify import Extent, Verification
from plait.version import __version__

FORM = 1
BATCH, MAX_TOKENS, LONGEST = 4, 64, 512
ALL_TOKENS = 1_000_000
DRAFT = "attention"  # the model that drafts for the others: all have one vocabulary
LIBRARIES = ("torch", "numpy", "numba", "llvmlite")
# Whatever a token depends on; a change elsewhere leaves a certificate as it is.
ROOMS = (
    *("checkpoint", "engine", "families", "kernels", "loading", "model", "ops", "quant", "runner"),
    *("schedule", "state", "verify", "worker"),
    *("config.py", "memory.py", "rare_specs.py", "request.py", "sampling_fields.py", "spec.py"),
)


class CertifiedCell(Struct, frozen=True, omit_defaults=True):
    """A cell that has run. `cell`: MODEL/CELL/ROUND. `shown`: how often what it tests has happened; 0: never,
    so that it shows nothing beyond its replies; -1: it needs no proof.

    `different`: replies with other tokens, `rounded` with other bits of log-probabilities. `digest`: of all
    tokens and bits. `error`: why it did not end.
    """

    cell: str
    replies: int
    tokens: int
    different: int
    rounded: int
    shown: int
    digest: str
    seconds: float
    error: str = ""

    @property
    def is_right(self) -> bool:
        return not (self.different or self.rounded or self.error)


class CertifiedModel(Struct, frozen=True):
    """A model of the certificate: its mixers, how its steps run, the engine's fingerprint, and its cells."""

    mixers: tuple[str, ...]
    step: str
    fingerprint: str
    cells: tuple[str, ...]


class VerifyCertificate(Struct):
    """What is in a file. `made_by`: all that decides a bit; a file goes on only where this is the same."""

    form: int
    made_by: dict[str, object]
    started: str
    models: dict[str, CertifiedModel]
    cells: list[CertifiedCell]
    ended: str = ""

    @property
    def num_tokens(self) -> int:
        return sum(cell.tokens for cell in self.cells)

    def summary(self) -> dict[str, object]:
        """Sums over the cells."""
        cells = self.cells
        return {
            "complete": bool(self.ended),
            "cells": len(cells),
            "replies": sum(c.replies for c in cells),
            "tokens": self.num_tokens,
            "replies_with_other_tokens": sum(c.different for c in cells),
            "replies_with_other_bits": sum(c.rounded for c in cells),
            "cells_that_failed": sum(bool(c.error) for c in cells),
            "cells_without_their_effect": sum(c.shown == 0 for c in cells),
            "seconds": round(sum(c.seconds for c in cells)),
        }

    def to_text(self) -> str:
        """The file: the sums first, a line for each cell, and a digest of these lines."""
        lines = [msgspec.json.encode(cell).decode() for cell in self.cells]
        head = {
            "form": self.form,
            "made_by": self.made_by,
            "started": self.started,
            "ended": self.ended,
            "summary": self.summary(),
            "digest": hashlib.blake2b("\n".join(lines).encode(), digest_size=16).hexdigest(),
            "models": msgspec.to_builtins(self.models),
        }
        body = ",\n  ".join(lines)
        return f'{json.dumps(head, indent=1)[:-2]},\n "cells": [\n  {body}\n ]\n}}\n'

    def write(self, path: Path) -> None:
        """Write the whole file under another name, and rename it. Raises OSError."""
        temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
        try:
            temporary.write_text(self.to_text(), encoding="utf-8")
            temporary.replace(path)
        finally:
            temporary.unlink(missing_ok=True)


def read_certificate(path: Path) -> VerifyCertificate | None:
    """What is in a file; None: there is none. Raises ConfigError for one that is no certificate."""
    try:
        made = msgspec.json.decode(path.read_bytes(), type=VerifyCertificate)
    except FileNotFoundError:
        return None
    except (msgspec.MsgspecError, OSError) as error:
        raise ConfigError(
            f"{path} is no certificate that can be read ({error}); name another file"
        ) from error
    if made.form != FORM:
        raise ConfigError(f"{path} is a certificate of form {made.form}, not {FORM}; name another file")
    return made


def resume(path: Path, made_by: Mapping[str, object]) -> VerifyCertificate:
    """The certificate in a file, to go on with, or a new one. Raises ConfigError if others have made it."""
    found = read_certificate(path)
    if found is None:
        return VerifyCertificate(FORM, dict(made_by), _now(), {}, [])
    if found.made_by != made_by:
        keys = sorted(k for k in {*found.made_by, *made_by} if found.made_by.get(k) != made_by.get(k))
        raise ConfigError(
            f"{path} was made by another Plait ({', '.join(keys)}: other values), so it cannot go on here; "
            "name another file, or remove it to begin again"
        )
    return found


def describe_maker(config: EngineConfig) -> dict[str, object]:
    """All that decides a bit of a certificate: code, libraries, processor, and options that are not usual."""
    usual = _engine_config(EngineConfig())
    options = {
        f.name: getattr(config, f.name)
        for f in fields(config)
        if getattr(config, f.name) != getattr(usual, f.name)
    }
    made: dict[str, object] = {
        "plait": __version__,
        "code": hash_code(),
        "python": platform.python_version(),
        **{name: version(name) for name in LIBRARIES},
        "system": f"{platform.system()} {platform.machine()}",
        "processor": _processor(),
        "target": hashlib.blake2b(host_target().encode(), digest_size=8).hexdigest(),
        "batch": BATCH,
        "max_tokens": MAX_TOKENS,
        "options": options,
    }
    plain: dict[str, object] = json.loads(json.dumps(made))
    return plain


def hash_code() -> str:
    """A hash of our source code that may decide a token."""
    made = hashlib.blake2b(digest_size=16)
    for room in ROOMS:
        for path in sorted([PACKAGE / room] if room.endswith(".py") else (PACKAGE / room).rglob("*.py")):
            made.update(str(path.relative_to(PACKAGE)).encode() + b"\0" + path.read_bytes())
    return made.hexdigest()


def _processor() -> str:
    """The processor's name, where the system has one."""
    try:
        found = re.search(r"^model name\s*:\s*(.*)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    except OSError:
        found = None
    return found[1] if found else platform.processor() or platform.machine()


@dataclass(frozen=True, slots=True)
class CellName:
    """MODEL/CELL/ROUND; the cell's words are joined by dashes."""

    model: str
    cell: str
    round_number: int

    def __str__(self) -> str:
        return f"{self.model}/{self.cell}/{self.round_number}"

    @classmethod
    def parse(cls, text: str) -> CellName:
        """Raises ConfigError for a text of another form, or another model."""
        model, _, rest = text.partition("/")
        cell, _, number = rest.rpartition("/")
        is_number = number.isascii() and number.isdigit() and int(number[:9]) > 0
        if not (model in NAMES and cell and is_number):
            known = ", ".join(NAMES)
            raise ConfigError(f"--cell {text}: write it as MODEL/CELL/ROUND; models are {known}")
        return cls(model, cell, int(number))


def _engine_config(config: EngineConfig) -> EngineConfig:
    return replace(
        config,
        device="cpu",
        max_model_len=LONGEST,
        max_num_seqs=1,
        prefix_cache=False,
        startup_image="off",
        packed_cache="off",
    )


class CertificateRun:
    """Runs cells, in models that are written into `folder`. Raises what loading does."""

    def __init__(self, config: EngineConfig, folder: Path) -> None:
        if config.device == "cuda":
            raise ConfigError("--certificate: it is about the kernels of a CPU; leave --device cuda out")
        self.config, self._folder = _engine_config(config), folder
        self.made_by = describe_maker(self.config)

    def rounds(
        self, certificate: VerifyCertificate, tokens: int
    ) -> Iterator[tuple[CellName, CellResult | None]]:
        """Run what the certificate does not have, round by round, until it has so many tokens.

        Each cell is added to it before it is given out. None: the cell failed with an error.
        """
        number = 0
        while not number or certificate.num_tokens < tokens:
            number += 1
            for model in NAMES:
                yield from self._run_round(certificate, model, number)
        certificate.ended = certificate.ended or _now()

    def _run_round(
        self, certificate: VerifyCertificate, model: str, number: int
    ) -> Iterator[tuple[CellName, CellResult | None]]:
        done = {cell.cell for cell in certificate.cells}
        known = certificate.models.get(model)
        if known and all(str(CellName(model, cell, number)) in done for cell in known.cells):
            return
        certificate.ended = ""
        verification = self._open(model, number)
        try:
            certificate.models[model] = _describe(verification)
            for cell in verification.cells:
                name = CellName(model, cell.word, number)
                if str(name) in done:
                    continue
                made, result = _certify(verification, cell, name)
                certificate.cells.append(made)
                yield name, result
        finally:
            verification.loaded.front.close(drain=False)

    def run_cell(self, name: CellName) -> tuple[CertifiedCell, CellResult | None]:
        """Run one cell alone. Raises ConfigError for a cell that its model does not have."""
        verification = self._open(name.model, name.round_number)
        try:
            known = {cell.word: cell for cell in verification.cells}
            if name.cell not in known:
                listed = ", ".join(known)
                raise ConfigError(f"--cell {name}: the cells of {name.model} are {listed}")
            return _certify(verification, known[name.cell], name)
        finally:
            verification.loaded.front.close(drain=False)

    def _open(self, model: str, number: int) -> Verification:
        draft, path = self._write(DRAFT), self._write(model)
        loaded = load(str(path), self.config)
        try:
            vocab_size = loaded.front.spec.vocab_size
            opened = open_draft(replace(self.config, speculate=str(draft)), loaded.front.spec, None)
            return Verification(
                loaded,
                batch=BATCH,
                max_tokens=MAX_TOKENS,
                prompts=make_up_prompts(vocab_size, number),
                extent=Extent(model=str(path), draft=opened),
            )
        except BaseException:
            loaded.front.close(drain=False)
            raise

    def _write(self, model: str) -> Path:
        path = self._folder / model
        if not path.exists():
            write_named(model, path)
        return path


def _certify(
    verification: Verification, cell: Cell, name: CellName
) -> tuple[CertifiedCell, CellResult | None]:
    started = time.perf_counter()
    try:
        result = verification.result(cell)
    except PlaitError as error:
        seconds = round(time.perf_counter() - started, 2)
        return CertifiedCell(str(name), 0, 0, 0, 0, 0, "", seconds, f"{type(error).__name__}: {error}"), None
    shown = -1 if result.proof is None else result.counts.get(result.proof, 0)
    numbers = (result.num_replies, result.num_tokens, result.num_different, result.num_rounded, shown)
    seconds = round(time.perf_counter() - started, 2)
    return CertifiedCell(str(name), *numbers, result.digest, seconds), result


def _describe(verification: Verification) -> CertifiedModel:
    loaded = verification.loaded
    names = (type(mixer).__name__.removesuffix("Spec") for _, mixer in loaded.front.spec.mixers())
    step, cells = loaded.runner.step_kind.partition(";")[0], tuple(cell.word for cell in verification.cells)
    known = fingerprint(loaded.opened, loaded.target).arithmetic
    return CertifiedModel(tuple(dict.fromkeys(names)), step, known, cells)


def _now() -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
