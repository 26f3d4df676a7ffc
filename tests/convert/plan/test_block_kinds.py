"""Formats that say the same numbers: bytes are moved between them, and no number changes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from plait.checkpoint.readers.gguf import GgufFile
from plait.config import EngineConfig
from plait.convert.convert import ConversionResult, Order, convert_model
from plait.convert.plan.block_kinds import as_blocks, block_kind, factors, nibbles_of
from plait.loading.open_model import open_model
from plait.quant.bits import pack
from plait.quant.fp4 import Fp4
from plait.quant.grouped import Grouped
from tests.families import tiny
from tests.families.parity import decoder, whole, worst
from tests.families.variant import Variant

IDS = torch.arange(2, 24)
STACKS = ("gate_up_proj", "down_proj")


def drawn(seed: int = 3) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def grouped(bits: int, group: int, dtype: torch.dtype = torch.float16, **given: Any) -> Grouped:
    codes = torch.randint(0, 1 << bits, (6, 128), generator=drawn(), dtype=torch.uint8)
    scales = (torch.rand(6, 128 // group, generator=drawn()) / 8).to(dtype)
    return Grouped(pack(codes, bits), scales, given.get("zeros"), bits, group, given.get("order"))


def fp4(rows: int = 6, cols: int = 128) -> Fp4:
    codes = torch.randint(0, 256, (rows, cols // 2), generator=drawn(), dtype=torch.uint8)
    scales = torch.randint(110, 130, (rows, cols // 32), generator=drawn(), dtype=torch.uint8)
    return Fp4(codes, scales)


@pytest.mark.parametrize(
    ("value", "kind"),
    [
        (grouped(4, 32), "Q4_0"),
        (grouped(4, 128), "Q4_0"),  # a scale of many columns is in each of their blocks
        (grouped(4, 64, torch.bfloat16), "Q4_0"),
        (grouped(8, 32), "Q8_0"),
        (grouped(8, 128), "Q8_0"),
        (fp4(), "MXFP4"),
    ],
)
def test_every_number_is_the_same(value: Grouped | Fp4, kind: str) -> None:
    found = block_kind(value)
    assert found is not None
    assert found.name == kind
    assert torch.equal(as_blocks(value, found).dequantize(torch.float32), value.dequantize(torch.float32))


@pytest.mark.parametrize(
    "value",
    [
        grouped(4, 16),  # less than a block
        grouped(5, 32),
        grouped(4, 32, torch.float32),  # scales that float16 would round
        grouped(4, 32, zeros=torch.full((6, 4), 7, dtype=torch.uint8)),
        grouped(4, 32, order=torch.arange(128).flip(0).int()),
        Fp4(fp4().codes, fp4().scales, torch.tensor([0.5])),
        torch.zeros(4, 32),
    ],
)
def test_what_would_be_rounded_has_no_counterpart(value: Grouped | Fp4 | Tensor) -> None:
    assert block_kind(value) is None


def test_and_back_in_the_order_of_neighbours() -> None:
    value = fp4()
    codes, scales = nibbles_of(as_blocks(value, block_kind(value)), 1)  # type: ignore[arg-type]
    assert torch.equal(codes, value.codes)
    assert torch.equal(scales.squeeze(2), value.scales)


def run(model: Path, out: Path, **given: Any) -> ConversionResult:
    return convert_model(Order(str(model), out, threads=1, **given), lambda *_: None)


def logits(path: Path) -> Tensor:
    opened = open_model(str(path), EngineConfig(device="cpu"))
    return whole(decoder(opened.resolved, opened.checkpoint), IDS)


def published(folder: Path, name: str = "gpt_oss") -> Path:
    """gpt-oss with experts in MXFP4, as it was published."""
    variant = tiny.VARIANTS[name]
    wide = Variant(variant.config, {**variant.changes, "hidden_size": 64, "intermediate_size": 32})
    tiny.write("model", folder / "model", wide)
    path = folder / "model" / "model.safetensors"
    tensors = load_file(path)
    for key in [k for k in tensors if k.endswith(STACKS)]:
        count, cols, rows = tensors.pop(key).shape
        packed = fp4(count * rows, cols)
        tensors[f"{key}_blocks"] = packed.codes.view(count, rows, cols // 32, 16)
        tensors[f"{key}_scales"] = packed.scales.view(count, rows, cols // 32)
    save_file(tensors, path, {"format": "pt"})
    config = json.loads((folder / "model" / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
    (folder / "model" / "config.json").write_text(json.dumps(config))
    return folder / "model"


def test_gpt_oss_keeps_its_bits_in_gguf_and_back(tmp_path: Path) -> None:
    model = published(tmp_path)
    result = run(model, tmp_path / "a.gguf")
    file = GgufFile(tmp_path / "a.gguf")
    assert file.metadata["general.architecture"] == "gpt-oss"
    assert {file.format_of(f"blk.0.ffn_{x}_exps.weight") for x in ("gate", "up", "down")} == {"MXFP4"}
    assert result.storages["MXFP4"] == 9
    wanted = logits(model)
    assert worst(logits(tmp_path / "a.gguf"), wanted) <= 1e-4
    back = run(tmp_path / "a.gguf", tmp_path / "b")
    assert back.storages["MXFP4"] == 6
    before, after = (load_file(folder / "model.safetensors") for folder in (model, tmp_path / "b"))
    packed = [key for key in before if key.endswith(("_blocks", "_scales"))]
    assert len(packed) == 12
    assert all(torch.equal(before[key], after[key]) for key in packed)
    config = json.loads((tmp_path / "b" / "config.json").read_text())
    assert config["quantization_config"]["quant_method"] == "mxfp4"
    assert "model.layers.0.self_attn.q_proj" in config["quantization_config"]["modules_to_not_convert"]
    assert worst(logits(tmp_path / "b"), wanted) <= 1e-4


@pytest.mark.parametrize("name", ["gpt_oss", "gpt_oss_plain"])
def test_packed_stacks_become_plain_ones_that_lie_turned(name: str, tmp_path: Path) -> None:
    model = published(tmp_path, name)
    wanted = logits(model)
    run(model, tmp_path / "a", quantize="f32")
    assert worst(logits(tmp_path / "a"), wanted) <= 1e-4
    assert "quantization_config" not in json.loads((tmp_path / "a" / "config.json").read_text())
    run(model, tmp_path / "b.gguf")
    run(tmp_path / "b.gguf", tmp_path / "b", quantize="f32")
    for made in ("b.gguf", "b"):
        assert worst(logits(tmp_path / made), wanted) <= 1e-4


def test_without_a_storage_packed_files_are_copied(tmp_path: Path) -> None:
    model = published(tmp_path)
    run(model, tmp_path / "a", shard_nbytes=20_000)
    files = list((tmp_path / "a").glob("model-*.safetensors"))
    assert len(files) > 1
    after = {key: tensor for file in files for key, tensor in load_file(file).items()}
    before = load_file(model / "model.safetensors")
    assert before.keys() == after.keys()
    assert all(torch.equal(before[key], after[key]) for key in before)
    assert json.loads((tmp_path / "a" / "config.json").read_text()) == json.loads(
        (model / "config.json").read_text()
    )


def llama(folder: Path) -> Path:
    tiny.write(
        "llama", folder / "model", Variant("LlamaConfig", {"hidden_size": 128, "intermediate_size": 256})
    )
    return folder / "model"


def test_integers_around_a_middle_zero_stay_packed_both_ways(tmp_path: Path) -> None:
    run(llama(tmp_path), tmp_path / "a", quantize="int4")
    wanted = logits(tmp_path / "a")
    there = run(tmp_path / "a", tmp_path / "b.gguf")
    assert there.storages == {"Q4_0": 21, "float32": 2}
    assert worst(logits(tmp_path / "b.gguf"), wanted) <= 1e-4
    back = run(tmp_path / "b.gguf", tmp_path / "c", quantize="int4")
    assert back.storages["int4"] == 21
    assert worst(logits(tmp_path / "c"), wanted) <= 1e-4


def test_what_is_quantized_anew_is_reported(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    run(llama(tmp_path), tmp_path / "a.gguf", quantize="q8_0")
    run(tmp_path / "a.gguf", tmp_path / "b", quantize="fp8")
    assert "21 tensors were quantized before and are so anew" in caplog.text


@pytest.mark.parametrize("storage", ["q6_k", "q5_k", "q4_k", "q8_0"])
def test_blocks_are_decoded_for_safetensors(storage: str, tmp_path: Path) -> None:
    variant = Variant("LlamaConfig", {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 1})
    tiny.write("llama", tmp_path / "model", variant)
    run(tmp_path / "model", tmp_path / "a.gguf", quantize=storage)
    result = run(tmp_path / "a.gguf", tmp_path / "b", quantize="f32")
    assert result.storages == {"float32": 9}
    assert worst(logits(tmp_path / "b"), logits(tmp_path / "a.gguf")) <= 1e-4
    result = run(tmp_path / "a.gguf", tmp_path / "c")
    assert result.storages == {"float16": 9}


def stacked(folder: Path, name: str) -> Path:
    """A checkpoint with experts in stacks, as some are published."""
    variant = tiny.VARIANTS[name]
    tiny.write(name, folder / "m", Variant(variant.config, {**variant.changes, "hidden_size": 160}))
    path, tensors, single = folder / "m" / "model.safetensors", {}, dict[str, list[Tensor]]()
    for key, tensor in load_file(path).items():
        stem, among, last = key.partition(".experts.")
        if among:
            single.setdefault(f"{stem}.experts.{last.split('.')[1]}", []).append(tensor)
        else:
            tensors[key] = tensor
    for stem in {key.rpartition(".")[0] for key in single}:
        gate, up, down = (torch.stack(single[f"{stem}.{x}_proj"]) for x in ("gate", "up", "down"))
        tensors |= {f"{stem}.gate_up_proj": torch.cat((gate, up), 1), f"{stem}.down_proj": down}
    tiny.rewrite(tensors, path)
    return folder / "m"


@pytest.mark.parametrize("name", ["qwen3_moe", "qwen3_5_moe"])
@pytest.mark.parametrize(("storage", "end"), [("fp8", "weight_scale_inv"), ("int4", "weight_packed")])
def test_stacks_of_experts_are_taken_apart_to_be_packed(
    name: str, storage: str, end: str, tmp_path: Path
) -> None:
    model = stacked(tmp_path, name)
    run(model, tmp_path / "a", quantize=storage)
    stored = load_file(tmp_path / "a" / "model.safetensors")
    layer = "model.layers.0.mlp"
    assert f"{layer}.experts.5.gate_proj.{end}" in stored
    assert not any(key.endswith(STACKS) for key in stored)
    plain = load_file(model / "model.safetensors")[f"{layer}.experts.gate_up_proj"][5, 24:]
    opened = open_model(str(tmp_path / "a"), EngineConfig(device="cpu"))
    packed = opened.checkpoint.read(f"{layer}.experts.5.up_proj.weight").dequantize(torch.float32)  # type: ignore[union-attr]
    assert 0 < float((packed - plain).abs().max()) < 0.13 * float(plain.abs().max())
    logits(tmp_path / "a")  # every tensor is used


def in_nvfp4(folder: Path, variant: Variant) -> Path:
    """Maps as modelopt packs them, each under a factor of its own."""
    tiny.write("m", folder / "m", variant)
    path = folder / "m" / "model.safetensors"
    tensors = load_file(path)
    for n, key in enumerate([k for k in tensors if k.endswith("_proj.weight")]):
        rows, cols = tensors.pop(key).shape
        scales = torch.rand(rows, cols // 16, generator=drawn(n)).to(torch.float8_e4m3fn)
        tensors[key] = fp4(rows, cols).codes
        tensors[f"{key}_scale"] = scales
        tensors[f"{key}_scale_2"] = torch.tensor(0.05 + n / 1000)
    save_file(tensors, path, {"format": "pt"})
    config = json.loads((folder / "m" / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "modelopt", "quant_algo": "NVFP4"}
    (folder / "m" / "config.json").write_text(json.dumps(config))
    return folder / "m"


SIZES = {"hidden_size": 128, "intermediate_size": 256, "moe_intermediate_size": 64, "head_dim": 32}


@pytest.mark.parametrize(("name", "maps"), [("llama", 21), ("qwen3_moe", 21)])
def test_nvfp4_keeps_its_bits_and_its_factors(name: str, maps: int, tmp_path: Path) -> None:
    variant = tiny.VARIANTS[name]
    sizes = {k: v for k, v in SIZES.items() if name != "llama" or not k.startswith("moe")}
    model = in_nvfp4(tmp_path, Variant(variant.config, {**variant.changes, **sizes}))
    result = run(model, tmp_path / "a.gguf")
    assert result.storages["NVFP4"] == maps
    wanted = logits(model)
    assert worst(logits(tmp_path / "a.gguf"), wanted) <= 1e-4
    again = run(tmp_path / "a.gguf", tmp_path / "b.gguf")
    assert again.storages["NVFP4"] == maps
    assert torch.equal(logits(tmp_path / "b.gguf"), logits(tmp_path / "a.gguf"))
    stored = {tensor.name: tensor for tensor in gguf.GGUFReader(tmp_path / "b.gguf").tensors}
    last = "ffn_down_exps" if name == "qwen3_moe" else "ffn_down"
    assert stored[f"blk.0.{last}.weight"].tensor_type.name == "NVFP4"
    assert len(stored[f"blk.0.{last}.scale"].data) == (6 if name == "qwen3_moe" else 1)


def test_several_factors_in_one_matrix_are_not_lost() -> None:
    one, other = (
        Fp4(torch.zeros(4, 32, dtype=torch.uint8), torch.ones(4, 4).to(torch.float8_e4m3fn), by)
        for by in (torch.tensor([2.0]), torch.tensor([2.0, 2.0, 3.0, 3.0]))
    )
    assert factors([one, one], 1).tolist() == [2.0]  # type: ignore[union-attr]
    assert factors([one, other], 1) is None
    assert factors([one, other], 4).tolist() == [2.0, 2.0, 2.0, 3.0]  # type: ignore[union-attr]
    assert factors([one, torch.zeros(4, 64)], 1) is None
