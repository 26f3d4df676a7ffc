"""RWKV as GGUF in llama.cpp's words, as safetensors under its published names, and back."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from plait.convert.gguf.target import gguf_target
from plait.convert.hf.target import hf_target
from plait.convert.plan.source import Model
from plait.errors import UnsupportedFormat
from tests.convert.test_round_trips import as_gguf, written
from tests.families import rwkv6_oracle, rwkv7_oracle
from tests.families.parity import Memory, decoder, resolved, whole, worst

IDS = torch.arange(2, 20)
CONFIGS: dict[str, dict[str, Any]] = {
    "rwkv5": rwkv6_oracle.FIVE,
    "rwkv6": {
        **rwkv6_oracle.PUBLISHED,
        "layer_norm_epsilon": 1e-5,
    },  # GGUF has one, and the last norm has this
    "rwkv6_fla": rwkv6_oracle.FLA,
    "rwkv6_fla_same": {**rwkv6_oracle.FLA, "expand_k": 1.0, "norm_eps": 64e-5},  # what llama.cpp computes
    "rwkv7": {**rwkv7_oracle.CONFIG, "hidden_size": 128, "head_dim": 64},  # the epsilon of heads of 64
}


def source(name: str) -> Model:
    made = (rwkv7_oracle if name == "rwkv7" else rwkv6_oracle).checkpoint(CONFIGS[name])
    tensors = Memory({key: w.float() for key, w in made.items()})
    return Model(resolved(tensors, CONFIGS[name]), tensors)


@pytest.mark.parametrize("name", CONFIGS)
def test_files_are_written_with_their_own_names_shapes_and_keys(name: str) -> None:
    model = source(name)
    target = hf_target(model, "float32")
    file = written(model, target.made)
    check_same(model, file)
    wanted = whole(decoder(model.resolved, model.checkpoint), IDS)
    assert worst(whole(decoder(resolved(file, target.config), file), IDS), wanted) <= 1e-6
    own = CONFIGS[name]
    read = {key for key in own if own[key] is not None} - {"auto_map", "architectures"}
    assert {key: target.config.get(key) for key in read} == {key: own[key] for key in read}


@pytest.mark.parametrize("name", ["rwkv6", "rwkv7"])
def test_gguf_is_the_same_model_and_so_is_what_comes_back(name: str) -> None:
    model = source(name)
    again, file = as_gguf(model, name)
    wanted = whole(decoder(model.resolved, model.checkpoint), IDS)
    assert worst(whole(decoder(again.resolved, file), IDS), wanted) == 0
    check_same(model, written(again, hf_target(again, "float32").made))


def test_what_flash_linear_attention_wrote_is_written_as_gguf_where_llama_cpp_computes_the_same() -> None:
    model = source("rwkv6_fla_same")
    again, file = as_gguf(model, "rwkv6")
    wanted = whole(decoder(model.resolved, model.checkpoint), IDS)
    assert worst(whole(decoder(again.resolved, file), IDS), wanted) <= 1e-6


def check_same(model: Model, file: Memory) -> None:
    assert {*file} == {*model.checkpoint.names()}
    for name, w in file.items():
        torch.testing.assert_close(w, model.checkpoint.read(name), rtol=1e-6, atol=1e-7, msg=name)


@pytest.mark.parametrize(
    ("name", "changes", "why"),
    [
        ("rwkv6", {"layer_norm_epsilon": 1e-3}, r"norm\.eps = 0\.001, there 1e-05"),
        ("rwkv6", {"head_size_divisor": 4}, r"mixer\.norm\.eps"),
        ("rwkv6_fla", {"expand_k": 1.0}, r"mixer\.norm\.eps = 1e-05, there 0\.00064"),
        ("rwkv6_fla", {"norm_eps": 64e-5}, r"r\.weight: the file has shape \[15, 30\]"),
        ("rwkv7", {"head_dim": 32}, r"mixer\.norm\.eps = 0\.00032, there 0\.00064"),
        ("rwkv7", {"norm_eps": 1e-6}, r"mixer\.norm\.eps"),
        ("rwkv5", {}, "llama.cpp has no architecture for rwkv5 models"),
    ],
)
def test_what_llama_cpp_cannot_say_is_named(name: str, changes: dict[str, Any], why: str) -> None:
    config = {**CONFIGS[name], **changes}
    made = (rwkv7_oracle if name == "rwkv7" else rwkv6_oracle).checkpoint(config)
    tensors = Memory({key: w.float() for key, w in made.items()})
    with pytest.raises(UnsupportedFormat, match=why):
        gguf_target(Model(resolved(tensors, config), tensors))
