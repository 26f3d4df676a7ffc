"""A model with quantized weights answers what the same model with the decoded weights answers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import save_file
from torch import Tensor

from plait import LLM
from plait.checkpoint.quantized.packed import QuantizedCheckpoint
from plait.checkpoint.quantized.scheme import find_scheme
from plait.cli.info import checkpoint_facts
from plait.config import EngineConfig
from plait.errors import UnsupportedFormat
from plait.families.common.recipes import expert_half, half, part, reorder_rows, scale_tensor
from plait.loading.meta.meta_model import model_states
from plait.loading.open_model import open_model
from plait.quant.weight import Weight
from tests.checkpoint.quantized.packings import (
    PACKINGS,
    InMemory,
    Packing,
    awq,
    fp8,
    gpt_oss,
    gptq,
    packed_like,
)
from tests.families import tiny
from tests.families.parity import Memory, decoder, in_pieces, resolved, whole, worst
from tests.quant.storages import STORAGES, made

SIZES = {"vocab_size": 97, "hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2} | {
    "num_hidden_layers": 2, "intermediate_size": 192, "max_position_embeddings": 64, "head_dim": 16
}  # fmt: skip
MOE = {**SIZES, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 160}
LATENT = {**SIZES, **tiny.MLA, "num_key_value_heads": 4, "moe_intermediate_size": 160, "kv_lora_rank": 136}
CONFIGS = {
    "llama": lambda: transformers.LlamaConfig(**SIZES, tie_word_embeddings=False),
    "qwen3_moe": lambda: transformers.Qwen3MoeConfig(**MOE, tie_word_embeddings=False),
    "deepseek_v3": lambda: transformers.DeepseekV3Config(
        **{k: v for k, v in LATENT.items() if k != "head_dim"},
        q_lora_rank=144,
        n_group=2,
        topk_group=1,
        tie_word_embeddings=False,
    ),
}
IDS = torch.arange(23) * 31 % 97
Model = tuple[dict[str, Any], dict[str, Tensor]]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Model]:
    """Config and tensors of each, as saved."""
    found = {}
    for name, config in CONFIGS.items():
        model = transformers.AutoModelForCausalLM.from_config(config(), dtype=torch.float32).eval()
        tiny.randomize(model, one_plus=False)
        folder = tmp_path_factory.mktemp(name)
        tiny.save(model, folder)
        found[name] = tiny.read(folder)[:2]
    return found


def quantized(files: InMemory, config: Any) -> QuantizedCheckpoint:
    return QuantizedCheckpoint(files, find_scheme({"quantization_config": config}) if config else None)


def agree(config: dict[str, Any], checkpoint: QuantizedCheckpoint, plain: dict[str, Tensor]) -> None:
    """Whole and in chunks, to the last bits that the order of sums decides."""
    found = decoder(resolved(checkpoint, config), checkpoint)
    wanted = decoder(resolved(Memory(plain), config), Memory(plain))
    logits = whole(wanted, IDS)
    assert worst(whole(found, IDS), logits) <= 1e-4 * float(logits.abs().max())
    for one, other in zip(in_pieces(found, [IDS, IDS[:17]]), [logits, logits[:17]], strict=True):
        assert worst(one, other) <= 1e-4 * float(logits.abs().max())


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", PACKINGS)
def test_llama_in_every_packing_is_its_decoded_twin(name: str, models: dict[str, Model]) -> None:
    config, tensors = models["llama"]
    files, plain = packed_like(tensors, PACKINGS[name])
    said = PACKINGS[name].config
    agree({**config, "quantization_config": said} if said else config, quantized(files, said), plain)


@pytest.mark.parametrize(
    ("model", "name"),
    [
        ("deepseek_v3", "fp8 in blocks"),  # its ranks are no multiples of a block
        ("deepseek_v3", "compressed fp8 by row"),
        *(("qwen3_moe", name) for name in ("fp8 in blocks", "gptq4 by importance", "modelopt nvfp4", "nf4")),
    ],
)
def test_mixtures_of_experts_are_their_decoded_twins(model: str, name: str, models: dict[str, Model]) -> None:
    config, tensors = models[model]
    files, plain = packed_like(tensors, PACKINGS[name])
    agree(config, quantized(files, PACKINGS[name].config), plain)


def test_maps_that_are_computed_together_may_be_stored_in_different_ways(models: dict[str, Model]) -> None:
    """q, k and v are one linear layer: of one scheme with orders of their own, and of three schemes."""
    config, tensors = models["llama"]
    mixed = {
        "q_proj": Packing(None, gptq(4, ordered=True), ""),
        "k_proj": Packing(None, fp8((128, 128), name="weight_scale_inv"), ""),
        "gate_proj": Packing(None, awq(), ""),
        "up_proj": Packing(None, gptq(8), ""),
    }
    files, plain = InMemory(), dict[str, Tensor]()
    for name, tensor in tensors.items():
        word = name.split(".")[-2]
        some = (
            packed_like({name: tensor}, mixed[word])
            if word in mixed
            else (InMemory({name: tensor}), {name: tensor})
        )
        files |= some[0]
        plain |= some[1]
    agree(config, quantized(files, None), plain)


def write(folder: Path, config: dict[str, Any], tensors: dict[str, Tensor]) -> str:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    save_file({name: t.contiguous() for name, t in tensors.items()}, folder / "model.safetensors")
    return str(folder)


@pytest.mark.parametrize("name", ["gptq4 by importance", "fp8 in blocks"])
def test_a_quantized_model_answers_through_the_engine(
    name: str, models: dict[str, Model], tmp_path: Path
) -> None:
    config, tensors = models["llama"]
    packing = PACKINGS[name]
    files, plain = packed_like(tensors, packing)
    said = {**config, "quantization_config": packing.config}
    packed = write(tmp_path / "packed", said, {k: v.clone() for k, v in files.items()})
    twin = write(tmp_path / "plain", config, plain)
    ids = IDS[:12].tolist()
    options: dict[str, Any] = {"device": "cpu", "threads": 1, "precise": True, "ops": "reference"}
    with LLM(packed, **options) as found, LLM(twin, **options) as wanted:
        logits = wanted.logits(ids)
        assert worst(found.logits(ids), logits) <= 2e-3 * float(logits.abs().max())
        assert found._loaded.target.weights_nbytes < 0.75 * wanted._loaded.target.weights_nbytes
    shown = open_model(packed, EngineConfig())
    assert shown.checkpoint.format_of("model.layers.0.mlp.down_proj.weight") == packing.format
    assert shown.nbytes == sum(tensor.nbytes for tensor in files.values())
    facts = checkpoint_facts(shown)
    assert sum(facts["formats"].values()) == shown.nbytes
    assert facts["formats"]["float32"] == sum(t.nbytes for n, t in plain.items() if "_proj" not in n)
    assert packing.format in facts["formats"]
    assert facts["parameters"] == sum(tensor.numel() for tensor in plain.values())


def test_a_config_beside_the_weights_counts(models: dict[str, Model], tmp_path: Path) -> None:
    config, tensors = models["llama"]
    files, _ = packed_like(tensors, PACKINGS["gptq4"])
    folder = Path(write(tmp_path / "packed", config, dict(files)))
    (folder / "quantize_config.json").write_text(json.dumps({"bits": 3, "group_size": 32, "desc_act": False}))
    with pytest.raises(Exception, match="the config says bits 3, its tensors show 4"):
        open_model(str(folder), EngineConfig())


def test_a_method_that_is_not_read_is_refused_when_the_model_is_opened(
    models: dict[str, Model], tmp_path: Path
) -> None:
    config, tensors = models["llama"]
    told = {**config, "quantization_config": {"quant_method": "hqq", "bits": 4}}
    with pytest.raises(UnsupportedFormat, match=r"method 'hqq' is not read; read are .*awq.*gptq"):
        open_model(write(tmp_path / "packed", told, tensors), EngineConfig())


@pytest.mark.parametrize("name", [name for name in STORAGES if name != "int4 with order"])
def test_recipes_of_families_keep_the_storage(name: str) -> None:
    """halves, parts, other orders and multipliers of rows: nothing is decoded."""
    weight = made(name)
    weight = weight.pick(torch.tensor([0, 1, 2, 3, 4, 5, 6, 3]))
    rows = weight.dequantize(torch.float32)
    order = torch.tensor([7, 2, 0, 1, 3, 5, 4, 6])
    for recipe, wanted in (
        (half(1, "x"), rows[4:]),
        (part(1, [3, 5], "x"), rows[3:]),
        (reorder_rows(order, "x"), rows[order]),
        (scale_tensor(0.5, "x"), rows * 0.5),
        (scale_tensor(torch.linspace(1, 2, 8), "x"), rows * torch.linspace(1, 2, 8)[:, None]),
    ):
        found: Weight = recipe.fn(weight)
        assert (type(found), found.format) == (type(weight), weight.format)
        np.testing.assert_allclose(found.dequantize(torch.float32), wanted, rtol=1e-6, atol=1e-9)
    one = expert_half(1, 2, "x").fn(weight, e="1")
    assert torch.equal(one.dequantize(torch.float32), rows[6:])


def test_a_model_without_a_config_is_known_by_the_shapes_of_its_packed_weights(
    models: dict[str, Model],
) -> None:
    tensors, heads = models["llama"][1], ["num_attention_heads=4"]
    wanted = resolved(Memory(tensors), None, heads).spec
    for name in ("gptq4", "fp8 in blocks", "nf4", "compressed int4"):
        files, _ = packed_like(tensors, PACKINGS[name])
        assert resolved(quantized(files, None), None, heads).spec == wanted


def test_experts_of_gpt_oss_are_their_decoded_twins() -> None:
    sizes = {**SIZES, "num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 96}
    shown = transformers.GptOssConfig(**sizes, tie_word_embeddings=False)
    model = transformers.GptOssForCausalLM(shown).eval()
    tiny.randomize(model, one_plus=False)
    config = json.loads(shown.to_json_string(use_diff=False)) | {"architectures": ["GptOssForCausalLM"]}
    files, plain = InMemory(), dict[str, Tensor]()
    torch.manual_seed(0)
    for name, tensor in model.state_dict().items():
        plain[name] = files[name] = tensor
        if name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            parts, numbers = gpt_oss(4, tensor.shape[2], tensor.shape[1])
            del files[name]
            files.update({name + end: part for end, part in parts.items()})
            plain[name] = torch.from_numpy(numbers).float().transpose(1, 2).contiguous()
    said = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]}
    agree({**config, "quantization_config": said}, quantized(files, said), plain)
    with torch.no_grad():
        model.load_state_dict(plain)
        wanted = model(IDS[None], use_cache=False).logits[0]
    found = decoder(resolved(quantized(files, said), config), quantized(files, said))
    assert worst(whole(found, IDS), wanted) <= 1e-4 * float(wanted.abs().max())
    states = model_states(resolved(quantized(files, said), config), quantized(files, said))
    assert len(states) == 2
