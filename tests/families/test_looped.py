"""Looped families from their own files: the logits of a plain description of each, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import save_file

from plait.checkpoint.readers.gguf import GgufFile
from plait.config import EngineConfig
from plait.convert.convert import Order, convert_model
from plait.errors import UnsupportedModel
from plait.families.common.registry import build_spec
from plait.loading.open_model import open_model
from plait.spec.attention import NearFarSpec
from tests.families.looped_oracles import IQUEST_LOOP, LOOPED, OURO
from tests.families.older_oracles import IDS
from tests.families.parity import Memory, check_description, decoder, resolved, whole, worst

TURNS = ["full_attention", "sliding_attention", "full_attention"]
CHANGES: dict[str, tuple[str, dict[str, Any]]] = {
    **{name: (name, {}) for name in LOOPED},
    "ouro in one step": ("ouro", {"total_ut_steps": 1}),
    "ouro with windows": ("ouro", {"layer_types": TURNS, "use_sliding_window": True, "sliding_window": 6}),
    "iquest without a clip": ("iquest", {"clip_qkv": None}),
    "iquest in one round": ("iquest_loop", {"loop_num": 1}),
    "iquest in three rounds": ("iquest_loop", {"loop_num": 3}),
}


@pytest.mark.parametrize("name", CHANGES)
def test_logits_are_those_of_the_description(name: str) -> None:
    which, changes = CHANGES[name]
    family, config = LOOPED[which], {**LOOPED[which].config, **changes}
    tensors = family.checkpoint(config)
    check_description(config, tensors, [family.logits(config, tensors, ids) for ids in IDS], IDS)


def test_every_step_of_ouro_has_keys_of_its_own() -> None:
    spec = build_spec(OURO)[0]
    assert len(spec.layers) == 9
    assert [layer[0].name for layer in spec.layers[2:5]] == ["attn", "cycle", "attn"]


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("early_exit_threshold", 0.9, "early_exit_threshold is 0.9: tokens that end before the last of 3"),
        ("early_exit_step", 1, "--set total_ut_steps=2 has the logits of that step"),
        ("total_ut_steps", 0, "total_ut_steps is 0, of 3 layers; known is a whole number"),
    ],
)
def test_ouro_refuses_steps_that_differ_among_tokens(key: str, value: object, words: str) -> None:
    with pytest.raises(UnsupportedModel, match=words):
        build_spec({**OURO, key: value})


def test_a_step_of_ouro_is_set_as_its_error_says() -> None:
    family, config = LOOPED["ouro"], {**OURO, "early_exit_step": 1}
    memory = Memory({key: w.float() for key, w in family.checkpoint(config).items()})
    found = resolved(memory, config, ["early_exit_step=null", "total_ut_steps=2"])
    assert len(found.spec.layers) == 2 * config["num_hidden_layers"]


def test_rounds_of_iquest_read_keys_of_the_first() -> None:
    every = build_spec({**IQUEST_LOOP, "loop_num": 3})[0].mixers()
    mixers = [m for _, m in every if isinstance(m, NearFarSpec)]
    assert [m.source for m in mixers] == [f"layers.{i}.attn" for i in range(3)] * 2
    assert {m.window for m in mixers} == {6}


@pytest.mark.parametrize(
    ("name", "changes", "arch"),
    [
        ("iquest", {"clip_qkv": None}, "llama"),
        ("iquest", {}, "plait"),  # llama.cpp clips nothing there
        ("iquest_loop", {}, "plait"),
        ("ouro", {}, "plait"),
    ],
)
def test_they_become_gguf_and_safetensors_again(
    name: str, changes: dict[str, Any], arch: str, tmp_path: Path
) -> None:
    family, config = LOOPED[name], {**LOOPED[name].config, **changes}
    tensors = {key: w.float() for key, w in family.checkpoint(config).items()}
    (tmp_path / "config.json").write_text(json.dumps(config))
    save_file(tensors, tmp_path / "model.safetensors")
    file, folder = tmp_path / "a.gguf", tmp_path / "b"
    convert_model(Order(str(tmp_path), file, threads=1), lambda *_: None)
    assert GgufFile(file).metadata["general.architecture"] == arch
    convert_model(Order(str(file), folder, threads=1, quantize="f32"), lambda *_: None)
    want = family.logits(config, family.checkpoint(config), IDS[0])
    for path in (file, folder):
        opened = open_model(str(path), EngineConfig(device="cpu"))
        assert worst(whole(decoder(opened.resolved, opened.checkpoint), IDS[0]).double(), want) <= 1e-4
