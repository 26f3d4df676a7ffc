"""A config without a key has the default of transformers' class; what is not implemented is refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from plait.errors import UnsupportedModel
from tests.families import tiny
from tests.families.parity import Memory, decoder, resolved, whole, worst

TOLERANCE = 1e-4
ROPE = "rope_parameters"
ABSENT = [
    *((name, ROPE) for name in ("gpt_oss", "gemma4", "laguna", "cwm", "apertus", "ministral3", "mistral4")),
    ("flex_olmo", ROPE),
    *((name, "layer_types") for name in ("mellum", "flint", "laguna", "cohere_compass", "lfm3", "cwm")),
    *((name, "layer_types") for name in ("mimo_v2_flash", "beam")),
    ("cwm", "rms_norm_eps"),
    ("phi3_longrope", "original_max_position_embeddings"),
    ("bigbird_decoder", "hidden_act"),
    ("bigbirdpegasus_decoder", "activation_function"),
    ("bigbirdpegasus_decoder", "scale_embedding"),
    ("plbart_decoder", "scale_embedding"),
    ("xlmrobertaxl_decoder", "layer_norm_eps"),
]
# Experts of a token, and how many there must be for the default.
EXPERTS = {
    "flint": ("num_experts", 12),
    "kolibri": ("num_experts", 12),
    "laguna": ("num_experts", 12),
    "axk1": ("n_routed_experts", 16),
    "deepseek_v3": ("n_routed_experts", 16),
    "deepseek_v32": ("n_routed_experts", 16),
    "glm4_moe": ("n_routed_experts", 16),
    "glm4_moe_lite": ("n_routed_experts", 16),
    "solar_open": ("n_routed_experts", 16),
    "kimi_linear": ("num_experts", 16),
}


def changed(name: str, folder: Path, drop: str = "", **values: Any) -> tuple[dict[str, Any], Memory, Any]:
    """A checkpoint of this variant with other values, and its config without one key."""
    known = tiny.VARIANTS[name]
    changes = {key: value for key, value in known.changes.items() if key != drop} | values
    tiny.write(name, folder, replace(known, changes=changes))
    config, tensors, oracle = tiny.read(folder)
    config.pop(drop, None)
    return config, Memory(tensors), oracle


def check(config: dict[str, Any], checkpoint: Memory, oracle: Any) -> None:
    found = whole(decoder(resolved(checkpoint, config), checkpoint), oracle["ids"][0])
    assert worst(found, oracle["logits"][0]) <= TOLERANCE


@pytest.mark.parametrize(("name", "key"), ABSENT)
def test_absent_keys_have_the_default_of_transformers(name: str, key: str, tmp_path: Path) -> None:
    check(*changed(name, tmp_path, key))


@pytest.mark.parametrize("name", EXPERTS)
def test_absent_counts_of_experts_have_the_default_of_transformers(name: str, tmp_path: Path) -> None:
    key, count = EXPERTS[name]
    names = ("num_experts_per_tok", "num_experts_per_token")
    check(
        *changed(name, tmp_path, next(x for x in names if x in tiny.VARIANTS[name].changes), **{key: count})
    )


@pytest.mark.parametrize("word", ["gelu", "relu", "silu"])
def test_gemma_has_the_activation_of_its_config(word: str, tmp_path: Path) -> None:
    check(*changed("gemma", tmp_path, hidden_act=word))


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("modernbert_decoder", {"layer_types": ["full_attention"] * 3}),
        ("modernbert_decoder", {"layer_types": ["sliding_attention"] * 3}),
        ("modernbert_decoder", {"sliding_window": 3}),
        ("bert_decoder", {"tie_word_embeddings": False}),
        ("modernbert_decoder", {"tie_word_embeddings": False}),
        ("roberta_decoder", {"tie_word_embeddings": False}),
        ("roformer_decoder", {"tie_word_embeddings": False}),
        ("bigbird_decoder", {"tie_word_embeddings": False}),
        ("electra_decoder", {"tie_word_embeddings": False}),
    ],
)
def test_windows_and_heads_of_their_own_are_those_of_transformers(
    name: str, values: dict[str, Any], tmp_path: Path
) -> None:
    check(*changed(name, tmp_path, **values))


@pytest.mark.parametrize(
    "values",
    [
        {"attention_chunk_size": None},
        {"attention_chunk_size": 1},
        {"attention_chunk_size": 5, "layer_types": ["full_attention", "chunked_attention"] * 2},
    ],
    ids=str,
)
def test_chunks_of_llama4_are_those_of_transformers(values: dict[str, Any], tmp_path: Path) -> None:
    check(*changed("llama4", tmp_path, **values))


@pytest.mark.parametrize("name", ["llama4", "nanochat"])
def test_norms_behind_a_rotation_undo_what_yarn_multiplies_by(name: str, tmp_path: Path) -> None:
    check(*changed(name, tmp_path, rope_parameters=dict(tiny.YARN)))


@pytest.mark.parametrize(
    ("name", "values", "words"),
    [
        ("bamba", {"hidden_act": "gelu"}, "hidden_act 'gelu' is not implemented for Bamba"),
        ("falcon_h1", {"hidden_act": "relu"}, "hidden_act 'relu' is not implemented for Falcon-H1"),
        ("granite", {"hidden_act": "gelu"}, "hidden_act 'gelu' is not implemented for Granite 4"),
        ("llama4", {"layer_types": ["sliding_attention"] * 4}, "has sliding_attention; Llama 4 has full"),
        ("aria", {"hidden_act": "gelu"}, "hidden_act 'gelu' is not implemented for Aria"),
        ("ernie4_5_moe", {"moe_norm_min": 0.1}, "moe_norm_min = 0.1 is not implemented for ERNIE 4.5"),
        ("mimo_v2_flash", {"v_head_dim": 16}, "v_head_dim = 16 is wider than head_dim"),
        ("granite_swa", {"num_attention_heads": 32}, "head_dim is 1, and positions turn pairs"),
        ("nemotron_h", {"sliding_window": 2}, "sliding_window = 2, which is not implemented"),
    ],
)
def test_what_is_not_implemented_is_refused_by_name(
    name: str, values: dict[str, Any], words: str, tmp_path: Path
) -> None:
    config, checkpoint, _ = changed(name, tmp_path)
    with pytest.raises(UnsupportedModel, match=words):
        resolved(checkpoint, {**config, **values})


def test_a_share_that_gemma_4_would_not_look_at_is_refused(tmp_path: Path) -> None:
    config, checkpoint, _ = changed("gemma4", tmp_path)
    turned = {"rope_type": "default", "rope_theta": 1e6, "partial_rotary_factor": 0.25}
    config[ROPE] = {**config[ROPE], "full_attention": turned}
    with pytest.raises(UnsupportedModel, match="needs rope_type 'proportional' in Gemma 4"):
        resolved(checkpoint, config)


def test_step_knows_no_other_activation(tmp_path: Path) -> None:
    config, checkpoint, _ = changed("step3p5", tmp_path)
    config["text_config"]["hidden_act"] = "gelu"
    with pytest.raises(UnsupportedModel, match="hidden_act 'gelu' is not implemented for Step"):
        resolved(checkpoint, config)
