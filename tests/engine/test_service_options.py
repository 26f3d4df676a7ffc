"""Options of a request: what cannot be honoured is refused by name, here, before work on it begins."""

from __future__ import annotations

from typing import Any

import pytest

from plait.engine.admission import MAX_PRIORITY, MAX_SALT_CHARS, ServiceOptions
from plait.errors import InvalidField


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *(
            ("cache_salt", value)
            for value in ("", "x" * (MAX_SALT_CHARS + 1), "é", "a\0b", "\ud800", 7, b"x")
        ),
        *(("priority", value) for value in (MAX_PRIORITY + 1, -MAX_PRIORITY - 1, 1.0, True, "1", None)),
        *(("timeout_s", value) for value in (0, -0.5, float("nan"), float("inf"), True, "1")),
    ],
)
def test_a_value_that_cannot_be_is_refused_by_name(field: str, value: Any) -> None:
    with pytest.raises(InvalidField, match=f"^{field}: ") as caught:
        ServiceOptions(**{field: value})
    assert caught.value.param == field


def test_the_edges_are_taken() -> None:
    for salt in ("x", "x" * MAX_SALT_CHARS, "tenant 7: key=A+/~"):
        assert ServiceOptions(cache_salt=salt).cache_salt == salt
    for priority in (-MAX_PRIORITY, 0, MAX_PRIORITY):
        assert ServiceOptions(priority=priority).priority == priority
    assert ServiceOptions(timeout_s=1e-9).timeout_s == 1e-9
    assert ServiceOptions() == ServiceOptions(cache_salt=None, priority=0, timeout_s=None)
