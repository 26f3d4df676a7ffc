"""Ling 1 and 2 and DeepSeek-MoE under their own names: the logits of the same arithmetic."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from plait.checkpoint.names import Derived
from plait.checkpoint.readers.gguf import GgufFile
from plait.config import EngineConfig
from plait.convert.convert import Order, convert_model
from plait.errors import UnsupportedModel
from plait.loading.open_model import open_model
from plait.spec.model import MoeSpec
from tests.families import tiny
from tests.families.gguf.published import as_published
from tests.families.gguf.recorded import variant
from tests.families.parity import Memory, decoder, in_pieces, resolved, whole, worst

FAMILIES = {
    "bailing_v1": "bailing_moe",
    "bailing_v2": "bailing_moe_v2",
    "deepseek_v1": "deepseek",
    "param2": "param2moe",
}


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[] if name == "bailing_v2" else [pytest.mark.slow]) for name in FAMILIES],
)
def test_published_names_give_the_logits_of_the_same_arithmetic(name: str, tmp_path: Path) -> None:
    tiny.write(name, tmp_path, variant(name))
    config, tensors, oracle = tiny.read(tmp_path)
    config, tensors = as_published(name, config, tensors)
    checkpoint = Memory(tensors)
    found = resolved(checkpoint, json.loads(json.dumps(config)))
    assert found.spec.family == FAMILIES[name]
    model = decoder(found, checkpoint)
    assert worst(whole(model, oracle["ids"][0]), oracle["logits"][0]) <= 1e-4
    for logits, want in zip(in_pieces(model, oracle["ids"]), oracle["logits"], strict=True):
        assert worst(logits, want) <= 1e-4
    assert next(found.spec.mixers_of(MoeSpec)).router.renormalize is (name == "bailing_v1")


def test_columns_of_a_head_that_is_normalised_have_one_length(tmp_path: Path) -> None:
    tiny.write("bailing_v2", tmp_path, variant("bailing_v2"))
    config, tensors, oracle = tiny.read(tmp_path)
    config, tensors = as_published("bailing_v2", config, tensors)
    named, plain = Memory(tensors), Memory(tensors)
    plain["lm_head.weight"] = torch.nn.functional.normalize(tensors["lm_head.weight"], dim=0)
    even = decoder(resolved(named, {**config, "norm_head": True}), named)
    wanted = whole(decoder(resolved(plain, config), plain), oracle["ids"][0])
    assert worst(whole(even, oracle["ids"][0]), wanted) <= 1e-5
    assert worst(wanted, oracle["logits"][0]) > 0.1
    sizes = {"hidden_size": 32, "num_attention_heads": 4, "num_hidden_layers": 2, "vocab_size": 97}
    sizes |= {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8, "intermediate_size": 16}
    first = {"architectures": ["BailingMoeForCausalLM"], **sizes, "norm_head": True}
    first["tie_word_embeddings"] = False
    source, _ = resolved(plain, first).names.resolve("head.weight")
    assert isinstance(source, Derived)
    with pytest.raises(UnsupportedModel, match="norm_softmax = True is not implemented for Ling"):
        resolved(Memory(), {**first, "norm_softmax": True})
    with pytest.raises(UnsupportedModel, match="norm_head of a head that shares the embedding's table"):
        resolved(Memory(), {**first, "tie_word_embeddings": True})


def test_param_2_is_written_as_ling_2_in_gguf(tmp_path: Path) -> None:
    tiny.write("param2", tmp_path, variant("param2"))
    config, tensors, oracle = tiny.read(tmp_path)
    config, tensors = as_published("param2", config, tensors)
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    save_file({name: w.contiguous() for name, w in tensors.items()}, folder / "model.safetensors")
    convert_model(Order(str(folder), tmp_path / "a.gguf", threads=1), lambda *_: None)
    assert GgufFile(tmp_path / "a.gguf").metadata["general.architecture"] == "bailingmoe2"
    opened = open_model(str(tmp_path / "a.gguf"), EngineConfig(device="cpu"))
    found = whole(decoder(opened.resolved, opened.checkpoint), oracle["ids"][0])
    assert worst(found, oracle["logits"][0]) <= 1e-4
