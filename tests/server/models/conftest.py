"""Unloading does not look for circles of garbage here: the tests' own objects are millions."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from plait.server.models import loading_threads


@pytest.fixture(autouse=True)
def no_collection(monkeypatch: pytest.MonkeyPatch) -> None:
    names = ("unfreeze", "collect", "freeze")
    monkeypatch.setattr(loading_threads, "gc", SimpleNamespace(**dict.fromkeys(names, int)))
