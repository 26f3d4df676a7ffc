"""Files of any model: what llama.cpp has no architecture for is GGUF under its own names, and comes back."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from safetensors.torch import load_file

from plait.checkpoint.readers.gguf import GgufFile
from plait.checkpoint.readers.gguf_metadata import CONFIG, MAX_NAME_BYTES, NAMES, own_config, restore_names
from plait.config import EngineConfig
from plait.convert import convert as conversion
from plait.convert.convert import ConversionResult, Order, convert_model
from plait.errors import BadFile, ConfigError, PlaitError, UnsupportedFormat
from plait.loading.open_model import open_model, with_values
from plait.loading.probe.cache import Findings, write_findings
from tests.convert.words import byte_level
from tests.families import (
    tiny,
    tiny_bare,
    tiny_dense,
    tiny_inside,
    tiny_mixers,
    tiny_moe,
    tiny_more,
    tiny_plain,
)
from tests.families.gguf.test_config import OLD
from tests.families.parity import decoder, whole, worst
from tests.families.variant import Variant

IDS = torch.arange(2, 24)
SAYABLE = {
    *(*OLD, "falcon_heads", "gpt2", "ernie4_5", "olmo", "nemotron", "jais2", "stablelm", "stablelm_wide"),
    *("hunyuan", "exaone4_whole", "minimax_m2", "ernie4_5_moe", "minicpm3", "hy_v3", "hunyuan_moe"),
    *(
        "ernie_vl",
        "hunyuan_vl",
        "granite_docling",
        "qwen2_5_omni",
        "qwen3_omni",
        "qwen3_vl",
        "granite4_vision",
    ),
}
NO_ARCHITECTURE = (
    *("zamba2", "zamba2_plain", "olmo_hybrid", "olmo_hybrid_nope", "recurrent_gemma", "recurrent_gemma_wide"),
    *("ministral", "qwen2_window", "gpt_oss_plain", "smollm3", "starcoder2", "cohere2_plain"),
    *("falcon_mamba", "minimax_factors", "mistral4", "hrm_text", "muse_glimmer", *tiny_mixers.VARIANTS),
    *("dory", "dory_once", "sarvam_mla", "lara_mini", "glm4v", "hy_v4_vl", "mistral_large4", "muse_spark"),
    *({*tiny_inside.VARIANTS} - SAYABLE),
    *({*tiny_dense.VARIANTS, *tiny_moe.VARIANTS, *tiny_more.VARIANTS, *tiny_plain.VARIANTS} - SAYABLE),
)
# In GGUF they are Granite hybrids of which a share of each head turns; of transformers' whole heads do.
ONE_WAY = ("bamba", "bamba_plain")
FAST = ("zamba2", "olmo_hybrid", "recurrent_gemma", "ministral", "gpt_oss_plain", "minimax_factors")
FAST_TOO = ("llama_dynamic", "qwen3_moe", "granite_moe", "gpt_oss")  # which llama.cpp has an architecture for
# Numbers change where a format keeps them otherwise. Under their own names none do; but torch's products of
# a few rows have other last bits where memory is aligned otherwise, as that of an expert in a stack is.
NEAR, SAME = 1e-4, 1e-5


def run(model: Path, out: Path, **given: Any) -> ConversionResult:
    return convert_model(Order(str(model), out, threads=1, **given), lambda *_: None)


def logits(path: Path) -> torch.Tensor:
    opened = open_model(str(path), EngineConfig(device="cpu"))
    return whole(decoder(opened.resolved, opened.checkpoint), IDS)


def near(found: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((found - wanted).square().mean().sqrt() / wanted.square().mean().sqrt())


def made(name: str, folder: Path, variants: Mapping[str, Variant] | None = None) -> Path:
    tiny.write(name, folder / name, (variants or tiny.VARIANTS)[name])
    (folder / name / "oracle.pt").unlink()
    return folder / name


def marked(names: list[str]) -> list[Any]:
    """The costly ones wait for those who ask for them."""
    fast = {*FAST, *FAST_TOO}
    return [name if name in fast else pytest.param(name, marks=pytest.mark.slow) for name in names]


@pytest.mark.parametrize("name", marked(list(tiny.VARIANTS)))
def test_every_model_becomes_gguf_and_safetensors_again(name: str, tmp_path: Path) -> None:
    model = made(name, tmp_path)
    wanted = logits(model)
    first = run(model, tmp_path / "a.gguf")
    file = GgufFile(tmp_path / "a.gguf")
    is_own = name in NO_ARCHITECTURE
    assert (file.metadata["general.architecture"] == "plait") is is_own
    assert (
        any(note.startswith("only Plait reads this file: llama.cpp has no") for note in first.notes) is is_own
    )
    limit = SAME if is_own else NEAR
    assert worst(logits(tmp_path / "a.gguf"), wanted) <= limit
    if name in ONE_WAY:
        with pytest.raises(
            UnsupportedFormat, match=r"granitemoehybrid cannot say layers\.1\.0\.mixer\.rope\.dim"
        ):
            run(tmp_path / "a.gguf", tmp_path / "b", quantize="f32")
        return
    last = run(tmp_path / "a.gguf", tmp_path / "b", quantize="f32")
    assert last.notes == ()
    assert worst(logits(tmp_path / "b"), wanted) <= limit
    if is_own:
        before, after = (load_file(folder / "model.safetensors") for folder in (model, tmp_path / "b"))
        before = {key: value for key, value in before.items() if value.dim() <= 4}  # as many as GGUF has
        assert before.keys() == after.keys()
        assert all(torch.equal(before[key], after[key].view(before[key].shape)) for key in before)
        config = json.loads((tmp_path / "b" / "config.json").read_text())
        wanted_config = json.loads((model / "config.json").read_text())
        assert {k: v for k, v in config.items() if "dtype" not in k} == {
            k: v for k, v in wanted_config.items() if "dtype" not in k
        }


def test_what_is_next_to_a_text_model_is_copied_or_named_as_left_out(tmp_path: Path) -> None:
    model = made("qwen3_vl", tmp_path)
    files = load_file(model / "model.safetensors")
    sizes = {name: tensor.nbytes for name, tensor in files.items()}
    eyes = [name for name in files if "visual" in name]
    told = run(model, tmp_path / "a.gguf")
    assert told.notes == (f"text alone: {len(eyes)} tensors of visual are not written",)
    assert told.source_nbytes == sum(sizes.values()) - sum(sizes[name] for name in eyes)
    told = run(model, tmp_path / "b")
    assert told.notes == ()
    assert told.source_nbytes == told.nbytes == sum(sizes.values())


def test_the_nano_hybrid_both_ways(nano_hybrid: Path, tmp_path: Path) -> None:
    told = run(nano_hybrid, tmp_path / "a.gguf")
    assert told.notes == (
        "only Plait reads this file: llama.cpp has no architecture that says all of this oxidizr model",
    )
    run(tmp_path / "a.gguf", tmp_path / "b")  # bfloat16, as it was
    wanted = logits(nano_hybrid)
    assert worst(logits(tmp_path / "a.gguf"), wanted) == 0
    assert worst(logits(tmp_path / "b"), wanted) == 0
    text = "def f(x):\n    return x + 1  # tëst"
    first, second, third = (
        open_model(str(path), EngineConfig()) for path in (nano_hybrid, tmp_path / "a.gguf", tmp_path / "b")
    )
    assert second.is_oxidizr
    for one in (second, third):
        assert one.tokenizer().encode(text) == first.tokenizer().encode(text)  # type: ignore[union-attr]
        assert one.language().generation_config == first.language().generation_config
        assert one.language().stop_token_ids == first.language().stop_token_ids
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        assert json.loads((tmp_path / "b" / name).read_text()) == json.loads((nano_hybrid / name).read_text())
    before, after = (load_file(folder / "model.safetensors") for folder in (nano_hybrid, tmp_path / "b"))
    before |= load_file(nano_hybrid / "mtp.safetensors")
    assert before.keys() == after.keys()
    assert all(
        before[key].dtype == after[key].dtype and torch.equal(before[key], after[key]) for key in before
    )
    source = second.resolved.provenance.values()
    assert any(CONFIG in why for why in source)
    assert not any("config.json" in why for why in source)


@pytest.mark.parametrize(("storage", "kind", "error"), [("q8_0", "Q8_0", 0.06), ("q5_k", "Q5_K", 0.3)])
def test_its_maps_are_quantized_as_in_other_files(
    nano_hybrid: Path, tmp_path: Path, storage: str, kind: str, error: float
) -> None:
    result = run(nano_hybrid, tmp_path / "a.gguf", quantize=storage)
    assert result.storages[kind] > 30
    assert 0 < near(logits(tmp_path / "a.gguf"), logits(nano_hybrid)) < error
    run(tmp_path / "a.gguf", tmp_path / "b.gguf", quantize=storage)
    first, second = GgufFile(tmp_path / "a.gguf"), GgufFile(tmp_path / "b.gguf")
    assert first.metadata == second.metadata
    name = next(n for n in first.names() if first.format_of(n) == kind)
    assert torch.equal(first.read(name).data, second.read(name).data)  # type: ignore[union-attr]


def test_a_checkpoint_without_a_config_is_found_again(tmp_path: Path) -> None:
    model = made("zamba2", tmp_path, tiny_bare.VARIANTS)
    (model / "config.json").unlink()
    run(model, tmp_path / "a.gguf")
    assert CONFIG not in GgufFile(tmp_path / "a.gguf").metadata
    assert worst(logits(tmp_path / "a.gguf"), logits(model)) == 0
    run(tmp_path / "a.gguf", tmp_path / "b", quantize="f32")
    assert not (tmp_path / "b" / "config.json").exists()
    assert worst(logits(tmp_path / "b"), logits(model)) == 0


@pytest.mark.parametrize("out", ["a.gguf", "a"])
def test_what_is_set_is_written_into_the_config(out: str, tmp_path: Path) -> None:
    model = made("ministral", tmp_path)
    run(model, tmp_path / out, set=("sliding_window=3",), quantize="f32")
    opened = open_model(str(model), EngineConfig(device="cpu", set=("sliding_window=3",)))
    wanted = whole(decoder(opened.resolved, opened.checkpoint), IDS)
    assert worst(logits(tmp_path / out), wanted) == 0
    assert worst(wanted, logits(model)) > 0.01


@pytest.mark.parametrize("out", ["a.gguf", "a"])
def test_a_head_of_its_own_is_not_tied_in_the_config(out: str, tmp_path: Path) -> None:
    model = made("llama", tmp_path)
    path = model / "config.json"
    run(model, tmp_path / f"untied-{out}", quantize="f32")
    path.write_text(json.dumps({**json.loads(path.read_text()), "tie_word_embeddings": True}))
    run(model, tmp_path / out, quantize="f32")
    assert worst(logits(tmp_path / out), logits(tmp_path / f"untied-{out}")) == 0
    if out == "a":
        assert json.loads((tmp_path / out / "config.json").read_text())["tie_word_embeddings"] is False


def test_what_a_probe_found_is_written_into_the_config(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = made("llama", tmp_path)
    (model / "config.json").unlink()
    opened = open_model(str(model), EngineConfig(device="cpu"))
    found = replace(opened, resolved=with_values(opened, {"rope_theta": 77_000.0}))
    monkeypatch.setattr(conversion, "open_model", lambda *_: found)
    for out in ("a", "a.gguf"):
        run(model, tmp_path / out)
    monkeypatch.undo()
    assert json.loads((tmp_path / "a" / "config.json").read_text()) == {"rope_theta": 77_000.0}
    wanted = whole(decoder(found.resolved, found.checkpoint), IDS)
    assert worst(wanted, logits(model)) > 0.01
    for out in ("a", "a.gguf"):
        assert worst(logits(tmp_path / out), wanted) <= NEAR


def test_what_a_probe_found_about_a_gguf_file_is_read(tmp_path: Path) -> None:
    model = made("zamba2", tmp_path)
    (model / "config.json").unlink()
    run(model, tmp_path / "a.gguf")
    bare = open_model(str(tmp_path / "a.gguf"), EngineConfig(device="cpu"))
    found = Findings({"rope_theta": 77_000.0}, {"rope_theta": 1.0}, 2.0, 200)
    assert write_findings(bare.files, bare.checkpoint, None, found) == tmp_path / "a.plait.json"
    probed = open_model(str(tmp_path / "a.gguf"), EngineConfig(device="cpu")).resolved
    assert probed.config["rope_theta"] == 77_000.0
    assert probed.provenance["rope_theta"].startswith("probed")
    run(tmp_path / "a.gguf", tmp_path / "b.gguf")  # which says it from now on
    assert json.loads(GgufFile(tmp_path / "b.gguf").metadata[CONFIG]) == {"rope_theta": 77_000.0}


def test_what_is_set_of_a_gguf_file_is_in_the_next(tmp_path: Path) -> None:
    model = made("llama", tmp_path)
    run(model, tmp_path / "a.gguf")
    for change, architecture in (("rope_theta=500.0", "llama"), ('hidden_act="relu"', "plait")):
        run(tmp_path / "a.gguf", tmp_path / "b.gguf", set=(change,), force=True)
        assert GgufFile(tmp_path / "b.gguf").metadata["general.architecture"] == architecture
        opened = open_model(str(tmp_path / "a.gguf"), EngineConfig(device="cpu", set=(change,)))
        wanted = whole(decoder(opened.resolved, opened.checkpoint), IDS)
        assert worst(logits(tmp_path / "b.gguf"), wanted) <= NEAR


def test_names_that_are_too_long_have_a_list(tmp_path: Path) -> None:
    model = made("zamba2", tmp_path)
    run(model, tmp_path / "a.gguf")
    long = [name for name in load_file(model / "model.safetensors") if len(name) > MAX_NAME_BYTES]
    assert long
    stored = {tensor.name for tensor in gguf.GGUFReader(tmp_path / "a.gguf").tensors}
    assert max(map(len, stored)) <= MAX_NAME_BYTES
    file = GgufFile(tmp_path / "a.gguf")
    assert sorted(file.metadata[NAMES]) == sorted(long)
    assert set(long) <= set(file.names())


@pytest.mark.parametrize(
    ("names", "why"),
    [
        (["a", "b", "c"], r"has a name for 'plait\.2', which is no tensor"),
        (["a", "a"], "two tensors have one name"),
        ([1], "must be a list of names"),
        ("a", "must be a list of names"),
    ],
)
def test_a_list_of_names_that_lies_is_refused(names: Any, why: str) -> None:
    with pytest.raises(BadFile, match=why):
        restore_names({"plait.0": 0, "plait.1": 1}, {NAMES: names})


@pytest.mark.parametrize(
    ("text", "why"), [("{", "not valid JSON"), ("[]", "must be a JSON object"), (7, "as text")]
)
def test_a_config_that_is_none_is_refused(text: Any, why: str) -> None:
    with pytest.raises(BadFile, match=rf"plait\.config.*{why}"):
        own_config({CONFIG: text})


def test_stacks_that_lie_turned_are_quantized_along_their_inputs(tmp_path: Path) -> None:
    variant = tiny.VARIANTS["gpt_oss_plain"]
    wide = Variant(variant.config, {**variant.changes, "hidden_size": 64, "intermediate_size": 32})
    model = made("m", tmp_path, {"m": wide})
    result = run(model, tmp_path / "a.gguf", quantize="q8_0")
    file = GgufFile(tmp_path / "a.gguf")
    assert file.metadata["general.architecture"] == "plait"
    stack = "model.layers.0.mlp.experts.gate_up_proj"
    assert (file.format_of(stack), file.shape(stack)) == ("Q8_0", (4, 64, 64))
    assert result.storages["Q8_0"] > 10
    plain = load_file(model / "model.safetensors")[stack]
    turned = file.read(stack).dequantize(torch.float32)  # type: ignore[union-attr]
    assert 0 < near(turned.view(4, 64, 64), plain.mT) < 0.01
    run(tmp_path / "a.gguf", tmp_path / "b", quantize="f32")  # and turned back
    assert load_file(tmp_path / "b" / "model.safetensors")[stack].shape == plain.shape
    assert worst(logits(tmp_path / "b"), logits(tmp_path / "a.gguf")) <= NEAR


def test_a_number_that_a_tensor_does_not_read_is_left_out_with_a_word(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = made("ministral", tmp_path)
    tensors = load_file(model / "model.safetensors")
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(4, dtype=torch.bool)
    tiny.rewrite(tensors, model / "model.safetensors")
    run(model, tmp_path / "a.gguf")
    assert "1 tensors that the model does not read are left out" in caplog.text
    with pytest.raises(PlaitError):
        GgufFile(tmp_path / "a.gguf").read("model.layers.0.self_attn.rotary_emb.inv_freq")
    run(model, tmp_path / "b")  # safetensors keep it
    assert torch.equal(
        load_file(tmp_path / "b" / "model.safetensors")["model.layers.0.self_attn.rotary_emb.inv_freq"],
        tensors["model.layers.0.self_attn.rotary_emb.inv_freq"],
    )


def test_a_vocabulary_that_is_named_is_the_one_that_is_written(nano_hybrid: Path, tmp_path: Path) -> None:
    (tmp_path / "words").mkdir()
    library = byte_level()
    library.save(str(tmp_path / "words" / "tokenizer.json"))
    run(nano_hybrid, tmp_path / "a.gguf", vocab=str(tmp_path / "words"))
    run(nano_hybrid, tmp_path / "b", vocab=str(tmp_path / "words" / "tokenizer.json"))
    run(tmp_path / "a.gguf", tmp_path / "c")
    run(made("llama", tmp_path), tmp_path / "d.gguf")
    run(tmp_path / "d.gguf", tmp_path / "e.gguf", vocab=str(tmp_path / "words"))  # llama.cpp's metadata, kept
    wanted = library.encode("the boat", add_special_tokens=False).ids
    for name in ("a.gguf", "b", "c", "e.gguf"):
        tokenizer = open_model(str(tmp_path / name), EngineConfig()).tokenizer()
        assert tokenizer is not None
        assert tokenizer.encode("the boat", add_special=False) == wanted


@pytest.mark.parametrize("out", ["a.gguf", "a"])
def test_a_vocabulary_without_a_file_is_not_passed_over(out: str, nano_hybrid: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"--vocab cl100k_base: .* name a tokenizer\.json"):
        run(nano_hybrid, tmp_path / out, vocab="cl100k_base")
    assert not list(tmp_path.iterdir())
