"""The policy, on a small simulated cluster: cost routing finds more of the prompts than load alone does."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from types import ModuleType

import pytest

BENCHMARKS = Path(__file__).resolve().parent.parent.parent / "benchmarks"


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("cluster_simulation")


@pytest.mark.parametrize("kind", ["hybrid", "paged"])
def test_cost_routing_finds_more_prompt_tokens_than_load_and_round_robin(
    script: ModuleType, kind: str
) -> None:
    options = ["--replicas", "8", "--seconds", "60", "--policies", "cost,load,round_robin", "--kind", kind]
    found = {row["policy"]: row for row in script.rows(script.parse(options))}
    shares = {policy: row["found_share"] for policy, row in found.items()}
    assert shares["cost"] > max(shares["load"], shares["round_robin"]) + 0.15
    assert shares["cost"] > 0.9 * found["cost"]["one_cache_share"]
    assert found["cost"]["first_token_p50_ms"] < 0.5 * found["load"]["first_token_p50_ms"]


def test_four_gateways_find_what_one_cache_would(script: ModuleType) -> None:
    options = ["--replicas", "16", "--gateways", "4", "--seconds", "60", "--policies", "cost"]
    (row,) = script.rows(script.parse(options))
    assert (
        row["found_share"] > 0.95 * row["one_cache_share"]
    )  # which knows beginnings before their first reader
    assert row["found_share"] > 0.97 * row["one_replica_share"]  # one engine with the memory of all


@pytest.mark.parametrize("seed", range(3))
def test_four_replicas_find_what_one_with_four_times_the_memory_would(script: ModuleType, seed: int) -> None:
    row = script.Simulation("cost", 4, gateways=2, seconds=120.0, seed=seed).run()
    assert row["found_share"] > 0.95 * row["one_replica_share"]


def test_rows_repeat_but_for_measured_times_and_are_json(script: ModuleType) -> None:
    options = script.parse(["--replicas", "1,3", "--seconds", "20", "--policies", "cost,home,two"])
    first, second = ([json.loads(json.dumps(row)) for row in script.rows(options)] for _ in range(2))
    for row in (*first, *second):
        row.pop("choose_us")
        row.pop("hear_us", None)
    assert first == second
    assert [(row["replicas"], row["policy"]) for row in first] == [
        (number, policy) for number in (1, 3) for policy in ("cost", "home", "two")
    ]


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (["--replicas", "0"], "'0' is not a number from 1 to 1024"),
        (["--replicas", "4,2000"], "'2000' is not a number from 1 to 1024"),
        (["--policies", "cost,best"], "'best' is not one of cost"),
        (["--seconds", "-1"], "-1.0 is not a positive number"),
    ],
)
def test_options_out_of_range_are_refused_by_name(
    script: ModuleType, words: list[str], error: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        script.parse(words)
    assert error in capsys.readouterr().err
