"""`plait info --probe`: what was tried, what was chosen, and that it stays."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from plait.cli.common.probe_table import probe_rows, values_text
from plait.families import llama
from plait.families.detect import sizes
from tests.loading.test_probe_scorer import OLD_WORDS, bare

Run = Callable[..., Any]


@pytest.fixture
def words(tmp_path: Path) -> str:
    path = tmp_path / "words.txt"
    path.write_text(OLD_WORDS, "utf-8")
    return str(path)


def test_a_row_says_what_set_would_take_and_why_it_was_chosen() -> None:
    tried = [
        {"values": {"head_dim": 64}, "tokens": 128, "loss": 2.5, "chosen": True},
        {"values": {"head_dim": 32}, "tokens": 128, "loss": 9.75, "chosen": False},
        {"values": {"head_dim": 7}, "tokens": 128, "loss": None, "chosen": False, "error": "7 is odd"},
    ]
    quantity = {"name": "head_dim", "tried": tried, "margin": 7.25, "sure": True}
    assert probe_rows({"quantities": [quantity]}) == [
        ("→", "head_dim=64", "2.500", "margin 7.2 nats on 128 tokens"),
        ("", "head_dim=32", "9.750", ""),
        ("", "head_dim=7", "–", "cannot be: 7 is odd"),
    ]
    (first, *_) = probe_rows({"quantities": [{**quantity, "sure": False}]})
    assert first[3] == "margin 7.2 nats on 128 tokens, within chance"
    (first, *_) = probe_rows({"quantities": [{**quantity, "margin": None}]})
    assert first[3] == "nothing depends on it"


def test_long_values_are_cut() -> None:
    assert values_text({"a": 1, "b": [2.5]}) == "a=1 b=[2.5]"
    assert len(values_text({"rope_scaling": {"factor": 8.0, "rope_type": "y" * 80}})) == 60


@pytest.mark.slow
def test_a_probe_is_shown_kept_and_used(plait: Run, nano_hybrid: Path, tmp_path: Path, words: str) -> None:
    model = str(bare(nano_hybrid, tmp_path / "model"))
    shown = plait("info", model, "--cpu", "--probe-text", words)
    assert shown.code == 0, shown.err
    assert re.search(r"^  → +experts_per_tok=2 +2\.\d{3} ", shown.out, re.MULTILINE)
    assert re.search(
        r"^  2\.\d\d nats per token on 2\d\d tokens, after \d\d passes$", shown.out, re.MULTILINE
    )
    assert re.search(r"^  rope_interleave +false +probed \(margin 0\.\d+ nats\)$", shown.out, re.MULTILINE)
    later = json.loads(plait("info", model, "--json").out)
    assert "probe" not in later
    assert later["sources"]["rope_interleave"]["source"].startswith("probed (margin")
    told = json.loads(plait("info", model, "--json", "--set", "rope_interleave=true").out)
    assert told["sources"]["rope_interleave"] == {"value": True, "source": "--set"}


@pytest.mark.slow
def test_a_probe_replaces_a_damaged_file(plait: Run, nano_hybrid: Path, tmp_path: Path, words: str) -> None:
    model = bare(nano_hybrid, tmp_path / "model")
    (model / "plait.json").write_text("{")
    broken = plait("info", str(model))
    assert broken.code == 3
    assert "plait.json" in broken.err
    assert broken.err.count("\n") == 1
    asked = ("info", str(model), "--json", "--cpu", "--ops", "--probe", "--probe-text", words)
    facts = json.loads(plait(*asked).out)
    assert facts["probe"]["understood"]
    assert [q["name"] for q in facts["probe"]["quantities"]] == [
        *("rope_interleave", "states of Mamba", "experts_per_tok", "rope_theta")
    ]
    assert any(row["op"] == "paged_latent_attention" for row in facts["ops"])
    assert plait("info", str(model)).code == 0


@pytest.mark.slow
def test_a_text_it_does_not_understand_is_reported_loudly(
    plait: Run, nano_hybrid: Path, tmp_path: Path
) -> None:
    model = bare(nano_hybrid, tmp_path / "model")
    result = plait("info", str(model), "--probe", "--cpu")
    assert result.code == 0
    assert "warning: probe: the best loss is" in result.err
    assert "more than 7.0" in result.out
    assert not (model / "plait.json").exists()


def test_a_model_that_says_everything_is_not_run(plait: Run, nano_hybrid: Path) -> None:
    result = plait("info", str(nano_hybrid), "--probe", "--cpu")
    assert result.code == 0
    assert "nothing is open: the files say all that can be tried" in result.out


def test_a_text_that_cannot_be_read_is_one_line(plait: Run, nano_hybrid: Path, tmp_path: Path) -> None:
    model = bare(nano_hybrid, tmp_path / "model")
    result = plait("info", str(model), "--probe-text", str(tmp_path / "nowhere.txt"))
    assert result.code == 2
    assert "nowhere.txt" in result.err
    assert result.err.count("\n") == 1


@pytest.fixture(scope="module")
def smollm2_tensors(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """SmolLM2 as safetensors, without a config."""
    from plait.convert.convert import Order, convert_model

    folder = tmp_path_factory.mktemp("smollm2") / "model"
    convert_model(Order(str(smollm2), folder, "safetensors", "bf16"), lambda *_: None)
    (folder / "config.json").unlink()
    return folder


def spoil(monkeypatch: pytest.MonkeyPatch, head_dim: int) -> None:
    """Assume wrong values for what shapes leave open."""
    monkeypatch.setattr(sizes, "_guess_head_dim", lambda *_: (head_dim, "default (spoilt)"))
    monkeypatch.setattr(llama, "LLAMA_VOCABULARIES", {})


def probed(plait: Run, folder: Path) -> dict[str, Any]:
    result = plait("info", str(folder), "--json", "--probe", "--cpu", "--threads", "1")
    assert result.code == 0, result.err
    facts: dict[str, Any] = json.loads(result.out)
    assert facts["probe"]["loss"] < 2.5
    assert facts["probe"]["passes"] < 60
    return facts


@pytest.mark.slow
def test_a_real_model_is_found_from_bad_assumptions(
    plait: Run, smollm2_tensors: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spoil(monkeypatch, 32)
    sources = probed(plait, smollm2_tensors)["sources"]
    found = {key: entry["value"] for key, entry in sources.items()}
    assert (found["head_dim"], found["num_attention_heads"], found["num_key_value_heads"]) == (64, 9, 3)
    assert (found["rope_theta"], found["rope_interleave"], found["hidden_act"]) == (1e5, False, "silu")
    assert all(sources[key]["source"].startswith("probed (margin") for key in ("head_dim", "rope_theta"))
    asked = ("--prompt", "The capital of France is", "--max-tokens", "8", "--temperature", "0", "--cpu")
    assert "Paris" in plait("generate", "--model", str(smollm2_tensors), *asked).out


@pytest.mark.slow
def test_a_real_model_in_another_layout_is_found(
    plait: Run, smollm2_tensors: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows that turn together lie side by side, and norms are stored around 0."""
    spoil(monkeypatch, 96)
    folder = tmp_path / "moved"
    shutil.copytree(smollm2_tensors, folder, ignore=shutil.ignore_patterns("plait.json"))
    tensors = load_file(folder / "model.safetensors")
    for name, w in tensors.items():
        if name.endswith(("q_proj.weight", "k_proj.weight")):
            tensors[name] = w.view(-1, 2, 32, w.shape[1]).transpose(1, 2).reshape(w.shape).contiguous()
        elif name.endswith("norm.weight"):
            tensors[name] = w - 1
    save_file(tensors, folder / "model.safetensors")
    found = {key: entry["value"] for key, entry in probed(plait, folder)["sources"].items()}
    assert (found["head_dim"], found["rope_theta"]) == (64, 1e5)
    assert (found["rope_interleave"], found["norm_offset"]) == (True, 1.0)
