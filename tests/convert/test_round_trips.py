"""Every family: its checkpoint as GGUF is the same model, and that file as safetensors is the first again."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch

from plait.convert.gguf.target import gguf_target
from plait.convert.hf.target import hf_target
from plait.convert.plan.source import Model
from plait.convert.plan.tensor_plan import Made, matrices, pieces
from plait.errors import UnsupportedFormat
from tests.families import tiny
from tests.families.parity import Memory, decoder, resolved, whole, worst
from tests.families.plamo2_oracle import CONFIG, checkpoint

# variant -> the architecture it becomes
BOTH_WAYS = {
    "llama_llama3": "llama",
    "llama_biases": "llama",
    "mixtral": "llama",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "qwen2_moe": "qwen2moe",
    "qwen3_moe": "qwen3moe",
    "gemma2_plain": "gemma2",
    "gemma3_plain": "gemma3",
    "deepseek_v2": "deepseek2",
    "deepseek_v3": "deepseek2",
    "mamba2": "mamba2",
    "granite": "granitehybrid",
    "granite_rope": "granitehybrid",
    "nemotron_h": "nemotron_h_moe",
    "nemotron_h_groups": "nemotron_h",
    "falcon_h1": "falcon-h1",
    "falcon_h1_norm": "falcon-h1",
    "mamba": "mamba",
    "jamba": "jamba",
    "qwen3_5": "qwen35",
    "qwen3_next": "qwen3next",
    "lfm2_moe": "lfm2moe",
    "gpt_oss": "gpt-oss",
    "olmo2": "olmo2",
    "olmo3": "olmo2",
    "olmo3_plain": "olmo2",
    "phi3_longrope": "phi3",
    "llama_longrope": "llama",
    "llama_longrope_short": "llama",
    "glm4_moe": "glm4moe",
}
ONE_WAY = {
    "llama_dynamic": "llama",
    "llama_linear": "llama",
    "llama_yarn": "llama",
    "mistral": "llama",
    "gemma2": "gemma2",  # no GGUF has a key for its scale: it goes into k
    "gemma3": "gemma3",
    "bamba": "granitehybrid",
    "phi3": "phi3",
    "granite_moe_shared": "granitemoe",
    "kimi_linear": "kimi-linear",
    "minimax": "minimax-01",
    "minicpm3": "minicpm3",
    "ernie4_5_moe": "ernie4_5-moe",
    "stablelm_wide": "stablelm",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("convert")


def written(model: Model, made: Iterable[Made]) -> Memory:
    """What a file of these tensors holds, in float32."""
    found = Memory()
    for one in made:
        parts = [piece.flatten() for m, scale in matrices(model, one) for piece in pieces(m, scale)]
        found[one.name] = torch.cat(parts).reshape(one.shape)
    return found


def source(name: str, folder: Path) -> tuple[Model, Any]:
    if not (folder / name).exists():
        tiny.write(name, folder / name)
    config, tensors, oracle = tiny.read(folder / name)
    checkpoint = Memory(tensors)
    return Model(resolved(checkpoint, config), checkpoint), oracle


def as_gguf(model: Model, arch: str) -> tuple[Model, Memory]:
    target = gguf_target(model)
    assert target.arch == arch
    file = written(model, target.made)
    file |= target.extra
    return Model(resolved(file, gguf=target.keys), file), file


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", BOTH_WAYS | ONE_WAY)
def test_gguf_is_the_same_model(name: str, folder: Path) -> None:
    model, oracle = source(name, folder)
    again, file = as_gguf(model, (BOTH_WAYS | ONE_WAY)[name])
    ids = oracle["ids"][0]
    assert worst(whole(decoder(again.resolved, file), ids), oracle["logits"][0]) <= 1e-4


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", BOTH_WAYS)
def test_what_comes_back_has_the_names_and_numbers_of_the_first(name: str, folder: Path) -> None:
    first, oracle = source(name, folder)
    model, _ = as_gguf(first, BOTH_WAYS[name])
    target = hf_target(model, "float32")
    file = written(model, target.made)
    again = resolved(file, target.config)
    assert worst(whole(decoder(again, file), oracle["ids"][0]), oracle["logits"][0]) <= 1e-4
    if not name.startswith("falcon"):  # its multipliers stay in its numbers
        originals = first.checkpoint
        for key in originals.names():
            assert torch.allclose(file[key], originals.read(key), rtol=1e-5, atol=1e-6), key


@pytest.mark.parametrize("name", ["zaya", "rwkv", "doge"])
def test_what_no_gguf_holds_is_written_as_it_was_read(name: str, folder: Path) -> None:
    model, oracle = source(name, folder)
    target = hf_target(model, "float32")
    file = written(model, target.made)
    shapes = {key: model.checkpoint.shape(key) for key in model.checkpoint.names()}
    assert {key: tuple(tensor.shape) for key, tensor in file.items()} == shapes
    again = decoder(resolved(file, target.config), file)
    assert worst(whole(again, oracle["ids"][0]), oracle["logits"][0]) <= 1e-4


def test_dory_is_written_with_the_names_of_published_files(folder: Path) -> None:
    model, oracle = source("dory", folder)
    target = hf_target(model, "float32")
    file = written(model, target.made)
    assert {"backbone.layers.9.mixer.suv_up", "backbone.layers.8.attn_alpha"} <= set(file)
    again = decoder(resolved(file, target.config), file)
    assert worst(whole(again, oracle["ids"][0]), oracle["logits"][0]) <= 1e-5


def test_rotary_pairs_are_where_each_format_wants_them(folder: Path) -> None:
    """A wrong order of q's rows would be seen in logits; here, that it is the converters' order."""
    from tests.families.as_gguf import permuted

    model, _ = source("llama_linear", folder)
    target = gguf_target(model)
    file = written(model, target.made)
    q = model.checkpoint.read("model.layers.1.self_attn.q_proj.weight")
    assert torch.equal(file["blk.1.attn_q.weight"], permuted(q, 4))


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("ministral", r"\(llama: the format cannot say layers\.0\.0\.mixer\.window = None, there 6"),
        ("zamba2", "llama.cpp has no architecture for zamba2 models"),
    ],
)
def test_what_llama_cpp_cannot_say_is_named(name: str, why: str, folder: Path) -> None:
    model, _ = source(name, folder)
    with pytest.raises(UnsupportedFormat, match=why):
        gguf_target(model)


@pytest.mark.parametrize(
    ("name", "notes"),
    [
        ("lfm2_moe", {"llama.cpp has no factor of the weights of experts for lfm2moe: there it is 1"}),
        ("qwen3_next", {"llama.cpp makes weights of experts sum to one in qwen3next models"}),
        ("mixtral", set()),
    ],
)
def test_how_llama_cpp_weighs_experts_whatever_the_file_says_is_reported(
    name: str, notes: set[str], folder: Path
) -> None:
    found = gguf_target(source(name, folder)[0]).notes
    assert {note for note in found if "experts" in note} == notes


def test_keys_and_shapes_are_those_that_llama_cpp_wants(folder: Path) -> None:
    ernie = gguf_target(source("ernie4_5_moe", folder)[0])
    assert ernie.keys["ernie4_5-moe.interleave_moe_layer_step"] == 1
    minicpm = gguf_target(source("minicpm3", folder)[0])
    assert minicpm.keys["minicpm3.attention.key_length"] == 12  # not of latents
    assert minicpm.keys["minicpm3.attention.value_length"] == 6
    assert "blk.0.attn_kv_b.weight" in {one.name for one in minicpm.made}
    stablelm = gguf_target(source("stablelm_wide", folder)[0])
    shapes = {one.name: one.shape for one in stablelm.made}
    assert shapes["blk.0.attn_q_norm.weight"] == (4, 8)


def test_positions_that_stretch_with_length_are_carried_and_llama_cpps_within_the_context(
    folder: Path,
) -> None:
    model, _ = source("llama_dynamic", folder)
    target = gguf_target(model)
    assert target.keys["llama.rope.scaling.dynamic_factor"] == 2.0
    assert target.keys["llama.context_length"] == 16
    assert "llama.rope.scaling.type" not in target.keys
    assert target.notes == (
        "llama.cpp does not stretch positions by length (dynamic NTK): its model is this one up to 16 tokens",
    )
    again, _ = as_gguf(model, "llama")
    ropes = [
        dict(mixer.rope.scaling)
        for spec in (model.spec, again.spec)
        for _, mixer in spec.mixers()
        if hasattr(mixer, "rope")
    ]
    assert len({str(sorted(rope.items())) for rope in ropes}) == 1


def test_positions_that_are_stretched_within_the_context_are_plaits_alone(folder: Path) -> None:
    source("llama_dynamic", folder)
    config, tensors, _ = tiny.read(folder / "llama_dynamic")
    longer = Memory(tensors)
    config = {
        **config,
        "rope_parameters": {**config["rope_parameters"], "original_max_position_embeddings": 8},
    }
    with pytest.raises(UnsupportedFormat, match="dynamic NTK"):
        gguf_target(Model(resolved(longer, config), longer))


def test_what_transformers_has_no_word_for_is_read_by_plait(folder: Path) -> None:
    first, _ = source("llama_llama3", folder)
    target = gguf_target(first)
    file = written(first, target.made) | {"rope_freqs.weight": torch.tensor([1.0, 1.5, 1.2, 7.0])}
    model = Model(resolved(Memory(file), gguf=target.keys), Memory(file))
    made = hf_target(model, "float32")
    assert "transformers has no word" in made.notes[0]
    back = written(model, made.made)
    ids = torch.arange(2, 20)
    found = whole(decoder(resolved(back, made.config), back), ids)
    assert worst(found, whole(decoder(model.resolved, Memory(file)), ids)) <= 1e-4


def mamba2_of_an_odd_width() -> tuple[dict[str, Any], Memory]:
    """Six heads of eight, with a hidden size of 32."""
    config = {"model_type": "mamba2", "architectures": ["Mamba2ForCausalLM"], "vocab_size": 50, "expand": 1.5}
    config |= {
        "hidden_size": 32,
        "num_heads": 6,
        "head_dim": 8,
        "state_size": 8,
        "n_groups": 2,
        "num_hidden_layers": 1,
    }
    shapes = {
        "in_proj.weight": (48 * 2 + 32 + 6, 32),
        "conv1d.weight": (80, 1, 4),
        "conv1d.bias": (80,),
        **dict.fromkeys(("A_log", "D", "dt_bias"), (6,)),
        "norm.weight": (48,),
        "out_proj.weight": (32, 48),
    }
    named = {f"backbone.layers.0.mixer.{name}": shape for name, shape in shapes.items()}
    named |= {"backbone.embeddings.weight": (50, 32), "lm_head.weight": (50, 32)}
    named |= {"backbone.layers.0.norm.weight": (32,), "backbone.norm_f.weight": (32,)}
    draw = torch.Generator().manual_seed(2)
    return config, Memory({name: torch.randn(shape, generator=draw) / 4 for name, shape in named.items()})


def test_a_mamba2_of_an_odd_width_goes_there_and_back() -> None:
    config, tensors = mamba2_of_an_odd_width()
    first = Model(resolved(tensors, config), tensors)
    model, file = as_gguf(first, "mamba2")
    made = hf_target(model, "float32")
    assert made.config["expand"] == 1.5
    assert made.notes[0].endswith("no whole number of times as wide as the model")
    back, ids = written(model, made.made), torch.arange(2, 20)
    wanted = whole(decoder(first.resolved, tensors), ids)
    assert worst(whole(decoder(model.resolved, file), ids), wanted) <= 1e-4
    assert worst(whole(decoder(resolved(back, made.config), back), ids), wanted) <= 1e-4


@pytest.mark.parametrize(("window", "arch"), [(2048, "plamo2"), (5, None)])
def test_plamo2_has_its_usual_window_in_gguf(window: int, arch: str | None) -> None:
    config = {**CONFIG, "attention_window_size": window, "full_attention_idx": []}
    tensors = Memory(checkpoint(config))
    model = Model(resolved(tensors, config), tensors)
    if arch is None:
        with pytest.raises(UnsupportedFormat, match="window"):
            gguf_target(model)
        return
    again, file = as_gguf(model, arch)
    wanted = whole(decoder(model.resolved, tensors), torch.arange(2, 20))
    assert worst(whole(decoder(again.resolved, file), torch.arange(2, 20)), wanted) <= 1e-4
    back = hf_target(again, "float32")
    last = written(again, back.made)
    assert worst(whole(decoder(resolved(last, back.config), last), torch.arange(2, 20)), wanted) <= 1e-4
