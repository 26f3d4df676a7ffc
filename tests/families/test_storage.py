"""The same model stored in other ways: wrapped, stacked, by another project, tied, with tensors to spare."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from plait.families.resolve import resolve
from tests.families import tiny
from tests.families.every import as_state_spaces
from tests.families.parity import Memory, decoder, resolved, whole, worst

Model = tuple[dict[str, Any], dict[str, Tensor], dict[str, list[Tensor]]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("storage")


def made(name: str, folder: Path) -> Model:
    if not (folder / name).exists():
        tiny.write(name, folder / name)
    return tiny.read(folder / name)


def difference(config: dict[str, Any] | None, tensors: dict[str, Tensor], oracle: Any) -> float:
    checkpoint = Memory(tensors)
    model = decoder(resolved(checkpoint, config), checkpoint)
    return worst(whole(model, oracle["ids"][0]), oracle["logits"][0])


@pytest.mark.parametrize("prefix", ["model.language_model.", "language_model.model."])
def test_gemma3_inside_its_multimodal_wrapper(prefix: str, folder: Path) -> None:
    text, tensors, oracle = made("gemma3", folder)
    config = {
        "architectures": ["Gemma3ForConditionalGeneration"],
        "model_type": "gemma3",
        "text_config": {k: v for k, v in text.items() if k not in ("architectures", "tie_word_embeddings")},
        "vision_config": {"hidden_size": 7, "num_hidden_layers": 1},
    }
    wrapped = {name.replace("model.", prefix, 1): tensor for name, tensor in tensors.items()}
    wrapped["vision_tower.vision_model.encoder.layers.0.mlp.fc1.weight"] = torch.zeros(3, 3)
    wrapped["multi_modal_projector.mm_input_projection_weight"] = torch.zeros(3, 3)
    assert difference(config, wrapped, oracle) <= 1e-4


def test_gemma3_as_transformers_saves_the_wrapper(folder: Path) -> None:
    sizes = {**tiny.SIZES, **tiny.GEMMA, "num_hidden_layers": 6}
    vision = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = transformers.Gemma3Config(
        text_config=sizes, vision_config={**vision, "image_size": 28, "patch_size": 14}, mm_tokens_per_image=1
    )
    model = transformers.Gemma3ForConditionalGeneration._from_config(
        config, attn_implementation="eager"
    ).eval()
    tiny.randomize(model, one_plus=True)
    (folder / "wrapper").mkdir()
    tiny.save(model, folder / "wrapper")
    assert difference(*tiny.read(folder / "wrapper")) <= 1e-4


def test_mistral_inside_a_multimodal_wrapper(folder: Path) -> None:
    text, tensors, oracle = made("mistral", folder)
    config = {"architectures": ["Mistral3ForConditionalGeneration"], "model_type": "mistral3"}
    config["text_config"] = {k: v for k, v in text.items() if k != "architectures"}
    wrapped = {f"language_model.{name}": tensor for name, tensor in tensors.items()}
    wrapped["multi_modal_projector.norm.weight"] = torch.zeros(3)
    assert difference(config, wrapped, oracle) <= 1e-4


@pytest.mark.parametrize(
    ("name", "wrapper", "prefix"),
    [
        ("qwen3", "Qwen3VLForConditionalGeneration", "model.language_model."),
        ("qwen2", "Qwen2_5_VLForConditionalGeneration", "model."),
        ("deepseek_v3", "KimiK25ForConditionalGeneration", "language_model.model."),
    ],
)
def test_the_text_model_inside_a_wrapper_that_sees_images(
    name: str, wrapper: str, prefix: str, folder: Path
) -> None:
    text, tensors, oracle = made(name, folder)
    config = {"architectures": [wrapper], "model_type": "a_wrapper"}
    inner = {k: v for k, v in text.items() if k != "architectures"}
    if name == "qwen2":  # as it was first published
        inner["rope_scaling"] = {"type": "mrope", "mrope_section": [2, 3, 3]}
    config["text_config"] = inner
    wrapped = {name.replace("model.", prefix, 1): tensor for name, tensor in tensors.items()}
    if prefix.startswith("language_model."):
        wrapped["language_model.lm_head.weight"] = wrapped.pop("lm_head.weight")
    wrapped["visual.blocks.0.mlp.fc1.weight"] = torch.zeros(3, 3)
    assert difference(config, wrapped, oracle) <= 1e-4


@pytest.mark.parametrize("name", ["qwen3_moe", "qwen2_moe", "deepseek_v3", "mixtral"])
def test_experts_stacked_as_transformers_5_keeps_them(name: str, folder: Path) -> None:
    config, tensors, oracle = made(name, folder)
    stacked = {n: t for n, t in tensors.items() if ".experts." not in n}
    part = {"mixtral": ("w1", "w3", "w2")}.get(name, ("gate_proj", "up_proj", "down_proj"))
    roots = sorted({n.split(".experts.")[0] for n in tensors if ".experts." in n})
    for root in roots:
        count = len({n for n in tensors if n.startswith(f"{root}.experts.") and part[0] in n})
        gate, up, down = (
            torch.stack([tensors[f"{root}.experts.{e}.{p}.weight"] for e in range(count)]) for p in part
        )
        theirs = root.replace("block_sparse_moe", "mlp")
        stacked[f"{theirs}.experts.gate_up_proj"] = torch.cat([gate, up], 1)
        stacked[f"{theirs}.experts.down_proj"] = down
        if name == "mixtral":
            stacked[f"{theirs}.gate.weight"] = stacked.pop(f"{root}.gate.weight")
    assert difference(config, stacked, oracle) <= 1e-4


def test_mamba2_in_the_format_of_state_spaces(folder: Path) -> None:
    config, tensors, oracle = made("mamba2", folder)
    theirs, renamed = as_state_spaces(config, tensors)
    assert difference(theirs, renamed, oracle) <= 1e-4
    native = {f"model.{name}": t for name, t in renamed.items()}
    assert difference(config, native, oracle) <= 1e-4


def test_a_checkpoint_without_a_head_is_tied_whatever_its_config_says(folder: Path) -> None:
    config, tensors, _ = made("llama", folder)
    tensors.pop("lm_head.weight")
    found = resolved(Memory(tensors), config)
    assert found.spec.tied
    assert "lm_head.weight" in found.provenance["tie_word_embeddings"]


def test_a_tied_model_may_carry_a_copy_of_its_head(folder: Path) -> None:
    config, tensors, oracle = made("llama_biases", folder)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]
    assert difference(config, tensors, oracle) <= 1e-4


def test_a_head_with_numbers_of_its_own_wins_over_a_config_that_ties(folder: Path) -> None:
    config, tensors, oracle = made("llama", folder)
    tied = {**config, "tie_word_embeddings": True}
    assert difference(tied, tensors, oracle) <= 1e-4
    found = resolved(Memory(tensors), tied)
    assert not found.spec.tied
    told = found.provenance["tie_word_embeddings"]
    assert told == "tensor lm_head.weight is not equal to model.embed_tokens.weight"
    # What a user sets wins over both.
    assert resolved(Memory(tensors), tied, ["tie_word_embeddings=true"]).spec.tied


def test_layers_that_draft_a_second_token_are_not_the_model(folder: Path) -> None:
    config, tensors, oracle = made("deepseek_v3_plain", folder)
    extra = {n.replace("layers.2.", "layers.3."): t for n, t in tensors.items() if ".layers.2." in n}
    guess = {
        "model.layers.3.eh_proj.weight": torch.zeros(32, 64),
        "model.layers.3.enorm.weight": torch.zeros(32),
    }
    assert difference(config, {**tensors, **extra, **guess}, oracle) <= 1e-4
    assert difference(None, {**tensors, **extra, **guess}, oracle) <= 1e-4


def test_tensors_win_over_a_config_that_mixes_up_its_layers(folder: Path) -> None:
    config, tensors, oracle = made("bamba", folder)
    assert difference({**config, "attn_layer_indices": [0]}, tensors, oracle) <= 1e-4
    found = resolved(Memory(tensors), {**config, "attn_layer_indices": [0]})
    told = "tensor model.layers.0.mamba.A_log; config.json says layer 0 is full_attention"
    assert found.provenance["layer_types"] == told
    assert found.config["layer_types"][:2] == ["linear_attention", "full_attention"]


def test_a_part_of_a_config_is_completed_from_tensors(folder: Path) -> None:
    config, tensors, oracle = made("llama_llama3", folder)
    kept = ("architectures", "rope_parameters", "num_attention_heads", "rms_norm_eps")
    partial = {key: config[key] for key in kept}
    assert difference(partial, tensors, oracle) <= 1e-4
    found = resolved(Memory(tensors), partial)
    assert found.provenance["rope_parameters"] == "config.json"
    assert "model.embed_tokens.weight [97, 32]" in found.provenance["hidden_size"]


def test_set_wins_over_everything(folder: Path) -> None:
    config, tensors, oracle = made("mamba2", folder)
    checkpoint = Memory(tensors)
    assert resolved(checkpoint).spec != resolved(checkpoint, config).spec  # groups and states look alike
    found = resolved(checkpoint, None, ["n_groups=2", "head_dim=8"])
    assert worst(whole(decoder(found, checkpoint), oracle["ids"][0]), oracle["logits"][0]) <= 1e-4
    assert found.provenance["n_groups"] == "--set"


def test_inv_freq_shows_the_head_size(folder: Path) -> None:
    _, tensors, _ = made("llama_linear", folder)
    shapes = {name: tuple(t.shape) for name, t in tensors.items()}
    shapes["model.layers.0.self_attn.rotary_emb.inv_freq"] = (4,)
    spec = resolve(None, shapes, read=tensors.__getitem__).spec
    assert {mixer.head_dim for name, mixer in spec.mixers() if name.endswith("attn")} == {8}
