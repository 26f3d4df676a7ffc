"""Nemotron 3 Puzzle: blocks of experts with sizes, and numbers of experts for a token, of their own.

transformers has no such class. Rows of experts that are zero do nothing behind a squared ReLU. A Nemotron 3
with these, and with another number of experts in one router, is the oracle.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file
from torch import Tensor

from plait.errors import UnsupportedModel
from plait.families.common.registry import build_spec
from plait.spec.model import AttentionSpec, MoeSpec
from tests.families import tiny, tiny_more
from tests.families.gguf.recorded import converted, read_checkpoint
from tests.families.parity import Memory, decoder, in_pieces, resolved, whole, worst

SIZES, CHOSEN = {2: 20, 4: 12}, {2: 2, 4: 3}  # of the blocks of experts
KINDS = ["mamba", "attention", "moe", "mlp", "moe"]
BLOCKS: list[dict[str, Any]] = [
    {"block_type": kind}
    if kind != "moe"
    else {
        "block_type": kind,
        "moe_intermediate_size": SIZES[i],
        "num_experts_per_tok": CHOSEN[i],
        "n_routed_experts": 8,
        "moe_latent_size": 12,
        "moe_shared_expert_intermediate_size": 28,
    }
    for i, kind in enumerate(KINDS)
]
SMALL = dict(vocab_size=97, hidden_size=32, num_attention_heads=2, n_groups=1, head_dim=16)
SMALL |= dict(ssm_state_size=16, mamba_num_heads=8, mamba_head_dim=8, intermediate_size=48)
OWN = {key for block in BLOCKS for key in block}


@torch.no_grad()
def write_puzzle(folder: Path) -> tuple[dict[str, Any], dict[str, Tensor], list[Tensor], list[Tensor]]:
    """(config, tensors, ids, the oracle's logits)."""
    latent = tiny_more.VARIANTS["nemotron_h_latent"].changes
    keys = {**latent, "hybrid_override_pattern": "M*E-E", "num_hidden_layers": 5}
    sizes = {k: v for k, v in tiny.SIZES.items() if k not in keys}
    config = transformers.NemotronHConfig(**sizes, **keys)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    tiny.randomize(model, one_plus=False)
    experts = model.model.layers[4].mixer
    experts.experts.up_proj[:, SIZES[4] :] = 0
    experts.gate.top_k = CHOSEN[4]
    model.save_pretrained(folder)
    ids = [torch.randint(0, 97, (n,), generator=torch.Generator().manual_seed(n)) for n in (23, 17)]
    logits = [model(one[None], use_cache=False).logits[0] for one in ids]
    written = json.loads((folder / "config.json").read_text())
    kept = {k: v for k, v in written.items() if k not in OWN and "layers_block_type" not in k}
    kept |= {"architectures": ["NemotronHPuzzleForCausalLM"], "model_type": "nemotron_h_puzzle"}
    return (
        kept | {"block_configs": BLOCKS, "num_hidden_layers": 99},
        {_rename(name): _cut(name, value) for name, value in load_file(folder / "model.safetensors").items()},
        ids,
        logits,
    )


def _rename(name: str) -> str:
    name = name.replace("e_score_correction_bias", "e_score_correction.bias")
    return re.sub(r"^backbone\.", "model.", name)


def _cut(name: str, value: Tensor) -> Tensor:
    if match := re.search(r"layers\.4\.mixer\.experts\.\d+\.(up|down)_proj", name):
        value = value[: SIZES[4]] if match[1] == "up" else value[:, : SIZES[4]]
    return value.contiguous()


def test_blocks_have_sizes_of_their_own(tmp_path: Path) -> None:
    config, tensors, ids, wanted = write_puzzle(tmp_path)
    file = Memory(tensors)
    found = resolved(file, config)
    experts = list(found.spec.mixers_of(MoeSpec))
    assert [(m.top_k, m.expert.size) for m in experts] == [(2, 20), (3, 12)]
    model = decoder(found, file)
    assert worst(whole(model, ids[0]), wanted[0]) <= 1e-4
    for logits, want in zip(in_pieces(model, ids), wanted, strict=True):
        assert worst(logits, want) <= 1e-4


@pytest.mark.parametrize(
    ("key", "value", "error"),
    [
        ("mamba_num_heads", 4, "block_configs: mamba_num_heads = 4 of one block is not implemented"),
        ("n_routed_experts", 4, "4 experts in one block and 8 in another"),
    ],
)
def test_what_one_block_may_not_have_otherwise_is_refused(key: str, value: int, error: str) -> None:
    blocks = [*BLOCKS[:4], {**BLOCKS[4], key: value}]
    with pytest.raises(UnsupportedModel, match=error):
        build_spec({"architectures": ["NemotronHPuzzleForCausalLM"], **SMALL, "block_configs": blocks})


def test_the_head_for_drafts_has_sizes_of_its_own() -> None:
    own = [{"block_type": "attention"}, {**BLOCKS[2], "moe_intermediate_size": 24, "num_experts_per_tok": 4}]
    names = ["NemotronHPuzzleForCausalLM"]
    spec = build_spec({**SMALL, "architectures": names, "block_configs": BLOCKS, "mtp_block_configs": own})[0]
    assert spec.mtp is not None
    attn, experts = (layer[0].mixer for layer in spec.mtp.layers)
    assert isinstance(attn, AttentionSpec)
    assert isinstance(experts, MoeSpec)
    assert (experts.top_k, experts.expert.size) == (4, 24)


def test_a_gguf_file_lists_sizes_by_layer(tmp_path: Path) -> None:
    config, tensors, oracle = read_checkpoint("nemotron_h_latent", tmp_path)
    metadata, stored = converted("nemotron_h_latent", config, tensors)
    kinds = ["mamba", "attention", "moe", "moe"]
    for key, own, other in (("expert_used_count", 2, 5), ("expert_feed_forward_length", 20, 7)):
        metadata[f"nemotron_h_moe.{key}"] = [own if kind == "moe" else other for kind in kinds]
    file = Memory(stored)
    found = resolved(file, gguf=metadata)
    assert [m.top_k for m in found.spec.mixers_of(MoeSpec)] == [2, 2]
    assert worst(whole(decoder(found, file), oracle["ids"][0]), oracle["logits"][0]) <= 1e-4
    metadata["nemotron_h_moe.expert_used_count"] = [2, 5]
    with pytest.raises(UnsupportedModel, match="lists of sizes are not of 4 layers"):
        resolved(file, gguf=metadata)
