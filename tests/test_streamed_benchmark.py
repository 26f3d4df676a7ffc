"""What the client of `benchmarks/streamed.py` reads from a server."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType

import pytest

SCRIPT = Path(__file__).resolve().parent.parent / "benchmarks" / "streamed.py"
OK = b"HTTP/1.1 200 OK\r\n"


@pytest.fixture
def streamed(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    spec = importlib.util.spec_from_file_location("streamed", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, module)  # its dataclasses look there
    spec.loader.exec_module(module)
    return module


def test_streams_are_read_across_the_cuts_of_http_chunks(streamed: ModuleType) -> None:
    values = [{"choices": [{"text": text}]} for text in ("a", "", "b")]
    values.append({"choices": [], "usage": {"completion_tokens": 3}})
    body = b"".join(b"data: " + json.dumps(one).encode() + b"\n\n" for one in values) + b"data: [DONE]\n\n"
    parts = [body[at : at + 7] for at in range(0, len(body), 7)]
    raw = b"".join(b"%x\r\n%s\r\n" % (len(part), part) for part in parts) + b"0\r\n\r\n"
    reply = streamed.read_reply(OK + b"Transfer-Encoding: chunked\r\n\r\n" + raw)
    assert (reply.text, reply.tokens, reply.events) == ("ab", 3, 2)


def test_whole_replies_are_read_and_errors_end_the_run(streamed: ModuleType) -> None:
    body = json.dumps({"choices": [{"text": "ab"}], "usage": {"completion_tokens": 2}}).encode()
    reply = streamed.read_reply(OK + b"Content-Length: 9\r\n\r\n" + body)
    assert (reply.text, reply.tokens) == ("ab", 2)
    with pytest.raises(SystemExit, match=r"the server refused: HTTP/1\.1 503"):
        streamed.read_reply(b"HTTP/1.1 503 Service Unavailable\r\n\r\n{}")
