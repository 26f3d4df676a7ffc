from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from plait.checkpoint.adapters.peft import CONFIG, WEIGHTS, open_peft
from plait.errors import BadFile, CheckpointError, MissingTensor, ShapeMismatch, UnsupportedFormat
from tests.loading.adapters.made import write_peft

MODULES = ("model.layers.0.self_attn.q_proj", "model.layers.1.self_attn.q_proj")
WEIGHT = {f"{module}.weight": torch.zeros(32, 24) for module in MODULES}
A, B = (f"base_model.model.{MODULES[0]}.lora_{which}.weight" for which in "AB")


def test_peft_adapter_has_the_scale_of_its_rank_and_alpha(tmp_path: Path) -> None:
    changes = write_peft(tmp_path, WEIGHT, MODULES)
    file = open_peft(tmp_path, 8)
    for module, change in changes.items():
        pair = file.pairs[f"{module}.weight"]
        torch.testing.assert_close(pair.up @ pair.down, change)
        assert pair.scale == 8 / 4
    assert (file.max_rank, file.naming) == (4, "hf")
    assert file.digest == open_peft(tmp_path, 8).digest


def test_peft_patterns_give_single_modules_a_rank_and_an_alpha(tmp_path: Path) -> None:
    more = {"rank_pattern": {"layers.1.self_attn.q_proj": 2}, "alpha_pattern": {r"layers\.0.*q_proj": 16}}
    write_peft(tmp_path, WEIGHT, MODULES, ranks={MODULES[1]: 2}, use_rslora=True, **more)
    pairs = open_peft(tmp_path, 8).pairs
    assert pairs[f"{MODULES[0]}.weight"].scale == 16 / math.sqrt(4)
    assert pairs[f"{MODULES[1]}.weight"].scale == pytest.approx(8 / math.sqrt(2))


@pytest.mark.parametrize(
    ("config", "kind", "text"),
    [
        ({"use_dora": True}, UnsupportedFormat, "use_dora.*DoRA"),
        ({"bias": "all"}, UnsupportedFormat, "bias is 'all'"),
        ({"modules_to_save": ["lm_head"]}, UnsupportedFormat, "modules_to_save"),
        ({"trainable_token_indices": [3]}, UnsupportedFormat, "token embeddings"),
        ({"target_parameters": ["experts.gate_up_proj"]}, UnsupportedFormat, "target_parameters"),
        ({"init_lora_weights": "pissa"}, UnsupportedFormat, "pissa.*changes the base model"),
        ({"peft_type": "IA3"}, UnsupportedFormat, "peft_type is 'IA3'"),
        ({"r": 3}, ShapeMismatch, r"lora_A is \[4, 24\], and its rank is 3"),
        ({"r": 9}, ShapeMismatch, "r is 9; the limit is 8"),
        ({"r": 2.5}, BadFile, "r is 2.5"),
        ({"r": None}, BadFile, "r is None"),
        ({"lora_alpha": float("nan")}, BadFile, "lora_alpha"),
        ({"lora_alpha": "2"}, BadFile, "lora_alpha is '2'"),
        ({"rank_pattern": {"(a+)+": 2}}, UnsupportedFormat, "behind a group"),
        ({"rank_pattern": {".*.*.*x": 2}}, UnsupportedFormat, "more than two quantifiers"),
        ({"rank_pattern": {"(": 2}}, BadFile, "is no pattern"),
        ({"alpha_pattern": [1]}, BadFile, "alpha_pattern is not an object"),
    ],
)
def test_peft_config_that_cannot_be_served_is_one_line(
    tmp_path: Path, config: dict[str, object], kind: type[CheckpointError], text: str
) -> None:
    write_peft(tmp_path, WEIGHT, MODULES, **config)
    with pytest.raises(kind, match=text) as found:
        open_peft(tmp_path, 8)
    assert "\n" not in str(found.value)


@pytest.mark.parametrize(
    ("changed", "kind", "text"),
    [
        (
            {"base_model.model.lm_head.base_layer.weight": torch.zeros(9, 24)},
            UnsupportedFormat,
            r"a weight of the base model.*save_embedding_layers=False",
        ),
        ({B: None}, BadFile, "q_proj.weight has no lora_B"),
        ({B: torch.zeros(32, 5)}, ShapeMismatch, "their ranks differ"),
        ({A: torch.full((4, 24), float("inf"))}, BadFile, "not finite"),
        ({A: torch.zeros(4, 24, dtype=torch.int8)}, UnsupportedFormat, "is int8"),
        ({A: torch.zeros(9, 24)}, ShapeMismatch, "has rank 9; the limit is 8"),
        ({A: torch.zeros(4)}, ShapeMismatch, "is a matrix|a factor is a matrix"),
        (
            {"base_model.model.lm_head.modules_to_save.weight": torch.zeros(2)},
            UnsupportedFormat,
            "modules_to",
        ),
        ({"base_model.model.x.lora_embedding_A": torch.zeros(4, 9)}, UnsupportedFormat, "embeddings"),
        ({"base_model.model.x.lora_magnitude_vector": torch.zeros(4)}, UnsupportedFormat, "DoRA"),
        ({"something": torch.zeros(4)}, UnsupportedFormat, "'something' is no factor"),
    ],
)
def test_peft_tensors_that_cannot_be_served_are_one_line(
    tmp_path: Path, changed: dict[str, torch.Tensor | None], kind: type[CheckpointError], text: str
) -> None:
    write_peft(tmp_path, WEIGHT, MODULES)
    tensors = {**load_file(tmp_path / WEIGHTS), **changed}
    save_file({name: value for name, value in tensors.items() if value is not None}, tmp_path / WEIGHTS)
    with pytest.raises(kind, match=text) as found:
        open_peft(tmp_path, 8)
    assert "\n" not in str(found.value)


def test_peft_folder_without_safetensors_names_what_is_missing(tmp_path: Path) -> None:
    (tmp_path / "adapter_model.bin").touch()
    with pytest.raises(MissingTensor, match="pickle"):
        open_peft(tmp_path, 8)
    (tmp_path / "adapter_model.bin").unlink()
    with pytest.raises(MissingTensor, match="is not there"):
        open_peft(tmp_path, 8)
    write_peft(tmp_path, WEIGHT, ())
    with pytest.raises(BadFile, match="no lora_A"):
        open_peft(tmp_path, 8)
    (tmp_path / CONFIG).write_text(json.dumps([1]))
    with pytest.raises(CheckpointError):
        open_peft(tmp_path, 8)
