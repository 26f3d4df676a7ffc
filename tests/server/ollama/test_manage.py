"""Ollama's paths about models: one model, listed and shown; requests to change that are answered truly."""

from __future__ import annotations

import json
from datetime import datetime
from typing import Any

import pytest
from starlette.testclient import TestClient

from plait.config import ServerConfig
from plait.server.app import create_app
from plait.server.gateway.request_context import LoadingState
from plait.server.ollama.manage import API_VERSION, NOT_DONE
from tests.contract.wire import Answer, Client
from tests.server.fake import CONTEXT, HIDDEN_SIZE, EchoLoop


def delete(client: Client, body: Any) -> Answer:
    return client.request(
        "DELETE", "/api/delete", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )


def test_the_served_model_is_listed_and_runs_for_ever(client: Client) -> None:
    (tag,) = client.get("/api/tags").json["models"]
    (running,) = client.get("/api/ps").json["models"]
    assert (tag["name"], tag["model"], tag["details"]["family"]) == (client.model, client.model, "fake")
    assert len(bytes.fromhex(tag["digest"])) == 32
    assert {**tag, **running} == {**running}
    assert running["context_length"] == CONTEXT
    assert datetime.fromisoformat(running["expires_at"]).year == 9999
    assert datetime.fromisoformat(tag["modified_at"]).year >= 2024


@pytest.mark.parametrize("nbytes", [0, 5 << 30])
def test_memory_of_a_gpu_is_shown(client: Client, engine: EchoLoop, nbytes: int) -> None:
    """`ollama ps` calls a model without it "100% CPU"."""
    engine.device_nbytes = nbytes
    (running,) = client.get("/api/ps").json["models"]
    assert (running["size"], running["size_vram"]) == (nbytes, nbytes)


def test_the_version_is_that_of_the_api(client: Client) -> None:
    assert client.get("/api/version").json["version"] == API_VERSION


@pytest.mark.parametrize("name", ["model", "name"])
def test_show_has_context_template_and_abilities(client: Client, name: str) -> None:
    found = client.post("/api/show", {name: client.model}).json
    assert found["model_info"]["general.architecture"] == "fake"
    assert found["model_info"]["fake.context_length"] == CONTEXT
    assert found["model_info"]["fake.embedding_length"] == HIDDEN_SIZE
    assert found["capabilities"][0] == "completion"
    assert "FROM fake" in found["modelfile"]
    parameters = dict(line.split() for line in found["parameters"].splitlines())
    assert (parameters["temperature"], parameters["repeat_penalty"]) == ("0.7", "1")
    assert client.post("/api/show", {"model": "llama3"}).status == 404


def test_a_pull_of_the_served_model_succeeds_and_of_another_says_what_to_do(client: Client) -> None:
    for name in (client.model, f"{client.model}:latest"):
        answer = client.post("/api/pull", {"model": name, "stream": True})
        assert (answer.status, answer.json) == (200, {"status": "success"})
    answer = client.post("/api/pull", {"model": "llama3"})
    assert answer.status == 404
    assert "`plait pull NAME`" in answer.json["error"]
    assert client.post("/api/pull", {}).status == 400


def test_what_one_server_does_not_do_is_refused_with_what_to_do(client: Client) -> None:
    body = {"model": client.model, "source": client.model, "destination": "x"}
    for path, why in NOT_DONE.items():
        answer = client.post(path, body)
        assert answer.status == 400
        assert why in answer.json["error"]
    for answer in (delete(client, body), client.post("/api/copy", body)):
        assert answer.status == 403
        assert "--admin-key" in answer.json["error"]


def test_an_unknown_path_has_ollamas_error(client: Client) -> None:
    answer = client.post("/api/nothing", {})
    assert answer.status == 404
    assert isinstance(answer.json["error"], str)


def test_while_the_model_loads_there_are_no_tags() -> None:
    with TestClient(create_app(LoadingState(), ServerConfig())) as client:
        answer = client.get("/api/tags")
    assert answer.status_code == 503
    assert "loading" in answer.json()["error"]
