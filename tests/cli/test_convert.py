"""`plait convert`: what it says, and how it ends."""

from __future__ import annotations

import signal
from functools import partial
from pathlib import Path

import pytest

from plait.cli.convert import end_by_signals
from plait.cli.main import run
from plait.convert import compare_quality


def test_a_model_is_written_and_the_comparison_is_reported(
    nano_hybrid: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = partial(compare_quality.compare, ops="reference")  # nothing to compile
    monkeypatch.setattr(compare_quality, "compare", plain)
    out = tmp_path / "nano"
    assert run(["convert", str(nano_hybrid), str(out), "-q", "bf16", "--threads", "1", "--verify"]) == 0
    told = capsys.readouterr().out
    assert "nano: " in told
    assert " in bfloat16" in told
    assert "perplexity" in told
    assert "same first token 100.00 %" in told
    assert (out / "model.safetensors").exists()


def test_readers_of_the_file_are_named_and_the_file_is_a_model_like_any_other(
    nano_hybrid: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "nano.gguf"
    assert run(["convert", str(nano_hybrid), str(out), "--threads", "1"]) == 0
    told = capsys.readouterr().out.splitlines()
    assert told[-1].startswith("  only Plait reads this file: llama.cpp has no architecture that says all of")
    assert run(["info", str(out)]) == 0
    info = capsys.readouterr().out
    assert "nano.gguf: oxidizr" in info
    assert "tensors, gguf, " in info
    assert "plait.config" in info
    assert "tokenizer: tokenizer.json" in info


@pytest.mark.parametrize(
    ("arguments", "code", "why"),
    [
        (["nowhere", "a.gguf"], 2, "no such file or directory"),
        (
            ["MODEL", "a", "-q", "q4_k"],
            2,
            "only GGUF has this storage (OUT.gguf); --to safetensors holds int4, fp8, f32, f16, bf16",
        ),
        (["MODEL", "a.gguf", "--max-shard", "1G"], 2, "--max-shard has no effect: a GGUF is one file"),
        (["MODEL"], 2, "Missing argument 'OUT'"),
    ],
)
def test_errors_are_one_line(
    arguments: list[str],
    code: int,
    why: str,
    nano_hybrid: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run(["convert", *(str(nano_hybrid) if a == "MODEL" else a for a in arguments)]) == code
    told = capsys.readouterr().err
    assert why in told
    assert told.count("\n") == 1


def test_sigterm_ends_it_like_ctrl_c_and_only_inside() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(KeyboardInterrupt), end_by_signals():
        signal.raise_signal(signal.SIGTERM)
    assert signal.getsignal(signal.SIGTERM) is before
