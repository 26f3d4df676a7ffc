"""What of Doge is refused, and where its sequences end."""

from __future__ import annotations

from typing import Any

import pytest

from plait.errors import UnsupportedModel
from plait.families.common.registry import build_spec
from tests.families import tiny

CONFIG: dict[str, Any] = {"architectures": ["DogeForCausalLM"], "model_type": "doge", **tiny.SIZES}


@pytest.mark.parametrize(("window", "longest"), [(2048, 128), (128, 128), (50, 50)])
def test_sequences_end_where_keys_would_be_chosen(window: int, longest: int) -> None:
    spec, _ = build_spec({**CONFIG, "keep_window_size": window})
    assert spec.max_len == longest


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({"is_moe": True}, "its router mixes the scores of different tokens"),
        ({"keep_window_size": 0}, "keep_window_size = 0; a number of keys, 1 or more"),
    ],
)
def test_what_is_refused(changed: dict[str, Any], why: str) -> None:
    with pytest.raises(UnsupportedModel, match=why):
        build_spec({**CONFIG, **changed})
