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
    plait: Run, served: list[Any], tmp_path: Path, caplog: pytest.LogCaptureFixture
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
    assert (reread(), caplog.text) == (server, "")
    more = '[engine]\nmax-num-seqs = 5\ndtype = "float16"\n[models.a]\nmodel = "b"\n'
    file.write_text('[server]\nport = 1\nlog_level = "error"\n' + more)
    assert reread() == ServerConfig(port=8080, log_level="error")
    assert "reload: [engine] max_num_seqs, [models.a] model: what is new takes effect at the" in caplog.text
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


@pytest.fixture
def several(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What a server of several models gets: its catalogue and its options."""
    found: list[Any] = []

    def serve(catalog: Any, server: ServerConfig, reread: Any, begun: None) -> None:
        found.extend((catalog, server))

    monkeypatch.setattr("plait.cli.serve.begin_engine", lambda engine: None)
    monkeypatch.setattr("plait.server.run_models.run_models", serve)
    return found


def test_models_have_names_aliases_and_options_of_their_own(
    plait: Run, several: list[Any], tmp_path: Path
) -> None:
    file, folder = tmp_path / "plait.toml", tmp_path / "models"
    (folder / "found").mkdir(parents=True)
    (folder / "found" / "model.safetensors").write_text("x")
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "model.safetensors").write_text("x")
    file.write_text(
        "[engine]\nmax_num_seqs = 4\n"
        '[models.big]\nmax-model-len = 64\naliases = ["gpt-4"]\nkeep-alive = "-1"\n'
        '[models.third]\nmodel = "org/third"\nreasoning-parser = "none"\n'
        "[models.found]\nmax_num_seqs = 2\n"
    )
    words = ["small,mini=a/b.gguf", "big=org/name@rev", str(tmp_path / "own")]
    flags = ["--models-dir", str(folder), "--config", str(file)]
    assert plait("serve", *words, *flags).code == 0
    catalog, server = several
    entries = {entry.name: entry for entry in catalog.entries}
    assert list(entries) == ["small", "big", "own", "third", "found"]
    assert (entries["small"].source, entries["small"].aliases) == ("a/b.gguf", ("mini",))
    assert entries["big"].engine == EngineConfig(max_num_seqs=4, max_model_len=64)
    assert (entries["big"].aliases, entries["big"].keep_alive_s) == (("gpt-4",), float("inf"))
    assert (entries["third"].source, entries["third"].reasoning_parser) == ("org/third", "none")
    assert entries["found"].engine.max_num_seqs == 2
    assert server.models_dir == str(folder)


def test_one_model_with_a_name_is_served_as_one_model(plait: Run, served: list[Any], tmp_path: Path) -> None:
    file = tmp_path / "plait.toml"
    file.write_text("[models.small]\nmax_num_seqs = 3\n")
    assert plait("serve", "small=a=b", "--config", str(file)).code == 0
    assert (served[0], served[1].max_num_seqs, served[2].served_model_name) == ("a=b", 3, "small")
    assert served[3]().served_model_name == "small"
    path = tmp_path / "x=y"
    path.mkdir()
    assert plait("serve", str(path)).code == 0
    assert served[4] == str(path)


def test_one_model_that_is_to_be_unloaded_is_a_pool_of_one(plait: Run, several: list[Any]) -> None:
    assert plait("serve", "m", "--keep-alive", "10m").code == 0
    assert [entry.name for entry in several[0].entries] == ["m"]
    assert plait("serve", "m,n=x").code == 0
    assert several[2].find("n").name == "m"


@pytest.mark.parametrize(
    ("arguments", "text", "said"),
    [
        (["a=m", "a=n"], "", "two of them have the name 'a'"),
        (["a b=m", "n"], "", "'a b' is no name"),
        (["a=", "n"], "", "names no model"),
        (["m", "n", "--served-model-name", "x"], "", "write NAME=PATH"),
        (["m", "n", "--keep-alive", "soon"], "", "plait: keep_alive: 'soon' is no time"),
        (["a,=m", "n"], "", "'' is no name"),
        (["a,b=m", "b=n"], "", "two of them have the name 'b'"),
        (["a=m", "n"], "[models.a]\nport = 1\n", "[models.a] has no option 'port'"),
        (["a=m", "n"], "[models.a]\nmax_num_seqs = 0\n", "models.a: max_num_seqs: 0 is less than 1"),
        (["a=m", "n"], "[models.b]\nmax_num_seqs = 1\n", "[models.b]: no model has this name"),
        (["a=m", "n"], "[models]\na = 1\n", "must be a table"),
        (["a=m", "--served-model-name", "b"], "", "named 'a' already"),
        (["--models-dir", "/no/such/folder"], "", "is not a folder"),
        ([], "", "name a model with --model"),
    ],
)
def test_models_that_cannot_be_served_are_refused_with_a_reason(
    plait: Run, several: list[Any], tmp_path: Path, arguments: list[str], text: str, said: str
) -> None:
    file = tmp_path / "plait.toml"
    file.write_text(text)
    result = plait("serve", *arguments, "--config", str(file))
    assert result.code == 2
    assert said in result.err
    assert not several
