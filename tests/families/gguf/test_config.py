"""The same models as GGUF: other names, changed numbers, metadata for a config; the same logits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch

from plait.checkpoint.readers.gguf import GgufFile
from plait.errors import UnsupportedModel
from plait.families.gguf.config import gguf_config
from plait.ops.rope import frequencies, yarn_mscale
from plait.spec.model import AttentionSpec
from tests.families import as_gguf_plain, tiny
from tests.families.as_gguf import converted, permuted
from tests.families.parity import Memory, decoder, in_pieces, resolved, whole, worst

VARIANTS = {
    "llama": "llama",
    "llama_linear": "llama",
    "mixtral": "llama",
    "mistral": "llama",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "qwen2_moe": "qwen2moe",
    "qwen3_moe": "qwen3moe",
    "gemma2_plain": "gemma2",
    "gemma3_plain": "gemma3",
    "deepseek_v2_lite": "deepseek2",
    "deepseek_v2": "deepseek2",
    "deepseek_v3": "deepseek2",
    "mamba2": "mamba2",
    "granite": "granitehybrid",
    "granite_rope": "granitehybrid",
    "falcon_h1": "falcon-h1",
    "falcon_h1_norm": "falcon-h1",
    "nemotron_h": "nemotron_h_moe",
    "nemotron_h_groups": "nemotron_h",
    "olmo2": "olmo2",
    "olmo3": "olmo2",
    "olmo3_plain": "olmo2",
    "gpt_oss": "gpt-oss",
    "phi3": "phi3",
    "phi3_longrope": "phi3",
    "smollm3_plain": "smollm3",
    "starcoder2_plain": "starcoder2",
    "cohere": "command-r",
    "cohere_plain": "command-r",
    "cohere2": "cohere2",
    "glm": "chatglm",
    "glm4": "glm4",
    "glm4_plain": "glm4",
    "glm4_moe": "glm4moe",
    "glm4_moe_plain": "glm4moe",
    "granite_dense": "granite",
    "granite_moe": "granitemoe",
    "granite_moe_shared": "granitemoe",
    "mamba": "mamba",
    "mamba_biases": "mamba",
    "falcon_mamba_biases": "mamba",
    "jamba": "jamba",
    "jamba_dense": "jamba",
    "lfm2": "lfm2",
    "lfm2_biases": "lfm2",
    "lfm2_moe": "lfm2moe",
    "qwen3_next": "qwen3next",
    "qwen3_next_biases": "qwen3next",
    "qwen3_5": "qwen35",
    "qwen3_5_tied": "qwen35",
    "qwen3_5_moe": "qwen35moe",
    "kimi_linear": "kimi-linear",
    "kimi_linear_groups": "kimi-linear",
    "minimax": "minimax-01",
}


# Families of other converters: those of before Llama, mostly.
OLD = {
    "bloom": "bloom",
    "mpt": "mpt",
    "falcon": "falcon",
    "falcon_grouped": "falcon",
    "gpt2_plain": "gpt2",
    "gpt_neox": "gptneox",
    "gpt_neox_in_turn": "gptneox",
    "gpt_bigcode": "starcoder",
    "dbrx": "dbrx",
    "phi": "phi2",
    "gemma": "gemma",
    "olmoe": "olmoe",
    "arcee": "arcee",
    "seed_oss": "seed_oss",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("gguf")


def made(name: str, folder: Path) -> Any:
    if not (folder / name).exists():
        tiny.write(name, folder / name)
    return tiny.read(folder / name)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", VARIANTS)
def test_logits_are_those_of_the_original(name: str, folder: Path) -> None:
    config, tensors, oracle = made(name, folder)
    metadata, stored = converted(VARIANTS[name], config, tensors)
    checkpoint = Memory(stored)
    model = decoder(resolved(checkpoint, gguf=metadata), checkpoint)
    assert worst(whole(model, oracle["ids"][0]), oracle["logits"][0]) <= 1e-4
    for found, wanted in zip(in_pieces(model, oracle["ids"]), oracle["logits"], strict=True):
        assert worst(found, wanted) <= 1e-4


@pytest.mark.slow
@pytest.mark.parametrize("name", OLD)
def test_logits_of_older_families_are_those_of_the_original(name: str, folder: Path) -> None:
    config, tensors, oracle = made(name, folder)
    metadata, stored = as_gguf_plain.convert(OLD[name], config, tensors)
    checkpoint = Memory(stored)
    model = decoder(resolved(checkpoint, gguf=metadata), checkpoint)
    for found, wanted in zip(in_pieces(model, oracle["ids"]), oracle["logits"], strict=True):
        assert worst(found, wanted) <= 1e-4


def test_llama3_factors_come_from_the_file(folder: Path) -> None:
    config, tensors, oracle = made("llama_llama3", folder)
    metadata, stored = converted("llama", {**config, "rope_parameters": {"rope_theta": 1e4}}, tensors)
    p = config["rope_parameters"]
    turns = 32 / (2 * torch.pi * 1e4 ** (torch.arange(0, 8, 2) / 8))
    smooth = ((turns - p["low_freq_factor"]) / (p["high_freq_factor"] - p["low_freq_factor"])).clamp(0, 1)
    stored["rope_freqs.weight"] = 1 / (smooth + (1 - smooth) / p["factor"])
    checkpoint = Memory(stored)
    found = resolved(checkpoint, gguf=metadata)
    assert found.provenance["rope_scaling"] == "tensor rope_freqs.weight"
    model = decoder(found, checkpoint)
    assert worst(whole(model, oracle["ids"][0]), oracle["logits"][0]) <= 1e-4


def test_experts_quantized_in_one_stack(folder: Path, tmp_path: Path) -> None:
    """A real file: Q8_0 stacks are matrices to the reader, and every expert is a slice of their rows."""
    config, tensors, oracle = made("qwen3_moe", folder)
    metadata, stored = converted("qwen3moe", config, tensors)
    writer = gguf.GGUFWriter(tmp_path / "model.gguf", "qwen3moe")
    for key, value in metadata.items():
        if key != "general.architecture":
            _add(writer, key, value)
    kind = gguf.GGMLQuantizationType.Q8_0
    near = {}
    for name, tensor in stored.items():
        numbers = tensor.numpy()
        if name.endswith(("ffn_gate_exps.weight", "ffn_up_exps.weight")):
            packed = gguf.quants.quantize(numbers, kind)
            writer.add_tensor(name, packed, raw_dtype=kind)
            numbers = gguf.quants.dequantize(packed, kind).reshape(numbers.shape)
        else:
            writer.add_tensor(name, np.ascontiguousarray(numbers))
        near[name] = torch.from_numpy(np.array(numbers))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    file = GgufFile(tmp_path / "model.gguf")
    found = resolved(file, gguf=file.metadata)
    plain = decoder(resolved(Memory(near), gguf=metadata), Memory(near))
    ids = oracle["ids"][0]
    assert worst(whole(decoder(found, file), ids), whole(plain, ids)) <= 1e-4


def _add(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    match value:
        case bool():
            writer.add_bool(key, value)
        case int():
            writer.add_uint32(key, value)
        case float():
            writer.add_float32(key, value)
        case _:
            writer.add_array(key, value)


def test_the_order_of_rows_can_be_undone() -> None:
    rows = torch.arange(16)[:, None]
    assert permuted(rows, 2).flatten().tolist()[:8] == [0, 4, 1, 5, 2, 6, 3, 7]


def test_old_files_keep_experts_one_by_one_and_kv_b_whole(folder: Path) -> None:
    config, tensors, oracle = made("mixtral", folder)
    metadata, stored = converted("llama", config, tensors)
    for name in [n for n in stored if "_exps" in n]:
        for e, w in enumerate(stored.pop(name)):
            stored[name.replace("_exps", f".{e}")] = w
    checkpoint = Memory(stored)
    model = decoder(resolved(checkpoint, gguf=metadata), checkpoint)
    assert worst(whole(model, oracle["ids"][0]), oracle["logits"][0]) <= 1e-4
    config, tensors, oracle = made("deepseek_v3", folder)
    metadata, stored = converted("deepseek2", config, tensors)
    stored = {n: w for n, w in stored.items() if "attn_k_b" not in n and "attn_v_b" not in n}
    for i in range(3):
        stored[f"blk.{i}.attn_kv_b.weight"] = tensors[f"model.layers.{i}.self_attn.kv_b_proj.weight"]
    checkpoint = Memory(stored)
    model = decoder(resolved(checkpoint, gguf=metadata), checkpoint)
    assert worst(whole(model, oracle["ids"][0]), oracle["logits"][0]) <= 1e-4


def test_what_is_not_known_is_refused_by_name() -> None:
    def config(**keys: Any) -> None:
        metadata = {"general.architecture": "llama", "llama.block_count": 1, **keys}
        gguf_config(metadata, {}, dict[str, Any]().__getitem__)

    with pytest.raises(UnsupportedModel, match=r"'spiral' of the GGUF file is not known; `plait families`"):
        config(**{"general.architecture": "spiral"})
    with pytest.raises(UnsupportedModel, match=r"rope\.scaling\.type 'spiral'"):
        config(**{"llama.rope.scaling.type": "spiral"})
    with pytest.raises(UnsupportedModel, match=r"layer to layer.*\[1, 2\]"):
        config(**{"llama.attention.head_count_kv": [1, 2]})


def test_files_that_join_queries_keys_and_values_and_halves_of_experts(folder: Path) -> None:
    """llama.cpp's --fuse-qkv and --fuse-gate-up-exps."""
    config, tensors, oracle = made("qwen3_moe", folder)
    metadata, stored = converted("qwen3moe", config, tensors)
    for i in range(3):
        b = f"blk.{i}"
        stored[f"{b}.attn_qkv.weight"] = torch.cat([stored.pop(f"{b}.attn_{x}.weight") for x in "qkv"])
        if f"{b}.ffn_up_exps.weight" in stored:
            halves = [stored.pop(f"{b}.ffn_{x}_exps.weight") for x in ("gate", "up")]
            stored[f"{b}.ffn_gate_up_exps.weight"] = torch.cat(halves, 1)
    checkpoint = Memory(stored)
    model = decoder(resolved(checkpoint, gguf=metadata), checkpoint)
    assert worst(whole(model, oracle["ids"][0]), oracle["logits"][0]) <= 1e-4


def test_an_old_file_of_qwen3_next_keeps_q_k_v_and_z_in_one_matrix(folder: Path) -> None:
    config, tensors, oracle = made("qwen3_next", folder)
    metadata, stored = converted("qwen3next", config, tensors)
    for i in (0, 2):
        del stored[f"blk.{i}.attn_qkv.weight"], stored[f"blk.{i}.attn_gate.weight"]
        stored[f"blk.{i}.ssm_in.weight"] = tensors[f"model.layers.{i}.linear_attn.in_proj_qkvz.weight"]
    checkpoint = Memory(stored)
    model = decoder(resolved(checkpoint, gguf=metadata), checkpoint)
    assert worst(whole(model, oracle["ids"][0]), oracle["logits"][0]) <= 1e-4


def test_kimi_linear_is_refused_with_gates_that_are_not_implemented(folder: Path) -> None:
    config, tensors, _ = made("kimi_linear", folder)
    metadata, stored = converted("kimi-linear", config, tensors)
    for key, value, said in (
        ("kda.safe_gate", True, "safe_gate"),
        ("expert_gating_func", 1, "gating_func 1"),
    ):
        with pytest.raises(UnsupportedModel, match=rf"{said} is not implemented for Kimi-Linear"):
            resolved(Memory(stored), gguf={**metadata, f"kimi-linear.{key}": value})


PLAIN = yarn_mscale(4.0, 1.0)


@pytest.mark.parametrize(
    ("told", "factor"),
    [
        ({}, PLAIN),
        ({"attn_factor": 1.3}, 1.3 * PLAIN),  # llama.cpp multiplies both
        ({"attn_factor": 1.2, "yarn_attn_factor": 1.5}, 1.2 * PLAIN),
        ({"attn_factor": PLAIN}, PLAIN),  # OLMo 3 as converted in 2025
        ({"yarn_attn_factor": 1.3}, 1.3),  # attention_factor of transformers
        ({"yarn_attn_factor": 1.0, "yarn_ext_factor": 1.0}, PLAIN),
        ({"yarn_log_multiplier": 0.1}, PLAIN),  # is DeepSeek's alone
    ],
)
def test_what_yarn_sharpens_attention_by(told: dict[str, float], factor: float, tmp_path: Path) -> None:
    tiny.write("olmo2", tmp_path)
    config, tensors, _ = tiny.read(tmp_path)
    metadata, stored = converted("olmo2", config, tensors)
    metadata |= {f"olmo2.rope.scaling.{key}": float(np.float32(value)) for key, value in told.items()}
    mixer = resolved(Memory(stored), gguf=metadata).spec.layers[0][0].mixer
    assert isinstance(mixer, AttentionSpec)
    assert mixer.rope
    assert frequencies(mixer.rope, 64)[1] == pytest.approx(factor, rel=1e-5)
