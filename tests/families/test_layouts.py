"""Published files with names of their own give the logits of their twins in transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from plait.errors import UnsupportedModel
from plait.families.common.registry import build_spec
from tests.families.gguf.published_kin import KIN, as_published
from tests.families.gguf.recorded import read_checkpoint
from tests.families.parity import Memory, decoder, in_pieces, resolved, whole, worst

QUICK = ("minicpm", "internlm2", "phi4mm", "minicpmo_4_5", "molmo_o")
OTHERS = ("exaone3", "qwen1", "orion", "pangu", "xverse", "codeshell", "baichuan", "chatglm", "telechat3")
NAMES = dict.fromkeys((*QUICK, *OTHERS, *KIN))


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in QUICK else [pytest.mark.slow]) for name in NAMES]
)
def test_published_files_give_the_logits_of_their_twins(name: str, tmp_path: Path) -> None:
    config, tensors, oracle = read_checkpoint(name, tmp_path / name)
    theirs, stored = as_published(name, dict(config), tensors)
    file = Memory(stored)
    model = decoder(resolved(file, theirs), file)
    assert worst(whole(model, oracle["ids"][0]), oracle["logits"][0]) <= 1e-4
    for logits, want in zip(in_pieces(model, oracle["ids"]), oracle["logits"], strict=True):
        assert worst(logits, want) <= 1e-4


MINICPM: dict[str, Any] = {
    "architectures": ["MiniCPMForCausalLM"],
    "vocab_size": 97,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "max_position_embeddings": 32_768,
    "scale_emb": 12,
    "scale_depth": 1.4,
    "dim_model_base": 256,
}


def test_minicpm_ends_where_its_attention_becomes_sparse() -> None:
    assert build_spec(MINICPM)[0].max_len == 32_768
    assert build_spec({**MINICPM, "sparse_config": {"dense_len": 4096}})[0].max_len == 4095
    with pytest.raises(UnsupportedModel, match="num_experts = 8 is not implemented for MiniCPM"):
        build_spec({**MINICPM, "num_experts": 8, "num_experts_per_tok": 2})


SIZES = {
    "vocab_size": 97,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-6,
}


@pytest.mark.parametrize(
    ("config", "error"),
    [
        ({"architectures": ["MiniCPMV"], "version": 9}, r"version 9 of None is not known; known: 2.0, 2.5"),
        ({"architectures": ["MolmoForCausalLM"], "layer_norm_type": "low_precision"}, "layer_norm_type"),
        ({"architectures": ["InternLMForCausalLM"], "rotary": {"type": "ntk"}}, "type = 'ntk'"),
    ],
)
def test_what_such_models_may_be_besides_is_refused(config: dict[str, Any], error: str) -> None:
    with pytest.raises(UnsupportedModel, match=error):
        build_spec({**SIZES, **config})


@pytest.mark.parametrize("name", ["AquilaModel", "AquilaForCausalLM", "SkyworkForCausalLM"])
def test_llamas_under_other_names(name: str) -> None:
    mine, theirs = (build_spec({**SIZES, "architectures": [n]})[0] for n in (name, "LlamaForCausalLM"))
    assert mine.layers == theirs.layers
