"""QRWKV6 and ARWKV-7, of which GGUF files are served, next to a plain description."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from plait.checkpoint.weights import Target
from plait.ops.ranks import Comm
from tests.families.parity import CPU, LONGEST, Memory, decoder, in_pieces, resolved, whole, worst
from tests.families.qrwkv_oracle import GATED, SEVEN, SIX, checkpoint, logits, metadata
from tests.model.together import rank_decoder, run_ranks

IDS = [torch.randint(0, 97, (n,), generator=torch.Generator().manual_seed(7)) for n in (23, 17)]


@pytest.mark.parametrize("keys", [SIX, SEVEN, GATED], ids=["qrwkv6", "arwkv7", "arwkv7 with a gate"])
def test_gguf_gives_the_logits_of_the_description(keys: dict[str, Any]) -> None:
    tensors = checkpoint(keys)
    stored = Memory({name: w.float() for name, w in tensors.items()})
    if keys is not SIX:  # the converter writes them, of nothing
        rank = keys["attention.iclr_lora_rank"]
        shapes = {"v0": (30,), "v1": (rank, 30), "v2": (30, rank)}
        stored |= {f"blk.0.time_mix_{x}.weight": torch.full(shape, torch.nan) for x, shape in shapes.items()}
    model = decoder(resolved(stored, gguf=metadata(keys)), stored)
    wanted = [logits(keys, tensors, ids) for ids in IDS]
    assert worst(whole(model, IDS[0]).double(), wanted[0]) <= 1e-4
    for got, want in zip(in_pieces(model, IDS), wanted, strict=True):
        assert worst(got.double(), want) <= 1e-4


def test_two_ranks_share_its_heads_and_key_heads() -> None:
    stored = Memory({name: w.float() for name, w in checkpoint(SIX).items()})
    found = resolved(stored, gguf=metadata(SIX))
    wanted = in_pieces(decoder(found, stored), IDS)

    def work(comm: Comm) -> list[torch.Tensor]:
        target = Target(CPU, torch.float32, LONGEST, found.spec.hidden_size)
        return in_pieces(rank_decoder(found, stored, target, comm), IDS)

    for parts in run_ranks(work, 2):
        for got, want in zip(parts, wanted, strict=True):
            assert worst(got, want) <= 1e-5
