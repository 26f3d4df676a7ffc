"""Loaded by every Python of a run: changes torch and Triton when, and if, the process imports them.

A process that loads neither, such as the one that answers HTTP, stays as it is.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType

FOLDER = Path(__file__).resolve().parent.parent
PACKAGE = "cuda_stand_in"
CHANGES = {"torch": "operators", "triton": "triton_kernels"}  # a package -> our module that changes it


def find_ourselves() -> None:
    """Make this folder importable as `cuda_stand_in`, and nothing next to it."""
    spec = importlib.util.spec_from_file_location(
        PACKAGE, FOLDER / "__init__.py", submodule_search_locations=[str(FOLDER)]
    )
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[PACKAGE] = module
    spec.loader.exec_module(module)


class ImportWatcher:
    """Runs `install` of our module once the package that it changes is imported."""

    def __init__(self) -> None:
        self.left = dict(CHANGES)

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        change = self.left.pop(name, None)
        spec = importlib.util.find_spec(name) if change else None
        if spec is None or spec.loader is None:
            return None
        execute = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            execute(module)
            importlib.import_module(f"{PACKAGE}.{change}").install()

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


find_ourselves()
sys.meta_path.insert(0, ImportWatcher())
