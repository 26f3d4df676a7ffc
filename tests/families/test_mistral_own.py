"""Mistral's own files (params.json, consolidated.safetensors): the models that transformers has of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from plait import LLM
from plait.checkpoint.find_files import find_model
from plait.checkpoint.mistral_files import rename_tensor
from plait.config import EngineConfig
from plait.errors import BadFile, UnsupportedModel
from plait.families.config.mistral_params import read_params
from plait.loading.open_model import Opened, open_model
from plait.quant.weight import as_tensor
from plait.request import SamplingParams
from tests.families import mistral_own
from tests.text import tekken_files


def opened(folder: Path) -> Opened:
    return open_model(str(folder), EngineConfig())


@pytest.mark.parametrize("name", mistral_own.MODELS)
def test_the_model_is_that_of_transformers_files(name: str, tmp_path: Path) -> None:
    theirs, own = map(opened, mistral_own.write_both(name, tmp_path))
    assert own.resolved.spec == theirs.resolved.spec
    single = {tensor for tensor in theirs.tensors if ".experts." not in tensor}
    assert {tensor for tensor in own.tensors if ".experts." not in tensor} == single
    for tensor in single:
        assert torch.equal(own.checkpoint.read(tensor), theirs.checkpoint.read(tensor)), tensor
    assert own.resolved.provenance["hidden_size"] == "params.json"


@pytest.mark.parametrize("name", ["ministral3", "mistral4"])
def test_texts_are_those_of_transformers_files(name: str, tmp_path: Path) -> None:
    prompt, params = list(range(3, 40)), SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)
    texts = []
    for folder in mistral_own.write_both(name, tmp_path):
        with LLM(str(folder), ops="reference") as llm:
            texts.append(llm.generate([prompt], params)[0].outputs[0].token_ids)
    assert texts[0] == texts[1]


def test_chats_have_the_format_of_the_vocabularys_version(tmp_path: Path) -> None:
    mistral_own.write_chat_model(tmp_path, tekken_files.content("v13"))
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello [INST]"}]
    with LLM(str(tmp_path), ops="reference") as llm:
        (found,) = llm.chat(messages, SamplingParams(max_tokens=4, temperature=0.0))
    assert len(found.outputs[0].token_ids) == 4
    marks = [i for i in found.prompt_token_ids if i < 32]  # control tokens, none of which a user can write
    names = tekken_files.RECORDED["special_tokens"]
    assert [names[i] for i in marks] == ["<s>", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]", "[INST]", "[/INST]"]


def test_weights_in_fp8_have_their_scales(tmp_path: Path) -> None:
    hf, _ = mistral_own.write_both("mistral", tmp_path)
    tensors = load_file(hf / "model.safetensors")
    packed: dict[str, torch.Tensor] = {}
    for name, value in tensors.items():
        if name.endswith("_proj.weight"):
            scale = value.abs().max() / 448
            packed[name] = (value / scale).to(torch.float8_e4m3fn)
            packed[name.replace(".weight", ".qscale_weight")] = scale
            packed[name.replace(".weight", ".qscale_act")] = scale.clone()
        else:
            packed[name] = value
    fp8 = {"qformat_weight": "fp8_e4m3", "qscheme_act": "TENSOR"}
    mistral_own.write_own(tmp_path / "fp8", packed, {**mistral_own.OWN, "quantization": fp8})
    found = opened(tmp_path / "fp8").checkpoint
    name = "model.layers.1.self_attn.q_proj.weight"
    assert found.format_of(name).startswith("fp8")
    restored = as_tensor(found.read(name)).float()
    assert torch.allclose(restored, tensors[name], atol=0.07 * float(tensors[name].abs().max()))
    assert torch.equal(restored, packed[name].float() * packed[name.replace(".weight", ".qscale_weight")])


def test_files_of_transformers_win_over_mistrals_own(tmp_path: Path) -> None:
    for stem in ("model", "consolidated"):
        for n in (1, 2):
            save_file({f"a{n}": torch.zeros(1)}, tmp_path / f"{stem}-0000{n}-of-00002.safetensors")
        index = {"weight_map": {f"a{n}": f"{stem}-0000{n}-of-00002.safetensors" for n in (1, 2)}}
        (tmp_path / f"{stem}.safetensors.index.json").write_text(json.dumps(index))
    (tmp_path / "params.json").write_text(json.dumps(mistral_own.OWN))
    (tmp_path / "config.json").write_text("{}")
    found = find_model(tmp_path)
    assert {path.name[:5] for path in found.weights} == {"model"}
    assert found.config == tmp_path / "config.json"
    for path in tmp_path.glob("model*"):
        path.unlink()
    found = find_model(tmp_path)
    assert {path.name[:5] for path in found.weights} == {"conso"}
    assert found.config == tmp_path / "params.json"


def test_a_config_of_codestral_mamba_stays_what_is_read(tmp_path: Path) -> None:
    save_file({"a": torch.zeros(1)}, tmp_path / "consolidated.safetensors")
    (tmp_path / "params.json").write_text('{"dim": 64, "n_layers": 2, "model_type": "mamba"}')
    (tmp_path / "config.json").write_text("{}")
    assert find_model(tmp_path).config == tmp_path / "config.json"


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"ada_rms_norm_t_cond": True}, "params.json has 'ada_rms_norm_t_cond', which is not known"),
        ({"yarn": {"factor": 2, "gamma": 3}}, r"yarn.gamma = '3' is not implemented"),
        ({"yarn": [1]}, "yarn must be an object"),
        ({"moe": {"num_experts": 4, "route_every_n": 2}}, "moe.route_every_n"),
        ({"qk_nope_head_dim": 4, "moe": {"use_load_balancing_bias": True}}, "read is False"),
        ({"sliding_window": [8, 16]}, "must repeat one size"),
        ({"sliding_window": []}, "must repeat one size"),
        ({"quantization": {"qformat_weight": "int3"}}, "read is fp8_e4m3"),
        ({"llama_4_scaling": {"original_max_position_embeddings": 8, "beta": 0.1}}
         | {"yarn": {"original_max_position_embeddings": 16, "factor": 2}}, "models where both agree"),
    ],
)  # fmt: skip
def test_what_is_not_known_is_refused(changes: dict[str, Any], says: str) -> None:
    with pytest.raises(UnsupportedModel, match=says):
        read_params({**mistral_own.OWN, **changes})


@pytest.mark.parametrize(
    "changes", [{"n_heads": "x"}, {"n_heads": -1}, {"head_dim": 7}, {"head_dim": 10**30}, {"n_kv_heads": [2]}]
)
def test_counts_that_no_model_has_are_refused(changes: dict[str, Any], tmp_path: Path) -> None:
    _, own = mistral_own.write_both("mistral", tmp_path)
    (own / "params.json").write_text(json.dumps({**mistral_own.OWN, **changes}))
    with pytest.raises((BadFile, UnsupportedModel)):
        opened(own)


def test_tensors_with_transformers_names_stay_in_their_order(tmp_path: Path) -> None:
    hf, _ = mistral_own.write_both("mistral", tmp_path)
    (hf / "model.safetensors").rename(hf / "consolidated.safetensors")
    (hf / "params.json").write_text(json.dumps(mistral_own.OWN))
    name = "model.layers.0.self_attn.q_proj.weight"
    stored = load_file(hf / "consolidated.safetensors")[name]
    assert torch.equal(as_tensor(opened(hf).checkpoint.read(name)), stored)


def test_two_names_of_one_weight_are_refused(tmp_path: Path) -> None:
    tensors = {"norm.weight": torch.zeros(4), "model.norm.weight": torch.zeros(4)}
    save_file(tensors, tmp_path / "consolidated.safetensors")
    (tmp_path / "params.json").write_text(json.dumps(mistral_own.OWN))
    with pytest.raises(BadFile, match="are one weight"):
        opened(tmp_path)


def test_windows_of_a_pattern_repeat() -> None:
    found = read_params({**mistral_own.OWN, "n_layers": 4, "sliding_window": [None, 8]})
    assert found["layer_types"] == ["full_attention", "sliding_attention"] * 2
    assert found["sliding_window"] == 8
    assert read_params({**mistral_own.OWN, "sliding_window": 8})["sliding_window"] == 8
    assert read_params(mistral_own.OWN)["sliding_window"] is None


@pytest.mark.parametrize(
    ("stored", "name"),
    [
        ("mm_streams_embeddings.embedding_module.tok_embeddings.weight", "model.embed_tokens.weight"),
        ("mm_whisper_embeddings.a.b.weight", "audio_tower.mm_whisper_embeddings.a.b.weight"),
        ("patch_merger.merging_layer.weight", "multi_modal_projector.patch_merger.merging_layer.weight"),
        ("layers.3.attention.wq.bias", "model.layers.3.self_attn.q_proj.bias"),
        ("layers.3.attention.strange.weight", "layers.3.attention.strange.weight"),
    ],
)  # fmt: skip
def test_names(stored: str, name: str) -> None:
    assert rename_tensor(stored) == name
