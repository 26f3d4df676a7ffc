"""`plait verify --certificate` and `--cell`: run the cells, show what differs, and how to run it again."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

import msgspec

from plait.cli.common.options import write_json
from plait.cli.common.progress import Status
from plait.config import EngineConfig

if TYPE_CHECKING:
    from plait.verify.certificate_file import CertifiedCell, VerifyCertificate

MOST_SHOWN = 5  # differences of a cell


def run_certificate(
    path: Path, config: EngineConfig, tokens: int, as_json: bool, *, keeps_others: bool = False
) -> int:
    """Go on with the certificate in a file until it has so many tokens; 1 if a cell is not right.

    keeps_others: where another revision has made it, too.
    """
    from plait.verify.certificate import CertificateRun
    from plait.verify.certificate_file import resume

    with TemporaryDirectory(prefix="plait-certificate-") as folder, _quiet(), Status("loading") as status:
        run = CertificateRun(config, Path(folder))
        certificate = resume(path, run.maker, keeps_others=keeps_others)
        for name, result in run.rounds(certificate, tokens):
            certificate.write(path)
            if not certificate.cells[-1].is_right:
                status.clear()
                show_cell(certificate.cells[-1], [str(d) for d in result.differences] if result else [])
            status.say(f"{certificate.num_tokens:,} of {tokens:,} tokens: {name}")
        certificate.write(path)
    if as_json:
        write_json(certificate.summary())
    else:
        show_summary(path, certificate)
    return int(not all(cell.is_right for cell in certificate.cells))


def run_cell(text: str, config: EngineConfig, path: Path | None, as_json: bool) -> int:
    """Run one cell of a certificate; 1 if it is not right, or not what the certificate in a file has."""
    from plait.verify.certificate import CellName, CertificateRun
    from plait.verify.certificate_file import read_certificate

    name = CellName.parse(text)
    with TemporaryDirectory(prefix="plait-certificate-") as folder, _quiet(), Status(text) as status:
        cell, result = CertificateRun(config, Path(folder)).run_cell(name)
        status.clear()
    certificate = read_certificate(path) if path else None
    known = next((c for c in certificate.cells if c.cell == text), None) if certificate else None
    is_same = known is None or known.digest == cell.digest
    if as_json:
        write_json({**msgspec.to_builtins(cell), "is_right": cell.is_right, "is_same_as_before": is_same})
    else:
        show_cell(cell, [str(d) for d in result.differences] if result else [])
        if path:
            found = "the same bits" if is_same else "OTHER BITS"
            made_by = f", made at {known.revision}" if known else ""
            _say(f"  {path}: {'no such cell' if known is None else found}{made_by}")
    return int(not (cell.is_right and is_same))


def show_cell(cell: CertifiedCell, differences: list[str]) -> None:
    """A cell, what differs in it, and the command that runs it again."""
    _say(f"{cell.cell}: {cell.tokens:,} tokens of {cell.replies} replies, digest {cell.digest or '-'}")
    if cell.error:
        _say(f"  it failed: {cell.error}")
    for difference in differences[:MOST_SHOWN]:
        _say(f"  {difference}")
    if cell.is_right:
        _say("  no difference" if cell.shown else "  no difference; its effect did not come about")
    else:
        _say(f"  {cell.different} replies with other tokens, {cell.rounded} with other bits")
        _say(f"  once more: plait verify --cell {cell.cell}")


def show_summary(path: Path, certificate: VerifyCertificate) -> None:
    """What is in a certificate, in a few lines."""
    found = certificate.summary()
    _say(f"{path}: {found['tokens']:,} tokens of {found['replies']:,} replies in {found['cells']:,} cells")
    _say(f"  {len(certificate.models)} models, {found['seconds']} s")
    for revision, count in certificate.count_revisions().items():
        numbers = f"{count['models']} models, {count['cells']:,} cells, {count['tokens']:,} tokens"
        _say(f"  {revision}: {numbers}, {certificate.makers[revision].get('processor', 'unknown processor')}")
    for cell in certificate.cells:
        if not cell.is_right:
            _say(f"  WRONG  plait verify --cell {cell.cell}")
    if all(cell.is_right for cell in certificate.cells):
        _say("  no difference, in no token and in no bit")


@contextmanager
def _quiet() -> Iterator[None]:
    """Without what engines log of being killed."""
    logger = logging.getLogger("plait")
    before = logger.level
    logger.setLevel(logging.CRITICAL + 1)
    try:
        yield
    finally:
        logger.setLevel(before)


def _say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()
