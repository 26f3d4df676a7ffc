"""State spaces and short convolutions: what is shared, what other projects' files say, what is refused."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from plait.checkpoint.weights import Target, Weights
from plait.errors import UnsupportedModel
from plait.families.registry import build_spec
from plait.model.decoder import Decoder
from plait.quant.encode import fitting
from tests.families import tiny
from tests.families.as_gguf import converted
from tests.families.parity import CPU, LONGEST, Memory, decoder, resolved, whole, worst
from tests.families.plamo2_oracle import CONFIG, checkpoint
from tests.families.test_plamo2 import IDS


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("ssm")


def made(name: str, folder: Path) -> tuple[dict[str, Any], dict[str, Tensor], dict[str, list[Tensor]]]:
    if not (folder / name).exists():
        tiny.write(name, folder / name)
    return tiny.read(folder / name)


def built(config: Mapping[str, Any], tensors: dict[str, Tensor]) -> tuple[Decoder, int]:
    """(the model, the bytes of its weights)."""
    found = resolved(Memory(tensors), config)
    target = Target(CPU, torch.float32, LONGEST, found.spec.hidden_size)
    model = Decoder(found.spec, Weights(Memory(tensors), found.names, target))
    return model, target.weights_nbytes


def test_a_shared_block_is_in_memory_once(folder: Path) -> None:
    config, tensors, _ = made("zamba2", folder)
    model, nbytes = built(config, tensors)
    first, second, third = (branch.aside for branch in model.branches if branch.aside)
    assert first.block is third.block
    assert first.block is not second.block
    assert len({*first.states, *second.states, *third.states}) == 3  # keys and values are each layer's own
    head = tensors["model.embed_tokens.weight"]  # a tied head is counted with the table it reads
    stored = sum(w.numel() for w in tensors.values()) + head.numel()
    assert abs(nbytes - 4 * stored) <= 4 * head.numel()


def test_copies_of_shared_blocks_change_nothing(folder: Path) -> None:
    config, tensors, oracle = made("zamba2", folder)
    own = "model.layers.0.shared_transformer."
    copies = {n.replace(own, own.replace("0", "2")): w for n, w in tensors.items() if n.startswith(own)}
    checkpoint = Memory(tensors | copies)
    model = decoder(resolved(checkpoint, config), checkpoint)
    assert worst(whole(model, oracle["ids"][0]), oracle["logits"][0]) <= 1e-4


def test_mamba_in_the_format_of_state_spaces(folder: Path) -> None:
    config, tensors, oracle = made("mamba", folder)
    names = {"backbone.embeddings.weight": "backbone.embedding.weight"}
    theirs = Memory({names.get(name, name): w for name, w in tensors.items()})
    original = {
        "d_model": config["hidden_size"],
        "n_layer": config["num_hidden_layers"],
        "vocab_size": 95,
        "pad_vocab_size_multiple": 97,
        "tie_embeddings": False,
        "ssm_cfg": {"d_state": 8, "dt_rank": 5},
        "rms_norm": True,
        "residual_in_fp32": True,
        "fused_add_norm": True,
    }
    model = decoder(resolved(theirs, original), theirs)
    assert worst(whole(model, oracle["ids"][0]), oracle["logits"][0]) <= 1e-4


def test_a_config_that_names_its_model_is_not_taken_for_that_format(folder: Path) -> None:
    config, tensors, _ = made("mamba", folder)
    plain = resolved(Memory(tensors), config).spec
    assert resolved(Memory(tensors), {**config, "ssm_cfg": {}, "d_model": 32}).spec == plain


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"model_type": "mamba", "hidden_act": "gelu"}, r"hidden_act 'gelu'.*mamba"),
        ({"model_type": "jamba", "hidden_act": "relu"}, r"hidden_act 'relu'.*Jamba"),
        ({"model_type": "jamba", "mamba_inner_layernorms": False}, "mamba_inner_layernorms = False"),
        ({"model_type": "zamba2", "use_long_context": True}, "use_long_context = True"),
        ({"model_type": "lfm2", "block_use_swiglu": False}, "block_use_swiglu = False"),
        ({"model_type": "plamo2", "linear_type": "fp8"}, "linear_type = 'fp8'"),
        ({"ssm_cfg": {"layer": "Mamba3"}}, r"ssm_cfg\.layer = 'Mamba3'"),
        ({"ssm_cfg": {"ngroups": 2}}, r"ssm_cfg has \['ngroups'\]"),
    ],
)
def test_what_is_not_honoured_is_refused_by_name(config: dict[str, Any], message: str) -> None:
    sizes = {"hidden_size": 32, "vocab_size": 97, "num_attention_heads": 4, "intermediate_size": 48}
    with pytest.raises(UnsupportedModel, match=message):
        build_spec(
            {**sizes, "num_hidden_layers": 54 if config.get("model_type") == "zamba2" else 3, **config}
        )


def test_experts_that_llama_cpp_chooses_otherwise_are_refused(folder: Path) -> None:
    config, tensors, _ = made("lfm2_moe", folder)
    metadata, stored = converted("lfm2moe", config, tensors)
    with pytest.raises(UnsupportedModel, match="expert_gating_func 1"):
        resolved(Memory(stored), gguf={**metadata, "lfm2moe.expert_gating_func": 1})


def test_blocks_stay_blocks_when_their_rows_change_places() -> None:
    """PLaMo 2 mixes the rows of heads, of q, k and v, of B, C and steps: none of them is decoded for that."""
    tensors = checkpoint({**CONFIG, "intermediate_size": 64})
    packed, near = dict[str, Any](tensors), dict(tensors)
    for name, w in tensors.items():
        how = fitting("q8_0", w.shape[1]) if w.ndim == 2 and "proj" in name else None
        if how:
            packed[name] = how(w, name, 1)
            near[name] = packed[name].dequantize(torch.float32)
    config = {**CONFIG, "intermediate_size": 64}
    model, nbytes = built(config, packed)
    plain, plain_nbytes = built(config, near)
    assert nbytes < 0.6 * plain_nbytes
    assert worst(whole(model, IDS[0]), whole(plain, IDS[0])) <= 1e-4
