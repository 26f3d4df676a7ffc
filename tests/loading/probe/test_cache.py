"""What a probe found, in a file: bound to its model, weaker than --set, and never silently wrong."""

from __future__ import annotations

import json
import logging
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from plait.checkpoint.find_files import find_model
from plait.config import EngineConfig
from plait.errors import BadFile
from plait.loading.open_model import Opened, open_model
from plait.loading.probe.cache import Findings, fingerprint, places, read_findings, write_findings

FOUND = Findings({"head_dim": 32, "rope_theta": 5e5}, {"head_dim": 4.0, "rope_theta": 0.0}, 2.5, 200)


def write_model(folder: Path, hidden: int = 128, name: str = "model.safetensors") -> Path:
    layer = "model.layers.0."
    shapes = {
        "model.embed_tokens.weight": (97, hidden),
        "model.norm.weight": (hidden,),
        f"{layer}input_layernorm.weight": (hidden,),
        f"{layer}post_attention_layernorm.weight": (hidden,),
        **{f"{layer}self_attn.{x}_proj.weight": (hidden, hidden) for x in "qkvo"},
        **{f"{layer}mlp.{x}_proj.weight": (hidden, hidden) for x in ("gate", "up", "down")},
    }
    folder.mkdir(exist_ok=True)
    save_file({key: torch.zeros(shape) for key, shape in shapes.items()}, folder / name)
    return folder


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_model(tmp_path / "model")


def opened(model: Path, *overrides: str, **options: Any) -> Opened:
    cache = model.parent / "cache"
    return open_model(str(model), EngineConfig(device="cpu", cache_dir=str(cache), set=overrides, **options))


def keep(model: Path, found: Findings = FOUND) -> Path | None:
    bare = opened(model)
    return write_findings(bare.files, bare.checkpoint, bare.config.cache_dir, found)


def test_later_runs_use_what_was_found_and_say_so(model: Path) -> None:
    assert opened(model).resolved.config["head_dim"] == 64
    assert keep(model) == model / "plait.json"
    resolved = opened(model).resolved
    assert (resolved.config["head_dim"], resolved.config["num_attention_heads"]) == (32, 4)
    assert resolved.spec.layers[0][0].mixer.rope.theta == 5e5  # type: ignore[union-attr]
    assert resolved.provenance["head_dim"] == "probed (margin 4 nats)"
    assert resolved.provenance["rope_theta"] == "probed (no other is better beyond chance)"
    assert resolved.is_detected


def test_what_a_user_says_wins(model: Path) -> None:
    keep(model)
    resolved = opened(model, "head_dim=128").resolved
    assert (resolved.config["head_dim"], resolved.provenance["head_dim"]) == (128, "--set")
    assert resolved.config["rope_theta"] == 5e5
    by_heads = opened(model, "num_attention_heads=8").resolved
    assert by_heads.config["head_dim"] == 16


def test_a_config_that_came_later_wins(model: Path) -> None:
    keep(model)
    (model / "config.json").write_text(json.dumps({"rope_theta": 7.0}))
    resolved = opened(model).resolved
    assert (resolved.config["rope_theta"], resolved.provenance["rope_theta"]) == (7.0, "config.json")
    assert resolved.config["head_dim"] == 32


def test_another_architecture_is_not_what_was_probed(model: Path, caplog: pytest.LogCaptureFixture) -> None:
    keep(model)
    resolved = opened(model, 'architectures=["SmolLM3ForCausalLM"]').resolved
    assert resolved.config["head_dim"] == 64
    assert "left aside" in caplog.text


def test_a_model_with_other_tensors_ignores_them_with_a_line_in_the_log(
    model: Path, caplog: pytest.LogCaptureFixture
) -> None:
    keep(model)
    write_model(model, hidden=256)
    with caplog.at_level(logging.WARNING, "plait"):
        assert opened(model).resolved.config["head_dim"] == 64
    assert "plait.json is about other tensors" in caplog.text


def test_the_same_tensors_in_another_format_are_another_model() -> None:
    plain, half = (_Tensors({"w": torch.zeros(2, 3, dtype=d)}) for d in (torch.float32, torch.bfloat16))
    assert fingerprint(plain) == fingerprint(_Tensors({"w": torch.ones(2, 3)}))
    assert len({fingerprint(plain), fingerprint(half), fingerprint(_Tensors({"w": torch.zeros(3, 2)}))}) == 3


class _Tensors(dict[str, torch.Tensor]):
    def names(self) -> list[str]:
        return list(self)

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self[name].shape)

    def format_of(self, name: str) -> str:
        return str(self[name].dtype)


@pytest.mark.parametrize(
    ("damage", "told"),
    [
        (lambda record: "{", r"plait\.json.*not valid JSON.*delete it, or run"),
        (lambda record: json.dumps({**record, "kind": "diary"}), "'diary'"),
        (lambda record: json.dumps({**record, "version": 9}), "version 9"),
        (lambda record: json.dumps({k: v for k, v in record.items() if k != "margins"}), "margins"),
        (lambda record: json.dumps({**record, "margins": {}}), "head_dim"),
        (lambda record: json.dumps({**record, "values": 3}), "TypeError"),
        (lambda record: json.dumps({**record, "loss": "low"}), "loss|float"),
        (lambda record: json.dumps({**record, "values": {"head_dim": "wide"}}), "found cannot be"),
        (lambda record: json.dumps({**record, "values": {"head_dim": 48}}), "48"),
        (
            lambda record: json.dumps({**record, "values": {"head_dmi": 32}, "margins": {"head_dmi": 1}}),
            "head_dmi",
        ),
    ],
)
def test_a_damaged_file_is_refused_and_says_what_to_do(model: Path, damage: Any, told: str) -> None:
    keep(model)
    path = model / "plait.json"
    path.write_text(damage(json.loads(path.read_text())))
    with pytest.raises(BadFile, match=told):
        opened(model)
    config = EngineConfig(device="cpu", cache_dir=str(model.parent / "cache"))
    assert open_model(str(model), config, probed=False).resolved.config["head_dim"] == 64


def test_a_folder_that_cannot_be_written_keeps_them_in_the_cache(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write, own = Path.write_text, model
    monkeypatch.setattr(Path, "write_text", lambda path, *a: refused(path, own) or write(path, *a))
    kept = keep(model)
    assert kept is not None
    assert kept.parent == model.parent / "cache" / "probes"
    monkeypatch.undo()
    assert opened(model).resolved.config["head_dim"] == 32


def refused(path: Path, folder: Path) -> None:
    if path.parent == folder:
        raise PermissionError(13, "Permission denied", str(path))


def test_a_disk_that_is_full_has_no_half_of_them(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def half(path: Path, text: str, *_: str) -> int:
        path.write_bytes(text[:9].encode())
        raise OSError(28, "No space left on device")

    before = sorted(model.parent.rglob("*.*"))
    monkeypatch.setattr(Path, "write_text", half)
    assert keep(model) is None
    assert sorted(model.parent.rglob("*.*")) == before


def test_where_nothing_can_be_written_it_is_reported(
    model: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(Path, "write_text", lambda path, *a: refused(path, path.parent))
    assert keep(model) is None
    assert "cannot be kept" in caplog.text


def test_without_a_home_they_are_looked_for_next_to_the_model_alone(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def homeless() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", homeless)
    bare = opened(model)
    assert read_findings(bare.files, bare.checkpoint, None) is None
    assert write_findings(bare.files, bare.checkpoint, None, FOUND) == model / "plait.json"


def test_a_cache_that_cannot_be_looked_into_is_no_error(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stat = os.stat

    def refuse(path: Any, **options: Any) -> os.stat_result:
        if "probes" in str(path):
            raise PermissionError(13, "Permission denied", str(path))
        return stat(path, **options)

    monkeypatch.setattr(os, "stat", refuse)
    bare = opened(model)
    assert read_findings(bare.files, bare.checkpoint, str(model.parent / "cache")) is None


def test_one_of_several_files_has_a_file_of_its_own(tmp_path: Path) -> None:
    write_model(tmp_path, name="small.safetensors")
    files = find_model(tmp_path / "small.safetensors")
    assert places(files, "ab", None)[0] == tmp_path / "small.plait.json"
    cached = places(files, "ab", str(tmp_path))[1]
    assert cached == tmp_path / "probes" / "ab.json"


def test_a_model_with_a_whole_config_looks_for_no_file(model: Path, nano_hybrid: Path) -> None:
    sizes = {"num_attention_heads": 2, "num_hidden_layers": 1, "hidden_size": 128, "intermediate_size": 128}
    config = {"architectures": ["LlamaForCausalLM"], "vocab_size": 97, **sizes}
    (model / "config.json").write_text(json.dumps(config))
    (model / "plait.json").write_text("{")
    assert not opened(model).resolved.is_detected


def test_what_is_written_is_what_is_read(model: Path) -> None:
    found = replace(
        FOUND, values={**FOUND.values, "rope_scaling": None}, margins={**FOUND.margins, "rope_scaling": 0}
    )
    keep(model, found)
    bare = opened(model)
    assert read_findings(bare.files, bare.checkpoint, bare.config.cache_dir) == found


def test_two_processes_that_probe_a_model_at_once_leave_what_one_found(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = replace(FOUND, values={"head_dim": 64, "rope_theta": 1e4}, loss=3.25)
    first = iter([True])

    def write(path: Path, text: str, encoding: str) -> None:
        """As the library's, but another process writes all of its own in the middle."""
        with path.open("w", encoding=encoding) as file:
            file.write(text[:100])
            file.flush()
            if next(first, False):
                assert keep(model, other) == model / "plait.json"
            file.write(text[100:])

    monkeypatch.setattr(Path, "write_text", write)
    assert keep(model) == model / "plait.json"
    bare = opened(model)
    assert read_findings(bare.files, bare.checkpoint, None) == FOUND
    assert sorted(path.name for path in model.iterdir()) == ["model.safetensors", "plait.json"]
