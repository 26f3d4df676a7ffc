"""Inkling 2 Mini: passes over blocks of several layers, what its configs say, and how experts are stored."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from plait.checkpoint.quantized.packed import QuantizedCheckpoint
from plait.checkpoint.weights import Target, Weights
from plait.errors import BadFile, ShapeMismatch, UnsupportedModel
from plait.families.common.registry import build_spec
from plait.model.decoder import Decoder
from plait.model.divide import divide_model
from plait.partition import Rank
from plait.quant.fp4 import Fp4
from plait.spec.attention import RelativeSpec
from plait.spec.branches import ConvolvedSpec, DepthSpec, MessageSpec
from plait.spec.model import ModelSpec
from tests.checkpoint.quantized.packings import InMemory
from tests.families import tiny
from tests.families.parity import CPU, LONGEST, Memory, decoder, in_pieces, resolved, whole, worst
from tests.families.tiny_mixers import INKLING2_LOOP
from tests.families.variant import Variant

CONFIG: dict[str, Any] = {
    "architectures": ["Inkling2LoopForCausalLM"],
    "model_type": "inkling2_loop_text",
    **tiny.SIZES,
    **INKLING2_LOOP,
    "moe_intermediate_size": 20,
}
# The loop has two blocks of two layers, both kinds of layers within a block and where one begins.
LONG: dict[str, Any] = {
    **INKLING2_LOOP,
    "num_hidden_layers": 7,
    "layer_types": [*["hybrid_sliding", "hybrid"] * 2, "hybrid", "hybrid_sliding", "hybrid"],
    "n_layers_per_attn_res_block": 2,
    "loop_layer_index_start": 2,
    "loop_layer_index_end": 6,
}
# Layers behind the loop have numbers behind all passes that are those of other layers in the file.
SHORT: dict[str, Any] = {
    **INKLING2_LOOP,
    "num_hidden_layers": 5,
    "layer_types": ["hybrid", "hybrid_sliding", "hybrid", "hybrid_sliding", "hybrid"],
    "loop_layer_index_end": 2,
    "loop_num_passes": 2,
}
START, END, PASSES, RANK = (
    "loop_layer_index_start",
    "loop_layer_index_end",
    "loop_num_passes",
    "loop_gate_rank",
)
QUERIES = "model.llm.middle_cycle_cross_pass_queries"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("inkling2_loop")
    tiny.write("inkling2_loop", made)
    return made


def depth_of(spec: ModelSpec, layer: int, branch: int = 0) -> DepthSpec:
    found = spec.layers[layer][branch].mixer
    assert isinstance(found, DepthSpec)
    return found


def attention_of(spec: ModelSpec, layer: int) -> RelativeSpec:
    middle = depth_of(spec, layer).parts["inner"]
    assert isinstance(middle, ConvolvedSpec)
    inner = middle.parts["inner"]
    assert isinstance(inner, RelativeSpec)
    return inner


def as_published(config: dict[str, Any]) -> dict[str, Any]:
    """The same config, with the numbers of the loop in `loop_config`."""
    words = {"core_start": START, "core_end": END, "num_passes": PASSES, "gate_rank": RANK}
    kept = {key: value for key, value in config.items() if key not in words.values()}
    return {**kept, "loop_config": {own: config[flat] for own, flat in words.items()}}


@pytest.mark.parametrize("sizes", [LONG, SHORT], ids=["two blocks of two layers", "three layers behind"])
def test_logits_of_passes_equal_those_of_transformers(sizes: dict[str, Any], tmp_path: Path) -> None:
    tiny.write("inkling2_loop", tmp_path, Variant("Inkling2LoopTextConfig", sizes))
    config, tensors, oracle = tiny.read(tmp_path)
    memory = Memory(tensors)
    model = decoder(resolved(memory, config), memory)
    for ids, want in zip(oracle["ids"], oracle["logits"], strict=True):
        assert worst(whole(model, ids), want) <= 1e-4
    for got, want in zip(in_pieces(model, oracle["ids"], 7), oracle["logits"], strict=True):
        assert worst(got, want) <= 1e-4


@pytest.mark.parametrize(
    "ends", [("gain_weight",), ("forget_weight",), ("cross_pass_queries",), ("_kv_queries",)]
)
def test_logits_differ_without_gates_and_without_queries(folder: Path, ends: tuple[str, ...]) -> None:
    """So that the comparison with transformers would show what is left out."""
    config, tensors, oracle = tiny.read(folder)
    none = Memory({k: torch.zeros_like(v) if k.endswith(ends) else v for k, v in tensors.items()})
    got = whole(decoder(resolved(none, config), none), oracle["ids"][0])
    assert worst(got, oracle["logits"][0]) > 0.01


def test_the_text_of_a_wrapper_is_the_same_model_in_both_layouts_of_its_config(folder: Path) -> None:
    config, tensors, oracle = tiny.read(folder)
    memory = Memory({**tensors, "model.visual.backbone.ln_pre.weight": torch.zeros(1)})
    wrapped = {"architectures": ["Inkling2LoopForConditionalGeneration"], "model_type": "inkling2_loop"}
    wrong = {**as_published(config), START: 3, PASSES: 7}  # `loop_config` comes first, as in transformers
    for text in (config, as_published(config), wrong):
        for kind in (wrapped, {"model_type": "inkling2_loop"}):
            found = resolved(memory, {**kind, "text_config": text, "image_token_id": 96})
            assert found.spec.family == "inkling2_loop_text"
            got = whole(decoder(found, memory), oracle["ids"][0])
            assert worst(got, oracle["logits"][0]) <= 1e-4


def test_one_pass_is_inkling_2_and_leaves_gates_unused(folder: Path) -> None:
    config, tensors, oracle = tiny.read(folder)
    own = ("controllers", "cross_pass")
    memory, plain = (
        Memory(tensors),
        Memory({k: v for k, v in tensors.items() if not any(x in k for x in own)}),
    )
    got = whole(decoder(resolved(memory, {**config, PASSES: 1}), memory), oracle["ids"][0])
    other = {**config, "architectures": ["Inkling2ForCausalLM"], "model_type": "inkling2_text"}
    assert worst(got, whole(decoder(resolved(plain, other), plain), oracle["ids"][0])) <= 1e-5


def test_published_sizes_are_24_layers_of_which_12_run_three_times() -> None:
    published = {
        "hidden_size": 2304,
        "num_hidden_layers": 24,
        "num_attention_heads": 24,
        "vocab_size": 201_024,
    }
    spec = build_spec({"model_type": "inkling2_loop_text", **published})[0]
    assert len(spec.layers) == 48
    later = [i for i in range(48) if isinstance(depth_of(spec, i), MessageSpec)]
    assert later == [*range(18, 42)]
    firsts = [depth_of(spec, i) for i in later]
    assert [i for i, m in zip(later, firsts, strict=True) if getattr(m, "restarts", None) is not None] == [
        18,
        30,
    ]
    assert {(m.messages, m.sent, m.rank) for m in firsts if isinstance(m, MessageSpec)} == {(3, 2, 64)}
    assert [depth_of(spec, i).sources for i in (5, 6, 12, 17, 18, 24, 42, 47)] == [1, 1, 2, 3, 1, 2, 3, 4]
    assert [i for i in range(48) if attention_of(spec, i).apart] == [*range(5, 48, 6)]
    assert [i for i in range(48) if attention_of(spec, i).split] == [i for i in range(6, 42) if (i + 1) % 6]
    assert [spec.layers[i][0].source for i in (5, 6, 17, 18, 41, 42)] == [
        *("", "layers.6.attn", "layers.17.attn", "layers.6.attn", "layers.17.attn", ""),
    ]


def test_passes_share_weights_and_have_states_of_their_own(folder: Path) -> None:
    config, tensors, _ = tiny.read(folder)
    memory, sizes = Memory(tensors), []
    for passes in (2, 3):
        found = resolved(memory, {**config, PASSES: passes})
        target = Target(CPU, torch.float32, LONGEST, found.spec.hidden_size)
        model = Decoder(found.spec, Weights(memory, found.names, target))
        assert {name.split(".")[1] for name in model.states} == {str(i) for i in range(2 + 2 * passes)}
        sizes.append(target.weights_nbytes)
    assert sizes[0] == sizes[1]


def test_ranks_divide_heads_of_each_pass() -> None:
    even = {**CONFIG, "swa_num_key_value_heads": 2}
    spec, cuts = divide_model(build_spec(even)[0], Rank(index=1, size=2, shares=2))
    assert (attention_of(spec, 4).num_heads, attention_of(spec, 4).split) == (3, True)
    assert cuts["layers.4.attn.inner.inner.k"] == cuts["layers.2.attn.inner.inner.k"]
    assert not [name for name in cuts if "gates" in name or "messages" in name]


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({PASSES: 0}, "loop_num_passes is 0"),
        ({PASSES: 2.5}, "loop_num_passes is 2.5; known is a whole number"),
        ({PASSES: 5000}, "at most 4096 layers"),
        ({RANK: 0}, "loop_gate_rank 0"),
        ({START: 0}, "layers 0 to 3 of 4 .*0 < start < end"),
        ({START: 3}, "layers 3 to 3 of 4"),
        ({END: 5}, "layers 1 to 5 of 4"),
        ({"n_layers_per_attn_res_block": 2}, "multiples of n_layers_per_attn_res_block, which is 2"),
        ({"n_layers_per_attn_res_block": 0}, "which is 0"),
        ({"loop_config": {"core_start": 1, "kind": "sum"}}, "loop_config has kind; known are core_start"),
        ({"loop_config": [1, 3]}, r"loop_config has \[1, 3\]; known are"),
        ({"loop_config": {"num_passes": "3"}}, "loop_num_passes is '3'"),
        ({"hidden_act": "gelu"}, "hidden_act = 'gelu'"),
    ],
)
def test_what_a_config_cannot_mean_is_refused_by_name(change: dict[str, Any], why: str) -> None:
    with pytest.raises(UnsupportedModel, match=why):
        build_spec({**CONFIG, **change})


def test_names_and_shapes_show_which_layers_run_in_passes(folder: Path) -> None:
    config, tensors, oracle = tiny.read(folder)
    memory = Memory(tensors)
    numbers = ("log_scaling_n_floor", "log_scaling_alpha", "qk_l2_clip_threshold", "rel_l2_clip_threshold")
    more = ("n_layers_per_attn_res_block", "num_experts_per_tok", "route_scale")
    found = resolved(memory, None, overrides=[f"{key}={config[key]}" for key in (*numbers, *more)])
    assert found.spec.family == "inkling2_loop_text"
    assert worst(whole(decoder(found, memory), oracle["ids"][0]), oracle["logits"][0]) <= 1e-4


def as_nvfp4(w: Tensor) -> dict[str, Tensor]:
    """Random codes of the shape of w, [experts, rows, columns], as they are published."""
    count, rows, columns = w.shape
    made = torch.Generator().manual_seed(rows)
    return {
        "": torch.randint(0, 256, (count, rows, columns // 2), generator=made, dtype=torch.uint8),
        "_scale": torch.rand(count, rows, columns // 16, generator=made).add(0.5).to(torch.float8_e4m3fn),
        "_amax": torch.rand(count, generator=made) + 0.5,
        "_outer_scale_denominator": torch.tensor(12.0),
    }


def test_experts_in_nvfp4_stay_so_and_equal_what_transformers_makes_of_them(tmp_path: Path) -> None:
    """transformers decodes them while it loads: its numbers are the comparison."""
    from transformers.core_model_loading import Inkling2LoopDequantizeExperts

    sizes = {**INKLING2_LOOP, "hidden_size": 64, "intermediate_size": 96}
    tiny.write("inkling2_loop", tmp_path, Variant("Inkling2LoopTextConfig", sizes))
    config, tensors, oracle = tiny.read(tmp_path)
    plain, ends = dict(tensors), ("", "_scale", "_amax", "_outer_scale_denominator")
    for name in [n for n in tensors if n.endswith(("w13_weight", "w2_weight"))]:
        parts = as_nvfp4(tensors.pop(name))
        tensors.update({name + end: part for end, part in parts.items()})
        decode = Inkling2LoopDequantizeExperts().convert
        plain[name] = decode(parts, [*ends], ["it"], model=torch.nn.Linear(1, 1), full_layer_name="weight")[
            "it"
        ]
    checkpoint = QuantizedCheckpoint(InMemory(tensors))
    kept = checkpoint.read("model.llm.layers.0.mlp.experts.w13_weight")
    assert isinstance(kept, Fp4)
    assert kept.format == "nvfp4"
    got = whole(decoder(resolved(checkpoint, config), checkpoint), oracle["ids"][0])
    memory = Memory(plain)
    assert worst(got, whole(decoder(resolved(memory, config), memory), oracle["ids"][0])) <= 1e-4


@pytest.mark.parametrize(
    ("part", "value", "error"),
    [
        ("_amax", torch.ones(3), ShapeMismatch),
        ("_outer_scale_denominator", torch.zeros(()), BadFile),
        ("_amax", torch.full((6,), torch.inf), BadFile),
        ("_scale", torch.ones(6, 8, 3).to(torch.float8_e4m3fn), ShapeMismatch),
    ],
)
def test_damaged_factors_of_experts_are_reported(part: str, value: Tensor, error: type[Exception]) -> None:
    name = "model.llm.layers.0.mlp.experts.w13_weight"
    parts = {**as_nvfp4(torch.zeros(6, 8, 64)), part: value}
    with pytest.raises(error, match=part):
        QuantizedCheckpoint(InMemory({name + end: t for end, t in parts.items()})).read(name)
