"""Options without effect on a model: each is named, with the reason."""

from __future__ import annotations

from typing import Any

import pytest

from plait.config import EngineConfig
from plait.memory import PagedState, SlotState, State
from plait.unread_options import list_unread, list_unread_text

KEYS, RECURRENT = PagedState({}), SlotState({})
HYBRID = (KEYS, RECURRENT)


@pytest.mark.parametrize(
    ("options", "states", "is_on_gpu", "lines"),
    [
        ({}, HYBRID, True, []),
        ({"threads": 2, "precise": True, "isa": "avx2", "kv_dtype": "int8"}, HYBRID, False, []),
        ({"precise": True, "isa": "avx2"}, HYBRID, True, ["precise, isa: without effect: for CPUs alone"]),
        ({"threads": 2, "packed_cache": "off"}, HYBRID, True, ["threads: without effect: for CPUs alone"]),
        ({"gpu_memory": 0.5}, HYBRID, False, ["gpu_memory: without effect: the model is on a CPU"]),
        ({"gpu_memory": 0.5}, HYBRID, True, []),
        ({"gpu_memory": 0.5, "memory_limit": 9}, HYBRID, True, ["gpu_memory: without effect: memory_limit"]),
        ({"ops": "reference", "prefill": "bf16"}, HYBRID, False, ["prefill: without effect: ops is"]),
        ({"num_draft_tokens": 4}, HYBRID, False, ["num_draft_tokens: without effect: speculate is off"]),
        ({"num_draft_tokens": 4, "speculate": "ngram"}, HYBRID, False, []),
        ({"max_lora_rank": 8}, HYBRID, False, ["max_lora_rank: without effect: there are no adapters"]),
        ({"max_lora_rank": 8, "lora": ("a=x",)}, HYBRID, False, []),
        ({"kv_dtype": "int8"}, [RECURRENT], False, ["kv_dtype: without effect: this model has no keys"]),
        ({"snapshot_interval": 64}, [KEYS], False, ["snapshot_interval: without effect: this model has no"]),
        (
            {"snapshot_interval": 64, "prefix_cache": False},
            HYBRID,
            False,
            ["snapshot_interval: without effect"],
        ),
        (
            {"tensor_parallel_size": 2, "packed_cache": "x", "num_draft_tokens": 4},
            HYBRID,
            False,
            ["packed_cache: without effect: weights", "num_draft_tokens: without effect: speculate"],
        ),
    ],
)
def test_an_option_without_effect_is_named_with_the_reason(
    options: dict[str, Any], states: list[State], is_on_gpu: bool, lines: list[str]
) -> None:
    named = {str(i): state for i, state in enumerate(states)}
    config = EngineConfig(**options)
    found = list_unread(config, named, causal=True, is_on_gpu=is_on_gpu, has_canvas=False)
    assert len(found) == len(lines)
    assert all(line.startswith(start) for line, start in zip(found, lines, strict=True)), found


def test_edits_of_canvases_are_read_by_models_that_fill_them() -> None:
    how: dict[str, bool] = dict(causal=True, is_on_gpu=False)
    both = EngineConfig(canvas_edit_threshold=0.0, canvas_edit_passes=4)
    assert list_unread(both, {"a": KEYS}, **how, has_canvas=True) == []
    (line,) = list_unread(both, {"a": KEYS}, **how, has_canvas=False)
    assert line.startswith("canvas_edit_threshold, canvas_edit_passes: without effect: this model fills")
    (line,) = list_unread(EngineConfig(canvas_edit_passes=4), {"a": KEYS}, **how, has_canvas=True)
    assert line == "canvas_edit_passes: without effect: there is no canvas_edit_threshold"


def test_a_threshold_of_canvases_is_read_by_models_that_fill_them() -> None:
    config = EngineConfig(canvas_threshold=0.5)
    how: dict[str, bool] = dict(causal=True, is_on_gpu=False)
    assert list_unread(config, {"a": KEYS}, **how, has_canvas=True) == []
    (line,) = list_unread(config, {"a": KEYS}, **how, has_canvas=False)
    assert line == "canvas_threshold: without effect: this model fills no masks"


def test_what_is_for_replies_is_named_for_a_model_without_them() -> None:
    config = EngineConfig(speculate="ngram", json_space="any")
    assert list_unread_text(config, "hermes", None, generates=True, has_template=True) == []
    assert list_unread_text(config, "hermes", "none", generates=True, has_template=False) == [
        "tool_call_parser: without effect: this model has no chat template"
    ]
    assert list_unread_text(config, None, None, generates=False, has_template=False) == [
        "speculate, json_space: without effect: this model writes no replies"
    ]
