"""A server of several models over HTTP, with fronts that need no engine."""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Iterator

import pytest
from prometheus_client.parser import text_string_to_metric_families

from plait.server.run import Server, serve_models
from tests.contract.wire import Client
from tests.patience import PATIENCE_S
from tests.server.conftest import wait_until
from tests.server.models.pooling import SIZE, Bench

ADMIN = {"Authorization": "Bearer secret", "Content-Type": "application/json"}


@contextlib.contextmanager
def serving(bench: Bench) -> Iterator[Client]:
    listening: queue.SimpleQueue[Server] = queue.SimpleQueue()
    thread = threading.Thread(target=serve_models, args=(bench.pool, bench.config, listening.put))
    thread.start()
    server = listening.get(timeout=PATIENCE_S)
    client = Client(server.url, "small")
    try:
        assert wait_until(lambda: client.get("/ready").status == 200)
        yield client
    finally:
        server.should_exit = True
        thread.join(PATIENCE_S)
        assert not thread.is_alive()


@pytest.fixture(scope="module")
def bench() -> Bench:
    made = Bench(
        "small",
        "big",
        "bad",
        fit=4,
        aliases={"big": ("gpt-4",)},
        admin_key="secret",
        metrics_vllm_names=True,
    )
    made.loader.broken["bad"] = ValueError("/models/bad/model.safetensors is truncated")
    return made


@pytest.fixture(scope="module")
def several(bench: Bench) -> Iterator[Client]:
    with serving(bench) as client:
        yield client


def test_every_api_picks_its_model_by_name(several: Client) -> None:
    chat = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4}
    bodies = {
        "/v1/completions": {"prompt": "Hi", "max_tokens": 4},
        "/v1/chat/completions": chat,
        "/v1/messages": chat,
        "/v1/responses": {"input": "Hi", "max_output_tokens": 16},
        "/api/chat": {**chat, "stream": False},
        "/api/generate": {"prompt": "Hi", "stream": False},
    }
    for path, body in bodies.items():
        for sent, name in (("gpt-4", "big"), ("big:latest", "big"), (None, "small")):
            answer = several.post(path, {**body, "model": sent} if sent else body)
            assert (answer.status, answer.json["model"]) == (200, name), path
            assert "x-plait-ignored" not in answer.headers
    for path, body in {"/tokenize": {"prompt": "Hi"}, "/v1/embeddings": {"input": "Hi"}}.items():
        assert several.post(path, {**body, "model": "big"}).status == 200
    assert several.get("/props?model=big").json["model_alias"] == "big"
    assert several.get("/slots").status == 200
    answer = several.post("/v1/completions", {"prompt": "Hi", "model": "../big"})
    assert (answer.status, answer.error["code"]) == (404, "model_not_found")


def test_lists_say_what_is_loaded_and_show_loads_nothing(several: Client, bench: Bench) -> None:
    several.post("/v1/completions", {"prompt": "Hi", "model": "big", "max_tokens": 1})
    cards = {card["id"]: card for card in several.get("/v1/models").json["data"]}
    assert list(cards) == ["small", "big", "bad"]
    assert [cards[name]["status"]["value"] for name in ("small", "big")] == ["loaded", "loaded"]
    assert cards["big"]["aliases"] == ["gpt-4"]
    assert cards["bad"]["size"] == SIZE
    assert several.get("/v1/models/gpt-4").json["id"] == "big"
    assert [tag["name"] for tag in several.get("/api/tags").json["models"]] == ["small", "big", "bad"]
    assert {one["name"] for one in several.get("/api/ps").json["models"]} == {"small", "big"}
    shown = several.post("/api/show", {"model": "bad"})
    assert (shown.status, shown.json["capabilities"]) == (200, ["completion"])
    assert several.post("/api/pull", {"model": "gpt-4"}).json == {"status": "success"}
    assert "bad" not in bench.loader.loaded


def test_keep_alive_is_read_on_every_path(several: Client, bench: Bench) -> None:
    model = bench.residents.models["small"]
    endless = float("inf")
    sents = {"10m": 600.0, 7: 7.0, -1: endless, "99999999h": endless, 10**400: endless, None: 300.0}
    for sent, seconds in sents.items():
        body = {"prompt": "Hi", "model": "small", "max_tokens": 1, "keep_alive": sent}
        for path in ("/v1/completions", "/api/generate"):
            answer = several.post(path, {**body, "stream": False} if "api" in path else body)
            assert answer.status == 200
            assert "x-plait-ignored" not in answer.headers
            assert wait_until(lambda: model.num_users == 0)
            assert model.keep_s == seconds
            assert several.get("/api/ps").status == 200  # it has the date until which the model stays
    assert several.post("/api/generate", {"model": "small", "keep_alive": "soon"}).status == 400


def test_managing_needs_the_admin_key(several: Client, bench: Bench) -> None:
    for path in ("/models/load", "/models/unload", "/admin/models/load", "/admin/models/unload"):
        assert several.post(path, {"model": "big"}).status == 401
    assert several.get("/admin/models").status == 401
    unloaded = several.request("POST", "/models/unload", b'{"model":"gpt-4"}', ADMIN)
    assert (unloaded.status, unloaded.json["success"]) == (200, True)
    assert wait_until(lambda: bench.phases()["big"] == "unloaded")
    loaded = several.request("POST", "/admin/models/load", b'{"model":"big"}', ADMIN)
    assert loaded.json["model"]["status"]["value"] == "loading"
    assert wait_until(lambda: bench.phases()["big"] == "loaded")
    found = several.request("GET", "/admin/models", b"", ADMIN)
    assert [card["id"] for card in found.json["data"]] == ["small", "big", "bad"]
    assert several.request("POST", "/models/load", b'{"model":"no"}', ADMIN).status == 404
    assert several.request("POST", "/models/load", b"{}", ADMIN).status == 400


def test_a_failed_load_names_its_cause_and_no_path(several: Client) -> None:
    answer = several.post("/v1/completions", {"prompt": "Hi", "model": "bad"})
    assert (answer.status, answer.error["code"]) == (503, "model_unavailable")
    assert "ValueError: model.safetensors is truncated" in answer.error["message"]
    assert "/models/" not in answer.error["message"]
    assert answer.headers["x-should-retry"] == "false"
    assert int(answer.headers["retry-after"]) > 0
    bad = several.get("/v1/models/bad").json
    assert bad["status"] == {"value": "failed", "error": "ValueError: model.safetensors is truncated"}
    assert several.get("/health").json["models"]["bad"]["status"] == "failed"
    assert several.get("/ready").status == 200


def test_health_and_metrics_cover_all_models(several: Client) -> None:
    several.post("/v1/completions", {"prompt": "Hi", "model": "big", "max_tokens": 1})
    health = several.get("/health").json
    assert (health["status"], health["models"]["small"]["status"]) == ("ok", "ok")
    text = several.get("/metrics").body.decode()
    found = {family.name: family for family in text_string_to_metric_families(text)}
    asked = {sample.labels["model"] for sample in found["plait_http_requests"].samples}
    assert {"big", ""} <= asked <= {"small", "big", "bad", ""}
    samples = {sample.labels["model"]: sample.value for sample in found["plait_model_loaded"].samples}
    assert samples == {"small": 1.0, "big": 1.0, "bad": 0.0}
    healthy = found["vllm:engine_healthy"].samples
    assert {sample.labels["model_name"] for sample in healthy} == {"small", "big"}


def test_waiting_for_a_model_is_part_of_a_requests_time(several: Client, bench: Bench) -> None:
    several.request("POST", "/models/unload", b'{"model":"big"}', ADMIN)
    assert wait_until(lambda: bench.phases()["big"] == "unloaded")
    bench.loader.held.add("big")
    body = {"prompt": "Hi", "model": "big", "max_tokens": 2}
    late = several.post("/v1/completions", {**body, "timeout_s": 0.05})
    assert (late.status, late.error["code"]) == (504, "deadline_exceeded")
    assert several.get("/v1/models/big").json["status"]["value"] == "loading"
    assert bench.residents.models["big"].waiters == []
    threading.Timer(0.1, bench.loader.held.clear).start()
    line = several.post("/api/generate", {"model": "big", "prompt": "Hi", "stream": False, "timeout_s": 30})
    assert line.status == 200
    assert 0 < line.json["load_duration"] < line.json["total_duration"]
    assert several.post("/api/generate", {**body, "stream": False}).json["load_duration"] == 0


def test_without_an_admin_key_no_client_manages_models(client: Client) -> None:
    answer = client.post("/models/unload", {"model": client.model})
    assert (answer.status, answer.error["code"]) == (403, "no_admin_key")
