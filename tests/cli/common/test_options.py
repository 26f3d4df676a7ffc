"""Flags come from the dataclasses: each field has one, and its default is the dataclass's."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from typing import Any

import pytest

from plait.cli.generate import generate
from plait.cli.serve import serve
from plait.config import EngineConfig, ServerConfig

Run = Callable[..., Any]


@pytest.mark.parametrize("cls", [EngineConfig, ServerConfig])
def test_every_field_is_a_flag_of_serve_with_its_default(cls: type) -> None:
    flags = {param.name: param for param in serve.params}
    for field in fields(cls):
        assert flags[field.name].opts == ["--" + field.name.replace("_", "-"), *field.metadata["also"]]
        assert (flags[field.name].default or None) == (field.default or None)


def test_engine_flags_reach_the_engine(plait: Run, engine: Any) -> None:
    flags = ["--cpu", "--dtype", "bfloat16", "--max-num-seqs", "4", "--memory-limit", "1.5GiB"]
    flags += ["--swap-memory", "4GiB", "--set", "rope_theta=1e6", "--set", "hidden_act=gelu"]
    assert plait("generate", "--model", "m", "--prompt", "x", *flags).code == 0
    config = EngineConfig(**{k: v for k, v in engine.settings.items() if k != "model"})
    assert config == EngineConfig(
        device="cpu",
        dtype="bfloat16",
        max_num_seqs=4,
        memory_limit=3 << 29,
        swap_memory=4 << 30,
        set=("rope_theta=1e6", "hidden_act=gelu"),
    )


@pytest.mark.parametrize("name", ["--kv-dtype", "--kv-cache-dtype"])
@pytest.mark.parametrize("kept", ["auto", "float32", "bfloat16", "int8"])
def test_what_keys_and_values_are_kept_in_has_two_names(
    name: str, kept: str, plait: Run, engine: Any
) -> None:
    assert plait("generate", "--model", "m", "--prompt", "x", name, kept).code == 0
    assert engine.settings["kv_dtype"] == kept


def test_what_they_cannot_be_kept_in_is_refused_with_what_can(plait: Run) -> None:
    result = plait("generate", "--model", "m", "--prompt", "x", "--kv-cache-dtype", "fp8")
    assert result.code == 2
    assert "'auto', 'float32', 'bfloat16', 'int8'" in result.err


def test_what_is_on_can_be_switched_off(plait: Run, engine: Any) -> None:
    assert plait("generate", "--model", "m", "--prompt", "x", "--no-prefix-cache").code == 0
    assert engine.settings["prefix_cache"] is False


def test_sampling_that_is_not_given_stays_open(plait: Run, engine: Any) -> None:
    plait("generate", "--model", "m", "--prompt", "x")
    (params,) = engine.params
    assert (params.temperature, params.top_p, params.top_k, params.max_tokens) == (None, None, None, 100)


def test_sampling_flags_reach_the_request(plait: Run, engine: Any) -> None:
    flags = ["--temperature", "0", "--top-p", "0.5", "--top-k", "3", "--min-p", "0.1", "--seed", "7"]
    flags += [
        "--stop",
        "a",
        "--stop",
        "b",
        "--ignore-eos",
        "--max-tokens",
        "9",
        "--repetition-penalty",
        "1.1",
    ]
    plait("generate", "--model", "m", "--prompt", "x", *flags)
    (params,) = engine.params
    assert (params.temperature, params.top_p, params.top_k, params.min_p) == (0.0, 0.5, 3, 0.1)
    assert (params.seed, params.stop, params.ignore_eos, params.max_tokens) == (7, ("a", "b"), True, 9)
    assert params.repetition_penalty == 1.1


def test_help_shows_the_documented_defaults() -> None:
    texts = {param.name: getattr(param, "help", "") for param in generate.params}
    for name, default in {"temperature": "0.7", "top_p": "0.9", "top_k": "40", "max_tokens": "100"}.items():
        assert f"{default}]" in texts[name]


def test_cpu_contradicts_cuda(plait: Run, engine: Any) -> None:
    result = plait("generate", "--model", "m", "--prompt", "x", "--cpu", "--device", "cuda")
    assert result.code == 2
    assert "contradict" in result.err


def test_a_combination_that_cannot_be_honoured_is_refused_before_loading(plait: Run) -> None:
    result = plait("serve", "--model", "m", "--max-num-seqs", "64", "--max-num-batched-tokens", "8")
    assert result.code == 2
    assert "max_num_batched_tokens (8) must be at least max_num_seqs (64)" in result.err
