"""xLSTM with fused weights: transformers cannot make such a model, so it is the plain one's, fused."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.families import tiny
from tests.families.parity import Memory, decoder, resolved, whole, worst

FUSED = {
    "mlstm_layer.qkv_opreact": [f"mlstm_layer.{x}" for x in ("q", "k", "v", "ogate_preact")],
    "mlstm_layer.ifgate_preact": [f"mlstm_layer.{x}gate_preact" for x in "if"],
    "ffn.proj_up_gate_z": ["ffn.proj_up_gate", "ffn.proj_up"],
}


def fuse(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The same model under the names of weight_mode fused."""
    left, found = dict(tensors), dict[str, Tensor]()
    for i in range(tiny.SIZES["num_hidden_layers"]):
        for fused, parts in FUSED.items():
            for end in ("weight", "bias"):
                names = [f"backbone.blocks.{i}.{part}.{end}" for part in parts]
                if names[0] in left:
                    found[f"backbone.blocks.{i}.{fused}.{end}"] = torch.cat([left.pop(n) for n in names])
    return left | found


@pytest.mark.slow
def test_fused_weights_are_the_same_model(tmp_path: Path) -> None:
    tiny.write("xlstm", tmp_path)
    config, tensors, oracle = tiny.read(tmp_path)
    fused = Memory(fuse(tensors))
    found = resolved(fused, {**config, "weight_mode": "fused"})
    assert worst(whole(decoder(found, fused), oracle["ids"][0]), oracle["logits"][0]) <= 1e-4
