"""Help in groups, hints for mistyped commands, completion in shells."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import click
import pytest

from plait.cli.common.help import GROUPS, GroupedCommand, group_options
from plait.cli.main import ALSO, COMMANDS, cli
from plait.config import EngineConfig, ServerConfig

Run = Callable[..., Any]
GROUPED = ("generate", "chat", "serve", "run-batch", "info", "verify", "warmup")


def command(name: str) -> click.Command:
    found = cli.get_command(click.Context(cli), name)
    assert isinstance(found, GroupedCommand)
    return found


@pytest.mark.parametrize("name", GROUPED)
def test_every_option_is_in_one_group_and_at_most_ten_come_first(name: str) -> None:
    context = click.Context(command(name))
    params = [p for p in context.command.get_params(context) if isinstance(p, click.Option)]
    groups = list(group_options(params))
    listed = [p.name for _, group in groups for p in group]
    assert sorted(map(str, listed)) == sorted(str(p.name) for p in params)
    title, first = groups[0]
    assert title == "Options"
    assert first[0].name == "model"
    assert len(first) <= 10
    assert len(set(dict(groups))) == len(groups)


def test_groups_name_options_that_exist() -> None:
    known = {f.name for cls in (EngineConfig, ServerConfig) for f in fields(cls)}
    known |= {
        "model",
        "prompt",
        "system",
        "input",
        "output",
        "config",
        "max_tokens",
        "temperature",
        "seed",
        "cpu",
    }
    assert {name for names in GROUPS.values() for name in names} <= known


def test_help_shows_examples_and_groups(plait: Run) -> None:
    text = plait("serve", "--help").out
    assert "\n  plait serve ./model --host 0.0.0.0 --api-key-file keys.txt\n" in text
    order = ["\nOptions:", "\nAccess:", "\nMemory:", "\nMessages:"]
    places = [text.index(title) for title in order]
    assert places == sorted(places)
    assert text.count("--help") == 1
    assert "plait chat ./model" in plait("--help").out


@pytest.mark.parametrize(("typed", "right"), [("srve", "serve"), ("genrate", "generate"), *ALSO.items()])
def test_a_mistyped_command_gets_a_hint(plait: Run, typed: str, right: str) -> None:
    result = plait(typed, "x")
    assert result.code == 2
    assert f"there is no command '{typed}'; did you mean {right}" in result.err
    assert right in COMMANDS


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_a_completion_script_is_whole(plait: Run, shell: str, tmp_path: Path) -> None:
    result = plait("completion", shell)
    assert result.code == 0
    assert f"_PLAIT_COMPLETE={shell}_complete" in result.out
    if program := shutil.which(shell):
        (tmp_path / "script").write_text(result.out)
        subprocess.run([program, "-n", str(tmp_path / "script")], check=True, timeout=30)


def completed(words: str) -> list[str]:
    env = {**os.environ, "_PLAIT_COMPLETE": "bash_complete", "COMP_WORDS": words}
    env["COMP_CWORD"] = str(len(re.split(" +", words)) - 1)
    code = "import sys; from plait.cli.main import run; run([]); print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=60)
    assert done.stdout.splitlines()[-1] == "False"
    return done.stdout.splitlines()[:-1]


def test_commands_options_and_files_are_completed() -> None:
    assert completed("plait se") == ["plain,serve"]
    assert "plain,--max-model-len" in completed("plait serve --max-m")
    assert completed("plait serve --model ./mo") == ["file,./mo"]
    assert completed("plait completion z") == ["plain,zsh"]
