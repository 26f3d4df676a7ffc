"""Other layouts of checkpoints of the newest families: first configs, projections apart, a wrapper."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from plait.errors import ConfigError, UnsupportedModel
from plait.families.common.registry import build_spec, find
from plait.spec.attention import NormedHeadsSpec
from plait.spec.sparse import GrownMlaSpec
from tests.families import tiny
from tests.families.parity import Memory, decoder, resolved, whole
from tests.families.tiny_latest import LARGE4, SPARK, TEXT

IDS = torch.arange(17) * 31 % 97
Model = tuple[dict[str, Any], dict[str, Tensor]]


def read(name: str, folder: Path) -> Model:
    tiny.write(name, folder)
    config, stored, _ = tiny.read(folder)
    return config, stored


def logits(config: dict[str, Any], stored: dict[str, Tensor]) -> Tensor:
    checkpoint = Memory(stored)
    return whole(decoder(resolved(checkpoint, config), checkpoint), IDS)


def test_projections_of_lara_may_be_apart(tmp_path: Path) -> None:
    config, stored = read("lara_mini", tmp_path)
    want = logits(config, stored)
    keys, values = 2 * 8, 4 * 6
    for i, kind in enumerate(config["layer_types"]):
        if kind != "linear_attention":
            continue
        here = f"model.layers.{i}.linear_attn"
        qkv, z, b, a = stored.pop(f"{here}.in_proj.weight").split([2 * keys + values, values, 4, 4])
        stored |= {f"{here}.in_proj_qkv.weight": qkv, f"{here}.in_proj_z.weight": z}
        stored |= {f"{here}.in_proj_b.weight": b, f"{here}.in_proj_a.weight": a}
        stored[f"{here}.norm.weight"] = stored.pop(f"{here}.out_norm.weight")
    assert torch.equal(logits(config, stored), want)


def test_layers_of_lara_have_a_period_of_five(tmp_path: Path) -> None:
    config, _ = read("lara_mini", tmp_path)
    assert build_spec({**config, "layer_types": None})[0] == build_spec(config)[0]


@pytest.mark.parametrize("name", ["sarvam_moe", "sarvam_mla"])
def test_sarvam_is_found_under_the_class_that_saved_it(name: str, tmp_path: Path) -> None:
    config, stored = read(name, tmp_path)
    own = {"sarvam_moe": "SarvamMoEForCausalLM", "sarvam_mla": "SarvamMLAForCausalLM"}[name]
    assert config["architectures"] != [own]
    assert find(config).name == find({"architectures": [own]}).name == name
    assert find({"architectures": config["architectures"]}).name != name
    assert torch.equal(logits({**config, "architectures": [own]}, stored), logits(config, stored))


def test_the_first_configs_of_sarvam_have_words_of_their_own(tmp_path: Path) -> None:
    config, stored = read("sarvam_mla", tmp_path)
    turns = {k: v for k, v in config["rope_parameters"].items() if k not in ("rope_type", "rope_theta")}
    renamed = {"n_routed_experts": "num_experts", "n_shared_experts": "num_shared_experts"}
    first = {renamed.get(key, key): value for key, value in config.items() if key != "rope_parameters"}
    first |= {"architectures": ["SarvamMLAForCausalLM"], "rope_theta": 1e4}
    first |= {"rope_scaling": {**turns, "type": "deepseek_yarn"}, "head_dim": 20, "q_head_dim": 12}
    for absent in ("n_group", "topk_group", "rope_interleave", "routed_scaling_factor"):
        first.pop(absent)
    assert torch.equal(logits(first, stored), logits(config, stored))


@pytest.mark.parametrize("words", [0, -1, 111])
def test_a_head_of_apertus_has_tokens_of_the_table(words: int, tmp_path: Path) -> None:
    config, _ = read("apertus1p5", tmp_path)
    if words:
        with pytest.raises(ConfigError, match=f"output_vocab_size is {words}: a head has 1 to 110 tokens"):
            build_spec({**config, "output_vocab_size": words})
    else:
        assert build_spec({**config, "output_vocab_size": None})[0].vocab_size == 110


def test_apertus_is_found_next_to_pictures_and_sound(tmp_path: Path) -> None:
    config, stored = read("apertus1p5", tmp_path)
    wrapped = {k: v for k, v in config.items() if k != "architectures"}
    wrapper = {"architectures": ["Apertus1p5ForConditionalGeneration"], "model_type": "apertus1p5"}
    inner = {name.replace("model.", "model.language_model.", 1): value for name, value in stored.items()}
    inner["model.vision_tokenizer.quantize.weight"] = torch.zeros(3)
    inner["model.audio_tokenizer.encoder.weight"] = torch.zeros(3)
    assert torch.equal(logits({**wrapper, "text_config": wrapped}, inner), logits(config, stored))


def large4(**changes: Any) -> dict[str, Any]:
    return {"model_type": "mistral_large4_text", **LARGE4["text_config"], **changes}


def mixers(config: dict[str, Any]) -> list[GrownMlaSpec]:
    return [mixer for _, mixer in build_spec(config)[0].mixers() if isinstance(mixer, GrownMlaSpec)]


def test_every_fourth_layer_of_mistral_large_4_has_no_positions_and_latents_are_its_own() -> None:
    usual = mixers(large4(no_rope_layers=None, kv_source_layers=None, indexer_types=None))
    assert [mixer.rope is None for mixer in usual] == [False, False, False, True, False, False]
    assert not any(mixer.source or mixer.indexer is None or mixer.indexer.source for mixer in usual)
    assert [mixer.nope_dim + mixer.rope_dim for mixer in usual] == [12] * 6


@pytest.mark.parametrize(
    ("sources", "words"),
    [
        ([0, 1, 0, 1, 4], "5 entries for 6 layers"),
        ([0, 1, 1, 1, 4, 5], "layer 2 reads 1; the last one with positions .* is 2"),
        ([0, 1, 2, 1, 0, 5], None),
        ([0, 1, 2, 1, 2, 5], None),
        ([0, 1, 2, 3, 2, 1], None),
        ([0, 1, 0, 1, 2, 5], "layer 4 reads 2; .* is 0"),
    ],
)
def test_latents_of_mistral_large_4_are_those_that_transformers_reads(
    sources: list[int], words: str | None
) -> None:
    config = large4(kv_source_layers=sources)
    if words is None:
        found = [mixer.source for mixer in mixers(config)]
        assert found == ["" if s == i else f"layers.{s}.attn" for i, s in enumerate(sources)]
        return
    with pytest.raises(UnsupportedModel, match=words):
        build_spec(config)


def test_no_other_family_ignores_shared_latents() -> None:
    config = {"model_type": "glm_moe_dsa", "kv_source_layers": [0, 0, 2]}
    with pytest.raises(UnsupportedModel, match="kv_source_layers"):
        build_spec({**TEXT, **config})


def test_mistral_large_4_is_whole_without_its_drafts(tmp_path: Path) -> None:
    config, stored = read("mistral_large4", tmp_path)
    want = logits(config, stored)
    assert torch.equal(logits(config, {**stored, "mtp_dspark.layers.0.x.weight": torch.zeros(3)}), want)


def spark(**changes: Any) -> dict[str, Any]:
    return {"model_type": "muse_spark_text", **SPARK["text_config"], **changes}


def heads(config: dict[str, Any]) -> list[NormedHeadsSpec]:
    return [mixer for _, mixer in build_spec(config)[0].mixers() if isinstance(mixer, NormedHeadsSpec)]


def test_every_fourth_layer_of_muse_spark_is_whole_and_has_no_positions() -> None:
    found = heads(spark(layer_types=None, layer_rope_theta=None))
    whole = [True, False, False, False, True]
    assert [mixer.window is None for mixer in found] == whole
    assert [mixer.rope is None for mixer in found] == whole
    kinds = ["full_attention", *["sliding_attention"] * 4]
    found = heads(spark(layer_types=kinds, layer_rope_theta=[5e5, 0, 5e5, 5e5, 5e5], rope_theta=5e5))
    assert [mixer.window is None for mixer in found] == [True, False, False, False, False]
    assert [mixer.rope is None for mixer in found] == [False, True, False, False, False]


def test_layers_of_muse_spark_have_one_base() -> None:
    with pytest.raises(UnsupportedModel, match="layer_rope_theta"):
        build_spec(spark(layer_rope_theta=[5e5, 1e4, 0, 0, 0]))


@pytest.mark.parametrize("key", ["moe_hidden_size", "residual_gate_temperature"])
def test_no_other_family_ignores_keys_of_muse_spark(key: str) -> None:
    with pytest.raises(UnsupportedModel, match=key):
        build_spec({"model_type": "mixtral", **TEXT, "num_local_experts": 4, key: 8})
