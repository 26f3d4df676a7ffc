"""The certificate: small models with every mixer, a file that goes on where it ended, one cell once more."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from plait.config import EngineConfig
from plait.errors import ConfigError
from plait.families.common.registry import build_spec
from plait.model.mixers.registry import list_mixers
from plait.rare_specs import Mamba3Spec
from plait.spec import Mixer
from plait.verify import certificate as module
from plait.verify.certificate import (
    CellName,
    CertificateRun,
    CertifiedCell,
    VerifyCertificate,
    describe_maker,
    read_certificate,
    resume,
)
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
    found = {Mamba3Spec}.union(*(_all_mixers(build_spec(config)[0]) for config in CONFIGS.values()))
    assert not ours - found


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
            made = resume(path, run.made_by)
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
    made = resume(tmp_path / "none.json", run.made_by)
    for _ in run.rounds(made, 1):
        pass
    cell, result = run.run_cell(CellName.parse("mamba2/restarts-alone/1"))
    assert result is not None
    assert cell.digest == next(c.digest for c in made.cells if c.cell == cell.cell)
    with pytest.raises(ConfigError, match="the cells of mamba2 are alone-once-more, batch-of-2"):
        run.run_cell(CellName.parse("mamba2/batch-of-99/1"))


def test_another_plait_does_not_go_on_with_a_file(tmp_path: Path) -> None:
    path = tmp_path / "c.json"
    made_by = describe_maker(CONFIG)
    VerifyCertificate(1, made_by, "now", {}, [CertifiedCell("a/b/1", 1, 2, 0, 0, -1, "d", 0.1)]).write(path)
    assert resume(path, made_by).num_tokens == 2
    with pytest.raises(ConfigError, match=r"made by another Plait \(code: other values\)"):
        resume(path, {**made_by, "code": "other"})
    assert describe_maker(replace(CONFIG, kv_dtype="int8")) != made_by


@pytest.mark.parametrize("text", ["", "[]", '{"form": 1}', '{"form": 1, "cells": 7}'])
def test_a_file_that_is_no_certificate_is_refused(text: str, tmp_path: Path) -> None:
    path = tmp_path / "c.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match="is no certificate"):
        read_certificate(path)


def test_the_file_has_sums_and_a_line_for_each_cell(tmp_path: Path) -> None:
    cells = [
        CertifiedCell("a/b/1", 1, 20, 0, 0, 3, "d", 0.5),
        CertifiedCell("a/c/1", 2, 30, 1, 1, 0, "e", 0.5, "EngineError: no"),
    ]
    path = tmp_path / "c.json"
    VerifyCertificate(1, {}, "now", {}, cells).write(path)
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
