"""A checkpoint that does not fit its model: one error, which names what is wrong."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from plait.config import EngineConfig
from plait.errors import (
    ConfigError,
    MissingTensor,
    ShapeMismatch,
    UnsupportedFormat,
    UnsupportedModel,
    UnusedTensor,
)
from plait.families.config.normalize import IncompleteConfig
from plait.families.detect.detect import infer_config
from plait.families.resolve import resolve
from plait.loading.open_model import open_model
from tests.families import tiny
from tests.families.parity import Memory, decoder, resolved

Files = tuple[dict[str, Any], dict[str, Tensor]]
Q = "model.layers.1.self_attn.q_proj.weight"


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wrong") / "llama"
    tiny.write("llama", folder)
    return folder


@pytest.fixture
def files(llama: Path) -> Files:
    config, tensors, _ = tiny.read(llama)
    return config, tensors


def build(config: dict[str, Any] | None, tensors: dict[str, Tensor]) -> None:
    decoder(resolved(Memory(tensors), config), Memory(tensors))


def test_a_missing_tensor_is_named_in_both_namings(files: Files) -> None:
    config, tensors = files
    tensors.pop(Q)
    with pytest.raises(MissingTensor, match=rf"layers\.1\.attn\.q\.weight wants '{Q}'"):
        build(config, tensors)
    with pytest.raises(MissingTensor, match=Q):
        build(None, tensors)


def test_an_odd_shape_is_named_with_both_shapes(files: Files) -> None:
    config, tensors = files
    tensors[Q] = torch.zeros(33, 32)
    with pytest.raises(ShapeMismatch, match=r"layers\.1\.attn\.q\.weight.*\[33, 32\].*\[32, 32\]"):
        build(config, tensors)


def test_a_tensor_left_over_is_named(files: Files) -> None:
    config, tensors = files
    tensors["model.layers.1.self_attn.sinks"] = torch.zeros(2)
    with pytest.raises(UnusedTensor, match=r"model\.layers\.1\.self_attn\.sinks"):
        build(config, tensors)


def test_a_config_of_more_layers_than_the_file_has(files: Files) -> None:
    config, tensors = files
    with pytest.raises(MissingTensor, match=r"model\.layers\.3\."):
        build({**config, "num_hidden_layers": 4}, tensors)


def test_packed_tensors_without_weights_are_refused_by_name(files: Files) -> None:
    _, tensors = files
    tensors[f"{Q}_scale_inv"] = torch.ones(1, 1)
    with pytest.raises(UnsupportedFormat, match=f"tensor {Q}_scale_inv"):
        build(None, tensors)


def test_an_unknown_architecture_is_refused_though_its_tensors_look_familiar(files: Files) -> None:
    config, tensors = files
    with pytest.raises(UnsupportedModel, match="'BlammoForCausalLM' is not known"):
        build({**config, "architectures": ["BlammoForCausalLM"], "model_type": "blammo"}, tensors)


def test_tensors_of_no_known_model_are_refused() -> None:
    with pytest.raises(UnsupportedModel, match=r"transformer\.h\.0\.attn\.c_attn\.weight"):
        infer_config({"transformer.h.0.attn.c_attn.weight": (3, 3), "transformer.wte.weight": (9, 3)})
    with pytest.raises(UnsupportedModel, match=r"qkv_proj.*--set 'architectures="):
        infer_config({"model.layers.0.self_attn.qkv_proj.weight": (9, 3)})
    with pytest.raises(UnsupportedModel, match=r"layer_scalar is one of Gemma 4, .* a config.json"):
        infer_config({"model.layers.0.layer_scalar": (1,), "model.layers.0.self_attn.q_proj.weight": (9, 3)})


def test_latent_attention_with_shapes_that_do_not_fit_together() -> None:
    layer = "model.layers.0.self_attn."
    shapes = {
        "model.embed_tokens.weight": (97, 32),
        f"{layer}q_proj.weight": (50, 32),
        f"{layer}kv_a_proj_with_mqa.weight": (20, 32),
        f"{layer}kv_a_layernorm.weight": (16,),
        f"{layer}kv_b_proj.weight": (64, 16),
        f"{layer}o_proj.weight": (32, 32),
    }
    with pytest.raises(UnsupportedModel, match="do not fit together as latent attention"):
        infer_config(shapes)


@pytest.mark.parametrize(
    ("heads", "nope", "rope", "v", "rank"),
    [(128, 128, 64, 128, 512), (16, 128, 64, 128, 512), (20, 192, 64, 256, 512)],
)
def test_latent_attention_is_solved_from_five_shapes(
    heads: int, nope: int, rope: int, v: int, rank: int
) -> None:
    layer = "model.layers.0.self_attn."
    shapes = {
        "model.embed_tokens.weight": (97, 2048),
        f"{layer}q_proj.weight": (heads * (nope + rope), 2048),
        f"{layer}kv_a_proj_with_mqa.weight": (rank + rope, 2048),
        f"{layer}kv_a_layernorm.weight": (rank,),
        f"{layer}kv_b_proj.weight": (heads * (nope + v), rank),
        f"{layer}o_proj.weight": (2048, heads * v),
    }
    found, _ = infer_config(shapes)
    keys = ("num_attention_heads", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "kv_lora_rank")
    assert tuple(found[key] for key in keys) == (heads, nope, rope, v, rank)


@pytest.mark.parametrize(
    ("vocab", "hidden", "q_rows", "kv_rows", "head_dim", "theta"),
    [
        (32000, 4096, 4096, 4096, 128, 1e4),  # Llama 2 7B
        (128256, 4096, 4096, 1024, 128, 5e5),  # Llama 3.1 8B
        (128256, 2048, 2048, 512, 64, 5e5),  # Llama 3.2 1B
        (49152, 576, 576, 192, 64, 1e5),  # SmolLM2 135M
        (131072, 5120, 4096, 1024, 128, 1e6),  # Mistral Nemo
    ],
)
def test_head_sizes_of_published_models_are_assumed(
    vocab: int, hidden: int, q_rows: int, kv_rows: int, head_dim: int, theta: float
) -> None:
    layer = "model.layers.0."
    shapes = {
        "model.embed_tokens.weight": (vocab, hidden),
        f"{layer}input_layernorm.weight": (hidden,),
        f"{layer}post_attention_layernorm.weight": (hidden,),
        f"{layer}self_attn.q_proj.weight": (q_rows, hidden),
        f"{layer}self_attn.k_proj.weight": (kv_rows, hidden),
        f"{layer}mlp.gate_proj.weight": (4 * hidden, hidden),
    }
    found, why = infer_config(shapes)
    assert (found["head_dim"], found["rope_theta"]) == (head_dim, theta)
    assert found["num_attention_heads"] == q_rows // head_dim
    assert why["head_dim"].startswith("default")
    assert why["hidden_size"].startswith("tensor model.embed")


def test_a_bias_that_an_rms_norm_would_not_add_is_refused(files: Files) -> None:
    config, tensors = files
    name = "model.layers.0.input_layernorm.bias"
    tensors[name] = torch.ones(config["hidden_size"])
    with pytest.raises(UnusedTensor, match=name):
        build(config, tensors)


@pytest.mark.parametrize("option", [{"ssm_mode": "exact"}, {"a_source": "trainer"}])
def test_an_option_of_another_format_is_refused_by_name(files: Files, option: dict[str, Any]) -> None:
    config, tensors = files
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    with pytest.raises(ConfigError, match=f"{next(iter(option))} .* is for oxidizr checkpoints alone"):
        resolve(config, shapes, read=tensors.__getitem__, **option)


@pytest.mark.parametrize("key", ["num_attention_heads", "hidden_size", "num_hidden_layers"])
def test_a_field_that_neither_config_nor_tensors_give_is_named(key: str) -> None:
    config: dict[str, Any] = {"architectures": ["Qwen3ForCausalLM"], "vocab_size": 97, "hidden_size": 32}
    config |= {"num_attention_heads": 4, "num_hidden_layers": 2, "intermediate_size": 48}
    del config[key]
    with pytest.raises(IncompleteConfig, match=rf"^config\.json does not say '{key}', .*--set {key}=VALUE$"):
        resolved(Memory(), config)


def test_a_message_on_an_absent_field_names_the_file(files: Files, tmp_path: Path) -> None:
    config, tensors = files
    config |= {"architectures": ["KimiK3ForCausalLM"], "model_type": "kimi_k3"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    tiny.rewrite(tensors, tmp_path / "model.safetensors")
    with pytest.raises(
        IncompleteConfig, match=rf"^{tmp_path}/config\.json: config\.json does not say 'attn_res"
    ):
        open_model(str(tmp_path), EngineConfig())


@pytest.mark.parametrize(
    ("kind", "key"), [("yarn", "factor"), ("llama3", "low_freq_factor"), ("longrope", "short_factor")]
)
def test_what_a_scaling_cannot_do_without_is_named(files: Files, kind: str, key: str) -> None:
    config, tensors = files
    config["rope_parameters"] = {"rope_theta": 1e4, "rope_type": kind}
    config["rope_parameters"] |= {} if key == "factor" else {"factor": 2.0}
    with pytest.raises(IncompleteConfig, match=f"rope_type '{kind}' need '{key}', which the config"):
        resolved(Memory(tensors), config)


@pytest.mark.parametrize(("name", "fused"), [("persimmon", "query_key_value"), ("phi3", "qkv_proj")])
def test_a_tensor_of_q_k_and_v_has_no_rows_that_the_config_does_not_list(
    name: str, fused: str, tmp_path: Path
) -> None:
    """Heads of keys that a model has not would take rows of others, in silence."""
    tiny.write(name, tmp_path)
    config, tensors, _ = tiny.read(tmp_path)
    checkpoint = Memory(tensors)
    found = resolved(checkpoint, {**config, "num_key_value_heads": 1 if name == "phi3" else 2})
    with pytest.raises(ShapeMismatch, match=rf"{fused}.* rows, of which the config lists"):
        decoder(found, checkpoint)
