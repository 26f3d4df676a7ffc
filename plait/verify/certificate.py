"""The certificate: small models with every mixer, in every cell of `plait verify`, over a million tokens.

A file says what came of it. It is written anew behind each cell, whole or not at all, so a run that was
interrupted goes on where it ended. Rounds go over all models and cells, each with prompts of its own, until
there are enough tokens.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec

from plait.config import EngineConfig
from plait.errors import ConfigError, PlaitError
from plait.loading.build import load
from plait.loading.draft_model import open_draft
from plait.loading.identity.fingerprint import fingerprint
from plait.verify.certificate_file import CertifiedCell, CertifiedModel, VerifyCertificate, now
from plait.verify.certificate_maker import CertificateMaker, describe_maker
from plait.verify.matrix import Cell
from plait.verify.prompts import make_up_prompts
from plait.verify.results import CellResult
from plait.verify.tiny.models import NAMES, write_named
from plait.verify.verify import Extent, Verification

BATCH, MAX_TOKENS, LONGEST = 4, 64, 512
DRAFT = "attention"  # the model that drafts for the others: all have one vocabulary


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


def find_maker(config: EngineConfig) -> CertificateMaker:
    """The maker of certificates with these options."""
    return describe_maker(_engine_config(config), _engine_config(EngineConfig()), BATCH, MAX_TOKENS)


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
        self.maker = find_maker(config)

    def rounds(
        self, certificate: VerifyCertificate, tokens: int
    ) -> Iterator[tuple[CellName, CellResult | None]]:
        """Run what the certificate does not have, round by round, until it has so many tokens.

        Each cell is added to it before it is given out. None: the cell failed with an error.
        """
        number = 0
        before = -1
        while not number or before < certificate.num_tokens < tokens:  # a round may fail in every cell
            number, before = number + 1, certificate.num_tokens
            for model in NAMES:
                yield from self._run_round(certificate, model, number)
        certificate.ended = certificate.ended or now()

    def _run_round(
        self, certificate: VerifyCertificate, model: str, number: int
    ) -> Iterator[tuple[CellName, CellResult | None]]:
        done = {cell.cell for cell in certificate.cells}
        if self._is_complete(certificate, model, number, done):
            return
        verification, revision = self._open(model, number), certificate.name_of(self.maker)
        try:
            names = {CellName(model, cell.word, number): cell for cell in verification.cells}
            for name, cell in names.items():
                if str(name) in done:
                    continue
                made, result = _certify(verification, cell, name)
                certificate.makers.setdefault(revision, dict(self.maker.facts))
                certificate.models.setdefault(model, {}).setdefault(revision, _describe(verification))
                certificate.cells.append(msgspec.structs.replace(made, revision=revision))
                certificate.ended = ""
                yield name, result
        finally:
            verification.loaded.front.close(drain=False)

    def _is_complete(self, certificate: VerifyCertificate, model: str, number: int, done: set[str]) -> bool:
        """Whether a revision with the cells of ours has run all of them: the model need not be loaded."""
        return any(
            certificate.makers[revision].get("matrix") == self.maker.facts["matrix"]
            and all(str(CellName(model, cell, number)) in done for cell in known.cells)
            for revision, known in certificate.models.get(model, {}).items()
        )

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
