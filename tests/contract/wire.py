"""Plain HTTP against any server: one connection per call, answers read to their end."""

from __future__ import annotations

import contextlib
import http.client
import json
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit


@dataclass
class Answer:
    """One HTTP response, read to its end."""

    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def error(self) -> dict[str, Any]:
        found: dict[str, Any] = self.json["error"]
        numbers = {"n_prompt_tokens", "n_ctx"}  # of a prompt that is too long
        assert set(found) - numbers == {"message", "type", "param", "code"}
        assert isinstance(found["message"], str)
        assert isinstance(found["type"], str)
        assert found["param"] is None or isinstance(found["param"], str)
        assert found["code"] is None or isinstance(found["code"], str)
        return found

    @property
    def events(self) -> list[dict[str, Any]]:
        """The JSON of a stream's events; the stream must be framed exactly and end with [DONE], once."""
        *frames, end = self.body.decode().split("\n\n")
        assert end == ""
        frames = [frame for frame in frames if not frame.startswith(":")]
        assert all(frame.startswith("data: ") and "\n" not in frame for frame in frames)
        assert frames[-1] == "data: [DONE]"
        return [json.loads(frame.removeprefix("data: ")) for frame in frames[:-1]]

    @property
    def named_events(self) -> list[dict[str, Any]]:
        """The JSON of a stream with named events; each name is the `type` of its JSON."""
        *frames, end = self.body.decode().split("\n\n")
        assert end == ""
        found = []
        for frame in frames:
            if frame.startswith(":") or frame == "data: [DONE]":
                continue
            name, data = frame.split("\n")
            found.append(json.loads(data.removeprefix("data: ")))
            assert name == f"event: {found[-1]['type']}"
        return found


@dataclass
class Client:
    """Plain HTTP on one connection per call."""

    base_url: str
    model: str = ""
    headers: dict[str, str] = field(default_factory=dict)

    @property
    def address(self) -> tuple[str, int]:
        parts = urlsplit(self.base_url)
        assert parts.hostname is not None
        return parts.hostname, parts.port or 80

    def request(
        self, method: str, path: str, body: bytes | None = None, headers: dict[str, str] | None = None
    ) -> Answer:
        connection = http.client.HTTPConnection(*self.address, timeout=60)
        with contextlib.closing(connection):
            connection.request(method, path, body, {**self.headers, **(headers or {})})
            response = connection.getresponse()
            found = {name.lower(): value for name, value in response.getheaders()}
            return Answer(response.status, found, response.read())

    def get(self, path: str) -> Answer:
        return self.request("GET", path)

    def post(self, path: str, body: Any, **headers: str) -> Answer:
        raw = body if isinstance(body, bytes) else json.dumps(body).encode()
        sent = {"Content-Type": "application/json", **{k.replace("_", "-"): v for k, v in headers.items()}}
        return self.request("POST", path, raw, sent)

    def complete(self, prompt: Any = "Hello there", **more: Any) -> Answer:
        return self.post("/v1/completions", {"prompt": prompt, "temperature": 0, **more})

    def chat(self, content: Any = "Hello there", **more: Any) -> Answer:
        messages = [{"role": "user", "content": content}]
        return self.post("/v1/chat/completions", {"messages": messages, "temperature": 0, **more})
