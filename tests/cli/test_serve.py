"""`plait serve --config`: options from a file, under those of the command line."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from plait.config import EngineConfig, ServerConfig
from plait.errors import ConfigError

Run = Callable[..., Any]


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    found: list[Any] = []

    def serve(model: str, engine: EngineConfig, server: ServerConfig, reread: Any, begun: None) -> None:
        found.extend((model, engine, server, reread))

    monkeypatch.setattr("plait.cli.serve.begin_engine", lambda engine: None)
    monkeypatch.setattr("plait.server.run.run_server", serve)
    return found


def test_flags_win_over_the_file_and_the_file_over_defaults(
    plait: Run, served: list[Any], tmp_path: Path
) -> None:
    file = tmp_path / "plait.toml"
    file.write_text(
        '[server]\nport = 9000\nlog-level = "debug"\napi_key = ["a:one", "b:two"]\n'
        '[engine]\nmax_num_seqs = 4\ndtype = "float32"\n'
    )
    flags = ["--port", "8080", "--dtype", "auto", "--config", str(file)]
    assert plait("serve", "--model", "m", *flags).code == 0
    model, engine, server, reread = served
    assert model == "m"
    assert server == ServerConfig(port=8080, log_level="debug", api_key=("a:one", "b:two"))
    assert engine == EngineConfig(max_num_seqs=4)
    file.write_text('[server]\nport = 1\nlog_level = "error"\n')
    assert reread() == ServerConfig(port=8080, log_level="error")
    file.write_text("[server")
    with pytest.raises(ConfigError, match="cannot be read"):
        reread()


def test_cpu_wins_over_a_device_of_the_file(plait: Run, served: list[Any], tmp_path: Path) -> None:
    file = tmp_path / "plait.toml"
    file.write_text('[engine]\ndevice = "cuda"\n')
    assert plait("serve", "--model", "m", "--cpu", "--config", str(file)).code == 0
    assert served[1].device == "cpu"


@pytest.mark.parametrize(
    ("text", "said"),
    [("[server]\nprot = 1\n", "'prot'"), ("[sever]\nport = 1\n", "'sever'"), ("port = 1\n", "'port'")],
)
def test_what_is_not_an_option_is_refused_by_name(
    plait: Run, served: list[Any], tmp_path: Path, text: str, said: str
) -> None:
    file = tmp_path / "plait.toml"
    file.write_text(text)
    result = plait("serve", "--model", "m", "--config", str(file))
    assert result.code == 2
    assert said in result.err
    assert not served


def test_keys_may_come_from_the_environment(
    plait: Run, served: list[Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    file = tmp_path / "plait.toml"
    file.write_text('[server]\napi_key = "c:three"\n')
    monkeypatch.setenv("PLAIT_API_KEY", "a:one b:two")
    assert plait("serve", "--model", "m", "--config", str(file)).code == 0
    assert served[2].api_key == ("a:one", "b:two")
    assert plait("serve", "--model", "m", "--api-key", "d:four").code == 0
    assert served[6].api_key == ("d:four",)
