"""Plug-ins: code of others that registers families, mixers, ops and kernels when it is imported.

Only installed plug-ins (the entry points `plait.plugins`) and named ones (`--plugin`) are loaded. Code in a
model's folder never is, because it would run with all rights of the process. Plug-ins are loaded where models
are opened, so the front process of a server has none.
"""

from __future__ import annotations

import hashlib
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType

from plait.config import EngineConfig
from plait.errors import PluginError
from plait.kernels.load import load_kernels

GROUP = "plait.plugins"


@dataclass(frozen=True, slots=True)
class Plugin:
    """A plug-in that was loaded. `module`: what was imported; `digest`: of the source of its package."""

    name: str
    module: str
    digest: str


def load_plugins(config: EngineConfig) -> tuple[Plugin, ...]:
    """Load what is installed and what is named; each is imported once in a process. Raises PluginError.

    Plait's own kernels come first: a variant that is registered later is tried first.
    """
    installed = entry_points(group=GROUP)
    if not installed and not config.plugins:
        return ()
    load_kernels(cache_dir=Path(config.cache_dir) if config.cache_dir else None, isa=config.isa)
    return (*map(_load_installed, installed), *map(_load_named, config.plugins))


@cache
def _load_installed(point: EntryPoint) -> Plugin:
    """An entry point names a module, or something in it to call without arguments."""
    package = f" (of the package {point.dist.name}; without it, uninstall that)" if point.dist else ""
    with _report_failure(f"{point.name}{package}"):
        found = point.load()
        if callable(found):
            found()
    return _plugin(point.name, sys.modules[point.module])


def _load_named(name: str) -> Plugin:
    path = Path(name).expanduser()
    if not (path.suffix == ".py" or path.is_dir()):
        return _plugin(name, _import_plugin(name))
    start = path / "__init__.py" if path.is_dir() else path
    if not start.is_file():
        raise PluginError(f"plug-in {name}: there is no file {start}")
    title = f"plait_plugin_{path.resolve().stem}_{_digest(path)[:12]}"
    return _plugin(name, sys.modules.get(title) or _run_file(name, title, start))


def _import_plugin(name: str) -> ModuleType:
    with _report_failure(name):
        try:
            return import_module(name)
        except ModuleNotFoundError as error:
            if error.name is None or not f"{name}.".startswith(f"{error.name}."):
                raise  # a module that the plug-in imports
            raise PluginError(
                f"plug-in {name}: there is no such module; name a FILE.py, a folder with an __init__.py, "
                "or a module that this Python finds"
            ) from error


def _run_file(name: str, title: str, start: Path) -> ModuleType:
    """A file, or a package in its folder, under a name that its content decides, as kept kernels need it."""
    folder = [str(start.parent)] if start.name == "__init__.py" else None
    spec = spec_from_file_location(title, start, submodule_search_locations=folder)
    if spec is None or spec.loader is None:
        raise PluginError(f"plug-in {name}: {start} is no Python source")
    module = sys.modules[title] = module_from_spec(spec)
    try:
        with _report_failure(name):
            spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[title]
        raise
    return module


@contextmanager
def _report_failure(name: str) -> Iterator[None]:
    """Whatever the plug-in raises becomes a PluginError, with its place."""
    try:
        yield
    except PluginError:
        raise
    except Exception as error:
        frames = [f for f in traceback.extract_tb(error.__traceback__) if "importlib" not in f.filename]
        where = f" ({frames[-1].filename}, line {frames[-1].lineno})" if len(frames) > 1 else ""
        text = " ".join(str(error).split())
        raise PluginError(
            f"plug-in {name} cannot be loaded: {type(error).__name__}: {text}{where}"
        ) from error


def _plugin(name: str, module: ModuleType) -> Plugin:
    """The record of a loaded plug-in, with a digest of the whole package that its module is in."""
    top = sys.modules[module.__name__.partition(".")[0]]
    source = Path(top.__file__) if top.__file__ else None
    if source is not None and source.name == "__init__.py":
        source = source.parent
    return Plugin(name, module.__name__, _digest(source) if source else "")


def _digest(source: Path) -> str:
    """The SHA-256 of a file, or of all Python files of a folder."""
    digest = hashlib.sha256()
    for path in sorted(source.rglob("*.py")) if source.is_dir() else [source]:
        data = path.read_bytes()
        digest.update(f"{path.relative_to(source)} {len(data)} ".encode() + data)
    return digest.hexdigest()
