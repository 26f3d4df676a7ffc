"""Ranks as processes over every kind of storage: logits of one rank, and its bits where they are promised."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file
from torch import Tensor

from plait.config import EngineConfig
from plait.verify.ranks import check_ranks
from plait.verify.tiny.models import write_model
from tests.checkpoint.quantized.packings import PACKINGS, packed_like
from tests.checkpoint.test_divided_splits import write_splits

pytestmark = pytest.mark.slow
LLAMA = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 96, "hidden_size": 256,
    "intermediate_size": 768, "num_hidden_layers": 2, "num_attention_heads": 8, "num_key_value_heads": 4,
    "max_position_embeddings": 128, "rms_norm_eps": 1e-5, "tie_word_embeddings": False,
}  # fmt: skip
PACKED = (
    *("gptq4 by importance", "gptq4", "gptq8", "awq", "fp8 in blocks", "fp8 static", "compressed int4"),
    *("modelopt nvfp4", "nf4"),
)
PROMPTS = [[7, 3, 90, 11, 2, 55, 8, 41, 13], [5, 5, 1]]


def write_shards(folder: Path, config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
    """In three files, as published models are."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    names, index = sorted(tensors), dict[str, str]()
    for n in range(3):
        file = f"model-0000{n + 1}-of-00003.safetensors"
        some = {name: tensors[name].clone().contiguous() for name in names[n::3]}
        save_file(some, folder / file)
        index |= dict.fromkeys(some, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A model in every storage, by its name."""
    top = tmp_path_factory.mktemp("storages")
    write_model(LLAMA, top / "float32")
    tensors = load_file(top / "float32" / "model.safetensors")
    write_shards(top / "bfloat16", LLAMA, {name: t.bfloat16() for name, t in tensors.items()})
    for name in PACKED:
        files, _ = packed_like(tensors, PACKINGS[name])
        write_shards(top / name, {**LLAMA, "quantization_config": PACKINGS[name].config}, files)
    found = {name: top / name for name in ("float32", "bfloat16", *PACKED)}
    return {**found, "gguf in seven files": write_splits(top)}


def check(model: Path, ranks: int, **options: Any) -> None:
    config = EngineConfig(device="cpu", tensor_parallel_size=ranks, max_num_seqs=2, threads=1, **options)
    found = check_ranks(str(model), config, max_tokens=6, prompts=PROMPTS, say=lambda text: None)
    assert found.num_replies > 0
    assert not found.other_tokens
    assert found.is_right, found
    if options.get("deterministic"):
        assert found.is_exact
        assert found.num_shares >= ranks
    else:
        assert found.is_float32


@pytest.mark.parametrize("name", ["float32", "bfloat16", *PACKED, "gguf in seven files"])
def test_two_ranks_give_the_logits_and_the_bits_of_one(name: str, stored: dict[str, Path]) -> None:
    check(stored[name], 2, ops="reference")
    check(stored[name], 2, deterministic=True)


@pytest.mark.parametrize("name", ["bfloat16", "gptq4 by importance", "fp8 in blocks"])
def test_four_ranks_do_too(name: str, stored: dict[str, Path]) -> None:
    check(stored[name], 4, ops="reference")
    check(stored[name], 4, deterministic=True)


@pytest.mark.parametrize("kind", ["q8_0", "q4_k"])
def test_weights_that_are_encoded_while_loading_are_those_of_one_rank(
    kind: str, stored: dict[str, Path]
) -> None:
    """Columns are cut at whole blocks; a head narrower than a block has its inputs gathered."""
    check(stored["bfloat16"], 2, quantize=kind, ops="reference")
    check(stored["bfloat16"], 2, quantize=kind, deterministic=True)
