"""Modules that a test imports when it first uses them: each worker collects all tests, and runs some."""

from __future__ import annotations

from importlib import import_module
from typing import Any


class LazyModule:
    """A module under its name."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, attribute: str) -> Any:
        return getattr(import_module(self._name), attribute)


def import_lazily(name: str) -> Any:
    """The module `name`, to be imported at the first look into it: for those that take seconds."""
    return LazyModule(name)
