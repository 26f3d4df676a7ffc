"""PLaMo 3, which transformers has not, against a plain implementation: from its own files, and from GGUF."""

from __future__ import annotations

import torch
from torch import Tensor

from plait.model.decoder import Decoder
from tests.families.parity import Memory, decoder, in_pieces, resolved, whole, worst
from tests.families.plamo3_oracle import AROUND, CONFIG, checkpoint, logits

IDS = [torch.randint(0, 97, (n,), generator=torch.Generator().manual_seed(7)) for n in (23, 17)]
NAMES = {  # of llama.cpp's converter
    "mixer.qkv_proj": "attn_qkv",
    "mixer.o_proj": "attn_output",
    "mixer.q_norm": "attn_q_norm",
    "mixer.k_norm": "attn_k_norm",
    "mlp.gate_up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "pre_mixer_norm": "attn_norm",
    "post_mixer_norm": "post_attention_norm",
    "pre_mlp_norm": "ffn_norm",
    "post_mlp_norm": "post_ffw_norm",
}


def answers(model: Decoder, wanted: list[Tensor]) -> None:
    assert worst(whole(model, IDS[0]).double(), wanted[0]) <= 1e-4
    for found, want in zip(in_pieces(model, IDS), wanted, strict=True):
        assert worst(found.double(), want) <= 1e-4


def test_logits_are_those_of_the_description() -> None:
    tensors = checkpoint(CONFIG)
    memory = Memory({name: t.float() for name, t in tensors.items()})
    found = resolved(memory, CONFIG)
    assert [layer[0].mixer.window for layer in found.spec.layers] == [6, 6, None, 6]
    answers(decoder(found, memory), [logits(CONFIG, tensors, ids) for ids in IDS])


def test_names_alone_show_it() -> None:
    config = {**CONFIG, "sliding_window_pattern": 8, "rope_local_theta": 10_000, "rms_norm_eps": 1e-6}
    tensors = checkpoint(config)
    memory = Memory({name: t.float() for name, t in tensors.items()})
    found = resolved(memory, None)
    assert found.spec.family == "plamo3"
    wide = {**config, "window_size": 2048}
    answers(decoder(found, memory), [logits(wide, tensors, ids) for ids in IDS])


def test_gguf_gives_the_same() -> None:
    tensors = checkpoint(CONFIG)
    c, stored = CONFIG, Memory({"token_embd.weight": tensors["model.embed_tokens.weight"].float()})
    stored["output_norm.weight"] = tensors["model.norm.weight"].float() + 1
    stored["output.weight"] = tensors["lm_head.weight"].float()
    for i in range(c["num_hidden_layers"]):
        for theirs, name in NAMES.items():
            around = AROUND.get(theirs.removesuffix("_norm"), 1.0 if theirs.endswith("_norm") else 0.0)
            weight = tensors[f"model.layers.layers.{i}.{theirs}.weight"].float()
            stored[f"blk.{i}.{name}.weight"] = weight + around
    keys = {
        "block_count": 4,
        "context_length": 128,
        "embedding_length": 36,
        "feed_forward_length": 44,
        "attention.head_count": 6,
        "attention.head_count_kv": 2,
        "attention.key_length": 8,
        "attention.value_length": 8,
        "attention.layer_norm_rms_epsilon": 1e-5,
        "vocab_size": 97,
        "attention.sliding_window": 6,
        "attention.sliding_window_pattern": 3,
        "rope.freq_base": 50_000.0,
        "rope.freq_base_swa": 700.0,
        "rope.dimension_count": 8,
    }
    metadata = {"general.architecture": "plamo3", **{f"plamo3.{key}": value for key, value in keys.items()}}
    found = resolved(stored, gguf=metadata)
    answers(decoder(found, stored), [logits(CONFIG, tensors, ids) for ids in IDS])
