"""Options that cannot be honoured are refused where they are given, by name."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any, get_type_hints

import pytest

from plait import option_fields
from plait.config import EngineConfig, ServerConfig
from plait.errors import ConfigError
from tests.patience import PATIENCE_S


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"device": "gpu"}, "device: 'gpu' is not one of auto, cpu, cuda"),
        ({"dtype": "fp8"}, "dtype: 'fp8' is not one of"),
        ({"ops": "fast"}, "ops: 'fast' is not one of auto, reference"),
        ({"ssm_mode": "fast"}, "ssm_mode"),
        ({"a_source": "file"}, "a_source"),
        ({"max_num_seqs": "8"}, "max_num_seqs: '8' is not a whole number"),
        ({"max_model_len": 1}, "max_model_len: 1 is less than 2"),
        ({"max_model_len": 1.5}, "max_model_len: 1.5 is not a whole number"),
        ({"max_num_seqs": 0}, "max_num_seqs: 0 is less than 1"),
        ({"cache_disk_limit": 1 << 30}, "cache_disk_limit: it needs cache_disk"),
        ({"block_size": 12}, "12 is not a power of two"),
        ({"max_num_batched_tokens": 4, "max_num_seqs": 8}, "must be at least max_num_seqs"),
    ],
)
def test_an_engine_option_that_cannot_be_is_refused_by_name(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        EngineConfig(**options)


@pytest.mark.parametrize(
    "options",
    [
        {"port": 70_000},
        {"max_body_bytes": 0},
        {"shutdown_timeout_s": -1.0},
        {"step_timeout_s": 0.0},
        {"loading_timeout_s": float("inf")},
        {"on_engine_lost": "pray"},
        {"max_body_bytes": 1.5},
        {"stream_interval": 0},
        {"stream_interval": -4},
        {"stream_interval": 257},
        {"stream_interval": 4.0},
        {"stream_interval": True},
        {"stream_interval": "8"},
        {"store_limit": 1 << 30},
        {"store_max_age": 3600},
        {"store_key": "x"},
        {"mcp_timeout_s": 5.0},
        {"kv_events_replay": "tcp://*:5558"},
    ],
)
def test_a_server_option_that_cannot_be_is_refused_by_name(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(options))):
        ServerConfig(**options)


def test_one_override_may_be_given_as_it_is() -> None:
    assert EngineConfig(set="rope_theta=1e6").set == ("rope_theta=1e6",)
    assert EngineConfig(set=["a=1", "b=2"]).set == ("a=1", "b=2")


def test_a_head_for_drafts_and_adapters_exclude_each_other() -> None:
    for more in ({"lora": ("a=x",)}, {"lora_folder": "x"}):
        with pytest.raises(ConfigError, match="with lora choose ngram"):
            EngineConfig(speculate="mtp", **more)  # type: ignore[arg-type]
    assert EngineConfig(speculate="ngram", lora=("a=x",)).lora == ("a=x",)


def test_two_threads_make_the_first_options_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """As two that load models: the second one finds types that are complete, or reads them itself."""
    is_inside, may_go = threading.Event(), threading.Event()

    class SlowHints(dict[str, Any]):
        def items(self) -> Any:
            if not is_inside.is_set():
                is_inside.set()
                assert may_go.wait(PATIENCE_S)
            return super().items()

    monkeypatch.setattr(option_fields, "_TYPES", {})
    monkeypatch.setattr(option_fields, "get_type_hints", lambda cls: SlowHints(get_type_hints(cls)))
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(EngineConfig)
        try:
            assert is_inside.wait(PATIENCE_S)
            assert EngineConfig(max_num_seqs=3).max_num_seqs == 3
        finally:
            may_go.set()
        assert first.result(PATIENCE_S) == EngineConfig()
