"""The certificate: small models with every mixer, a file that goes on where it ended, one cell once more."""

from __future__ import annotations

import json
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from plait.config import EngineConfig
from plait.errors import ConfigError
from plait.families.common.registry import build_spec
from plait.model.mixers.registry import list_mixers
from plait.spec.attention import BlockAttentionSpec
from plait.spec.model import Mixer
from plait.spec.recurrent import Mamba3Spec
from plait.verify import certificate as module
from plait.verify.certificate import CellName, CertificateRun, find_maker
from plait.verify.certificate_file import (
    FORM,
    CertifiedCell,
    CertifiedModel,
    VerifyCertificate,
    read_certificate,
    resume,
)
from plait.verify.certificate_maker import CertificateMaker, find_commit
from plait.verify.matrix import Cell
from plait.verify.tiny.models import CONFIGS, NAMES, write_named
from plait.verify.verify import Verification

CONFIG = EngineConfig(device="cpu", threads=1)


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two models, three cells of each, short replies."""

    def few(self: Verification) -> list[Cell]:
        return [
            Cell("alone, once more"),
            Cell("batch of 2", {"max_num_seqs": 2}),
            Cell("restarts, alone", restarts=5, proof="restarts"),
        ]

    monkeypatch.setattr(module, "NAMES", ("attention", "mamba2"))
    monkeypatch.setattr(module, "MAX_TOKENS", 3)
    monkeypatch.setattr(Verification, "cells", property(few))


def _all_mixers(spec: object) -> set[type]:
    """The classes of mixers anywhere in a spec."""
    found, todo = set(), [spec]
    while todo:
        value = todo.pop()
        if isinstance(value, Mixer):
            found.add(type(value))
        if isinstance(value, tuple | list):
            todo += value
        elif isinstance(value, dict):
            todo += value.values()
        elif hasattr(value, "__dataclass_fields__"):
            todo += [getattr(value, name) for name in value.__dataclass_fields__]
    return found


def test_the_models_have_every_mixer_that_is_registered() -> None:
    ours = {kind for kind in list_mixers() if kind.__module__.startswith("plait.")}
    by_hand = {
        Mamba3Spec,
        BlockAttentionSpec,
    }  # no config has one; heads alone do
    found = by_hand.union(*(_all_mixers(build_spec(config)[0]) for config in CONFIGS.values()))
    assert not ours - found


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", ["altup", "compressed", "mlstm", "mamba3"])
def test_models_are_written_the_same_each_time(name: str, tmp_path: Path) -> None:
    for folder in ("one", "two"):
        write_named(name, tmp_path / folder)
    for file in ("config.json", "model.safetensors"):
        assert (tmp_path / "one" / file).read_bytes() == (tmp_path / "two" / file).read_bytes()


def test_tables_of_experts_have_each_expert_and_none_twice_in_a_row(tmp_path: Path) -> None:
    write_named("compressed", tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    tables = [tensor for name, tensor in tensors.items() if name.endswith("tid2eid")]
    assert [(table.dtype, tuple(table.shape)) for table in tables] == [(torch.int64, (97, 2))] * 2
    for table in tables:
        assert sorted(table.unique().tolist()) == [*range(6)]
        assert bool((table[:, 0] != table[:, 1]).all())


@pytest.mark.usefixtures("small")
def test_a_run_that_was_interrupted_goes_on_and_ends_with_the_same_file(tmp_path: Path) -> None:
    files = []
    for stops in ((2, 3, 99), (99,)):
        path = tmp_path / f"{len(stops)}.json"
        for stop in stops:
            run = CertificateRun(CONFIG, tmp_path / "models")
            made = resume(path, run.maker)
            for count, _ in enumerate(run.rounds(made, 1), 1):
                made.write(path)
                if count == stop:
                    break
            else:
                made.write(path)
        files.append(read_certificate(path))
    cut, whole = files
    assert cut is not None
    assert whole is not None
    assert [cell.cell for cell in cut.cells] == [cell.cell for cell in whole.cells]
    assert [cell.digest for cell in cut.cells] == [cell.digest for cell in whole.cells]
    assert all(cell.is_right and cell.shown for cell in whole.cells)
    assert whole.summary()["complete"]
    assert whole.num_tokens == sum(cell.tokens for cell in whole.cells) > 0
    assert whole.models.keys() == {"attention", "mamba2"}
    assert not [*tmp_path.glob(".*")]


@pytest.mark.usefixtures("small")
def test_one_cell_runs_alone_with_the_same_bits(tmp_path: Path) -> None:
    run = CertificateRun(CONFIG, tmp_path)
    made = resume(tmp_path / "none.json", run.maker)
    for _ in run.rounds(made, 1):
        pass
    cell, result = run.run_cell(CellName.parse("mamba2/restarts-alone/1"))
    assert result is not None
    assert cell.digest == next(c.digest for c in made.cells if c.cell == cell.cell)
    with pytest.raises(ConfigError, match="the cells of mamba2 are alone-once-more, batch-of-2"):
        run.run_cell(CellName.parse("mamba2/batch-of-99/1"))


def _write(path: Path, maker: CertificateMaker, *cells: str) -> None:
    """A certificate with these cells of one maker."""
    rows = [CertifiedCell(c, 1, 20, 0, 0, -1, "d", 0.1, revision=maker.revision) for c in cells]
    models = {
        "attention": {maker.revision: CertifiedModel(("Attention",), "one", "fp", ("alone-once-more",))}
    }
    VerifyCertificate(FORM, {maker.revision: maker.facts}, "then", models, rows, "later").write(path)


def _other(maker: CertificateMaker, **facts: object) -> CertificateMaker:
    return CertificateMaker("0123456789ab", {**maker.facts, **facts})


def test_another_plait_does_not_go_on_with_a_file_unless_it_may_add_to_it(tmp_path: Path) -> None:
    path, maker = tmp_path / "c.json", find_maker(CONFIG)
    _write(path, maker, "a/b/1")
    assert resume(path, maker).num_tokens == 20
    with pytest.raises(ConfigError, match=r"made by another Plait \(.*; code: other values\).*--add-missing"):
        resume(path, _other(maker, code="other"))
    assert resume(path, _other(maker, code="other"), keeps_others=True).num_tokens == 20
    with pytest.raises(ConfigError, match=r"has other replies \(.*; max_tokens: other values\)"):
        resume(path, _other(maker, code="other", max_tokens=7), keeps_others=True)
    assert find_maker(replace(CONFIG, kv_dtype="int8")).facts != maker.facts


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("matrix", ["same", "other"])
def test_what_is_added_names_its_revision_and_what_was_there_keeps_its_own(
    tmp_path: Path, matrix: str
) -> None:
    path, run = tmp_path / "c.json", CertificateRun(CONFIG, tmp_path / "models")
    old = _other(run.maker, code="old", **({} if matrix == "same" else {"matrix": "other"}))
    _write(path, old, "attention/alone-once-more/1")
    made = resume(path, run.maker, keeps_others=True)
    ran = [str(name) for name, _ in run.rounds(made, 1)]
    # Cells of a model are known to be all there where both revisions have the same matrix.
    again = [f"attention/{cell}/1" for cell in ("batch-of-2", "restarts-alone")] if matrix == "other" else []
    assert ran == again + [f"mamba2/{cell}/1" for cell in ("alone-once-more", "batch-of-2", "restarts-alone")]
    made.write(path)
    found = read_certificate(path)
    assert found is not None
    assert {c.cell: c.revision for c in found.cells} == {
        "attention/alone-once-more/1": old.revision,
        **dict.fromkeys(ran, run.maker.revision),
    }
    assert found.makers == {old.revision: old.facts, run.maker.revision: run.maker.facts}
    assert found.models["mamba2"].keys() == {run.maker.revision}
    numbers = found.count_revisions()
    assert numbers[old.revision] == {"models": 1, "cells": 1, "tokens": 20}
    assert numbers[run.maker.revision]["cells"] == len(ran)
    assert [*run.rounds(found, 1)] == []
    assert found.ended == made.ended


def test_a_file_of_the_first_form_is_read_and_its_code_is_its_revision(tmp_path: Path) -> None:
    path = tmp_path / "c.json"
    cell = {"cell": "a/b/1", "replies": 1, "tokens": 2, "different": 0, "rounded": 0, "shown": -1}
    model = {"mixers": ["Mlp"], "step": "one", "fingerprint": "fp", "cells": ["b"]}
    first = {
        "form": 1,
        "made_by": {"code": "0123456789abcdef", "batch": 4},
        "started": "then",
        "models": {"a": model},
        "cells": [{**cell, "digest": "d", "seconds": 0.1}],
    }
    path.write_text(json.dumps(first))
    found = read_certificate(path)
    assert found is not None
    assert (found.form, found.cells[0].revision) == (FORM, "code-0123456789ab")
    assert found.makers == {"code-0123456789ab": first["made_by"]}
    assert found.models["a"]["code-0123456789ab"].cells == ("b",)


def test_a_revision_is_the_commit_and_says_where_modules_differ_from_it(tmp_path: Path) -> None:
    def git(*words: str) -> str:
        name = ["-c", "user.name=a", "-c", "user.email=a@b"]
        ran = subprocess.run(["git", "-C", str(tmp_path), *name, *words], capture_output=True, check=True)
        return ran.stdout.decode().strip()

    package = tmp_path / "package"
    package.mkdir()
    (package / "version.py").write_text("a = 1\n")
    assert find_commit(package) == ""
    git("init", "-q")
    git("commit", "-q", "--allow-empty", "-m", "none of it")
    assert find_commit(package) == ""  # a repository around an installed package
    git("add", ".")
    git("commit", "-q", "-m", "all of it")
    commit = git("rev-parse", "HEAD")[:12]
    (package / "page.html").write_text("no module")
    assert find_commit(package) == commit
    (package / "version.py").write_text("a = 2\n")
    assert find_commit(package) == f"{commit}+changes"
    facts: dict[str, object] = {"code": "f" * 32}
    assert CertificateMaker(commit, facts).revision == commit
    assert CertificateMaker(f"{commit}+changes", facts).revision == f"{commit}+changes:code-{'f' * 12}"
    assert CertificateMaker("", facts).revision == f"code-{'f' * 12}"


@pytest.mark.parametrize("text", ["", "[]", '{"form": 1}', '{"form": 1, "cells": 7}'])
def test_a_file_that_is_no_certificate_is_refused(text: str, tmp_path: Path) -> None:
    path = tmp_path / "c.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match="is no certificate"):
        read_certificate(path)


def test_a_commit_on_another_machine_is_another_maker() -> None:
    here, there = (CertificateMaker("a" * 12, {"code": "c", "processor": name}) for name in ("x", "y"))
    certificate = VerifyCertificate(FORM, {}, "now", {}, [])
    assert certificate.name_of(here) == here.revision
    certificate.makers[here.revision] = here.facts
    assert certificate.name_of(here) == here.revision
    other = certificate.name_of(there)
    assert other.startswith(f"{here.revision}:made-")
    assert other == certificate.name_of(there)


def test_a_file_with_cells_of_an_unknown_maker_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "c.json"
    cell = CertifiedCell("a/b/1", 1, 20, 0, 0, 3, "d", 0.5, revision="r")
    VerifyCertificate(FORM, {"other": {}}, "now", {}, [cell]).write(path)
    with pytest.raises(ConfigError, match="does not say who made the cells of 'r'"):
        read_certificate(path)


def test_the_file_has_sums_and_a_line_for_each_cell(tmp_path: Path) -> None:
    cells = [
        CertifiedCell("a/b/1", 1, 20, 0, 0, 3, "d", 0.5),
        CertifiedCell("a/c/1", 2, 30, 1, 1, 0, "e", 0.5, "EngineError: no"),
    ]
    path = tmp_path / "c.json"
    VerifyCertificate(FORM, {}, "now", {}, cells).write(path)
    found = json.loads(path.read_text())
    assert found["summary"] == {
        "complete": False,
        "cells": 2,
        "replies": 3,
        "tokens": 50,
        "replies_with_other_tokens": 1,
        "replies_with_other_bits": 1,
        "cells_that_failed": 1,
        "cells_without_their_effect": 1,
        "seconds": 1,
        "revisions": {"": {"models": 1, "cells": 2, "tokens": 50}},
    }
    assert sum('"cell":"a/' in line for line in path.read_text().splitlines()) == 2
    assert [cell.is_right for cell in cells] == [True, False]


@pytest.mark.parametrize(
    "text", ["mamba2", "mamba2/x", "mamba2/x/0", "mamba2/x/-1", "../x/1", "mamba2//1", "m/x/1"]
)
def test_a_cell_is_named_by_model_cell_and_round(text: str) -> None:
    with pytest.raises(ConfigError, match="MODEL/CELL/ROUND"):
        CellName.parse(text)


def test_cells_have_names_of_their_own() -> None:
    parsed = CellName.parse("mamba2/batch-of-4-steps-of-7-tokens/12")
    assert (parsed.model, parsed.cell, parsed.round_number) == ("mamba2", "batch-of-4-steps-of-7-tokens", 12)
    assert str(parsed) == "mamba2/batch-of-4-steps-of-7-tokens/12"
    assert len({*NAMES}) == len(NAMES)
    assert Cell("Batch of 4, steps").word == "batch-of-4-steps"
