"""Chameleon answers what transformers answers, but for tokens of images, which it never writes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.families import tiny
from tests.families.gguf.test_recorded import metadata_of
from tests.families.parity import Memory, decoder, in_pieces, resolved, whole, worst
from tests.families.variant import Variant

IMAGES = {"IMGIMGAAZ": 4, "IMGIMGBAZ": 90, "<image>": 91}
PICTURES = {"embed_dim": 4, "num_embeddings": 2, "base_channels": 32, "channel_multiplier": [1]}
PICTURES |= {"num_res_blocks": 1, "resolution": 4, "latent_channels": 4, "attn_resolutions": None}


def checkpoint(folder: Path, **changes: Any) -> tuple[dict[str, Any], dict[str, Tensor], dict[str, Any]]:
    own = {"vocabulary_map": IMAGES, "vq_config": PICTURES, "rms_norm_eps": 1e-5, **changes}
    model = "ChameleonForConditionalGeneration"
    tiny.write("chameleon", folder, Variant("ChameleonConfig", own, model=model))
    return tiny.read(folder)


@pytest.mark.slow
@pytest.mark.parametrize("behind", [False, True])
def test_logits_are_those_of_transformers(behind: bool, tmp_path: Path) -> None:
    config, tensors, oracle = checkpoint(tmp_path, swin_norm=behind)
    memory = Memory(tensors)
    model = decoder(resolved(memory, config), memory)
    words = [i for i in range(97) if i not in (4, 90)]
    found = whole(model, oracle["ids"][0])
    assert worst(found[:, words], oracle["logits"][0][:, words]) <= 1e-4
    assert float(found[:, [4, 90]].max()) < -1e29
    for logits, want in zip(in_pieces(model, oracle["ids"]), oracle["logits"], strict=True):
        assert worst(logits[:, words], want[:, words]) <= 1e-4


def in_pairs(w: Tensor, heads: int) -> Tensor:
    return w.unflatten(0, (heads, 2, -1)).transpose(1, 2).flatten(0, 2)


@pytest.mark.slow
def test_gguf_files_write_the_words_before_and_behind_those_of_images(tmp_path: Path) -> None:
    config, tensors, oracle = checkpoint(tmp_path)
    made: dict[str, Tensor] = {}
    words = {"embed_tokens": "token_embd", "norm": "output_norm"}
    layer = {"input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm", "o_proj": "attn_output"}
    layer |= {f"{x}_proj": f"attn_{x}" for x in "qkv"} | {
        f"{x}_proj": f"ffn_{x}" for x in ("gate", "up", "down")
    }
    for name, w in tensors.items():
        *_, word, end = name.split(".")
        if name == "lm_head.weight":
            made["output.weight"] = w
        elif "vqmodel" in name:
            continue
        elif ".layers." not in name:
            made[f"{words[word]}.{end}"] = w
        elif word in ("q_norm", "k_norm"):  # of each head the same
            heads = 4 if word[0] == "q" else 2
            w[:] = w[:1]
            made[f"blk.{name.split('.')[2]}.attn_{word}.{end}"] = in_pairs(w.flatten(), heads).view(heads, -1)
        else:
            turned = in_pairs(w, 4 if word[0] == "q" else 2) if word in ("q_proj", "k_proj") else w
            made[f"blk.{name.split('.')[2]}.{layer[word]}.{end}"] = turned
    keys = {"attention.head_count_kv": 2, "rope.dimension_count": 8, "rope.freq_base": 1e4}
    gguf = metadata_of("chameleon", block_count=3, context_length=128, **keys)
    own, file = Memory(tensors), Memory(made)
    usual = whole(decoder(resolved(own, config), own), oracle["ids"][0])
    found = whole(decoder(resolved(file, gguf=gguf), file), oracle["ids"][0])
    assert worst(found[:, :4], usual[:, :4]) <= 1e-4
    assert float(found[:, 4:].max()) < -1e29
    assert torch.isfinite(found).all()
