"""The file of a certificate: its cells, the maker of each, and when such a file may go on."""

from __future__ import annotations

import hashlib
import json
import secrets
import time
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

import msgspec
from msgspec import Struct

from plait.errors import ConfigError
from plait.typed_values import decode_json
from plait.verify.certificate_maker import CertificateMaker

FORM = 2
# What must be the same where cells of another maker are kept: it decides which replies there are.
SAME_REPLIES = ("batch", "max_tokens", "options")


class CertifiedCell(Struct, frozen=True, omit_defaults=True):
    """A cell that has run. `cell`: MODEL/CELL/ROUND. `shown`: how often what it tests has happened; 0: never,
    so that it shows nothing beyond its replies; -1: it needs no proof.

    `different`: replies with other tokens, `rounded` with other bits of log-probabilities. `digest`: of all
    tokens and bits. `error`: why it did not end. `revision`: of the source code that ran.
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
    revision: str = ""

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
    """What is in a file.

    `makers`: by revision, all that decides a bit. `models`: by name, then by revision.
    """

    form: int
    makers: dict[str, dict[str, object]]
    started: str
    models: dict[str, dict[str, CertifiedModel]]
    cells: list[CertifiedCell]
    ended: str = ""

    @property
    def num_tokens(self) -> int:
        return sum(cell.tokens for cell in self.cells)

    def name_of(self, maker: CertificateMaker) -> str:
        """The maker's revision; with a hash of all facts where another maker has that name."""
        if self.makers.get(maker.revision, maker.facts) == maker.facts:
            return maker.revision
        facts = json.dumps(maker.facts, sort_keys=True).encode()
        return f"{maker.revision}:made-{hashlib.blake2b(facts, digest_size=6).hexdigest()}"

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
            "revisions": self.count_revisions(),
        }

    def count_revisions(self) -> dict[str, dict[str, int]]:
        """Cells, tokens and models of each revision of the source code."""
        cells, tokens = Counter[str](), Counter[str]()
        models: dict[str, set[str]] = {}
        for cell in self.cells:
            cells[cell.revision] += 1
            tokens[cell.revision] += cell.tokens
            models.setdefault(cell.revision, set()).add(cell.cell.partition("/")[0])
        return {
            revision: {"models": len(models[revision]), "cells": count, "tokens": tokens[revision]}
            for revision, count in cells.items()
        }

    def to_text(self) -> str:
        """The file: the sums first, a line for each cell, and a digest of these lines."""
        lines = [msgspec.json.encode(cell).decode() for cell in self.cells]
        head = {
            "form": self.form,
            "makers": self.makers,
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


class FirstForm(Struct):
    """A file of form 1: one maker, which had no name."""

    made_by: dict[str, object]
    started: str
    models: dict[str, CertifiedModel]
    cells: list[CertifiedCell]
    ended: str = ""

    def convert(self) -> VerifyCertificate:
        """The same with a name for the maker, which is its hash of the code."""
        maker = CertificateMaker("", self.made_by)
        models = {name: {maker.revision: model} for name, model in self.models.items()}
        cells = [msgspec.structs.replace(cell, revision=maker.revision) for cell in self.cells]
        return VerifyCertificate(
            FORM, {maker.revision: self.made_by}, self.started, models, cells, self.ended
        )


def read_certificate(path: Path) -> VerifyCertificate | None:
    """What is in a file; None: there is none. Raises ConfigError for one that is no certificate."""
    try:
        raw = path.read_bytes()
        form = decode_json(raw, dict[str, object]).get("form")
        if form == 1:
            return decode_json(raw, FirstForm).convert()
        made = decode_json(raw, VerifyCertificate)
    except FileNotFoundError:
        return None
    except (msgspec.MsgspecError, OSError) as error:
        raise ConfigError(
            f"{path} is no certificate that can be read ({error}); name another file"
        ) from error
    if made.form != FORM:
        raise ConfigError(f"{path} is a certificate of form {made.form}, not {FORM}; name another file")
    named = {cell.revision for cell in made.cells}.union(*made.models.values())
    if unknown := sorted(named - made.makers.keys()):
        raise ConfigError(f"{path} does not say who made the cells of {unknown[0]!r}; name another file")
    return made


def resume(path: Path, maker: CertificateMaker, *, keeps_others: bool = False) -> VerifyCertificate:
    """The certificate in a file, to go on with, or a new one.

    keeps_others: cells of other makers stay as they are, and only what is missing is run. Raises ConfigError
    where others have made it, or where it has other replies.
    """
    found = read_certificate(path)
    if found is None:
        return VerifyCertificate(FORM, {}, now(), {}, [])
    for revision, facts in found.makers.items():
        keys = find_other_keys(facts, maker.facts)
        if keys and not keeps_others:
            raise ConfigError(
                f"{path} was made by another Plait ({revision}; {', '.join(keys)}: other values), so it "
                "cannot go on here; --add-missing keeps those cells and runs what is not there; or name "
                "another file"
            )
        if replies := [key for key in keys if key in SAME_REPLIES]:
            raise ConfigError(
                f"{path} has other replies ({revision}; {', '.join(replies)}: other values), so that nothing "
                "can be added to it; give the same options, or name another file"
            )
    return found


def find_other_keys(one: Mapping[str, object], other: Mapping[str, object]) -> list[str]:
    """The keys under which two makers have different values."""
    return sorted(key for key in {*one, *other} if one.get(key) != other.get(key))


def now() -> str:
    """The time of day, in UTC."""
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
