"""Plug-ins: named or installed, imported once, refused with their name and the reason."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from importlib.metadata import EntryPoint, EntryPoints
from pathlib import Path

import pytest

from plait.config import EngineConfig
from plait.errors import PluginError
from plait.loading import plugins
from plait.loading.plugins import GROUP, load_plugins


@pytest.fixture(autouse=True)
def apart() -> Iterator[None]:
    """Modules that a test's plug-ins brought are gone after it."""
    before = set(sys.modules)
    yield
    for name in set(sys.modules) - before:
        if name.startswith(("plait_plugin_", "theirs")):
            del sys.modules[name]


def load(*names: str | Path) -> tuple[plugins.Plugin, ...]:
    return load_plugins(EngineConfig(plugins=tuple(map(str, names))))


def test_load_plugins_loads_nothing_that_is_neither_named_nor_installed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "plugin.py").write_text("raise SystemExit('it ran')")
    monkeypatch.chdir(tmp_path)
    assert load() == ()


def test_load_plugins_imports_a_file_once_for_each_content(tmp_path: Path) -> None:
    file = tmp_path / "one.py"
    file.write_text("COUNT = []\n")
    (first,), (again,) = load(file), load(file)
    assert first == again
    file.write_text("COUNT = [1]\n")
    (other,) = load(file)
    assert other.digest != first.digest
    assert sys.modules[first.module].COUNT == []
    assert sys.modules[other.module].COUNT == [1]


def test_load_plugins_takes_a_folder_as_a_package(tmp_path: Path) -> None:
    folder = tmp_path / "hybrid"
    folder.mkdir()
    (folder / "__init__.py").write_text("from .part import NUMBER\n")
    (folder / "part.py").write_text("NUMBER = 3\n")
    (found,) = load(folder)
    assert sys.modules[found.module].NUMBER == 3
    (folder / "part.py").write_text("NUMBER = 41\n")  # bytecode is known by size and second
    (changed,) = load(folder)
    assert sys.modules[changed.module].NUMBER == 41


def test_load_plugins_takes_a_module_that_python_finds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "theirs_one.py").write_text("")
    (found,) = load("theirs_one")
    assert (found.name, found.module) == ("theirs_one", "theirs_one")


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("1 / 0\n", r"plug-in .*bad\.py cannot be loaded: ZeroDivisionError: .*bad\.py, line 1\)"),
        ("import theirs_that_is_not_there\n", "ModuleNotFoundError: No module named 'theirs_that"),
        ("def (\n", "SyntaxError"),
        (
            "from plait.families.common.registry import family\nfamily('LlamaForCausalLM')(lambda c: None)\n",
            "ValueError: family 'LlamaForCausalLM' is defined twice",
        ),
    ],
)
def test_load_plugins_names_the_plug_in_and_what_it_raised(source: str, message: str, tmp_path: Path) -> None:
    import plait.families.llama  # noqa: F401

    (tmp_path / "bad.py").write_text(source)
    with pytest.raises(PluginError, match=message):
        load(tmp_path / "bad.py")
    assert not any(name.startswith("plait_plugin_bad") for name in sys.modules)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("nowhere.py", "there is no file"),
        (".", "there is no file"),
        ("theirs_not", "there is no such module"),
    ],
)
def test_load_plugins_says_what_a_name_may_be(
    name: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(PluginError, match=message):
        load(name)


def test_load_plugins_calls_what_an_installed_entry_point_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "theirs_two.py").write_text("CALLS = []\ndef register():\n    CALLS.append(1)\n")
    (tmp_path / "theirs_three.py").write_text("")
    points = [EntryPoint("two", "theirs_two:register", GROUP), EntryPoint("three", "theirs_three", GROUP)]
    monkeypatch.setattr(plugins, "entry_points", lambda group: EntryPoints(points).select(group=group))
    for _ in range(2):
        assert [found.name for found in load()] == ["two", "three"]
    assert sys.modules["theirs_two"].CALLS == [1]
    points[:] = [EntryPoint("gone", "theirs_four", GROUP)]
    with pytest.raises(PluginError, match=r"plug-in gone cannot be loaded.*theirs_four"):
        load()
