"""`plait ps`, `load` and `stop` against a server of several models in this process."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.contract.wire import Client
from tests.server.conftest import serving as serving_one
from tests.server.fake import fake_front
from tests.server.models.pooling import Bench
from tests.server.models.test_served import serving

Run = Callable[..., Any]


@pytest.fixture(scope="module")
def bench() -> Bench:
    made = Bench("small", "big", "bad", fit=4, admin_key="secret", api_key=("k",), aliases={"big": ("b",)})
    made.loader.broken["bad"] = ValueError("it is truncated")
    return made


@pytest.fixture(scope="module")
def several(bench: Bench) -> Iterator[Client]:
    with serving(bench) as client:
        yield client


def test_models_are_listed_loaded_and_unloaded(
    plait: Run, several: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PLAIT_URL", several.base_url)
    monkeypatch.setenv("PLAIT_API_KEY", "k")
    monkeypatch.setenv("PLAIT_ADMIN_KEY", "secret")
    head, *rows = plait("ps").out.splitlines()
    assert head.split()[:3] == ["NAME", "STATUS", "CONTEXT"]
    assert [row.split()[:2] for row in rows] == [
        ["small", "loaded"],
        ["big", "unloaded"],
        ["bad", "unloaded"],
    ]
    loaded = plait("load", "b")
    assert (loaded.code, loaded.out) == (0, "big: loaded\n")
    assert '"value": "loaded"' in plait("ps", "--json").out
    assert plait("stop", "big").out == "big: unloaded\n"
    failed = plait("load", "bad")
    assert failed.code == 1
    assert "it is truncated" in failed.err
    *_, row, cause = plait("ps").out.splitlines()
    assert row.split()[:2] == ["bad", "failed"]
    assert "truncated" not in row
    assert cause == "bad: failed: ValueError: it is truncated"
    assert "no" in plait("load", "no").err


def test_a_wrong_key_and_an_address_without_a_server_are_named(plait: Run, several: Client) -> None:
    refused = plait("stop", "big", "--url", several.base_url, "--admin-key", "k")
    assert refused.code == 1
    assert "admin key" in refused.err
    refused = "cannot be reached: Connection refused; `plait serve MODEL` starts a server"
    assert refused in plait("ps", "--url", "http://127.0.0.1:9").err


def test_a_server_of_one_model_is_listed_and_keeps_it(plait: Run) -> None:
    with serving_one(fake_front(), admin_key="secret") as client:
        assert plait("ps", "--url", client.base_url).out.splitlines()[1].split()[:2] == ["fake", "loaded"]
        kept = plait("stop", "fake", "--url", client.base_url, "--api-key", "secret")
        assert kept.code == 2
        assert "only model" in kept.err
