"""Inkling under the names of its files, its padded vocabulary, its ranks, and what of it is refused."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from plait.errors import UnsupportedModel
from plait.families.common.registry import build_spec
from plait.model.divide import divide_model
from plait.partition import Rank
from plait.spec.attention import RelativeSpec
from plait.spec.branches import ConvolvedSpec
from tests.families import tiny
from tests.families.parity import Memory, decoder, resolved, whole, worst
from tests.families.tiny_mixers import INKLING

CONFIG: dict[str, Any] = {
    "architectures": ["InklingForCausalLM"],
    "model_type": "inkling_text",
    **tiny.SIZES,
    **INKLING,
}
RENAMED = {
    r"^model\.": "model.llm.",
    r"embed_tokens\.embed_norm": "embed_norm",
    r"embed_tokens": "embed",
    r"^lm_head": "model.llm.unembed",
    r"sconv\.conv1d": "sconv",
    r"self_attn\.(q|r)_proj": r"attn.w\1_du",
    r"self_attn\.(k|v)_proj": r"attn.w\1_dv",
    r"self_attn\.o_proj": "attn.wo_ud",
    r"self_attn": "attn",
    r"input_layernorm": "attn_norm",
    r"post_attention_layernorm": "mlp_norm",
    r"gate\.e_score_correction_bias": "gate.bias",
    r"shared_experts\.down_proj": "shared_experts.shared_w2_weight",
    r"mlp\.experts\.down_proj": "mlp.experts.w2_weight",
    r"mlp\.down_proj": "mlp.w2_md",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("inkling")
    tiny.write("inkling", made)
    return made


def in_turns(gate: Tensor, up: Tensor) -> Tensor:
    """Rows of both in turns."""
    return torch.stack([gate, up], -2).flatten(-3, -2)


def as_published(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    left, found = dict(tensors), dict[str, Tensor]()
    for name in [n for n in left if n.endswith("experts.gate_up_proj")]:
        place = name.removesuffix("gate_up_proj")
        found[f"{place}w13_weight"] = in_turns(*left.pop(name).chunk(2, 1))
    for name in [n for n in left if "gate_proj" in n]:
        both = in_turns(left.pop(name), left.pop(name.replace("gate_proj", "up_proj")))
        is_shared = "shared_experts" in name
        found[name.replace("gate_proj", "shared_w13_weight" if is_shared else "w13_dn")] = both
    for name, tensor in left.items():
        found[name] = tensor
    out = {}
    for name, tensor in found.items():
        for pattern, theirs in RENAMED.items():
            name = re.sub(pattern, theirs, name)
        out[name] = tensor
    return out


def test_the_published_names_are_the_same_model(folder: Path) -> None:
    config, tensors, oracle = tiny.read(folder)
    memory = Memory(as_published(tensors))
    assert "model.llm.layers.1.mlp.shared_experts.shared_w13_weight" in memory
    assert "model.llm.layers.0.mlp.w13_dn.weight" in memory
    wrapped = {"architectures": ["InklingForConditionalGeneration"], "model_type": "inkling_mm_model"}
    memory["model.visual.x.weight"] = torch.zeros(1)
    model = decoder(resolved(memory, {**wrapped, "text_config": config}), memory)
    assert worst(whole(model, oracle["ids"][0]), oracle["logits"][0]) <= 1e-4


def test_tokens_that_pad_the_vocabulary_are_never_likely(folder: Path) -> None:
    config, tensors, oracle = tiny.read(folder)
    for rows in (97, 90):
        memory = Memory({**tensors, "lm_head.weight": tensors["lm_head.weight"][:rows]})
        found = resolved(memory, {**config, "unpadded_vocab_size": 90})
        logits = whole(decoder(found, memory), oracle["ids"][0])
        assert worst(logits[:, :90], oracle["logits"][0][:, :90]) <= 1e-4
        assert (logits[:, 90:] < -1e29).all()


def test_ranks_divide_heads_with_their_channels_and_what_they_mix() -> None:
    even = {**CONFIG, "swa_num_key_value_heads": 2}
    spec, cuts = divide_model(build_spec(even)[0], Rank(index=1, size=2, shares=2))
    outer = spec.layers[1][0].mixer
    assert isinstance(outer, ConvolvedSpec)
    inner = outer.parts["inner"]
    assert isinstance(inner, RelativeSpec)
    assert (inner.num_heads, inner.num_kv_heads, inner.extent) == (2, 1, 9)
    assert cuts["layers.1.attn.inner.mix"].rows == ((10, 20),)
    assert cuts["layers.1.attn.inner.conv"].rows == ((10, 20), (30, 40))
    assert "layers.1.attn.conv" not in cuts


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"shared_expert_sink": False}, "shared_expert_sink = False"),
        ({"swa_num_key_value_heads": 4}, "6 heads over 4 key-value heads"),
        ({"d_rel": 0}, "0 profiles of 9 distances"),
    ],
)
def test_what_a_config_cannot_mean_is_refused_by_name(change: dict[str, Any], why: str) -> None:
    with pytest.raises(UnsupportedModel, match=why):
        build_spec({**CONFIG, **change})
