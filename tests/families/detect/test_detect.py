"""Detecting a model from names and shapes of its tensors alone; tables; where tensors win over the config."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from plait.errors import ConfigError, UnsupportedModel
from plait.families.common.registry import families_by_name
from plait.families.detect.detect import infer_config, layer_kinds
from plait.families.detect.markers import list_markers
from plait.families.resolve import resolve
from tests.families import tiny, tiny_bare
from tests.families.parity import Memory, decoder, resolved, whole, worst
from tests.families.plamo2_oracle import CONFIG, checkpoint, logits

LAYER = "model.layers.0."


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", tiny_bare.VARIANTS)
def test_logits_are_the_same_without_a_config(name: str, tmp_path: Path) -> None:
    tiny.write(name, tmp_path, tiny_bare.VARIANTS[name])
    config, tensors, oracle = tiny.read(tmp_path)
    checkpoint = Memory(tensors)
    bare = resolved(checkpoint, None)
    assert bare.spec.family == resolved(checkpoint, config).spec.family
    assert worst(whole(decoder(bare, checkpoint), oracle["ids"][0]), oracle["logits"][0]) <= 1e-4


def test_plamo_is_known_without_a_config() -> None:
    config = {**CONFIG, "attention_window_size": 2048, "full_attention_idx": []}
    tensors, ids = checkpoint(config), torch.arange(20) * 4
    bare = resolved(Memory(tensors), None)
    assert bare.spec.family == "plamo2"
    found = whole(decoder(bare, Memory(tensors)), ids)
    assert worst(found.double(), logits(config, tensors, ids)) <= 1e-4


def llama_like(vocab: int, hidden: int, count: int, **more: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (vocab, hidden)}
    for i in range(count):
        layer = f"model.layers.{i}."
        shapes |= {
            f"{layer}input_layernorm.weight": (hidden,),
            f"{layer}post_attention_layernorm.weight": (hidden,),
            f"{layer}self_attn.q_proj.weight": (hidden, hidden),
            f"{layer}self_attn.k_proj.weight": (hidden // 4, hidden),
            f"{layer}mlp.gate_proj.weight": (4 * hidden, hidden),
            **{f"{layer}{name}": shape for name, shape in more.items()},
        }
    return shapes


def test_smollm3_has_llamas_tensors_and_its_own_sizes() -> None:
    found, why = infer_config(llama_like(128256, 2048, 36))
    assert (found["architectures"], found["head_dim"], found["num_attention_heads"]) == (
        *(["SmolLM3ForCausalLM"], 128),
        16,
    )
    assert why["rope_theta"].startswith("default")
    assert infer_config(llama_like(128256, 2048, 16))[0]["architectures"] == ["LlamaForCausalLM"]


def test_a_vocabulary_distinguishes_falcon_mamba_from_mamba() -> None:
    layer = "backbone.layers.0.mixer."
    shapes = {
        f"{layer}A_log": (64, 16),
        f"{layer}x_proj.weight": (36, 64),
        f"{layer}dt_proj.weight": (64, 4),
        f"{layer}conv1d.weight": (64, 1, 4),
    }
    for vocab, name in ((65024, "FalconMambaForCausalLM"), (50280, "MambaForCausalLM")):
        found, why = infer_config({**shapes, "backbone.embeddings.weight": (vocab, 32)})
        assert found["architectures"] == [name]
        assert (found["mamba_d_ssm"], found["mamba_d_state"], found["mamba_dt_rank"]) == (64, 16, 4)
        assert why["mamba_dt_rank"] == f"tensor {layer}dt_proj.weight [64, 4]"


def test_olmo3_is_distinguished_from_olmo2_by_its_vocabulary() -> None:
    shapes = llama_like(
        100278, 512, 4, **{"self_attn.q_norm.weight": (512,), "self_attn.k_norm.weight": (128,)}
    )
    shapes = {n: s for n, s in shapes.items() if "input_layernorm" not in n}
    shapes |= {f"model.layers.{i}.post_feedforward_layernorm.weight": (512,) for i in range(4)}
    assert infer_config(shapes)[0]["architectures"] == ["Olmo3ForCausalLM"]
    shapes["model.embed_tokens.weight"] = (100352, 512)
    found, why = infer_config(shapes)
    assert found["architectures"] == ["Olmo2ForCausalLM"]
    assert "Olmo3ForCausalLM has the same" in why["architectures"]


@pytest.mark.parametrize(
    ("known_parts", "wanted"),
    [
        (
            {"architectures": ["Olmo3ForCausalLM"]},
            {"rope_theta": 5e5, "rope_scaling.factor": 8.0, "max_position_embeddings": 65_536},
        ),
        (
            {"architectures": ["Phi3ForCausalLM"], "vocab_size": 100352},
            {"rope_theta": 250_000.0, "max_position_embeddings": 16_384},
        ),
        (
            {"architectures": ["Phi3ForCausalLM"], "vocab_size": 200064},
            {"rope_theta": 1e4, "partial_rotary_factor": 0.75},
        ),
        ({"architectures": ["Glm4ForCausalLM"]}, {"norm_eps": 1e-5, "max_position_embeddings": 32_768}),
        ({"architectures": ["GlmForCausalLM"]}, {"norm_eps": None, "max_position_embeddings": 131_072}),
    ],
)
def test_what_shapes_leave_open_is_as_published(known_parts: dict[str, Any], wanted: dict[str, Any]) -> None:
    found, why = infer_config(llama_like(known_parts.get("vocab_size", 1000), 2048, 2), known_parts)
    for key, value in wanted.items():
        outer, _, inner = key.partition(".")
        assert (found[outer][inner] if inner else found.get(outer)) == value
        assert value is None or why[outer].startswith("default (")


def test_every_value_says_where_it_came_from(tmp_path: Path) -> None:
    tiny.write("qwen3_next", tmp_path, tiny_bare.VARIANTS["qwen3_next"])
    _, tensors, _ = tiny.read(tmp_path)
    found = resolved(Memory(tensors), None)
    assert set(found.provenance) >= set(found.config)
    why = found.provenance
    assert why["architectures"].startswith("tensor model.layers.0.linear_attn.in_proj_qkvz.weight")
    assert why["linear_num_value_heads"] == "tensor model.layers.0.linear_attn.A_log [4]"
    assert why["rope_theta"].startswith("default (usual for Qwen3Next")
    assert why["layer_types"] == why["mlp_layer_types"] == "the tensors of each layer"
    over = resolved(Memory(tensors), None, ["rope_theta=12345", "num_experts_per_tok=1"])
    assert (over.provenance["rope_theta"], over.config["num_experts_per_tok"]) == ("--set", 1)


@pytest.mark.parametrize("name", ["qwen3_next", "kimi_linear", "lfm2", "recurrent_gemma", "jamba", "minimax"])
def test_tensors_win_over_a_pattern_that_says_otherwise(name: str, tmp_path: Path) -> None:
    tiny.write(name, tmp_path, tiny_bare.VARIANTS[name])
    config, tensors, oracle = tiny.read(tmp_path)
    checkpoint = Memory(tensors)
    right = resolved(checkpoint, config)
    # the other way round: what has states is said to attend, and what attends to have states
    states = "conv" if "conv" in right.config["layer_types"] else "linear_attention"
    words = ["full_attention" if w == states else states for w in right.config["layer_types"]]
    if name in ("minimax", "kimi_linear") and states not in words:
        words[-1] = states
    lies = {**config, "layer_types": words}
    found = resolved(checkpoint, lies)
    assert "config.json says layer 0 is" in found.provenance["layer_types"]
    logits_found = whole(decoder(found, checkpoint), oracle["ids"][0])
    if name != "recurrent_gemma":  # its attention has a window, which a word of the pattern says
        assert worst(logits_found, oracle["logits"][0]) <= 1e-4


def test_kinds_of_layers_are_named_with_their_tensor() -> None:
    names = ["0.linear_attn.A_log", "1.self_attn.q_proj.weight", "2.conv.in_proj.weight", "3.mixer.A_log"]
    names += ["4.self_attn.q_proj.weight", "4.self_attn.A_log", "5.mlp.gate_proj.weight"]
    found = layer_kinds({f"model.layers.{name}": (4, 4) for name in names})
    assert {i: kind for i, (kind, _) in found.items()} == {
        0: "linear_attention",
        1: "full_attention",
        2: "conv",
        3: "linear_attention",
        4: "linear_attention",
    }
    assert found[4][1] == "model.layers.4.self_attn.A_log"


def test_every_marker_names_a_family_that_is_there() -> None:
    families = families_by_name()
    found = list_markers()
    assert families["zamba2"].detection.markers, "a family may have its markers itself"
    assert {architecture for architecture, _ in found} <= set(families)
    assert all(marker in families[architecture].detection.markers for architecture, marker in found)
    assert {marker.note for _, marker in found if marker.note} <= set(families)


@pytest.mark.parametrize(
    ("tensor", "what"),
    [
        ("altup.prediction_coefs.weight", "Gemma 3n"),
        ("layer_scalar", "Gemma 4"),
        ("self_attn.indexer.wk.weight", "sparse latent attention"),
        ("self_attn.k_rope_only_layernorm.weight", "dots3 note, of which only a config.json says"),
        ("hc_pre.hc_attn_layer.hc_fn", "Hunyuan 4"),
        ("self_attn.indexer.q_proj.weight", "MiniMax-M3"),
        ("hc_attn_fn", "DeepSeek-V4"),
    ],
)
def test_models_that_look_alike_and_are_not_are_refused_by_name(tensor: str, what: str) -> None:
    with pytest.raises(UnsupportedModel, match=rf"{tensor} is one of {what}"):
        infer_config({**llama_like(100, 64, 2), f"{LAYER}{tensor}": (4, 4)})


@pytest.mark.parametrize(
    "damage",
    [
        {f"{LAYER}self_attn.k_proj.weight": (7, 64)},
        {f"{LAYER}self_attn.q_proj.weight": (0, 64)},
        {f"{LAYER}self_attn.q_norm.weight": (0,)},
        {"model.embed_tokens.weight": (0, 64)},
    ],
)
def test_shapes_that_cannot_be_are_refused(damage: dict[str, Any]) -> None:
    with pytest.raises(UnsupportedModel):
        infer_config({**llama_like(100, 64, 2), **damage})


def test_every_key_that_detection_concludes_and_a_model_reads_can_be_set(tmp_path: Path) -> None:
    """A value that a user cannot correct would stay an assumption for ever."""
    refused = set[tuple[str, str]]()
    for name in ("zamba2", "recurrent_gemma", "minimax", "lfm2_moe", "kimi_linear"):
        tiny.write(name, tmp_path / name, tiny_bare.VARIANTS[name])
        _, tensors, _ = tiny.read(tmp_path / name)
        shapes = {n: tuple(t.shape) for n, t in tensors.items()}
        values, _ = infer_config(shapes)
        for key in sorted(set(values) - {"architectures"}):
            said = [f"{key}={json.dumps(values[key])}"]
            try:
                found = resolve(None, shapes, read=tensors.__getitem__, overrides=said)
            except ConfigError as error:
                refused.add((name, str(error).partition("=…: this model")[0]))
            else:
                assert found.provenance[key] == "--set", (name, key)
    assert refused == {
        ("minimax", "--set intermediate_size"),  # all its layers have experts
        ("minimax", "--set mlp_layer_types"),
        ("lfm2_moe", "--set block_auto_adjust_ff_dim"),  # which is of the sizes of a dense LFM2
    }
