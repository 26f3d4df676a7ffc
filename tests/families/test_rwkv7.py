"""RWKV-7, which transformers has not, against a plain implementation: from its own files, and from GGUF."""

from __future__ import annotations

import torch
from torch import Tensor

from tests.families.parity import Memory, decoder, in_pieces, resolved, whole, worst
from tests.families.rwkv7_oracle import CONFIG, checkpoint, logits

IDS = [torch.randint(0, 97, (n,), generator=torch.Generator().manual_seed(7)) for n in (23, 17)]


def test_logits_are_those_of_the_description() -> None:
    tensors = checkpoint(CONFIG)
    memory = Memory({name: t.float() for name, t in tensors.items()})
    model = decoder(resolved(memory, CONFIG), memory)
    wanted = [logits(CONFIG, tensors, ids) for ids in IDS]
    assert worst(whole(model, IDS[0]).double(), wanted[0]) <= 1e-4
    for got, want in zip(in_pieces(model, IDS), wanted, strict=True):
        assert worst(got.double(), want) <= 1e-4
    bare = resolved(memory, None)
    assert bare.spec.family == "rwkv7"
    assert worst(whole(decoder(bare, memory), IDS[0]).double(), wanted[0]) <= 1e-4


NAMES = {  # of llama.cpp's converter
    "attn_norm": "attn_norm",
    "ffn_norm": "attn_norm_2",
    "attn.g_norm": "time_mix_ln",
    "attn.r_proj": "time_mix_receptance",
    "attn.k_proj": "time_mix_key",
    "attn.v_proj": "time_mix_value",
    "attn.o_proj": "time_mix_output",
    "ffn.key": "channel_mix_key",
    "ffn.value": "channel_mix_value",
}


def as_gguf(tensors: dict[str, Tensor]) -> Memory:
    left = {name: t.float() for name, t in tensors.items()}
    stored = Memory(
        {"token_embd.weight": left["model.embeddings.weight"], "output.weight": left["lm_head.weight"]}
    )
    for end in ("weight", "bias"):
        stored[f"output_norm.{end}"] = left[f"model.norm.{end}"]
        stored[f"token_embd_norm.{end}"] = left[f"model.layers.0.pre_norm.{end}"]
    for i in range(CONFIG["num_hidden_layers"]):
        layer, b = f"model.layers.{i}", f"blk.{i}"
        for theirs, name in NAMES.items():
            stored |= {
                f"{b}.{name}.{e}": left[n]
                for e in ("weight", "bias")
                if (n := f"{layer}.{theirs}.{e}") in left
            }
        stored[f"{b}.time_mix_lerp_fused.weight"] = torch.stack(
            [left[f"{layer}.attn.x_{x}"] for x in "rwkvag"]
        )
        stored[f"{b}.channel_mix_lerp_k.weight"] = left[f"{layer}.ffn.x_k"].flatten()
        for x in ("k_k", "k_a", "r_k"):
            stored[f"{b}.time_mix_{x}.weight"] = left[f"{layer}.attn.{x}"].flatten()
        for x in "wavg":
            for n, end in ((1, "0.weight"), (2, "2.weight"), (0, "2.bias")):
                if (name := f"{layer}.attn.{x}_lora.lora.{end}") in left:
                    stored[f"{b}.time_mix_{x}{n}.weight"] = left[name]
                    if x == "a" and i == 0:  # what the converter writes for the first layer's v
                        stored[f"{b}.time_mix_v{n}.weight"] = left[name]
    return stored


def test_gguf_gives_the_same() -> None:
    tensors = checkpoint(CONFIG)
    stored = as_gguf(tensors)
    keys = {
        "block_count": 3,
        "context_length": 1 << 20,
        "embedding_length": 30,
        "feed_forward_length": 44,
        "attention.layer_norm_epsilon": 1e-5,
        "attention.head_count": 0,
        "wkv.head_size": 10,
        "attention.decay_lora_rank": 5,
        "attention.iclr_lora_rank": 6,
        "attention.gate_lora_rank": 7,
        "attention.value_residual_mix_lora_rank": 3,
    }
    metadata = {"general.architecture": "rwkv7", **{f"rwkv7.{key}": value for key, value in keys.items()}}
    model = decoder(resolved(stored, gguf=metadata), stored)
    wanted = logits({**CONFIG, "heads_eps": 64e-5}, tensors, IDS[0])
    assert worst(whole(model, IDS[0]).double(), wanted) <= 1e-4
