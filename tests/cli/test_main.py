"""The frame of the command line: help, exit codes, one line for every error."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from plait import __version__
from plait.cli.main import COMMANDS
from plait.errors import (
    BadFile,
    ConfigError,
    InvalidField,
    MissingTensor,
    OutOfMemory,
    UnsupportedModel,
)

ROOT = Path(__file__).resolve().parents[2]
Run = Callable[..., Any]


def test_help_names_every_command(plait: Run) -> None:
    result = plait("--help")
    assert result.code == 0
    assert all(f"  {name} " in result.out for name in COMMANDS)


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_help(plait: Run, name: str) -> None:
    result = plait(name, "--help")
    assert result.code == 0
    assert result.out.startswith(f"Usage: plait {name}")


def test_version(plait: Run) -> None:
    assert plait("--version").out == f"plait {__version__}\n"


def test_help_loads_neither_torch_nor_rich_nor_a_command() -> None:
    script = (
        "import sys; from plait.cli.main import run; run(['--help']);"
        "print(sorted({'torch', 'numpy', 'rich', 'starlette', 'plait.cli.generate'} & set(sys.modules)))"
    )
    run = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True)
    assert run.stdout.endswith("\n[]\n")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("juggle",), "No such command 'juggle'"),
        (("generate", "--model", "m", "--temprature", "1"), "No such option '--temprature'"),
        (("generate", "--prompt", "x"), "name a model with --model"),
        (("serve",), "name a model with --model"),
        (("generate", "--model", "m", "--device", "tpu"), "'tpu' is not one of"),
        (("generate", "--model", "m", "--max-tokens", "many"), "'many' is not a valid integer"),
        (("generate", "--model", "m", "--ids", "1,two"), "'two' is not a token id"),
        (("generate", "--model", "m", "--memory-limit", "4 elephants"), "is not a number of bytes"),
    ],
)
def test_wrong_usage_is_one_line_and_exit_2(plait: Run, arguments: tuple[str, ...], message: str) -> None:
    result = plait(*arguments)
    assert result.code == 2
    assert result.err.startswith("plait: ")
    assert result.err.count("\n") == 1
    assert message in result.err


@pytest.mark.parametrize(
    ("error", "code", "message"),
    [
        (ConfigError("threads: 0 is less than 1"), 2, "threads: 0 is less than 1"),
        (BadFile("model.gguf: it ends early"), 3, "model.gguf: it ends early"),
        (MissingTensor("layers.0.attn.q"), 3, "layers.0.attn.q"),
        (UnsupportedModel("architecture 'X' is not known"), 3, "architecture 'X' is not known"),
        (OutOfMemory("12 GiB are needed"), 4, "12 GiB are needed"),
        (InvalidField("top_p: 2 is outside [0, 1]", "top_p"), 2, "top_p: 2 is outside [0, 1]"),
        (MemoryError(), 4, "out of memory"),
        (RuntimeError("DefaultCPUAllocator: can't\nallocate memory: 9 bytes"), 4, "out of memory"),
        (
            FileNotFoundError(2, "No such file or directory", "nowhere"),
            3,
            "nowhere: No such file or directory",
        ),
        (KeyboardInterrupt(), 130, ""),
        (ZeroDivisionError("division by zero"), 1, "ZeroDivisionError: division by zero (a fault of Plait"),
    ],
)
def test_every_error_is_one_line_and_its_exit_code(
    plait: Run, engine: Any, error: BaseException, code: int, message: str
) -> None:
    engine.at_load = error
    result = plait("generate", "--model", "m", "--prompt", "x")
    assert result.code == code
    assert message in result.err
    assert result.err.count("\n") == 1
    assert "Traceback" not in result.err
    assert result.out == ""


def test_debug_shows_the_traceback(plait: Run, engine: Any) -> None:
    engine.at_load = BadFile("model.gguf: it ends early")
    result = plait("generate", "--model", "m", "--prompt", "x", "--debug")
    assert result.code == 3
    assert "Traceback" in result.err
    assert result.err.endswith("plait: model.gguf: it ends early\n")


def test_a_reader_that_leaves_hears_no_complaint() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "plait", "--help"]
    run = subprocess.run(command, cwd=ROOT, stdout=writer, stderr=subprocess.PIPE, text=True, check=False)
    os.close(writer)
    assert (run.returncode, run.stderr) == (1, "")
