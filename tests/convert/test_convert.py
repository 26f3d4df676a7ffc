"""Whole conversions on the disk: storages, side files, what is refused, and what is left when it fails."""

from __future__ import annotations

import errno
import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
import transformers
from safetensors.torch import load_file

from plait.checkpoint.readers.gguf import GgufFile
from plait.config import EngineConfig
from plait.convert.compare_quality import compare
from plait.convert.convert import Order, convert_model
from plait.convert.plan import output
from plait.convert.plan.output import TEMPLATES
from plait.errors import ConfigError, OutOfMemory, PlaitError
from plait.loading.open_model import open_model
from plait.text.load import template_sources
from plait.verify.tiny.models import write_named
from tests.convert.words import byte_level
from tests.families import tiny
from tests.families.parity import decoder, whole, worst

WIDE = {
    "hidden_size": 256,
    "num_attention_heads": 8,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "head_dim": 32,
}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """llama: a tiny model with rows of whole blocks, with a tokenizer and a template."""
    folder = tmp_path_factory.mktemp("models")
    torch.manual_seed(5)
    library = byte_level()
    sizes = {**tiny.SIZES, **WIDE, "vocab_size": library.get_vocab_size()}
    config = transformers.LlamaConfig(**sizes, bos_token_id=0, eos_token_id=1)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.save_pretrained(folder / "llama")
    library.save(str(folder / "llama" / "tokenizer.json"))
    words = {"bos_token": "<|begin|>", "eos_token": "<|end|>", "chat_template": "{{ messages[0].content }}"}
    (folder / "llama" / "tokenizer_config.json").write_text(json.dumps(words))
    return folder


def run(model: Path, out: Path, **given: Any) -> Any:
    return convert_model(Order(str(model), out, threads=1, **given), lambda *_: None)


def logits(path: Path) -> torch.Tensor:
    opened = open_model(str(path), EngineConfig(device="cpu"))
    return whole(decoder(opened.resolved, opened.checkpoint), torch.arange(2, 22))


def near(found: torch.Tensor, wanted: torch.Tensor) -> float:
    """The root of the mean squared difference, as a share of the expected values."""
    return float((found - wanted).square().mean().sqrt() / wanted.square().mean().sqrt())


def test_gguf_and_back_is_the_same_checkpoint(models: Path, tmp_path: Path) -> None:
    run(models / "llama", tmp_path / "a.gguf")
    run(tmp_path / "a.gguf", tmp_path / "b", quantize="f32")
    assert worst(logits(tmp_path / "a.gguf"), logits(models / "llama")) <= 1e-4
    first, last = (load_file(folder / "model.safetensors") for folder in (models / "llama", tmp_path / "b"))
    assert first.keys() == last.keys()
    assert all(torch.equal(first[key], last[key]) for key in first)
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "b", dtype=torch.float32)
    before = transformers.AutoModelForCausalLM.from_pretrained(models / "llama", dtype=torch.float32)
    ids = torch.arange(2, 22)[None]
    with torch.no_grad():
        assert torch.equal(again(ids).logits, before(ids).logits)


def test_words_and_template_come_along_both_ways(models: Path, tmp_path: Path) -> None:
    run(models / "llama", tmp_path / "a.gguf", quantize="q8_0")
    run(tmp_path / "a.gguf", tmp_path / "b")
    text = "It's 2024: hello, wörld!\n\n  done"
    opened = [
        open_model(str(p), EngineConfig()) for p in (models / "llama", tmp_path / "a.gguf", tmp_path / "b")
    ]
    first, *others = (one.tokenizer() for one in opened)
    for one in others:
        assert one.encode(text) == first.encode(text)
        assert one.eos_token_ids == first.eos_token_ids
    templates = [template_sources(one.text_directory, one.metadata) for one in opened]
    assert templates == [{"default": "{{ messages[0].content }}"}] * 3
    assert opened[1].metadata["tokenizer.ggml.pre"] == "llama-bpe"


@pytest.mark.parametrize(
    ("storage", "kind", "error"),
    [("bf16", "bfloat16", 0.01), ("q8_0", "Q8_0", 0.02), ("q5_k", "Q5_K", 0.1), ("q4_0", "Q4_0", 0.4)],
)
def test_a_storage_of_gguf_costs_what_it_costs(
    models: Path, tmp_path: Path, storage: str, kind: str, error: float
) -> None:
    result = run(models / "llama", tmp_path / "a.gguf", quantize=storage)
    assert result.storages[kind] == (16 if storage in ("bf16", "q8_0") else 14)
    file = GgufFile(tmp_path / "a.gguf")
    ends = {file.format_of("token_embd.weight"), file.format_of("output.weight")}
    assert ends == {kind if storage in ("bf16", "q8_0") else "Q6_K"}
    assert file.format_of("blk.0.attn_norm.weight") == "float32"
    found = near(logits(tmp_path / "a.gguf"), logits(models / "llama"))
    assert error / 40 < found < error


def test_the_library_reads_what_is_written(models: Path, tmp_path: Path) -> None:
    run(models / "llama", tmp_path / "a.gguf", quantize="q4_k")
    reader = gguf.GGUFReader(tmp_path / "a.gguf")
    assert reader.fields["general.architecture"].contents() == "llama"
    assert reader.fields["llama.block_count"].contents() == 2
    stored = {t.name: t for t in reader.tensors}
    assert stored["blk.1.ffn_down.weight"].tensor_type.name == "Q4_K"
    assert list(stored["blk.1.ffn_down.weight"].shape) == [512, 256]


def test_another_storage_of_a_gguf_keeps_everything_else(models: Path, tmp_path: Path) -> None:
    run(models / "llama", tmp_path / "a.gguf")
    run(tmp_path / "a.gguf", tmp_path / "b.gguf", quantize="q8_0")
    run(tmp_path / "b.gguf", tmp_path / "c.gguf")  # as it is: the same bytes
    first, second, third = (GgufFile(tmp_path / f"{name}.gguf") for name in "abc")
    own = {"general.file_type"}
    assert {k: v for k, v in first.metadata.items() if k not in own} == {
        k: v for k, v in second.metadata.items() if k not in own
    }
    assert first.value_types == second.value_types
    assert list(first.names()) == list(second.names())
    assert torch.equal(second.read("blk.0.attn_q.weight").data, third.read("blk.0.attn_q.weight").data)


@pytest.mark.parametrize(
    ("storage", "method", "error"), [("fp8", "fp8", 0.1), ("int4", "compressed-tensors", 0.25)]
)
def test_packed_safetensors_are_read_again(
    models: Path, tmp_path: Path, storage: str, method: str, error: float
) -> None:
    result = run(models / "llama", tmp_path / "a", quantize=storage)
    assert sum(result.storages.values()) == 16
    config = json.loads((tmp_path / "a" / "config.json").read_text())
    assert config["quantization_config"]["quant_method"] == method
    assert (tmp_path / "a" / "tokenizer.json").exists()
    assert result.nbytes < 0.7 * result.source_nbytes
    found = near(logits(tmp_path / "a"), logits(models / "llama"))
    assert error / 20 < found < error


@pytest.mark.parametrize("storage", ["bf16", "fp8"])
def test_tables_of_experts_stay_whole_numbers(tmp_path: Path, storage: str) -> None:
    write_named("compressed", tmp_path / "a")
    run(tmp_path / "a", tmp_path / "b", quantize=storage)
    first, last = (load_file(tmp_path / name / "model.safetensors") for name in "ab")
    tables = [name for name in first if name.endswith("tid2eid")]
    assert len(tables) == 2
    for name in tables:
        assert last[name].dtype is torch.int64
        assert torch.equal(last[name], first[name])


def test_large_models_are_written_in_several_files(models: Path, tmp_path: Path) -> None:
    run(models / "llama", tmp_path / "a", quantize="bf16", shard_nbytes=1_000_000)
    assert len(list((tmp_path / "a").glob("model-*-of-*.safetensors"))) > 2
    assert near(logits(tmp_path / "a"), logits(models / "llama")) < 0.01


def test_both_sides_are_compared_on_a_text(models: Path, tmp_path: Path) -> None:
    order = Order(str(models / "llama"), tmp_path / "a.gguf", quantize="q4_0", threads=1)
    convert_model(order, lambda *_: None)
    found = compare(order, lambda *_: None, ops="reference")
    assert found.tokens == 128  # the longest that it can read
    assert found.before is not None
    assert found.after is not None
    assert found.before > 100
    assert abs(found.after / found.before - 1) < 0.1
    assert 0 < found.kl_mean < found.kl_p99 < 1


@pytest.mark.parametrize(
    ("given", "out", "why"),
    [
        (
            {"to": "safetensors", "quantize": "q4_k"},
            "a",
            "q4_k: only GGUF has this storage .*--to safetensors holds int4, fp8, f32",
        ),
        ({"quantize": "int4"}, "a.gguf", "int4: only safetensors have this storage; --to gguf holds q8_0"),
        ({"quantize": "q9"}, "a.gguf", "q9 is not known; --to gguf holds q8_0"),
        ({"to": "safetensors"}, "a.gguf", "a name for GGUF"),
        ({}, "a.safetensors", "written into a directory"),
        ({}, "nowhere/a.gguf", "nowhere is no directory"),
    ],
)
def test_what_cannot_be_is_reported_before_anything_is_written(
    models: Path, tmp_path: Path, given: dict[str, Any], out: str, why: str
) -> None:
    with pytest.raises(ConfigError, match=why):
        run(models / "llama", tmp_path / out, **given)
    assert list(tmp_path.iterdir()) == []


def test_what_is_there_is_replaced_only_by_force_and_never_itself(models: Path, tmp_path: Path) -> None:
    run(models / "llama", tmp_path / "a", quantize="bf16")
    with pytest.raises(ConfigError, match="exists; --force replaces it"):
        run(models / "llama", tmp_path / "a")
    run(models / "llama", tmp_path / "a", quantize="f32", force=True)
    assert load_file(tmp_path / "a" / "model.safetensors")["lm_head.weight"].dtype is torch.float32
    with pytest.raises(ConfigError, match="that is the model itself"):
        run(tmp_path / "a", tmp_path / "a", force=True)
    (tmp_path / "a" / "diary.doc").write_text("mine")
    with pytest.raises(ConfigError, match=r"holds more than a model \(diary\.doc\)"):
        run(models / "llama", tmp_path / "a", force=True)
    assert [p.name for p in tmp_path.iterdir()] == ["a"]


def test_templates_with_names_come_along_and_may_be_replaced(models: Path, tmp_path: Path) -> None:
    shutil.copytree(models / "llama", tmp_path / "a")
    (tmp_path / "a" / TEMPLATES).mkdir()
    (tmp_path / "a" / TEMPLATES / "tool_use.jinja").write_text("named")
    for _ in range(2):
        run(tmp_path / "a", tmp_path / "b", quantize="f32", force=True)
        assert (tmp_path / "b" / TEMPLATES / "tool_use.jinja").read_text() == "named"
    (tmp_path / "b" / TEMPLATES / "diary.doc").write_text("mine")
    with pytest.raises(ConfigError, match=rf"holds more than a model \({TEMPLATES}\)"):
        run(tmp_path / "a", tmp_path / "b", force=True)


def test_modules_behind_the_model_come_along_and_may_be_replaced(models: Path, tmp_path: Path) -> None:
    """Without them a converted model of vectors could not be loaded: modules.json names their folders."""
    shutil.copytree(models / "llama", tmp_path / "a")
    modules = [{"type": "x.Pooling", "path": "1_Pooling"}, {"type": "x.Dense", "path": "../outside"}]
    (tmp_path / "a" / "modules.json").write_text(json.dumps(modules))
    (tmp_path / "in").mkdir()
    for name in ("a/1_Pooling", "outside"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text('{"pooling_mode": "mean"}')
    for _ in range(2):
        run(tmp_path / "a", tmp_path / "in" / "b", quantize="f32", force=True)
        assert "mean" in (tmp_path / "in" / "b" / "1_Pooling" / "config.json").read_text()
    assert [path.name for path in (tmp_path / "in").iterdir()] == ["b"], "nothing is written elsewhere"
    (tmp_path / "in" / "b" / "1_Pooling" / "diary.doc").write_text("mine")
    with pytest.raises(ConfigError, match=r"holds more than a model \(1_Pooling\)"):
        run(tmp_path / "a", tmp_path / "in" / "b", force=True)


def failing(error: BaseException) -> Callable[..., None]:
    """Progress that fails in the middle."""
    steps: Iterator[int] = iter(range(100))

    def progress(*_: Any) -> None:
        if next(steps) == 5:
            raise error

    return progress


@pytest.mark.parametrize("out", ["a.gguf", "a"])
@pytest.mark.parametrize(
    ("error", "told"),
    [
        (OSError(errno.ENOSPC, "No space left on device"), OutOfMemory),
        (OSError(errno.EFBIG, "File too large"), OutOfMemory),
        (KeyboardInterrupt(), KeyboardInterrupt),
        (RuntimeError("a fault"), RuntimeError),
    ],
)
def test_nothing_is_left_when_it_fails(
    models: Path, tmp_path: Path, out: str, error: BaseException, told: type[BaseException]
) -> None:
    (tmp_path / out).mkdir() if out == "a" else (tmp_path / out).write_text("before")
    with pytest.raises(told):
        convert_model(Order(str(models / "llama"), tmp_path / out, force=True, threads=1), failing(error))
    assert [p.name for p in tmp_path.iterdir()] == [out]
    if out != "a":
        assert (tmp_path / out).read_text() == "before"


def test_a_disk_that_is_too_small_is_reported_first(
    models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Usage:
        free = 1000

    monkeypatch.setattr(output.shutil, "disk_usage", lambda _: Usage)
    with pytest.raises(OutOfMemory, match="GiB are free there"):
        run(models / "llama", tmp_path / "a.gguf")
    assert list(tmp_path.iterdir()) == []


def test_numbers_beyond_float16_are_refused_by_name(models: Path, tmp_path: Path) -> None:
    tensors = load_file(models / "llama" / "model.safetensors")
    tensors["model.layers.0.mlp.up_proj.weight"][3, 3] = 1e6
    (tmp_path / "large").mkdir()
    tiny.rewrite(tensors, tmp_path / "large" / "model.safetensors")
    (tmp_path / "large" / "config.json").write_bytes((models / "llama" / "config.json").read_bytes())
    for storage, why in (("f16", "beyond float16"), ("q4_0", "largest number is 1")):
        with pytest.raises(PlaitError, match=rf"blk\.0\.ffn_up\.weight.*{why}"):
            run(tmp_path / "large", tmp_path / "a.gguf", quantize=storage)


@pytest.mark.parametrize("storage", ["int4", "fp8"])
def test_without_a_config_packed_weights_are_found_by_their_tensors(
    models: Path, tmp_path: Path, storage: str
) -> None:
    (tmp_path / "bare").mkdir()
    (tmp_path / "bare" / "model.safetensors").symlink_to(models / "llama" / "model.safetensors")
    result = run(tmp_path / "bare", tmp_path / "a", quantize=storage)
    (note,) = result.notes
    assert note.startswith("only Plait, which looks at the tensors, reads this")
    assert note.endswith(f"no config.json to tell others of {storage}")
    assert not (tmp_path / "a" / "config.json").exists()
    run(models / "llama", tmp_path / "b", quantize=storage)
    plain = logits(tmp_path / "bare")
    assert (
        0
        < near(logits(tmp_path / "a"), plain)
        < 1.01 * near(logits(tmp_path / "b"), logits(models / "llama"))
    )
