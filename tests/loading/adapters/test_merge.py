from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import gguf
import pytest
import torch
from safetensors.torch import load_file, save_file

from plait.checkpoint.adapters.adapter_file import FactorPair
from plait.checkpoint.adapters.gguf_adapter import open_gguf
from plait.checkpoint.adapters.peft import open_peft
from plait.checkpoint.readers.safetensors import SafetensorsFiles
from plait.convert.convert import Order, convert_model
from plait.errors import BadFile, ShapeMismatch, UnsupportedFormat, UnusedTensor
from plait.llm.llm import LLM
from plait.loading.adapters.merge import MergedTensors
from tests.families.as_gguf import permuted
from tests.loading.adapters.made import linear_modules, write_llama, write_peft
from tests.loading.adapters.test_place import OPTIONS, scores


def silent(what: str, done: int, total: int) -> None:
    pass


def test_convert_merges_an_adapter_into_the_weights(tmp_path: Path) -> None:
    tensors = write_llama(tmp_path / "base")
    changes = write_peft(tmp_path / "a", tensors, linear_modules(tensors))
    convert_model(Order(str(tmp_path / "base"), tmp_path / "out", lora=tmp_path / "a"), silent)
    found = load_file(tmp_path / "out/model.safetensors")
    assert found.keys() == tensors.keys()
    for name, value in tensors.items():
        change = changes.get(name.removesuffix(".weight"))
        torch.testing.assert_close(found[name], value if change is None else value + 2.0 * change)


def test_convert_refuses_to_merge_an_adapter_of_another_model(tmp_path: Path) -> None:
    write_llama(tmp_path / "base")
    for module, size, kind in (
        ("model.layers.9.x", (32, 32), UnusedTensor),
        ("lm_head", (9, 32), ShapeMismatch),
    ):
        write_peft(tmp_path / module, {f"{module}.weight": torch.zeros(size)}, [module])
        with pytest.raises(kind, match=module):
            convert_model(Order(str(tmp_path / "base"), tmp_path / "out", lora=tmp_path / module), silent)
    assert not (tmp_path / "out").exists()


def write_gguf(
    path: Path, tensors: dict[str, torch.Tensor], alpha: object = 8.0, kind: str = "adapter"
) -> Path:
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_string("general.type", kind)
    writer.add_string("adapter.type", "lora")
    if isinstance(alpha, float):
        writer.add_float32("adapter.lora.alpha", alpha)
    for name, value in tensors.items():
        writer.add_tensor(name, value.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.slow
def test_gguf_adapter_and_peft_adapter_of_a_model_in_gguf_are_the_merged_model(tmp_path: Path) -> None:
    tensors = write_llama(tmp_path / "base")
    words = {"self_attn.q_proj": "attn_q", "self_attn.v_proj": "attn_v", "mlp.down_proj": "ffn_down"}
    modules = [name for name in linear_modules(tensors) if name.endswith(tuple(words))]
    write_peft(tmp_path / "a", tensors, modules)
    for order in (
        Order(str(tmp_path / "base"), tmp_path / "base.gguf"),
        Order(str(tmp_path / "base"), tmp_path / "merged.gguf", lora=tmp_path / "a"),
    ):
        convert_model(order, silent)
    theirs = dict[str, torch.Tensor]()
    for name, value in load_file(tmp_path / "a/adapter_model.safetensors").items():
        number, _, rest = name.partition(".layers.")[2].partition(".")
        module, _, which = rest.removesuffix(".weight").partition(".lora_")
        is_moved = (module, which) == ("self_attn.q_proj", "B")
        theirs[f"blk.{number}.{words[module]}.weight.lora_{which.lower()}"] = (
            permuted(value, 4) if is_moved else value
        )
    write_gguf(tmp_path / "a.gguf", theirs)
    with LLM(str(tmp_path / "merged.gguf"), **OPTIONS) as merged:
        wanted = scores(merged)
    named = (f"g={tmp_path / 'a.gguf'}", f"p={tmp_path / 'a'}")
    with LLM(str(tmp_path / "base.gguf"), lora=named, **OPTIONS) as llm:
        for name in ("g", "p"):
            found = scores(llm, name)
            assert found[0] == wanted[0]
            torch.testing.assert_close(found[1], wanted[1], rtol=1e-5, atol=1e-5)
    with pytest.raises(UnsupportedFormat, match="is for a model in GGUF"):
        LLM(str(tmp_path / "base"), lora=named, **OPTIONS)


def test_gguf_file_that_is_no_adapter_is_one_line(tmp_path: Path) -> None:
    good = {
        "blk.0.attn_v.weight.lora_a": torch.zeros(4, 32),
        "blk.0.attn_v.weight.lora_b": torch.zeros(16, 4),
    }
    assert open_gguf(write_gguf(tmp_path / "x", good), 8).pairs["blk.0.attn_v.weight"].scale == 2.0
    for tensors, alpha, kind, error in (
        (good, 8.0, "model", UnsupportedFormat),
        (good, None, "adapter", BadFile),
        (good, float("inf"), "adapter", BadFile),
        ({"token_embd.weight.lora_a": torch.zeros(4, 32)}, 8.0, "adapter", UnsupportedFormat),
        ({"blk.0.attn_v.weight": torch.zeros(4, 32)}, 8.0, "adapter", UnsupportedFormat),
        ({"blk.0.attn_v.weight.lora_a": torch.zeros(9, 32)}, 8.0, "adapter", ShapeMismatch),
        ({"blk.0.attn_v.weight.lora_a": torch.zeros(4, 32)}, 8.0, "adapter", BadFile),
    ):
        with pytest.raises(error) as found:
            open_gguf(write_gguf(tmp_path / "y", tensors, alpha, kind), 8)
        assert "\n" not in str(found.value)


def test_an_adapter_is_merged_under_older_and_newer_names_of_a_text_model_inside_another(
    tmp_path: Path,
) -> None:
    """Files of Qwen2.5-VL have names of transformers 4 ("plain"); adapters are trained with those of 5."""
    tensors = write_llama(tmp_path / "base")
    module = "model.layers.1.self_attn.q_proj"
    write_peft(tmp_path / "a", tensors, [module, "lm_head"])
    stored = {
        "plain": dict(tensors),
        "old": {name.replace("model.", "language_model.model.", 1): t for name, t in tensors.items()},
        "new": {name.replace("model.", "model.language_model.", 1): t for name, t in tensors.items()},
    }
    for form, files in stored.items():
        files["visual.proj.weight"] = torch.zeros(8, 32)
        save_file(files, tmp_path / f"{form}.safetensors")
        for other in ("language_model.model.", "model.language_model.", "model."):
            adapter = open_peft(tmp_path / "a", 8)
            renamed = {name.replace("model.", other, 1): pair for name, pair in adapter.pairs.items()}
            down, up = torch.ones(1, 32), torch.ones(8, 1)
            renamed["model.visual.proj.weight"] = FactorPair(down, up, 1.0)
            merged = MergedTensors(
                SafetensorsFiles(tmp_path / f"{form}.safetensors"), replace(adapter, pairs=renamed)
            )
            changed = [name for name, value in files.items() if not torch.equal(merged.read(name), value)]
            assert len(changed) == 3
            ends = ("layers.1.self_attn.q_proj.weight", "lm_head.weight", "visual.proj.weight")
            assert all(name.endswith(ends) for name in changed)


def test_an_adapter_with_one_tensor_under_two_names_is_refused(tmp_path: Path) -> None:
    tensors = write_llama(tmp_path / "base")
    write_peft(tmp_path / "a", tensors, ["lm_head"])
    adapter = open_peft(tmp_path / "a", 8)
    (pair,) = adapter.pairs.values()
    twice = replace(adapter, pairs={"lm_head.weight": pair, "language_model.lm_head.weight": pair})
    with pytest.raises(BadFile, match=r"one tensor of the model: .*language_model.lm_head"):
        MergedTensors(SafetensorsFiles(tmp_path / "base/model.safetensors"), twice)
