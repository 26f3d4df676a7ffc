from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from plait.config import EngineConfig
from plait.engine.admission import ServiceOptions
from plait.errors import (
    BadFile,
    CheckpointError,
    ConfigError,
    InvalidField,
    ModelNotFound,
    UnsupportedFormat,
    UnusedTensor,
)
from plait.frontend.deltas import Delta
from plait.llm.llm import LLM
from plait.loading.adapters.place import AdapterLoader, place_adapters
from plait.loading.example_gpu import try_example
from plait.loading.open_model import load_decoder, open_model
from plait.loading.target import find_used_ops, make_target
from plait.ops.chip import EXAMPLES
from plait.ops.stacked_low_rank import add_stacked_low_rank
from plait.request import SamplingParams
from tests.families import tiny
from tests.loading.adapters.made import linear_modules, write_llama, write_merged, write_peft

PROMPT = [3, 14, 15, 9, 26, 5, 35, 8, 9, 79]
GREEDY = SamplingParams(max_tokens=6, temperature=0, logprobs=3, ignore_eos=True)
OPTIONS = {
    "dtype": "float32",
    "startup_image": "off",
    "packed_cache": "off",
    "threads": 1,
    "max_model_len": 64,
}


def scores(
    llm: LLM, adapter: str = "", prompt: Sequence[int] = PROMPT
) -> tuple[tuple[int, ...], torch.Tensor]:
    (out,) = llm.generate([list(prompt)], GREEDY, adapter=adapter)
    found = out.outputs[0]
    assert found.logprobs is not None
    return tuple(found.token_ids), torch.tensor(
        [[one.logprob for one in at.values()] for at in found.logprobs]
    )


def scored(delta: Delta) -> list[tuple[int, float]]:
    ids = delta.token_ids
    assert len(delta.logprobs or ()) == len(ids)
    return [(token, one.logprob) for token, one in zip(ids, delta.logprobs or (), strict=True)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model, adapters a (all linear layers) and b (queries, rank 16), and the model with a merged."""
    root = tmp_path_factory.mktemp("adapters")
    tensors = write_llama(root / "base")
    changes = write_peft(root / "more/a", tensors, linear_modules(tensors))
    queries = [name for name in linear_modules(tensors) if "q_proj" in name]
    write_peft(root / "more/b", tensors, queries, rank=16, seed=1, dtype=torch.bfloat16)
    write_merged(root / "base", root / "merged", {name: 2.0 * change for name, change in changes.items()})
    return root


@pytest.fixture(scope="module")
def llm(folder: Path) -> Iterator[LLM]:
    named = (f"a={folder / 'more/a'}", f"b={folder / 'more/b'}")
    with LLM(str(folder / "base"), lora=named, lora_folder=str(folder / "more"), **OPTIONS) as found:
        yield found


def test_adapter_equals_the_merged_model(folder: Path, llm: LLM) -> None:
    with LLM(str(folder / "merged"), **OPTIONS) as merged:
        wanted = scores(merged)
    found = scores(llm, "a")
    assert llm.step_kind.endswith("one call") or "launches" in llm.step_kind
    assert found[0] == wanted[0]
    torch.testing.assert_close(found[1], wanted[1], rtol=1e-5, atol=1e-5)


def test_rows_do_not_depend_on_the_adapters_of_other_rows(folder: Path, llm: LLM) -> None:
    with LLM(str(folder / "base"), **OPTIONS) as plain:
        base = scores(plain)
    alone = {name: scores(llm, name) for name in ("a", "b")}
    assert torch.equal(scores(llm)[1], base[1])
    assert not torch.equal(alone["a"][1], base[1])
    names = ["a", "", "b", "a", "", "b", "b"]
    requests = [llm.front.prepare(PROMPT[i:], GREEDY) for i in range(len(names))]
    streams = [
        llm.front.submit(llm.front.prepare(PROMPT, GREEDY, terms=ServiceOptions(adapter=name)))
        for name in names
    ]
    others = [llm.front.submit(request) for request in requests]
    for name, stream in zip(names, streams, strict=True):
        found = [pair for delta in stream for pair in scored(delta)]
        wanted = alone[name] if name else base
        assert [token for token, _ in found] == list(wanted[0])
        assert [score for _, score in found] == wanted[1][:, 0].tolist()
    for other in others:
        assert not any(delta.error for delta in other)


def test_prefixes_of_adapters_are_not_shared(llm: LLM) -> None:
    prompt = [*range(20, 60)]
    first = scores(llm, "a", prompt)
    for name in ("", "b"):
        (out,) = llm.generate([prompt], GREEDY, adapter=name)
        assert out.num_cached_tokens == 0
    (again,) = llm.generate([prompt], GREEDY, adapter="a")
    assert again.num_cached_tokens >= 32
    assert tuple(again.outputs[0].token_ids) == first[0]


def test_adapters_are_loaded_and_unloaded_while_the_model_runs(folder: Path, llm: LLM) -> None:
    wanted = scores(llm, "a")
    llm.front.served_adapters.load("c", "a")
    assert torch.equal(scores(llm, "c")[1], wanted[1])
    with pytest.raises(InvalidField, match="loaded already"):
        llm.front.served_adapters.load("c", "b")
    llm.front.served_adapters.unload("c")
    with pytest.raises(ModelNotFound):
        scores(llm, "c")
    with pytest.raises(ModelNotFound):
        llm.front.served_adapters.unload("c")
    for path in ("../base", "/etc", "a/../../merged", str(folder / "base"), ""):
        with pytest.raises(ConfigError, match="not inside"):
            llm.front.served_adapters.load("d", path)
    (folder / "more/link").symlink_to(folder / "base")
    with pytest.raises(ConfigError, match="not inside"):
        llm.front.served_adapters.load("d", "link")
    with pytest.raises(InvalidField, match="a name has"):
        llm.front.served_adapters.load("d e", "a")
    llm.front.served_adapters.load("d", "b")
    assert torch.equal(scores(llm, "d")[1], scores(llm, "b")[1])
    llm.front.served_adapters.unload("d")


def test_adapter_of_another_model_is_refused_and_its_slot_stays_free(folder: Path, llm: LLM) -> None:
    tensors = {"model.layers.7.self_attn.q_proj.weight": torch.zeros(32, 32)}
    write_peft(folder / "more/foreign", tensors, ["model.layers.7.self_attn.q_proj"])
    wide = {"model.layers.0.self_attn.q_proj.weight": torch.zeros(40, 32)}
    write_peft(folder / "more/wide", wide, ["model.layers.0.self_attn.q_proj"])
    for _ in range(6):  # more often than there are slots
        with pytest.raises(UnusedTensor, match=r"no linear layer for 1 weight.*layers\.7"):
            llm.front.served_adapters.load("f", "foreign")
        with pytest.raises(CheckpointError, match=r"q: lora_A is \[4, 32\] and lora_B \[40, 4\]"):
            llm.front.served_adapters.load("f", "wide")


def test_adapters_are_refused_where_they_cannot_run(folder: Path) -> None:
    named = (f"a={folder / 'more/a'}",)
    for more, text in (
        ({"lora": named * 2}, "there twice"),
        ({"lora": ("a",)}, "NAME=PATH"),
        ({"lora": named, "max_lora_rank": 5000}, "max_lora_rank"),
        ({"max_loras": 2}, "needs lora"),
        ({"lora": (*named, f"b={folder / 'more/b'}"), "max_loras": 1}, "less than the 2"),
    ):
        with pytest.raises(ConfigError, match=text):
            LLM(str(folder / "base"), **{**OPTIONS, **more})  # type: ignore[arg-type]
    with pytest.raises(CheckpointError, match="there is no adapter"):
        LLM(str(folder / "base"), lora=("a=nowhere",), **OPTIONS)
    (folder / "x.gguf").write_bytes(b"no")
    with pytest.raises(BadFile):
        LLM(str(folder / "base"), lora=(f"a={folder / 'x.gguf'}",), **OPTIONS)


def test_a_step_of_a_gpu_with_adapters_is_one_graph(folder: Path) -> None:
    pytest.importorskip("triton", reason="Triton is not installed here")
    config = EngineConfig(lora=(f"a={folder / 'more/a'}", f"b={folder / 'more/b'}"))
    step = try_example(str(folder / "base"), config, EXAMPLES[90], lambda *_: None)
    num_layers = 2 * 4 + 1  # q, k and v are one; gate and up are, too
    assert not step.faults
    assert (step.launches["shrink_rows"], step.launches["expand_rows"]) == (num_layers, num_layers)
    for some in (config, EngineConfig(), EngineConfig(lora_folder=str(folder))):
        is_tried = add_stacked_low_rank.name in (find_used_ops(open_model(str(folder / "base"), some)) or ())
        assert is_tried is bool(some.lora or some.lora_folder), "one without a trial is not bound"


def test_adapters_of_experts_are_part_of_the_graph_and_have_memory_only_by_name(tmp_path: Path) -> None:
    pytest.importorskip("triton", reason="Triton is not installed here")
    tiny.write("qwen3_moe", tmp_path / "base")
    _, tensors, _ = tiny.read(tmp_path / "base")
    experts = [name for name in linear_modules(tensors) if ".experts." in name]
    write_peft(tmp_path / "more/a", tensors, experts)
    named, folder = (f"a={tmp_path / 'more/a'}",), str(tmp_path / "more")
    step = try_example(str(tmp_path / "base"), EngineConfig(lora=named), EXAMPLES[90], lambda *_: None)
    num_layers = len({name.split(".experts.")[0] for name in experts})
    assert not step.faults
    assert step.launches["expand_rows"] == 2 * num_layers > 0, "gate and up are one"

    opened = open_model(str(tmp_path / "base"), EngineConfig(lora_folder=folder))
    target = make_target(opened, torch.device("cpu"), EXAMPLES[90])
    place_adapters(opened, target)
    load_decoder(opened, target, lambda *_: None)
    with pytest.raises(
        UnsupportedFormat, match=r"changes experts \(model\.layers\..*name this one by --lora"
    ):
        AdapterLoader(opened, target, ()).load(1, "a")
    opened = open_model(str(tmp_path / "base"), EngineConfig(lora_folder=folder, lora=named))
    target = make_target(opened, torch.device("cpu"), EXAMPLES[90])
    loader = AdapterLoader(opened, target, place_adapters(opened, target))
    load_decoder(opened, target, lambda *_: None)
    assert loader.load(2, "a") == loader.load(1, str(tmp_path / "more/a"))
    loader.clear(2)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["nemotron_h", "bamba", "qwen3_moe", "mixtral", "deepseek_v3", "qwen3_next", "phi3"]
)
@pytest.mark.parametrize("ops", ["auto", "reference"])
def test_adapter_equals_the_merged_model_of_a_family(tmp_path: Path, name: str, ops: str) -> None:
    tiny.write(name, tmp_path / "base")
    _, tensors, _ = tiny.read(tmp_path / "base")
    changes = write_peft(tmp_path / "a", tensors, linear_modules(tensors))
    write_merged(
        tmp_path / "base", tmp_path / "merged", {name: 2.0 * change for name, change in changes.items()}
    )
    with LLM(str(tmp_path / "base"), lora=(f"a={tmp_path / 'a'}",), ops=ops, **OPTIONS) as llm:
        found = scores(llm, "a")
        assert llm.step_kind.startswith("there is no executor") or "launches" in llm.step_kind
    with LLM(str(tmp_path / "merged"), ops=ops, **OPTIONS) as merged:
        wanted = scores(merged)
    assert found[0] == wanted[0]
    torch.testing.assert_close(found[1], wanted[1], rtol=1e-5, atol=1e-5)


NANO = Path(__file__).resolve().parents[3] / "examples/nano-hybrid"


# 0: the rank of the latent, with which the product of two factors of adapters has a shape, too.
@pytest.mark.parametrize("rank", [4, 0])
@pytest.mark.parametrize("kind", ["uq", "dq", "qr", "uq|dq|qr"])
def test_adapter_of_a_factor_of_a_product_is_refused(tmp_path: Path, kind: str, rank: int) -> None:
    tensors = {name: value for file in NANO.glob("*.safetensors") for name, value in load_file(file).items()}
    modules = [name.removesuffix(".weight") for name in tensors if re.search(rf"\.w_({kind})\.", name)]
    width = next(value.shape[0] for name, value in tensors.items() if ".w_dq." in name)
    write_peft(tmp_path / "a", tensors, modules, rank=rank or width)
    wanted = (
        rf"w_({kind}): this model's files have .*attn.q as a product .* merge it by `plait convert --lora`"
    )
    with pytest.raises(UnsupportedFormat, match=wanted):
        LLM(
            str(NANO),
            lora=(f"a={tmp_path / 'a'}",),
            **{**OPTIONS, "max_lora_rank": max(64, width)},
            device="cpu",
        )
