from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path
from typing import Any

import click
import pytest

from plait.cli import cluster as command
from plait.cli.main import run
from plait.cluster.config import NOT_SERVED


def parse(*arguments: str) -> Any:
    """The configs that `plait cluster serve` would run with."""
    found = []

    @click.command()
    @command.cluster_options()
    @click.pass_context
    def probe(ctx: click.Context, /, model: str, config: str | None, **given: Any) -> None:
        found.append((model, *command.read_configs(ctx, config, given)))

    probe.main([*arguments], standalone_mode=False)
    return found[0]


def test_options_come_from_the_line_the_environment_and_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "plait.toml"
    file.write_text(
        '[cluster]\nreplicas = "2..4"\ngateways = 3\n[engine]\nmax_num_seqs = 8\n[server]\nport = 9000\n'
    )
    monkeypatch.setenv("PLAIT_GATEWAYS", "5")
    model, engine, server, cluster = parse("some/model", "--config", str(file), "--patience-s", "7")
    assert (model, engine.max_num_seqs, server.port) == ("some/model", 8, 9000)
    assert (cluster.bounds, cluster.gateways, cluster.patience_s) == ((2, 4), 5, 7.0)


def test_options_without_effect_in_a_cluster_are_not_offered(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["cluster", "serve", "--help"]) == 0
    shown = capsys.readouterr().out
    assert "--replicas" in shown
    assert "--max-num-seqs" in shown
    assert "--api-key-file" in shown
    assert not [name for name in NOT_SERVED if f"--{name.replace('_', '-')} " in shown]
    assert run(["cluster", "serve", "m", "--tls-cert", "x"]) == 2
    assert "--tls-cert" in capsys.readouterr().err


@pytest.mark.skipif(importlib.util.find_spec("ray") is not None, reason="Ray is installed")
def test_without_ray_the_command_names_the_extra(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["cluster", "config", "some/model"]) == 2
    assert "pip install 'plait-engine[cluster]'" in capsys.readouterr().err


def test_a_status_is_shown_in_lines() -> None:
    replica = {"name": "abc", "state": "ready", "open": 2, "restarts": 1}
    replica |= {"arithmetic": "fp_1", "digest": "0123456789abcdef"}
    counts = {"moved": {"replica yes": 3}, "routed": {}}
    served = {"version": "0.1", "model": "m_1", "arithmetic": "fp_1"}
    gateway = {"name": "g1", "pid": 7, "open": 2, "replicas": [replica], **served, **counts}
    states = {"engine": {"RUNNING": 2}, "gateway": {"RUNNING": 2}}
    lines = command.describe_status({"status": "RUNNING", "deployments": states, "gateways": [gateway]})
    assert lines == [
        "plait: running",
        "engine: 2 running",
        "gateway: 2 running",
        "1 of 2 gateways did not answer",
        "gateway g1 (process 7): 1 replicas, 2 open streams, version 0.1, model m_1, arithmetic fp_1",
        "  abc: ready, 2 open, 1 restarts, fp_1, digest 0123456789abcdef",
        "  moved: 3 (replica yes)",
        "  routed: none",
    ]


def test_serving_one_model_imports_nothing_of_a_cluster() -> None:
    code = "import plait, plait.cli.serve, plait.server.run, sys; "
    code += "print([m for m in sys.modules if 'cluster' in m])"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"
