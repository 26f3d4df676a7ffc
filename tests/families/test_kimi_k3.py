"""Kimi-K3, which transformers has not, against a plain implementation; and its config as it was published."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from plait.errors import UnsupportedModel
from plait.families.common.registry import build_spec
from plait.model.divide import divide_model
from plait.partition import Rank
from plait.spec.branches import DepthSpec
from plait.spec.model import MlaSpec, MoeSpec
from plait.spec.recurrent import DeltaNetSpec
from tests.families.kimi_k3_oracle import BLOCK, CONFIG, TEXT, TOP, checkpoint, logits
from tests.families.parity import Memory, decoder, in_pieces, resolved, whole, worst

IDS = [torch.randint(0, 97, (n,), generator=torch.Generator().manual_seed(7)) for n in (23, 17)]


def with_text(**changes: Any) -> dict[str, Any]:
    return {**CONFIG, "text_config": {**TEXT, **changes}}


@pytest.mark.parametrize("block", [2, *(pytest.param(n, marks=pytest.mark.slow) for n in (1, 4))])
def test_logits_of_kimi_k3_are_those_of_its_description(block: int) -> None:
    config, tensors = with_text(**{BLOCK: block}), checkpoint(TEXT)
    memory = Memory({name: t.float() for name, t in tensors.items()})
    found = resolved(memory, config)
    assert found.spec.family == "kimi_k3"
    model = decoder(found, memory)
    wanted = [logits(config["text_config"], tensors, ids) for ids in IDS]
    assert worst(whole(model, IDS[0]).double(), wanted[0]) <= 1e-4
    for got, want in zip(in_pieces(model, IDS), wanted, strict=True):
        assert worst(got.double(), want) <= 1e-4


def test_the_text_alone_and_names_alone_give_the_same_model() -> None:
    tensors = {name: t.float() for name, t in checkpoint(TEXT).items()}
    own = {name.removeprefix("language_model."): t for name, t in tensors.items()}
    alone = {**TEXT, "architectures": ["KimiK3ForCausalLM"]}
    got = whole(decoder(resolved(Memory(own), alone), Memory(own)), IDS[0])
    assert worst(got, whole(decoder(resolved(Memory(tensors), CONFIG), Memory(tensors)), IDS[0])) == 0
    with pytest.raises(UnsupportedModel, match=f"{BLOCK}=VALUE"):
        resolved(Memory(tensors), None)


def test_kimi_k3_as_it_was_published() -> None:
    """93 layers, every fourth of latent attention, in eight blocks of twelve."""
    full = [*range(4, 93, 4), 93]
    linear = {"kda_layers": [i for i in range(1, 94) if i not in full], "full_attn_layers": full}
    sizes = {"num_hidden_layers": 93, "hidden_size": 7168, "num_experts": 896, "num_experts_per_token": 16}
    linear |= {x: v for x, v in TEXT["linear_attn_config"].items() if x not in linear}
    spec, _ = build_spec(with_text(**sizes, **{BLOCK: 12}, linear_attn_config=linear))
    depths = [branch.mixer for layer in spec.layers for branch in layer]
    assert all(isinstance(m, DepthSpec) for m in depths)
    assert [len(layer) for layer in spec.layers] == [2] * 92 + [3]
    firsts = [layer[0] for layer in spec.layers]
    assert [i for i, b in enumerate(firsts) if b.keep == 0.0] == list(range(0, 93, 12))
    assert [b.mixer.sources for b in firsts[:14]] == [0, *[1] * 12, 2]  # type: ignore[attr-defined]
    assert spec.layers[-1][-1].mixer == DepthSpec({}, sources=8, eps=1e-5)
    kinds = [type(m.parts["inner"]) for m in depths if isinstance(m, DepthSpec) and m.parts]
    assert (kinds.count(DeltaNetSpec), kinds.count(MlaSpec), kinds.count(MoeSpec)) == (69, 24, 92)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({BLOCK: 0}, "blocks of 0 layers"),
        ({"activation_situ_beta": 3.0}, "hidden_act 'situ' with .3.0, 25.0. as"),
        ({"mla_use_nope": False}, "mla_use_nope = False"),
    ],
)
def test_what_a_config_cannot_mean_is_refused_by_name(change: dict[str, Any], why: str) -> None:
    with pytest.raises(UnsupportedModel, match=why):
        build_spec(with_text(**change))


def test_ranks_divide_heads_and_experts_and_keep_what_leads_to_the_latent_space_whole() -> None:
    half, linear = Rank(index=0, size=2, shares=2), {**TEXT["linear_attn_config"], "num_heads": 4}
    spec, cuts = divide_model(build_spec(with_text(linear_attn_config=linear))[0], half)
    found = spec.layers[0][0].mixer
    assert isinstance(found, DepthSpec)
    assert found.parts["inner"].num_heads == 2  # type: ignore[attr-defined]
    assert cuts["layers.0.delta.inner.q"].rows == ((0, 20),)
    assert cuts["layers.1.ffn.inner.experts.*.down"].cols == (((0, 10),),)
    assert not [name for name in cuts if name.endswith(("enter", "leave", "router"))]


def test_every_tensor_has_a_place_next_to_those_of_images() -> None:
    tensors = {name: t.float() for name, t in checkpoint(TEXT).items()}
    tensors |= {"vision_tower.patch.weight": torch.zeros(2, 2), "mm_projector.norm.weight": torch.zeros(2)}
    decoder(resolved(Memory(tensors), CONFIG), Memory(tensors))
    assert f"{TOP}.norm.weight" in tensors
