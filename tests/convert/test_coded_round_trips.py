"""Families that came with code of their own: as GGUF under Llama's or GLM's names, and as they were."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from plait.convert.gguf.target import gguf_target
from plait.convert.hf.target import hf_target
from plait.convert.plan.source import Model
from plait.errors import UnsupportedFormat
from tests.convert.test_round_trips import as_gguf, written
from tests.families.coded_oracles import CODED
from tests.families.every import read_model
from tests.families.parity import Memory, decoder, resolved, whole, worst

IDS = torch.arange(2, 20)
ARCHES = {
    "chatglm": "chatglm",
    "baichuan": "baichuan",
    "telechat": "llama",
    "telechat3": "llama",
    "teleflm": "llama",
}


def source(name: str, folder: Path) -> Model:
    config, tensors = read_model(name, folder)
    return Model(resolved(tensors, config), tensors)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", ARCHES)
def test_gguf_is_the_same_model(name: str, tmp_path: Path) -> None:
    model = source(name, tmp_path)
    again, file = as_gguf(model, ARCHES[name])
    wanted = whole(decoder(model.resolved, model.checkpoint), IDS)
    assert worst(whole(decoder(again.resolved, file), IDS), wanted) <= 1e-4


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    "name",
    [*ARCHES, "chatglm_plain", "baichuan2", "solar", "k2_horizon", "step1", "step3"],
)
def test_files_are_written_with_their_own_names_and_keys(name: str, tmp_path: Path) -> None:
    model = source(name, tmp_path)
    target = hf_target(model, "float32")
    file = written(model, target.made)
    assert {*file} == {*model.checkpoint.names()}
    wanted = whole(decoder(model.resolved, model.checkpoint), IDS)
    assert worst(whole(decoder(resolved(file, target.config), file), IDS), wanted) <= 1e-4


def test_tables_and_matrices_of_n_grams_are_written_apart(tmp_path: Path) -> None:
    model = source("longcat_lite", tmp_path)
    target = hf_target(model, "float32")
    file = written(model, target.made)
    for n in range(6):
        for name in ("embedders", "post_projs"):
            key = f"model.ngram_embeddings.{name}.{n}.weight"
            assert torch.equal(file[key], model.checkpoint.read(key))
    wanted = whole(decoder(model.resolved, model.checkpoint), IDS)
    assert worst(whole(decoder(resolved(file, target.config), file), IDS), wanted) <= 1e-4


def test_the_head_of_a_second_baichuan_is_normed_in_gguf() -> None:
    """llama.cpp does not norm it, and 40 layers tell it that there are no positions."""
    family = CODED["baichuan2"]
    config = {**family.config, "num_hidden_layers": 40}
    tensors = Memory({name: w.float() for name, w in family.checkpoint(config).items()})
    model = Model(resolved(tensors, config), tensors)
    again, file = as_gguf(model, "baichuan")
    assert torch.allclose(file["output.weight"].norm(dim=1), torch.ones(97))
    wanted = whole(decoder(model.resolved, tensors), IDS)
    assert worst(whole(decoder(again.resolved, file), IDS), wanted) <= 1e-4


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("baichuan2", "no architecture that says all of this baichuan model"),
        ("chatglm_plain", "no architecture that says all of this chatglm model"),
        ("solar", "no architecture for solar models"),
    ],
)
def test_what_llama_cpp_cannot_say_is_named(name: str, why: str, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedFormat, match=why):
        gguf_target(source(name, tmp_path))
