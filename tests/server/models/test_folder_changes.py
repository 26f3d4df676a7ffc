"""/api/pull, /api/copy and /api/delete: with the admin key models of the folder come and go."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ollama
import pytest

from plait.server.models import folder_changes
from tests.checkpoint.hub.fake_hub import FakeHub, Repo, running
from tests.checkpoint.hub.test_client import CHUNK, SMALL, aim, tensors
from tests.contract.wire import Client
from tests.server.models.pooling import Bench
from tests.server.models.test_served import ADMIN, serving

ASK = [{"role": "user", "content": "Hello there"}]


@pytest.fixture(scope="module")
def hub_server() -> Iterator[FakeHub]:
    with running() as made:
        yield made


@pytest.fixture
def hub(hub_server: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeHub:
    hub_server.repos = {"org/m": Repo(), "org/q": Repo()}
    hub_server.repos["org/m"].commit({**SMALL, "model.safetensors": tensors(3000), "README.md": b"no"})
    hub_server.repos["org/q"].commit({"q-Q4_0.gguf": b"GGUF4", "q-Q8_0.gguf": b"GGUF8"})
    hub_server.broken, hub_server.drops = None, 0
    hub_server.forget()
    aim(hub_server.url, tmp_path, monkeypatch)
    monkeypatch.setattr(folder_changes, "LOOK_S", 0.01)
    return hub_server


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "models"
    made.mkdir()
    (made / "one.gguf").write_bytes(b"GGUF one")
    for part in (1, 2):
        (made / f"big-0000{part}-of-00002.gguf").write_bytes(b"GGUF")
    return made


@pytest.fixture
def several(folder: Path, hub: FakeHub) -> Iterator[Client]:
    bench = Bench("small", folder=folder, fit=8, admin_key="secret")
    with serving(bench) as client:
        yield client


@pytest.fixture
def admin(several: Client) -> Iterator[ollama.Client]:
    found = ollama.Client(several.base_url, headers={"Authorization": "Bearer secret"})
    yield found
    found._client.close()  # the server waits for connections that are open


def names(client: ollama.Client) -> set[str | None]:
    return {one.model for one in client.list().models}


def test_a_model_is_pulled_with_progress_and_served(
    several: Client, admin: ollama.Client, hub: FakeHub, folder: Path, tmp_path: Path
) -> None:
    steps = [*admin.pull("org/q:Q4_0", stream=True)]
    assert steps[0].status == "pulling manifest"
    assert steps[-1].status == "success"
    assert {step.total for step in steps if step.digest} <= {5}
    assert {*hub.fetched()} == {"q-Q4_0.gguf"}
    assert (folder / "org" / "q:Q4_0" / "q-Q4_0.gguf").read_bytes() == b"GGUF4"
    assert names(admin) == {"small", "one", "big", "org/q:Q4_0"}
    assert admin.chat("hf.co/org/q:Q4_0", ASK).message.content == "Hello there"  # as Ollama's clients name it
    assert not [*tmp_path.rglob("blobs/*")]  # nothing is there twice
    assert [step.status for step in admin.pull("org/q:Q4_0", stream=True)] == ["success"]
    assert admin.pull("org/m").status == "success"
    assert {*os.listdir(folder / "org" / "m")} == {*SMALL, "model.safetensors"}


def test_a_fetch_that_breaks_goes_on_where_it_stopped(admin: ollama.Client, hub: FakeHub) -> None:
    data = tensors(10 * CHUNK)
    hub.repos["org/m"].commit({**SMALL, "model.safetensors": data})
    hub.drops = 100
    with pytest.raises(ollama.ResponseError, match="cannot fetch org/m from the Hub"):
        [*admin.pull("org/m", stream=True)]
    assert "org/m" not in names(admin)
    hub.drops = 0
    hub.forget()
    assert [*admin.pull("org/m", stream=True)][-1].status == "success"
    assert hub.served < len(data) * 2 // 3


def test_a_copy_outlives_its_original(admin: ollama.Client, folder: Path) -> None:
    assert admin.copy("big", "mine/other").status == "success"
    assert admin.copy("one:latest", "two:latest").status == "success"
    assert names(admin) >= {"mine/other", "two"}
    assert admin.delete("big").status == "success"
    assert admin.delete("one").status == "success"
    assert names(admin) == {"small", "mine/other", "two"}
    assert not [*folder.glob("*.gguf")]
    assert sorted(os.listdir(folder / "mine" / "other")) == [
        "big-00001-of-00002.gguf",
        "big-00002-of-00002.gguf",
    ]
    assert admin.chat("mine/other", ASK).message.content == "Hello there"
    admin.delete("mine/other")
    assert not (folder / "mine").exists()


def test_a_model_that_is_loaded_is_deleted_and_unloaded(several: Client, admin: ollama.Client) -> None:
    assert admin.chat("one", ASK).message.content == "Hello there"
    admin.delete("one")
    assert names(admin) == {"small", "big"}  # also while it is being unloaded
    with pytest.raises(ollama.ResponseError, match="'one' is not served here"):
        admin.chat("one", ASK)


def test_any_model_name_deletes_and_copies_no_other_model(folder: Path, hub: FakeHub) -> None:
    bench = Bench("small", folder=folder, fit=8, admin_key="secret", any_model_name=True)
    before = sorted(path.name for path in folder.iterdir())
    with serving(bench) as client:
        for method, path, body in (
            ("DELETE", "/api/delete", {"model": "typo"}),
            ("POST", "/api/copy", {"source": "typo", "destination": "x"}),
        ):
            answer = client.request(method, path, json.dumps(body).encode(), ADMIN)
            assert answer.status == 404, answer.body
    assert sorted(path.name for path in folder.iterdir()) == before


REFUSED: list[tuple[str, Any, str]] = [
    ("/api/copy", {"source": "one", "destination": "../out"}, "is no name of a model"),
    ("/api/copy", {"source": "one", "destination": "a/../../out"}, "is no name of a model"),
    ("/api/copy", {"source": "one", "destination": "/etc/x"}, "is no name of a model"),
    ("/api/copy", {"source": "one", "destination": "a/b/c"}, "is no name of a model"),
    ("/api/copy", {"source": "one", "destination": "away/x"}, "leads out of the models' folder"),
    ("/api/copy", {"source": "one", "destination": "org"}, "there is a model 'org' already"),
    ("/api/copy", {"source": "one", "destination": "big"}, "there is a model 'big' already"),
    ("/api/copy", {"source": "one", "destination": "small"}, "there is a model 'small' already"),
    ("/api/copy", {"source": "one", "destination": "default"}, "there is a model 'default' already"),
    ("/api/copy", {"source": "one"}, "destination: send the name"),
    ("/api/copy", {"source": "none", "destination": "x"}, "is not served here"),
    ("/api/delete", {"model": "small"}, "was named when the server was started"),
    ("/api/delete", {}, "model: send the name"),
    ("/api/delete", {"model": "default"}, "model: send the name"),
    ("/api/delete", {"model": "../one.gguf"}, "is not served here"),
    ("/api/pull", {"model": "llama3"}, "is no name on the Hub"),
    ("/api/pull", {"model": "org/m/model.safetensors"}, "no file is pulled"),
    ("/api/pull", {"model": "org/none"}, "org/none"),
    ("/api/pull", {"model": 3}, "model: it must be a string"),
]


def test_what_cannot_be_done_is_refused_and_changes_nothing(
    several: Client, folder: Path, tmp_path: Path
) -> None:
    (tmp_path / "elsewhere").mkdir()
    (folder / "away").symlink_to(tmp_path / "elsewhere")
    (folder / "org").mkdir()

    def list_files() -> list[str]:
        return sorted(path.name for path in tmp_path.rglob("*") if "hub" not in str(path))

    before = list_files()
    for path, body, text in REFUSED:
        method = "DELETE" if path == "/api/delete" else "POST"
        answer = several.request(method, path, json.dumps({"stream": False, **body}).encode(), ADMIN)
        assert answer.status in {400, 404} or "org/none" in text, answer.body
        assert text in answer.json["error"]
        assert list_files() == before


def test_without_the_admin_key_nothing_changes(several: Client, folder: Path) -> None:
    wrong = ADMIN | {"Authorization": "Bearer wrong"}
    for headers in ({"Content-Type": "application/json"}, wrong):
        pulled = several.request("POST", "/api/pull", b'{"model": "org/m"}', headers)
        assert (pulled.status, "only the admin key" in pulled.json["error"]) == (404, True)
        copied = several.request("POST", "/api/copy", b'{"source": "one", "destination": "x"}', headers)
        deleted = several.request("DELETE", "/api/delete", b'{"model": "one"}', headers)
        assert (copied.status, deleted.status) == (401, 401)
        assert several.request("POST", "/api/pull", b'{"model": "one"}', headers).status == 200
    assert (folder / "one.gguf").exists()
    assert not (folder / "org").exists()


def test_without_a_folder_the_refusal_says_what_to_start(hub: FakeHub) -> None:
    with serving(Bench("small", "big", admin_key="secret")) as client:
        for method, path, body in (
            ("POST", "/api/pull", b'{"model": "org/m"}'),
            ("POST", "/api/copy", b'{"source": "small", "destination": "x"}'),
            ("DELETE", "/api/delete", b'{"model": "small"}'),
        ):
            answer = client.request(method, path, body, ADMIN)
            assert answer.status == 400
            assert "--models-dir" in answer.json["error"]
    assert hub.asked == []
