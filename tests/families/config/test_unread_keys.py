"""Keys that --set names: those that a model reads are taken, all others are refused, and change nothing."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig

from plait.errors import ConfigError, UnsupportedModel
from plait.families.config.normalize import Config, flatten, normalize
from plait.families.config.reads import ReadConfig
from plait.families.config.wrappers import NESTS
from plait.spec.model import AttentionSpec
from tests.families import every, tiny
from tests.families.parity import Memory, resolved

# In the config.json of a model of transformers, and read by no family.
NEVER = {"transformers_version", "use_cache", "attention_dropout", "vision_config"}
ALWAYS = {"architectures", "model_type", "hidden_size", "rms_norm_eps"}


def split_keys(memory: Memory, config: Mapping[str, Any]) -> tuple[list[str], set[str]]:
    """Overrides with the config's own values that are taken together, and the keys of those refused."""
    said = {key: f"{key}={json.dumps(value)}" for key, value in flatten(config).items()}
    refused = set[str]()
    while key := find_refused(memory, config, taken := [said[key] for key in said if key not in refused]):
        refused.add(key)
    return taken, refused


def find_refused(memory: Memory, config: Mapping[str, Any], said: list[str]) -> str:
    """The key that an error names; "" if all are taken."""
    try:
        resolved(memory, config, said)
    except ConfigError as error:
        return re.sub(
            r"^--set (\w+)=…: this model, of the family [\w.-]+, does not read it.*", r"\1", str(error)
        )
    return ""


def leave_out(config: Mapping[str, Any], keys: set[str]) -> dict[str, Any]:
    """The config without these keys, at the top and where a text model's keys are."""
    kept = {key: value for key, value in config.items() if key not in keys}
    inner = {nest: leave_out(kept[nest], keys) for nest in NESTS if isinstance(kept.get(nest), dict)}
    return kept | inner


@pytest.mark.sampled(12)
@pytest.mark.parametrize("name", every.NAMES)
def test_what_is_taken_keeps_its_meaning_and_what_is_refused_has_none(name: str, tmp_path: Path) -> None:
    config, memory = every.read_model(name, tmp_path)
    plain = resolved(memory, config).spec
    taken, refused = split_keys(memory, config)
    assert resolved(memory, config, taken).spec == plain
    assert resolved(memory, leave_out(config, refused)).spec == plain
    assert NEVER & flatten(config).keys() <= refused
    assert refused <= flatten(config).keys() - ALWAYS


def llama(folder: Path) -> tuple[dict[str, Any], Memory]:
    tiny.write("llama", folder)
    config, tensors, _ = tiny.read(folder)
    return config, Memory(tensors)


@pytest.mark.parametrize(
    ("override", "hint"),
    [
        ("use_cache=false", "$"),
        ("max_position_embedings=64", "; near keys that are read: max_position_embeddings"),
        ("text_config.rms_norm_esp=1e-5", "; near keys that are read: rms_norm_eps"),
        ("rope_theta=5e5", r"; rope_parameters has it: --set 'rope_parameters=\{…\}'$"),
        ('text_config={"rms_norm_eps": 1e-5}', "; a key inside it is set by its own name$"),
        ("num_local_experts=8", "$"),
        ("rotary_pct=0.5", "$"),
        ("max_window_layers=1", "$"),
    ],
)
def test_a_refusal_names_the_family_and_what_to_set_instead(override: str, hint: str, tmp_path: Path) -> None:
    config, memory = llama(tmp_path)
    key = re.escape(override.partition("=")[0])
    with pytest.raises(
        ConfigError, match=f"^--set {key}=…: this model, of the family llama, does not read it{hint}"
    ):
        resolved(memory, config, [override])


def test_a_key_of_a_condition_is_read_where_the_condition_holds(tmp_path: Path) -> None:
    config, memory = llama(tmp_path)
    old = {key: value for key, value in config.items() if key != "rope_parameters"}
    said = ["original_max_position_embeddings=32"]
    with pytest.raises(ConfigError, match="original_max_position_embeddings=…: this model, of the family"):
        resolved(memory, old, said)
    yarn = [*said, 'rope_scaling={"rope_type": "yarn", "factor": 4.0}']
    mixers = resolved(memory, old, yarn).spec.mixers_of(AttentionSpec)
    assert {mixer.rope and mixer.rope.scaling["original_max_position_embeddings"] for mixer in mixers} == {32}
    assert resolved(memory, old, ["rope_theta=5e5"]).spec != resolved(memory, old).spec


def test_keys_of_names_of_one_thing_are_read_under_each_name(tmp_path: Path) -> None:
    config, memory = llama(tmp_path)
    for key in ("norm_eps", "rms_norm_eps", "layer_norm_eps"):
        assert resolved(memory, config, [f"{key}=0.125"]).spec.norm.eps == 0.125


def test_a_model_without_overrides_records_nothing(tmp_path: Path) -> None:
    config, memory = llama(tmp_path)
    assert type(resolved(memory, config).config) is Config
    assert type(resolved(memory, config, ["rms_norm_eps=0.125"]).config) is Config  # nor once it is checked


def test_a_derived_key_stands_for_those_that_it_was_made_of() -> None:
    reads = set[str]()
    c = normalize(
        {"hidden_size": 64, "n_head": 4, "num_hidden_layers": 2, "vocab_size": 9, "rope_theta": 5e5},
        kind=lambda values: ReadConfig(values, reads),
    )
    for key, made_of in {
        "head_dim": {"head_dim", "hidden_size", "num_attention_heads", "n_head"},
        "rope_parameters": {"rope_parameters", "rope_scaling", "rope_theta"},
        "layer_types": {"layer_types", "num_hidden_layers"},
    }.items():
        reads.clear()
        assert c[key]
        assert reads >= made_of, key
        assert "vocab_size" not in reads
    reads.clear()
    c["head_dim"] = 8
    changed = c | {"vocab_size": 5}
    assert (changed["head_dim"], changed["vocab_size"], reads) == (8, 5, set())
    assert changed.get("intermediate_size") is None
    assert reads == {"intermediate_size"}
    assert {**c}.keys() <= {*reads, "head_dim"} | c.made.keys()


def test_an_original_length_next_to_rope_parameters_wins_as_in_transformers(tmp_path: Path) -> None:
    tiny.write("phi3_longrope", tmp_path)
    config, tensors, _ = tiny.read(tmp_path)
    key = "original_max_position_embeddings"
    assert config["rope_parameters"][key] == config[key] == 16
    (tmp_path / "config.json").write_text(json.dumps({**config, key: 8}))
    theirs = AutoConfig.from_pretrained(tmp_path).rope_parameters[key]
    found = resolved(Memory(tensors), config, [f"{key}=8"])
    ours = {mixer.rope and mixer.rope.scaling[key] for mixer in found.spec.mixers_of(AttentionSpec)}
    assert ours == {theirs} == {8}


def test_heads_of_single_layers_win_in_step_as_in_transformers(tmp_path: Path) -> None:
    tiny.write("step3p5", tmp_path)
    config, tensors, _ = tiny.read(tmp_path)
    memory, plain = Memory(tensors), resolved(Memory(tensors), config).spec
    with pytest.raises(ConfigError, match=r"--set num_sliding_attention_heads=…: .* does not read it"):
        resolved(memory, config, ["num_sliding_attention_heads=4"])
    assert resolved(memory, leave_out(config, {"num_sliding_attention_heads"})).spec == plain
    assert resolved(memory, config, ['per_layer_config={"1": {"num_attention_heads": 2}}']).spec != plain


def test_a_list_of_another_length_than_the_layers_of_gpt_neo_is_refused(tmp_path: Path) -> None:
    config, memory = every.read_model("gpt_neo", tmp_path)
    with pytest.raises(UnsupportedModel, match="attention_types lists 3 layers, and the config has 2"):
        resolved(memory, config, ["num_layers=2"])
    lacking = leave_out(config, {"num_layers"})
    assert resolved(memory, lacking, ["num_layers=3"]).spec == resolved(memory, config).spec
