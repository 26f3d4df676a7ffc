from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from plait.config import EngineConfig, ServerConfig
from plait.errors import BadFile, ConfigError, ModelNotFound
from plait.frontend.frontend import Front
from plait.request import Request
from plait.server.models.catalog import ModelCatalog, ModelEntry
from plait.server.run import run_server
from plait.server.run_models import run_models
from tests.server.conftest import serving
from tests.server.fake import fake_front


def adapted(monkeypatch: pytest.MonkeyPatch, folder: Path | None) -> tuple[Front, list[Any]]:
    """A Front with the adapter `a`; requests and changes of adapters are recorded."""
    front, seen = fake_front(), list[Any]()
    front.served_adapters.paths, front.lora_folder = {"a": "x"}, None if folder is None else str(folder)
    submit = front.loop.submit

    def record(request: Request, on_event: Any) -> None:
        seen.append(request.adapter)
        submit(request, on_event)

    def change(name: str, path: str | None) -> None:
        if path == "bad":
            raise BadFile(f"{folder}/bad: it is bad")
        if path is None and name == "gone":
            raise ModelNotFound("the adapter 'gone' is not loaded here (any more)", "model")
        seen.append((name, path))

    monkeypatch.setattr(front.loop, "submit", record)
    monkeypatch.setattr(front.loop, "change_adapter", change, raising=False)
    return front, seen


def test_request_chooses_an_adapter_by_its_model(monkeypatch: pytest.MonkeyPatch) -> None:
    front, seen = adapted(monkeypatch, None)
    with serving(front) as client:
        base, adapter = client.get("/v1/models").json["data"]
        assert "parent" not in base
        assert (adapter["id"], adapter["parent"]) == ("a", base["id"])
        assert client.get("/v1/models/a").json == adapter
        for model in ("a", None, base["id"], "default"):
            answer = client.complete(max_tokens=1, model=model)
            assert answer.json["model"] == ("a" if model == "a" else base["id"])
        assert seen == ["a", "", "", ""]
        assert client.complete(max_tokens=1, model="b").status == 404
        for path in ("/v1/load_lora_adapter", "/v1/unload_lora_adapter"):
            answer = client.post(path, {"lora_name": "b", "lora_path": "b"})
            assert answer.status == 400
            assert "--lora-folder" in answer.error["message"]


def test_adapters_are_loaded_and_unloaded_by_requests(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    front, seen = adapted(monkeypatch, tmp_path)
    with serving(front) as client:
        own = client.get("/v1/models").json["data"][0]["id"]
        answer = client.post("/v1/load_lora_adapter", {"lora_name": "b", "lora_path": "y"})
        assert (answer.status, seen) == (200, [("b", "y")])
        assert "'b' added successfully" in answer.json["message"]
        assert client.complete(max_tokens=1, model="b").json["model"] == "b"
        assert client.post("/v1/unload_lora_adapter", {"lora_name": "b"}).status == 200
        assert client.complete(max_tokens=1, model="b").status == 404
        gone = client.post("/v1/unload_lora_adapter", {"lora_name": "gone"})
        assert (gone.status, gone.error["param"], gone.error["code"]) == (404, "lora_name", "model_not_found")
        assert "/v1/models" in gone.error["message"]
        bad = client.post("/v1/load_lora_adapter", {"lora_name": "c", "lora_path": "bad"})
        assert (bad.status, bad.error["message"], bad.error["param"]) == (400, "bad: it is bad", "lora_path")
        for name, path in ((own, "y"), ("a b", "y"), ("c", "y\0"), (5, "y"), ("c", 5), ("c", None)):
            refused = client.post("/v1/load_lora_adapter", {"lora_name": name, "lora_path": path})
            assert refused.status == 400, (name, path)


def test_server_that_others_reach_changes_adapters_only_with_keys(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="only with a key"):
        run_server("m", EngineConfig(lora_folder=str(tmp_path)), ServerConfig(host="0.0.0.0"))
    entry = ModelEntry(name="a", source="m", engine=EngineConfig(lora_folder=str(tmp_path)))
    with pytest.raises(ConfigError, match="lora_folder: on an address that others reach"):
        run_models(ModelCatalog([entry]), ServerConfig(host="0.0.0.0"))
    with pytest.raises(ConfigError, match="kv_events: they are of the prefix cache"):
        run_server("m", EngineConfig(prefix_cache=False), ServerConfig(kv_events="tcp://127.0.0.1:0"))


@pytest.mark.parametrize("option", ["tool_call_parser", "reasoning_parser"])
def test_a_format_that_there_is_not_is_refused_before_a_model_is_loaded(option: str) -> None:
    named: dict[str, Any] = {option: "llama9"}
    with pytest.raises(ConfigError, match=r"'llama9' is not known.* the chat template decides"):
        run_server("m", EngineConfig(), ServerConfig(**named))
    entry = ModelEntry(name="a", source="m", engine=EngineConfig(), **named)
    with pytest.raises(ConfigError, match="'llama9' is not known"):
        run_models(ModelCatalog([entry]), ServerConfig())
