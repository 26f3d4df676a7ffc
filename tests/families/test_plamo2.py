"""PLaMo 2, which transformers has not: against a plain implementation, and against llama.cpp's numbers."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from plait.model.decoder import Decoder
from tests.families.as_gguf import converted
from tests.families.parity import Memory, decoder, in_pieces, resolved, whole, worst
from tests.families.plamo2_oracle import CONFIG, checkpoint, logits

IDS = [torch.randint(0, 97, (n,), generator=torch.Generator().manual_seed(7)) for n in (23, 17)]


def answers(model: Decoder, wanted: list[Tensor]) -> None:
    assert worst(whole(model, IDS[0]).double(), wanted[0]) <= 1e-4
    for found, want in zip(in_pieces(model, IDS), wanted, strict=True):
        assert worst(found.double(), want) <= 1e-4


def made(config: dict[str, Any]) -> tuple[dict[str, Tensor], list[Tensor]]:
    tensors = checkpoint(config)
    return tensors, [logits(config, tensors, ids) for ids in IDS]


def test_logits_are_those_of_the_description() -> None:
    tensors, wanted = made(CONFIG)
    found = resolved(Memory(tensors), CONFIG)
    windows = [layer[0].mixer.window for layer in found.spec.layers if layer[0].name == "attn"]
    assert windows == [6, None]
    answers(decoder(found, Memory(tensors)), wanted)


def test_attention_alone_and_a_head_of_its_own() -> None:
    config = {**CONFIG, "mamba_enabled": False, "num_hidden_layers": 2, "tie_word_embeddings": False}
    tensors, _ = made(config)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].flip(0)
    wanted = [logits(config, tensors, ids).flip(-1) for ids in IDS]
    answers(decoder(resolved(Memory(tensors), config), Memory(tensors)), wanted)


def gguf(config: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Tensor]]:
    tensors = {name.replace("layers.layers", "layers"): w for name, w in checkpoint(config).items()}
    words = {"head_dim": config["hidden_size_per_head"], "n_groups": 1}
    return converted("plamo2", {**config, **words}, tensors)


def test_gguf_gives_the_same_and_has_the_usual_window() -> None:
    config = {**CONFIG, "attention_window_size": 2048, "full_attention_idx": []}
    metadata, stored = gguf(config)
    found = resolved(Memory(stored), gguf=metadata)
    assert {layer[0].mixer.window for layer in found.spec.layers if layer[0].name == "attn"} == {2049}
    answers(decoder(found, Memory(stored)), made(config)[1])


# Of llama.cpp, from a file of these tensors (float32, also keys and values): the first logits of three rows.
LLAMA_CPP = {
    0: [2.3257, 6.4410, 2.8663, 5.9523, 7.7011, -0.4014],
    11: [-1.3236, 0.3986, 1.5686, -4.6881, 9.2694, -3.3390],
    22: [1.9674, -0.1039, 3.5027, -2.6742, -9.8838, 1.9236],
}


def test_llama_cpp_says_the_same() -> None:
    metadata, stored = gguf({**CONFIG, "attention_window_size": 2048, "full_attention_idx": []})
    stored = {
        n.replace("_norm.weight", "_norm") if "ssm_" in n else n: w for n, w in stored.items()
    }  # its names
    found = whole(decoder(resolved(Memory(stored), gguf=metadata), Memory(stored)), IDS[0])
    for row, wanted in LLAMA_CPP.items():
        assert worst(found[row, :6], torch.tensor(wanted)) <= 1e-4
