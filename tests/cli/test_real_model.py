"""The command line on a real model: SmolLM2-135M, as a user would call it."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
Run = Callable[..., Any]
GREEDY = ("--temperature", "0", "--cpu", "--max-model-len", "512")


def test_generate_streams_what_the_model_says(plait: Run, smollm2: Path) -> None:
    asked = ("--prompt", "The capital of France is", "--max-tokens", "8")
    result = plait("generate", "--model", str(smollm2), *asked, *GREEDY)
    assert result.code == 0, result.err
    assert "Paris" in result.out
    assert re.search(
        r"^5 prompt tokens · first token after .* · 8 tokens, .* tok/s$", result.err, re.MULTILINE
    )


def test_ids_and_text_are_the_same_prompt(plait: Run, smollm2: Path) -> None:
    model = ("--model", str(smollm2))
    ids = plait("tokenize", *model, "--text", "The capital of France is", "--ids").out.strip()
    assert plait("decode", *model, "--ids", ids).out == "The capital of France is\n"
    asked = ("generate", *model, "--max-tokens", "8", "--quiet", *GREEDY)
    assert plait(*asked, "--ids", ids).out == plait(*asked, "--prompt", "The capital of France is").out


def test_verbose_says_which_device_and_why(plait: Run, smollm2: Path) -> None:
    result = plait("generate", "-m", str(smollm2), "-p", "x", "--max-tokens", "1", "--verbose", *GREEDY)
    assert "plait: device: cpu (requested)" in result.err
    assert "memory: weights" in result.err


def test_ops_are_listed_with_their_variants(plait: Run, smollm2: Path) -> None:
    result = plait("info", str(smollm2), "--ops", "--cpu", "--max-model-len", "512")
    assert result.code == 0, result.err
    assert re.search(r"^  paged_attention +[\w-]+ +× 30", result.out, re.MULTILINE)


def test_a_truncated_file_is_one_line_and_exit_3(plait: Run, smollm2: Path, tmp_path: Path) -> None:
    broken = tmp_path / "broken.gguf"
    with smollm2.open("rb") as whole:
        broken.write_bytes(whole.read(1 << 20))
    result = plait("generate", "--model", str(broken), "--prompt", "x")
    assert result.code == 3
    assert "broken.gguf" in result.err
    assert result.err.count("\n") == 1


def test_too_little_memory_is_one_line_and_exit_4(plait: Run, smollm2: Path) -> None:
    asked = ("--prompt", "x", "--memory-limit", "100KiB", "--max-model-len", "2048")
    result = plait("generate", "--model", str(smollm2), *asked)
    assert result.code == 4
    assert "--memory-limit" in result.err
    assert result.err.count("\n") == 1


def test_a_context_that_is_too_long_names_both_numbers(plait: Run, smollm2: Path) -> None:
    result = plait("generate", "--model", str(smollm2), "--prompt", "a " * 100, "--max-model-len", "64")
    assert result.code == 2
    assert "64" in result.err
    assert "101 in the prompt" in result.err


def test_ctrl_c_stops_it_with_exit_code_130(smollm2: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "plait",
        "generate",
        "--model",
        str(smollm2),
        "--prompt",
        "Once",
        "--cpu",
    ]
    command += ["--max-tokens", "4000", "--ignore-eos", "--temperature", "0"]
    # Tests that run in the background have SIGINT ignored, and children inherit that.
    run = subprocess.Popen(
        command,
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    try:
        assert run.stdout is not None
        assert run.stdout.read(8)  # it is writing
        run.send_signal(signal.SIGINT)
        _, err = run.communicate(timeout=60)
    finally:
        run.kill()
    assert run.returncode == 130
    assert b"Traceback" not in err


@pytest.mark.sampled(2)
@pytest.mark.parametrize("path", ["nowhere", "nowhere/model.gguf"])
def test_a_missing_model_is_one_line(plait: Run, tmp_path: Path, path: str) -> None:
    for command in (
        ("generate", "--prompt", "x"),
        ("info",),
        ("tokenize", "--text", "x"),
        ("serve", "--port", "0"),
    ):
        result = plait(command[0], "--model", str(tmp_path / path), *command[1:])
        assert result.code in (2, 3)
        assert "nowhere" in result.err.splitlines()[-1]
        assert "Traceback" not in result.err
