"""`plait info MODEL --speculate …`: what drafts, from headers alone, and with --ops how it runs."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from safetensors import safe_open

from plait.cli.model_facts.drafts import draft_lines
from plait.config import EngineConfig
from plait.engine.draft_places import place_nbytes
from plait.errors import ConfigError
from plait.loading import build
from plait.loading.build import load
from plait.runner.host.mtp import MOST_KEPT
from tests.families import tiny
from tests.families.assistant_oracle import AssistantOracle
from tests.families.dflash_oracle import DFlashOracle
from tests.families.eagle_oracle import EagleOracle

Run = Callable[..., Any]
Pair = tuple[str, str]  # a model, and its head
SIZES = ("--device", "cpu", "--threads", "1", "--max-model-len", "64", "--max-num-seqs", "2")


@pytest.fixture(scope="module")
def eagle(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    folder = tmp_path_factory.mktemp("eagle")
    oracle = EagleOracle("first", folder)
    return str(oracle.trunk_folder), str(oracle.write(folder / "head"))


@pytest.fixture(scope="module")
def parallel(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    folder = tmp_path_factory.mktemp("parallel")
    oracle = EagleOracle("parallel", folder)
    return str(oracle.trunk_folder), str(oracle.write(folder / "head"))


@pytest.fixture(scope="module")
def assistant(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    oracle = AssistantOracle("shared keys", tmp_path_factory.mktemp("assistant"))
    return str(oracle.model_folder), str(oracle.head_folder)


@pytest.fixture(scope="module")
def dflash(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    folder = tmp_path_factory.mktemp("dflash")
    oracle = DFlashOracle("z-lab", folder)
    return str(oracle.trunk_folder), str(oracle.write(folder / "head"))


def show(plait: Run, pair: Sequence[str], *given: str) -> tuple[dict[str, Any], str]:
    """The facts, and the same for a reader."""
    asked = ("info", pair[0], "--speculate", pair[1], *SIZES, *given)
    as_json, text = plait(*asked, "--json"), plait(*asked)
    assert (as_json.code, text.code) == (0, 0), as_json.err + text.err
    return json.loads(as_json.out), text.out


def test_a_head_of_eagle_is_shown_from_its_headers(
    plait: Run, eagle: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(build, "load_decoder", lambda *_: pytest.fail("weights take minutes"))
    facts, text = show(plait, eagle)
    drafts = facts["drafts"]
    assert (drafts["kind"], drafts["title"]) == ("eagle3", "a head of EAGLE-3")
    assert (drafts["drafted"], drafts["vocab_size"], drafts["taps"]) == (41, 97, [2, 3, 4])
    assert drafts["weights"]["tensors"] == 15
    assert drafts["weights"]["files"] == [str(Path(eagle[1]).resolve() / "model.safetensors")]
    assert [len(group["indices"]) for group in drafts["layers"]] == [1]
    assert "draft_ops" not in facts
    assert "a head of EAGLE-3 (eagle3): head" in text
    assert "knows 41 of 97 tokens; reads the model's states before layers 2, 3, 4" in text


@pytest.mark.parametrize("kind", ["eagle", "dflash"])
def test_its_memory_is_what_is_taken_for_a_sequence(
    plait: Run, kind: str, request: pytest.FixtureRequest
) -> None:
    model, head = pair = request.getfixturevalue(kind)
    memory = show(plait, pair)[0]["drafts"]["memory"]
    config = EngineConfig(speculate=head, device="cpu", threads=1, max_model_len=64, max_num_seqs=2)
    loaded = load(model, config)
    try:
        assert loaded.drafter is not None
        assert loaded.head is not None
        assert memory["tokens"] == loaded.drafter.memory.max_len == 64
        assert memory["state"] == place_nbytes(loaded.drafter.memory, loaded.head.states, "float32")
        assert memory["kept"] == MOST_KEPT * loaded.head.width * 4
    finally:
        loaded.front.close(drain=False)


def test_ops_of_a_head_are_shown_with_how_it_runs(plait: Run, eagle: Pair) -> None:
    facts, text = show(plait, eagle, "--ops")
    found = facts["draft_ops"]
    assert found["recorded"]
    assert found["passes"].endswith("launches, one call")
    variants = {row["op"]: row["variant"] for row in found["ops"]}
    assert variants["pick_columns"] == variants["join"] == "native"
    assert variants["step"] == "recorded"
    assert 0 < found["weights_nbytes"] < facts["drafts"]["weights"]["nbytes"], "it is kept in five bits"
    assert f"passes: {found['passes']}" in text


@pytest.mark.parametrize("option", [("--block-size", "8"), ("--dtype", "bfloat16")], ids=" ".join)
def test_a_head_that_runs_op_by_op_says_why(plait: Run, eagle: Pair, option: tuple[str, str]) -> None:
    facts, text = show(plait, eagle, "--ops", *option)
    found = facts["draft_ops"]
    assert not found["recorded"]
    assert found["passes"].startswith("op by op: ")
    assert f"passes: {found['passes']}" in text
    slow = [row for row in found["ops"] if row["op"] == "paged_attention"]
    assert all("native" in row["skipped"] for row in slow), "the cause of it"


def test_a_head_of_blocks_says_how_many_it_drafts_at_once(plait: Run, dflash: Pair) -> None:
    facts, text = show(plait, dflash, "--ops")
    assert (facts["drafts"]["kind"], facts["drafts"]["title"]) == ("dflash", "a head of DFlash")
    assert facts["drafts"]["taps"]
    assert f"drafts up to {facts['drafts']['block']} at once; reads the model's states before layers " in text
    assert facts["draft_ops"]["recorded"]
    assert facts["draft_ops"]["passes"].endswith("launches, two calls")


def test_a_head_with_masks_says_how_many_it_drafts_at_once(plait: Run, parallel: Pair) -> None:
    facts, text = show(plait, parallel, "--ops")
    assert facts["drafts"]["title"] == "a head of P-EAGLE"
    assert (facts["drafts"]["block"], facts["drafts"]["block_nbytes"]) == (8, 8 * 97 * 4)
    assert "drafts up to 8 at once; reads the model's states before layers 2, 3, 4" in text
    assert facts["draft_ops"]["passes"].endswith("launches, one call")


def test_a_draft_model_of_pard_does_so_too(plait: Run, eagle: Pair, tmp_path: Path) -> None:
    shutil.copytree(eagle[0], folder := tmp_path / "pard")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"pard_token": 5}))
    facts, text = show(plait, (eagle[0], str(folder)))
    assert facts["drafts"]["title"] == "a draft model of PARD"
    assert "drafts up to 8 at once" in text


def test_an_assistant_names_the_layers_of_which_it_reads_keys(plait: Run, assistant: Pair) -> None:
    facts, text = show(plait, assistant, "--ops", "--kv-dtype", "int4")
    drafts = facts["drafts"]
    assert (drafts["taps"], drafts["keys_of"]) == ([], ["layers.1.attn", "layers.2.attn"])
    assert drafts["memory"]["state"] == 0
    assert "reads the model's states behind its last norm, and keys of layers.1.attn, layers.2.attn" in text
    assert "no state of its own, " in text
    assert "op by op: " in facts["draft_ops"]["passes"]


def test_a_head_of_the_model_has_the_tensors_of_its_file(plait: Run, nano_hybrid: Path) -> None:
    facts, text = show(plait, (str(nano_hybrid), "mtp"), "--ops")
    with safe_open(nano_hybrid / "mtp.safetensors", "pt") as file:
        own = sum(file.get_tensor(name).nbytes for name in file.keys())  # noqa: SIM118
    assert facts["drafts"]["weights"]["nbytes"] == own
    assert facts["drafts"]["kind"] == "mtp"
    assert facts["draft_ops"]["recorded"]
    assert text.count("the model's own head for multi-token prediction") == 1
    assert "(--speculate mtp)" not in text, "its layers stand once"


def test_a_draft_model_reads_tokens_alone(plait: Run, eagle: Pair) -> None:
    facts, text = show(plait, (eagle[0], eagle[0]), "--ops")
    drafts = facts["drafts"]
    assert (drafts["title"], drafts["taps"]) == ("a draft model", None)
    assert drafts["weights"]["nbytes"] == facts["checkpoint"]["nbytes"]
    assert drafts["memory"]["kept"] == 0
    assert drafts["memory"]["state"] == facts["memory"]["sequence"][0]["nbytes"] * 64 // 128
    assert {"largest", "step", "paged_attention"} <= {row["op"] for row in facts["draft_ops"]["ops"]}
    assert "knows all 97 tokens; reads tokens alone" in text


@pytest.mark.parametrize("is_head", [True, False], ids=["head", "draft model"])
def test_an_example_gpu_shows_what_drafts_there(plait: Run, eagle: Pair, *, is_head: bool) -> None:
    pair = eagle if is_head else (eagle[0], eagle[0])
    result = plait("info", pair[0], "--speculate", pair[1], "--ops", "--device", "cuda:sm_90", "--json")
    assert result.code == 0, result.err
    found = json.loads(result.out)["draft_ops"]
    assert (found["passes"], found["recorded"]) == (None, False)
    assert {row["variant"] for row in found["ops"] if row["op"] == "linear"} == {"triton"}


def test_a_head_that_does_not_fit_has_the_error_of_a_server(plait: Run, eagle: Pair, tmp_path: Path) -> None:
    tiny.write(
        "qwen3", tmp_path, replace(tiny.VARIANTS["qwen3"], changes={"vocab_size": 97, "hidden_size": 48})
    )
    for head in (eagle[1], "mtp", str(tmp_path / "nowhere")):
        with pytest.raises(ConfigError, match="speculate: ") as refused:
            load(str(tmp_path), EngineConfig(speculate=head, device="cpu", threads=1))
        result = plait("info", str(tmp_path), "--speculate", head)
        assert result.code == 2
        assert str(refused.value) in result.err


@pytest.mark.parametrize("word", ["off", "ngram"])
def test_prompts_that_draft_have_nothing_to_show(plait: Run, eagle: Pair, word: str) -> None:
    facts, text = show(plait, (eagle[0], word), "--ops")
    assert facts["drafts"] is None
    assert "draft_ops" not in facts
    assert "drafts" not in text


def test_a_head_that_drafts_all_tokens_says_so() -> None:
    weights = {"formats": {"float32": 8}, "parameters": 2, "tensors": 1}
    facts = {"title": "a head", "kind": "x", "weights": weights, "layers": [], "keys_of": [], "taps": []}
    memory = {"tokens": 4096, "state": 0, "kept": 0}
    assert [*draft_lines({**facts, "drafted": 5, "vocab_size": 5, "memory": memory})] == [
        "  a head",
        "  0.0 M parameters in 1 tensors, 8 B float32",
        "  knows all 5 tokens; reads the model's states behind its last norm",
        "  memory for a sequence of 4,096 tokens: no state of its own",
    ]
