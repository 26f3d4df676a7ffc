"""Loaded by every Python of a run: changes torch and Triton when, and if, the process imports them.

A process that loads neither, such as the one that answers HTTP, stays as it is. So does one that has not the
environment of a run, and with it not the libraries.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
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
        self._asks = False  # the others for a package that it changes

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if self._asks or name not in CHANGES:
            return None
        self._asks = True
        try:
            spec = importlib.util.find_spec(name)
        finally:
            self._asks = False
        if spec is None or spec.loader is None:
            return None
        execute = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            execute(module)
            importlib.import_module(f"{PACKAGE}.{CHANGES[name]}").install()

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


if "CUDA_STAND_IN_COMPLAINTS" in os.environ:
    find_ourselves()
    sys.meta_path.insert(0, ImportWatcher())
