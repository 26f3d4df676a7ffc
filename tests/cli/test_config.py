"""`plait config`, and options from the environment."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from plait.cli.common.unread_flags import variable_name, warn_of_variables
from plait.config import EngineConfig, ServerConfig, option_names

Run = Callable[..., Any]


def values(plait: Run, *arguments: str) -> dict[str, tuple[object, str]]:
    result = plait("config", "--json", *arguments)
    assert result.code == 0, result.err
    return {each["name"]: (each["value"], each["source"]) for each in json.loads(result.out)}


def test_flags_win_over_the_environment_and_that_over_the_file(
    plait: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "plait.toml"
    file.write_text('[server]\nport = 1\nhost = "0.0.0.0"\nlog_level = "debug"\n[engine]\nmax_num_seqs = 2\n')
    monkeypatch.setenv("PLAIT_CONFIG", str(file))
    monkeypatch.setenv("PLAIT_PORT", "3")
    monkeypatch.setenv("PLAIT_HOST", "::")
    monkeypatch.setenv("PLAIT_PREFIX_CACHE", "false")
    monkeypatch.setenv("PLAIT_NO_FUSE", "glu qkv")
    assert values(plait, "--host", "localhost", "--cpu") == {
        "host": ("localhost", "command line"),
        "port": (3, "PLAIT_PORT"),
        "log_level": ("debug", str(file)),
        "max_num_seqs": (2, str(file)),
        "prefix_cache": (False, "PLAIT_PREFIX_CACHE"),
        "no_fuse": (["glu", "qkv"], "PLAIT_NO_FUSE"),
        "device": ("cpu", "command line"),
    }


def test_all_of_them_have_the_default_that_their_class_has(plait: Run) -> None:
    found = values(plait, "--all")
    for kind in (ServerConfig, EngineConfig):
        for name in option_names(kind):
            default = getattr(kind(), name)
            assert found.pop(name) == (list(default) if default == () else default, "default")
    assert not found


MODELS = """
[engine]
max_num_seqs = 4
[models.small]
model = "./of-the-file"
aliases = ["gpt-4o-mini"]
max-num-seqs = 64
[models.big]
model = "org/name:Q4_K_M"
keep_alive = "1h"
"""


def rows_of_models(plait: Run, *arguments: str) -> dict[tuple[str, str], tuple[object, str]]:
    result = plait("config", "--json", *arguments)
    assert result.code == 0, result.err
    shown = {(row["table"], row["name"]): (row["value"], row["source"]) for row in json.loads(result.out)}
    return {key: row for key, row in shown.items() if key[0].startswith("models.")}


def test_options_of_one_model_are_listed_with_their_source(plait: Run, tmp_path: Path) -> None:
    file = tmp_path / "plait.toml"
    file.write_text(MODELS)
    arguments = ("--config", str(file), "--max-model-len", "512")
    assert rows_of_models(plait, *arguments) == {
        ("models.small", "model"): ("./of-the-file", str(file)),
        ("models.small", "aliases"): (["gpt-4o-mini"], str(file)),
        ("models.small", "max_num_seqs"): (64, str(file)),
        ("models.big", "model"): ("org/name:Q4_K_M", str(file)),
        ("models.big", "keep_alive"): ("1h", str(file)),
    }
    everything = rows_of_models(plait, *arguments, "--all")
    assert everything["models.small", "max_num_seqs"] == (64, str(file))
    assert everything["models.big", "max_num_seqs"] == (4, "[engine]")
    assert everything["models.big", "max_model_len"] == (512, "[engine]")
    for name in ("small", "big"):
        assert {key for table, key in everything if table == f"models.{name}"} >= {
            *option_names(EngineConfig)
        }
    typed = rows_of_models(plait, "small,mini=./typed", "one=./other", *arguments)
    assert typed["models.small", "model"] == ("./typed", "command line")
    assert typed["models.small", "aliases"] == (["mini", "gpt-4o-mini"], f"command line, {file}")
    assert typed["models.one", "model"] == ("./other", "command line")
    text = plait("config", *arguments).out
    assert "[models.small]" in text
    assert f"max_num_seqs = 64  # {file}" in text


@pytest.mark.parametrize(
    ("table", "told"),
    [
        ("max_num_seqs = 0", "models.small: max_num_seqs"),
        ("port = 1", "has no option 'port'"),
        ("keep_alive = 'x'", "no time"),
    ],
)
def test_a_wrong_option_of_one_model_is_refused_as_by_serve(
    plait: Run, tmp_path: Path, table: str, told: str
) -> None:
    file = tmp_path / "plait.toml"
    file.write_text(f"[models.small]\n{table}\n")
    result = plait("config", "--config", str(file))
    assert result.code == 2
    assert told in result.err
    assert result.err.count("\n") == 1


def test_as_text_it_is_toml_and_keys_are_hidden(plait: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PLAIT_API_KEY", "me:secret")
    result = plait("config", "--served-model-name", 'a "b"')
    assert result.out.splitlines() == [
        "[server]",
        'served_model_name = "a \\"b\\""  # command line',
        'api_key           = "(hidden)"  # PLAIT_API_KEY',
    ]
    monkeypatch.delenv("PLAIT_API_KEY")
    assert plait("config").out == "every option has its default; --all lists them\n"


def test_a_wrong_value_is_reported_with_its_variable(plait: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PLAIT_MAX_NUM_SEQS", "many")
    result = plait("config")
    assert result.code == 2
    assert "'many' is not a valid integer (of PLAIT_MAX_NUM_SEQS)" in result.err


def test_what_a_cluster_puts_into_a_container_is_no_option(
    plait: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    links = {
        "PLAIT_PORT": "tcp://10.0.0.1:8080",
        "PLAIT_PORT_8080_TCP_ADDR": "10.0.0.1",
        "PLAIT_SERVICE_HOST": "10.0.0.1",
        "PLAIT_NAME": "/web/plait",
    }
    for name, value in links.items():
        monkeypatch.setenv(name, value)
    assert values(plait, "--all")["port"] == (8080, "default")
    assert not plait("config").err


def test_a_misspelt_variable_is_reported(capsys: pytest.CaptureFixture[str]) -> None:
    warn_of_variables({"PLAIT_MAX_WAITNG": "1", "HOME": "/", variable_name("port"): "1"})
    told = capsys.readouterr().err
    assert told.startswith("plait: PLAIT_MAX_WAITNG is set, and no option has this name; did you mean")
    assert "PLAIT_MAX_WAITING" in told
    assert told.count("\n") == 1


ANY_COMMAND = [("generate", "m", "-p", "x"), ("config", "m"), ("families",), ("cluster", "config")]


@pytest.mark.parametrize("command", ANY_COMMAND)
def test_every_command_line_reports_misspelt_variables_once(
    plait: Run, monkeypatch: pytest.MonkeyPatch, command: tuple[str, ...]
) -> None:
    monkeypatch.setenv("PLAIT_THREDS", "2")
    assert plait(*command).err.count("PLAIT_THREDS is set, and no option has this name") == 1


def test_the_page_of_options_is_the_one_of_this_revision() -> None:
    root = Path(__file__).resolve().parents[2]
    print_page = [sys.executable, root / "tools" / "print_options.py"]
    page = subprocess.run(print_page, cwd=root, capture_output=True, text=True, check=True).stdout
    told = "docs/options.md is old: python tools/print_options.py > docs/options.md"
    assert (root / "docs" / "options.md").read_text("utf-8") == page, told
