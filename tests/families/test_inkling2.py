"""Inkling 2 inside its wrapper, its padded vocabulary, its names, its ranks, and what of it is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from plait.checkpoint.quantized.packed import QuantizedCheckpoint
from plait.errors import UnsupportedModel
from plait.families.common.registry import build_spec
from plait.model.divide import divide_model
from plait.partition import Rank
from plait.quant.fp8 import Fp8
from plait.spec.attention import RelativeSpec
from plait.spec.branches import ConvolvedSpec, DepthSpec
from plait.spec.model import ModelSpec
from tests.checkpoint.quantized.packings import InMemory
from tests.families import tiny
from tests.families.parity import Memory, decoder, in_pieces, resolved, whole, worst
from tests.families.tiny_mixers import INKLING2
from tests.families.variant import Variant

CONFIG: dict[str, Any] = {
    "architectures": ["Inkling2ForCausalLM"],
    "model_type": "inkling2_text",
    **tiny.SIZES,
    **INKLING2,
    "moe_intermediate_size": 20,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("inkling2")
    tiny.write("inkling2", made)
    return made


def attention_of(spec: ModelSpec, layer: int) -> tuple[DepthSpec, RelativeSpec]:
    outer = spec.layers[layer][0].mixer
    assert isinstance(outer, DepthSpec)
    middle = outer.parts["inner"]
    assert isinstance(middle, ConvolvedSpec)
    inner = middle.parts["inner"]
    assert isinstance(inner, RelativeSpec)
    return outer, inner


def test_the_text_of_a_wrapper_that_sees_images_is_the_same_model(folder: Path) -> None:
    config, tensors, oracle = tiny.read(folder)
    assert "model.llm.attn_res.output_query" in tensors
    memory = Memory({**tensors, "model.visual.backbone.ln_pre.weight": torch.zeros(1)})
    wrapped = {"architectures": ["Inkling2ForConditionalGeneration"], "model_type": "inkling2"}
    for kind in (wrapped, {"model_type": "inkling2"}):
        found = resolved(memory, {**kind, "text_config": config, "image_token_id": 96})
        assert found.spec.family == "inkling2_text"
        got = whole(decoder(found, memory), oracle["ids"][0])
        assert worst(got, oracle["logits"][0]) <= 1e-4


def test_rows_that_pad_the_vocabulary_are_no_tokens(folder: Path) -> None:
    """As in transformers, of which the logits are cut."""
    config, tensors, oracle = tiny.read(folder)
    memory = Memory(tensors)
    model = decoder(resolved(memory, {**config, "unpadded_vocab_size": 90}), memory)
    ids = [x[: int((x >= 90).nonzero().min())] if (x >= 90).any() else x for x in oracle["ids"]]
    assert min(map(len, ids)) > 4
    for got, want in zip([whole(model, x) for x in ids], oracle["logits"], strict=True):
        assert worst(got, want[: len(got), :90]) <= 1e-4


def test_a_block_may_be_longer_than_the_model(folder: Path) -> None:
    config, tensors, _ = tiny.read(folder)
    memory = Memory(tensors)
    spec = resolved(memory, {**config, "n_layers_per_attn_res_block": 9}).spec
    assert [attention_of(spec, i)[0].sources for i in range(5)] == [0, 1, 1, 1, 1]
    assert [attention_of(spec, i)[0].ends for i in range(3)] == [True, False, False]


def test_every_sixth_layer_reads_apart_where_a_config_names_no_layers() -> None:
    """48 layers in eight blocks, as they are published."""
    spec = build_spec({"model_type": "inkling2_text", **PUBLISHED})[0]
    found = [attention_of(spec, i) for i in range(48)]
    assert [i for i, (_, inner) in enumerate(found) if inner.apart] == list(range(5, 48, 6))
    assert [outer.reads for outer, _ in found[:6]] == [1, 1, 1, 1, 1, 3]
    assert {(inner.window, inner.extent) for _, inner in found} == {(1024, 1024), (None, 1024)}
    assert (spec.vocab_size, spec.logit_softcap) == (200_058, 30.0)
    assert spec.layers[-1][-1].mixer == DepthSpec({}, sources=8, of_normed=True)


PUBLISHED = {
    "architectures": ["Inkling2ForCausalLM"],
    "hidden_size": 4608,
    "num_hidden_layers": 48,
    "num_attention_heads": 48,
    "vocab_size": 201_024,
}


def test_ranks_divide_heads_with_their_taps_and_scales() -> None:
    even = {**CONFIG, "swa_num_key_value_heads": 2}
    spec, cuts = divide_model(build_spec(even)[0], Rank(index=1, size=2, shares=2))
    inner = attention_of(spec, 1)[1]
    assert (inner.num_heads, inner.num_kv_heads, inner.apart) == (2, 1, True)
    start = "layers.1.attn.inner.inner"
    assert cuts[f"{start}.mix"].rows == ((10, 20),)
    assert cuts[f"{start}.gate"].rows == ((20, 40),)
    for name in ("sink", "q_scale", "mix_scale"):
        assert cuts[f"{start}.{name}"].rows == ((2, 4),)
    for name in "kv":
        assert cuts[f"{start}.{name}_taps"].rows == ((3, 6),)
        assert cuts[f"{start}.{name}_fixed"].rows == ((10, 20),)
    assert cuts["layers.0.attn.inner.inner.conv"].rows == ((12, 24), (36, 48))


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"scoring_func": "softmax"}, "scoring_func = 'softmax'"),
        ({"mlp_up_softcap": 20.0}, "mlp_up_softcap = 20.0"),
        ({"hidden_act": "gelu"}, "hidden_act = 'gelu'"),
        ({"swa_num_key_value_heads": 4}, "6 heads over 4 key-value heads"),
        ({"qk_l2_clip_threshold": 0.0}, "lengths up to .0.0, 0.8."),
        ({"log_scaling_n_floor": 0}, "log_scaling_n_floor 0, "),
        ({"n_layers_per_attn_res_block": 0}, "blocks of 0 layers"),
    ],
)
def test_what_a_config_cannot_mean_is_refused_by_name(change: dict[str, Any], why: str) -> None:
    with pytest.raises(UnsupportedModel, match=why):
        build_spec({**CONFIG, **change})


def test_chunks_and_decodes_of_blocks_of_another_size_give_the_same(folder: Path) -> None:
    config, tensors, oracle = tiny.read(folder)
    memory = Memory(tensors)
    model = decoder(resolved(memory, config), memory)
    for got, want in zip(in_pieces(model, oracle["ids"], 7), oracle["logits"], strict=True):
        assert worst(got, want) <= 1e-4


def test_names_and_shapes_tell_all_but_what_is_a_number_in_the_arithmetic(folder: Path) -> None:
    config, tensors, oracle = tiny.read(folder)
    memory = Memory(tensors)
    numbers = ("log_scaling_n_floor", "log_scaling_alpha", "qk_l2_clip_threshold", "rel_l2_clip_threshold")
    more = ("n_layers_per_attn_res_block", "num_experts_per_tok", "route_scale")
    found = resolved(memory, None, overrides=[f"{key}={config[key]}" for key in (*numbers, *more)])
    assert worst(whole(decoder(found, memory), oracle["ids"][0]), oracle["logits"][0]) <= 1e-4


def as_mxfp8(w: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(codes, exponents of 32 columns each, as uint8, the numbers these say)."""
    groups = w.unflatten(-1, (-1, 32))
    exponents = (groups.abs().amax(-1) / 448).log2().ceil()
    codes = (groups * (-exponents).exp2()[..., None]).to(torch.float8_e4m3fn)
    numbers = (codes.float() * exponents.exp2()[..., None]).flatten(-2)
    return codes.flatten(-2), (exponents + 127).to(torch.uint8), numbers


def test_experts_in_mxfp8_stay_so_though_no_config_says_it(tmp_path: Path) -> None:
    """As they are published: rows of gate and up in turns, with an exponent for 32 columns."""
    sizes = {**INKLING2, "hidden_size": 64, "intermediate_size": 96}
    tiny.write("inkling2", tmp_path, Variant("Inkling2TextConfig", sizes))
    config, tensors, oracle = tiny.read(tmp_path)
    plain = dict(tensors)
    for name in [n for n in tensors if n.endswith(("w13_weight", "w2_weight"))]:
        tensors[name], tensors[f"{name}_scale"], plain[name] = as_mxfp8(tensors[name])
    checkpoint = QuantizedCheckpoint(InMemory(tensors))
    kept = checkpoint.read("model.llm.layers.0.mlp.experts.w13_weight")
    assert isinstance(kept, Fp8)
    assert kept.block == (1, 32)
    got = whole(decoder(resolved(checkpoint, config), checkpoint), oracle["ids"][0])
    memory = Memory(plain)
    assert worst(got, whole(decoder(resolved(memory, config), memory), oracle["ids"][0])) <= 1e-5
