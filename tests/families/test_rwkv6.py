"""RWKV-6, which transformers has not, next to a plain description: files of two kinds, and GGUF."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from plait.checkpoint.weights import Target
from plait.errors import UnsupportedModel
from plait.ops.ranks import Comm
from tests.families.parity import (
    CPU,
    LONGEST,
    Memory,
    check_description,
    decoder,
    in_pieces,
    resolved,
    whole,
    worst,
)
from tests.families.rwkv6_oracle import FIVE, FLA, PUBLISHED, checkpoint, logits
from tests.model.together import rank_decoder, run_ranks

IDS = [torch.randint(0, 97, (n,), generator=torch.Generator().manual_seed(7)) for n in (23, 17)]


@pytest.mark.parametrize("config", [PUBLISHED, FLA, FIVE], ids=["published", "fla", "RWKV-5"])
def test_logits_are_those_of_the_description(config: dict[str, Any]) -> None:
    tensors = checkpoint(config)
    check_description(config, tensors, [logits(config, tensors, ids) for ids in IDS], IDS)


@pytest.mark.parametrize("config", [PUBLISHED, FLA, FIVE], ids=["published", "fla", "RWKV-5"])
def test_three_ranks_share_its_heads(config: dict[str, Any]) -> None:
    tensors = checkpoint(config)
    memory = Memory({name: t.float() for name, t in tensors.items()})
    found = resolved(memory, config)

    def work(comm: Comm) -> list[Tensor]:
        target = Target(CPU, torch.float32, LONGEST, found.spec.hidden_size)
        return in_pieces(rank_decoder(found, memory, target, comm), IDS)

    wanted = [logits(config, tensors, ids) for ids in IDS]
    for parts in run_ranks(work, 3):
        for got, want in zip(parts, wanted, strict=True):
            assert worst(got.double(), want) <= 1e-4


def test_the_tensors_alone_show_what_flash_linear_attention_wrote() -> None:
    tensors = checkpoint(FLA)
    memory = Memory({name: t.float() for name, t in tensors.items()})
    bare = resolved(memory, None)
    assert bare.spec.family == "rwkv6"
    assert worst(whole(decoder(bare, memory), IDS[0]).double(), logits(FLA, tensors, IDS[0])) <= 1e-4


@pytest.mark.parametrize(
    ("config", "changes", "why"),
    [
        (PUBLISHED, {"head_size": 7}, "30 channels of time mixing are no multiple of head_size 7"),
        (FIVE, {"head_size": 0}, "no multiple of head_size 0"),
        (FLA, {"num_heads": 4}, "15 key and 30 value channels are no multiples of num_heads 4"),
        (FLA, {"attn": {"layers": [1], "num_heads": 2}}, "attn = .* is not implemented for RWKV-6"),
        (FLA, {"hidden_act": "gelu"}, "hidden_act = 'gelu' is not implemented for RWKV-6"),
        (FLA, {"norm_first": False}, "norm_first"),
        (FLA, {"gate_low_rank_dim": None}, "config.json has values that cannot be those of a model"),
    ],
)
def test_what_no_rwkv_is_is_refused(config: dict[str, Any], changes: dict[str, Any], why: str) -> None:
    memory = Memory({name: t.float() for name, t in checkpoint(config).items()})
    with pytest.raises(UnsupportedModel, match=why):
        resolved(memory, {**config, **changes})


NAMES = {  # of llama.cpp's converter
    "ln1": "attn_norm",
    "ln2": "attn_norm_2",
    "attention.ln_x": "time_mix_ln",
    **{f"attention.{x}": f"time_mix_{x}" for x in ("receptance", "key", "value", "gate", "output")},
    **{f"feed_forward.{x}": f"channel_mix_{x}" for x in ("receptance", "key", "value")},
}


def as_gguf(tensors: dict[str, Tensor], every: int, *, is_fused: bool) -> Memory:
    """As llama.cpp's converter writes it. Older ones leave the shares of the last token apart."""
    left = {name: t.float() for name, t in tensors.items()}
    ends = {"token_embd": "rwkv.embeddings", "output": "head", "output_norm": "rwkv.ln_out"}
    ends |= {"token_embd_norm": "rwkv.blocks.0.pre_ln"}
    there = ((f"{ours}.{e}", f"{theirs}.{e}") for ours, theirs in ends.items() for e in ("weight", "bias"))
    stored = Memory({ours: left[theirs] for ours, theirs in there if theirs in left})
    for i in range(PUBLISHED["num_hidden_layers"]):
        layer, b = f"rwkv.blocks.{i}", f"blk.{i}"
        for theirs, name in NAMES.items():
            ends = (e for e in ("weight", "bias") if f"{layer}.{theirs}.{e}" in left)
            stored |= {f"{b}.{name}.{e}": left[f"{layer}.{theirs}.{e}"] for e in ends}
        for name in ("time_mix_output", "channel_mix_value"):
            stored[f"{b}.{name}.weight"] = stored[f"{b}.{name}.weight"] / 2 ** (i // every)
        mix = f"{layer}.attention.time"
        shares = [left[f"{mix}_maa_{x}"].squeeze() for x in "wkvrg"]
        if is_fused:
            stored[f"{b}.time_mix_lerp_fused.weight"] = torch.stack(shares)[:, None, None]
        else:
            stored |= {f"{b}.time_mix_lerp_{x}.weight": w for x, w in zip("wkvrg", shares, strict=True)}
        stored |= {
            f"{b}.time_mix_lerp_x.weight": left[f"{mix}_maa_x"].squeeze(),
            f"{b}.time_mix_w1.weight": left[f"{mix}_maa_w1"].T.contiguous(),
            f"{b}.time_mix_w2.weight": left[f"{mix}_maa_w2"].permute(0, 2, 1).contiguous(),
            f"{b}.time_mix_first.weight": left[f"{mix}_faaaa"],
            f"{b}.time_mix_decay.weight": left[f"{mix}_decay"].squeeze(),
            f"{b}.time_mix_decay_w1.weight": left[f"{mix}_decay_w1"].T.contiguous(),
            f"{b}.time_mix_decay_w2.weight": left[f"{mix}_decay_w2"].T.contiguous(),
        }
        for x in "kr":
            share = left[f"{layer}.feed_forward.time_maa_{x}"].squeeze()
            stored[f"{b}.channel_mix_lerp_{x}.weight"] = share
    return stored


@pytest.mark.parametrize("is_fused", [True, False])
def test_gguf_gives_the_same(is_fused: bool) -> None:
    tensors, every = checkpoint(PUBLISHED), PUBLISHED["rescale_every"]
    stored = as_gguf(tensors, every, is_fused=is_fused)
    keys = {
        "block_count": 3,
        "context_length": 1 << 20,
        "embedding_length": 30,
        "feed_forward_length": 96,
        "attention.layer_norm_epsilon": 1e-3,
        "attention.head_count": 0,
        "wkv.head_size": 10,
        "time_mix_extra_dim": 32,
        "time_decay_extra_dim": 64,
        "rescale_every_n_layers": every,
    }
    metadata = {"general.architecture": "rwkv6", **{f"rwkv6.{key}": value for key, value in keys.items()}}
    model = decoder(resolved(stored, gguf=metadata), stored)
    wanted = [logits(PUBLISHED, tensors, ids, every) for ids in IDS]
    assert worst(whole(model, IDS[0]).double(), wanted[0]) <= 1e-4
    for got, want in zip(in_pieces(model, IDS), wanted, strict=True):
        assert worst(got.double(), want) <= 1e-4
