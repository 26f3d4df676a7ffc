from __future__ import annotations

import pytest

from plait.cluster.config import NOT_COMPUTED, NOT_SERVED, ClusterConfig, check_cluster, share_limits
from plait.config import EngineConfig, ServerConfig, option_names
from plait.errors import ConfigError


@pytest.mark.parametrize(("text", "bounds"), [("2", (2, 2)), ("1..8", (1, 8)), (" 3 ", (3, 3))])
def test_replicas_are_a_number_or_a_range(text: str, bounds: tuple[int, int]) -> None:
    assert ClusterConfig(replicas=text).bounds == bounds


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("replicas", "0"), ("replicas", "3..2"), ("replicas", "many"), ("replicas", "2..")),
        *(("cpus", -1.0), ("gpus", float("inf")), ("gateways", 0), ("drain_s", -1.0), ("patience_s", 1.0)),
        *(("max_queue_s", 0.0), ("max_queue_s", float("inf")), ("down_after_s", -1.0)),
    ],
)
def test_a_value_that_cannot_be_is_named(name: str, value: object) -> None:
    with pytest.raises(ConfigError, match=name):
        ClusterConfig(**{name: value})  # type: ignore[arg-type]


def test_options_that_a_cluster_cannot_keep_are_refused_by_name() -> None:
    check_cluster(EngineConfig(max_num_seqs=8), ServerConfig(port=9000, api_key=("k",)))
    with pytest.raises(ConfigError, match="tls_cert: not in a cluster: put a proxy"):
        check_cluster(EngineConfig(), ServerConfig(tls_cert="a", tls_key="b"))
    with pytest.raises(ConfigError, match="lora_folder"):
        check_cluster(EngineConfig(lora_folder="adapters"), ServerConfig())
    assert {*NOT_SERVED} <= {*option_names(ServerConfig)}
    assert {*NOT_COMPUTED} <= {*option_names(EngineConfig)}


def test_a_gateway_gets_its_share_of_each_limit_and_never_nothing() -> None:
    shared = share_limits(ServerConfig(requests_per_minute=5, tokens_per_minute=1000), 2)
    assert (shared.requests_per_minute, shared.tokens_per_minute) == (3, 500)
    assert shared.max_requests_per_key is None
