"""Dory: both layouts of its files and its configs, what absent keys mean, and what is refused."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from plait.checkpoint.names import NameMap
from plait.checkpoint.weights import Target, Weights
from plait.errors import UnsupportedModel
from plait.families.common.registry import build_spec
from plait.model.layers.layers import Norm
from plait.spec.model import NormSpec
from tests.families import tiny
from tests.families.parity import CPU, Memory, decoder, in_pieces, resolved, whole, worst

KNOWN = tiny.VARIANTS["dory"]
COUNTS = ("num_hidden_layers", "n_input_layers", "n_recurrent_layers", "n_output_layers")
CONFIG: dict[str, Any] = {
    "architectures": ["DoryForCausalLM"], "model_type": "dory", **tiny.SIZES, **KNOWN.changes,
}  # fmt: skip


def as_published(name: str) -> str:
    """A tensor's name in files in which attention and an MLP are a layer each."""
    found = re.fullmatch(r"backbone\.layers\.(\d+)\.(self_attn|mlp|lambda_1|lambda_2)(.*)", name)
    if found is None:
        return name
    layer, part, rest = 2 * int(found[1]), found[2], found[3]
    layer += part in ("mlp", "lambda_2")
    word = {"lambda_1": "attn_alpha", "lambda_2": "mlp_alpha"}.get(part, "mixer")
    return f"backbone.layers.{layer}.{word}{rest}"


def plain_config(config: dict[str, Any]) -> dict[str, Any]:
    """The same config, in which an attention and an MLP are one layer."""
    kinds = [kind for kind in config["layer_types"] if kind != "mlp"]
    return {**config, "layer_types": kinds, **{key: config[key] // 2 for key in COUNTS}}


def test_published_names_of_tensors_are_read(tmp_path: Path) -> None:
    tiny.write("dory", tmp_path)
    config, tensors, oracle = tiny.read(tmp_path)
    renamed = {as_published(name): tensor for name, tensor in tensors.items()}
    assert {"backbone.layers.9.mixer.suv_up", "backbone.layers.8.mixer.g_proj.weight"} < set(renamed)
    memory = Memory(renamed)
    for known in (config, plain_config(config)):
        model = decoder(resolved(memory, known), memory)
        for logits, want in zip(in_pieces(model, oracle["ids"]), oracle["logits"], strict=True):
            assert worst(logits, want) <= 1e-5


def test_both_layouts_of_configs_are_one_model(tmp_path: Path) -> None:
    tiny.write("dory", tmp_path)
    config, tensors, _ = tiny.read(tmp_path)
    assert config["num_hidden_layers"] == 10
    assert config["layer_types"][1] == "mlp"
    memory = Memory({f"model.{name.removeprefix('backbone.')}": tensor for name, tensor in tensors.items()})
    assert resolved(memory, plain_config(config)).spec == resolved(memory, config).spec


def test_absent_keys_have_the_default_of_transformers(tmp_path: Path) -> None:
    absent = ("layer_types", "rope_parameters", "n_recurrent_layers", "n_recurrent_loops", "ngpt_alpha_init")
    changes = {key: value for key, value in KNOWN.changes.items() if key not in absent}
    tiny.write("dory_absent", tmp_path, replace(KNOWN, changes=changes))
    config, tensors, oracle = tiny.read(tmp_path)
    known = {key: value for key, value in plain_config(config).items() if key not in absent}
    memory = Memory(tensors)
    found = resolved(memory, known)
    assert len(found.spec.layers) == 8
    logits = whole(decoder(found, memory), oracle["ids"][0])
    assert worst(logits, oracle["logits"][0]) <= 1e-5


def test_scales_are_stored_by_the_range_that_weights_began_with(tmp_path: Path) -> None:
    """Numbers of published files are 20 times as small as the test's, and mean the same."""
    tiny.write("dory", tmp_path)
    config, tensors, oracle = tiny.read(tmp_path)
    scales = ("sqk", "s_gate", "lambda_1", "lambda_2", "logit_scale")
    small = {k: t * (0.0177 / 0.35) if k.endswith(scales) else t for k, t in tensors.items()}
    memory = Memory(small)
    model = decoder(resolved(memory, {**config, "initializer_range": 0.0177}), memory)
    assert worst(whole(model, oracle["ids"][0]), oracle["logits"][0]) <= 1e-5
    assert all(tensors[k].std() > 0.1 for k in tensors if k.endswith(scales))


def test_no_loop_changes_what_a_cut_prompt_gives() -> None:
    once = {**CONFIG, "n_recurrent_loops": 1}
    assert len(build_spec({**once, "recurrent_kv_cache_mode": "last_loop"})[0].layers) == 5
    with pytest.raises(UnsupportedModel, match="logits would depend on where a prompt is cut"):
        build_spec({**CONFIG, "recurrent_kv_cache_mode": "last_loop"})


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({"recurrent_kv_cache_mode": "first_loop"}, "'first_loop' is not known; known: per_loop"),
        ({"layer_types": ["full_attention", "mlp", "mlp", "full_attention", "mlp"]}, "in turns"),
        ({"layer_types": ["linear_attention"] * 5}, "Dory has 'linear_attention'; known"),
        (
            {"n_recurrent_layers": 2},
            "1 input, 2 recurrent and 1 output layers, and 5 layers; they must agree",
        ),
        ({"n_output_layers": None}, "n_input_layers and n_output_layers are null"),
        ({"n_input_layers": 4, "n_recurrent_layers": 0}, "one recurrent layer, one loop, or more"),
        ({"n_recurrent_loops": 0}, "in 0 loops: known are one recurrent layer, one loop, or more"),
        ({"n_recurrent_loops": 10_000}, "known are at most 4096 layers in all"),
        ({"initializer_range": 0.0}, "initializer_range and ngpt_alpha_init"),
    ],
)
def test_what_is_refused(changed: dict[str, Any], why: str) -> None:
    with pytest.raises(UnsupportedModel, match=why):
        build_spec({**CONFIG, **changed})


@pytest.mark.parametrize("groups", [1, 3])
def test_a_norm_to_length_one_divides_by_the_root_of_squares_and_eps(groups: int) -> None:
    weights = Weights(Memory(), NameMap(), Target(CPU, torch.float32, 8, 24))
    norm = Norm(NormSpec(1e-2, "length", weight=False), weights, 24, groups)
    x = torch.randn(5, 24) / 20
    parts = x.double().unflatten(-1, (groups, -1))
    wanted = (parts / (parts.square().sum(-1, keepdim=True) + 1e-2).sqrt()).flatten(-2)
    assert worst(norm(x), wanted.float()) <= 1e-6
    total, normed = norm.add(x, x)
    assert torch.equal(total, 2 * x)
    assert groups > 1 or torch.equal(normed, norm(2 * x))
