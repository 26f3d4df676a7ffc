"""What becomes of a model that was loaded."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from plait.server.gateway import request_context
from plait.server.gateway.request_context import LoadingState


def test_collections_look_at_what_came_after_the_first_model(monkeypatch: pytest.MonkeyPatch) -> None:
    frozen: list[str] = []
    counted = SimpleNamespace(get_freeze_count=lambda: len(frozen), freeze=lambda: frozen.append("all"))
    monkeypatch.setattr(request_context, "gc", counted)
    for name in ("first", "second"):
        assert LoadingState().arrive(cast(Any, name))
    assert frozen == ["all"]
