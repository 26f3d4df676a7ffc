"""The keys that llama.cpp needs for models with linear attention: tried with it, pinned here."""

from __future__ import annotations

from typing import Any

import pytest

from plait.convert.gguf.keys import model_keys
from plait.families.common.registry import build_spec
from tests.families.test_published_linear import KIMI_LINEAR_48B, MINIMAX_TEXT_01, QWEN3_5_WRAPPED

D, A = "linear_attention", "full_attention"


def keys_of(arch: str, config: dict[str, Any]) -> dict[str, Any]:
    spec, _ = build_spec(config)
    return {key.removeprefix(f"{arch}."): value for key, value in model_keys(arch, spec, config).items()}


def qwen(*kinds: str) -> dict[str, Any]:
    text = {**QWEN3_5_WRAPPED["text_config"], "layer_types": list(kinds), "num_hidden_layers": len(kinds)}
    return {**QWEN3_5_WRAPPED, "text_config": text}


@pytest.mark.parametrize(
    ("kinds", "interval", "recurrent"),
    [
        ((D, D, A, D, D, A, D), 3, None),
        ((D, A, A, D), 2, [True, False, False, True]),
        ((D, D), 3, None),
    ],
)
def test_layers_are_described_by_an_interval_or_else_one_by_one(
    kinds: tuple[str, ...], interval: int, recurrent: list[bool] | None
) -> None:
    keys = keys_of("qwen35", qwen(*kinds))
    assert keys["full_attention_interval"] == interval
    assert keys.get("attention.recurrent_layers") == recurrent


def test_key_heads_are_one_number_where_an_interval_describes_the_layers() -> None:
    assert keys_of("qwen35", QWEN3_5_WRAPPED)["attention.head_count_kv"] == 2
    minimax = keys_of("minimax-01", MINIMAX_TEXT_01)
    assert (minimax["attention.head_count_kv"], minimax["full_attention_interval"]) == (8, 8)
    assert keys_of("kimi-linear", KIMI_LINEAR_48B)["attention.head_count_kv"][:5] == [0, 0, 0, 1, 0]


def test_every_frequency_is_in_a_section() -> None:
    assert keys_of("qwen35", QWEN3_5_WRAPPED)["rope.dimension_sections"] == [11, 11, 10, 0]
