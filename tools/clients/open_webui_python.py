"""Open WebUI, started with this server as its Ollama and as its OpenAI, over its own API."""

import contextlib
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from common import MODEL, PARAMETERS, QUESTION, URL, report

READY_S = 240
ASKED = {"model": MODEL, "messages": [{"role": "user", "content": QUESTION}], "max_tokens": 24}
SETTINGS = {
    "WEBUI_AUTH": "False",
    "WEBUI_SECRET_KEY": "x",
    "OFFLINE_MODE": "true",
    "HF_HUB_OFFLINE": "1",
    "OLLAMA_BASE_URL": URL,
    "OPENAI_API_BASE_URL": f"{URL}/v1",
    "OPENAI_API_KEY": "x",
    "RAG_EMBEDDING_ENGINE": "openai",  # its own would be fetched
    "RAG_OPENAI_API_BASE_URL": f"{URL}/v1",
    "RAG_OPENAI_API_KEY": "x",
    "RAG_EMBEDDING_MODEL": MODEL,
}


class WebUi:
    """A running Open WebUI."""

    def __init__(self, url: str) -> None:
        self._url, self._token = url, ""
        self._token = self.call("/api/v1/auths/signin", {"email": "", "password": ""})["token"]

    def text(self, path: str, body: dict[str, Any] | None = None) -> str:
        """The body of an answer; a request without a body is a GET."""
        headers = {"Authorization": f"Bearer {self._token}", "Content-Type": "application/json"}
        data = None if body is None else json.dumps(body).encode()
        with urllib.request.urlopen(
            urllib.request.Request(self._url + path, data, headers), timeout=60
        ) as sent:
            return str(sent.read().decode())

    def call(self, path: str, body: dict[str, Any] | None = None) -> Any:
        """The answer as JSON."""
        return json.loads(self.text(path, body))


@contextlib.contextmanager
def start() -> Iterator[WebUi]:
    """Open WebUI on a free port, with a folder of its own."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    command = [
        str(Path(sys.executable).with_name("open-webui")),
        "serve",
        "--host",
        "127.0.0.1",
        "--port",
        port,
    ]
    with tempfile.TemporaryDirectory() as home:
        environment = {**os.environ, **SETTINGS, "HOME": home, "DATA_DIR": home}
        with (Path(home) / "log").open("wb") as log:
            process = subprocess.Popen(command, cwd=home, env=environment, stdout=log, stderr=log)
        try:
            wait_until_ready(f"http://127.0.0.1:{port}/health", process)
            yield WebUi(f"http://127.0.0.1:{port}")
        finally:
            process.terminate()
            process.wait(60)


def wait_until_ready(url: str, process: subprocess.Popen[bytes]) -> None:
    ends = time.monotonic() + READY_S
    while time.monotonic() < ends and process.poll() is None:
        with contextlib.suppress(OSError), urllib.request.urlopen(url, timeout=5):
            return
        time.sleep(1)
    raise RuntimeError("Open WebUI did not start")


def try_features(ui: WebUi) -> None:
    def models() -> None:
        assert MODEL in [one["id"] for one in ui.call("/api/models")["data"]]
        assert MODEL in [one["name"] for one in ui.call("/ollama/api/tags")["models"]]
        assert ui.call("/ollama/api/version")["version"]
        assert MODEL in [one["id"] for one in ui.call("/openai/models")["data"]]
        assert ui.call("/ollama/api/show", {"model": MODEL})["capabilities"]

    def chat() -> None:
        for path in ("/api/chat/completions", "/openai/chat/completions"):
            assert ui.call(path, ASKED)["choices"][0]["message"]["content"]

    def stream() -> None:
        for path in ("/api/chat/completions", "/openai/chat/completions"):
            events = ui.text(path, {**ASKED, "stream": True}).split("\n\n")
            assert sum('"content"' in event for event in events) > 1, events
        lines = ui.text("/ollama/api/chat", {"model": MODEL, "messages": ASKED["messages"]}).splitlines()
        assert json.loads(lines[-1])["done"]

    def tools() -> None:
        function = {"name": "weather", "description": "The weather of a city.", "parameters": PARAMETERS}
        choice = {"type": "function", "function": {"name": "weather"}}
        more = {"tools": [{"type": "function", "function": function}], "tool_choice": choice}
        made = ui.call("/openai/chat/completions", {**ASKED, "max_tokens": 96, **more})
        assert "city" in made["choices"][0]["message"]["tool_calls"][0]["function"]["arguments"]

    def embeddings() -> None:
        assert ui.call("/ollama/api/embed", {"model": MODEL, "input": ["a", "b"]})["embeddings"][1]
        assert ui.call("/api/embeddings", {"model": MODEL, "input": ["a"]})["data"][0]["embedding"]

    report(models=models, chat=chat, stream=stream, tools=tools, embeddings=embeddings)


with start() as running:
    try_features(running)
