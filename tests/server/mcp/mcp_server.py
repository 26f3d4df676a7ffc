"""MCP servers on a free port, written to the specification: good ones, and every bad one, by their path.

`/json` answers with JSON, `/events` with a stream, `/broken-stream` breaks it and goes on when the rest is
requested, `/plain` refuses the handshake and speaks 2026-07-28. The rest are hostile.
"""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

TOOLS: list[dict[str, Any]] = [
    {
        "name": "weather",
        "description": "The weather somewhere.",
        "inputSchema": {
            "type": "object",
            "properties": {"city": {"type": "string"}},
            "required": ["city"],
        },
        "annotations": {"readOnlyHint": True},
    },
    {"name": "say", "description": "Says it again.", "inputSchema": {"type": "object"}},
    {"name": "fail", "inputSchema": {"type": "object"}},
    {"name": "long", "inputSchema": {"type": "object"}},
]


class McpTestServer(ThreadingHTTPServer):
    """Keeps what it got: `messages` with the path of each, and all `headers`.

    `begun`: the sessions that it gave, in turn; `ended`: those that it saw end, in any test.
    """

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.messages: list[tuple[str, dict[str, Any]]] = []
        self.headers: list[dict[str, str]] = []
        self.begun: list[str] = []
        self.ended: set[str] = set()
        self.tools = TOOLS

    def url(self, path: str) -> str:
        return f"http://127.0.0.1:{self.server_port}{path}"

    def methods(self, path: str) -> list[str]:
        return [message.get("method", "reply") for where, message in self.messages if where == path]

    def calls(self) -> list[dict[str, Any]]:
        """The parameters of every call of a tool."""
        return [m["params"] for _, m in self.messages if m.get("method") == "tools/call"]


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: McpTestServer
    is_handshake = False

    def log_message(self, *args: object) -> None:
        return

    def do_DELETE(self) -> None:
        self.is_handshake = False
        self.server.messages.append((self.path, {"method": "DELETE"}))
        self.server.ended.add(self.headers["Mcp-Session-Id"])
        self.answer(200, b"")

    def do_GET(self) -> None:
        """The rest of a stream that broke."""
        assert self.path in ("/broken-stream", "/cut-stream")
        assert self.headers["Last-Event-ID"] == "e1"
        self.server.messages.append((self.path, {"method": "GET"}))
        number = self.server.messages[-2][1]["id"]
        self.events([({"jsonrpc": "2.0", "id": number, "result": text_result("late")}, "e2")])

    def do_POST(self) -> None:
        message = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.is_handshake = message.get("method") == "initialize"
        self.server.messages.append((self.path, message))
        self.server.headers.append({name.lower(): value for name, value in self.headers.items()})
        hostile = HOSTILE.get(self.path)
        with contextlib.suppress(ConnectionError):
            if hostile is not None:
                hostile(self, message)
            elif "id" not in message or "method" not in message:
                self.answer(202, b"")
            else:
                self.reply(message)

    def reply(self, message: dict[str, Any]) -> None:
        found = result_of(message, self.server.tools, self.path)
        reply = {"jsonrpc": "2.0", "id": message["id"], **found}
        if self.path == "/broken-stream" and message["method"] == "tools/call":
            self.events([(None, "e1")])
        elif self.path == "/cut-stream" and message["method"] == "tools/call":
            self.cut_within_an_event()
        elif self.path in ("/events", "/broken-stream"):
            ping = {"jsonrpc": "2.0", "id": "p1", "method": "ping"}
            sampling = {"jsonrpc": "2.0", "id": "p2", "method": "sampling/createMessage", "params": {}}
            note = {"jsonrpc": "2.0", "method": "notifications/message", "params": {"data": "x\ny"}}
            self.events([(ping, ""), (note, ""), (sampling, ""), (reply, "")])
        else:
            status = 400 if "error" in found and self.path == "/plain" else 200
            self.answer(status, json.dumps(reply).encode())

    def answer(self, status: int, body: bytes, kind: str = "application/json", **headers: str) -> None:
        self.send_response(status)
        if body:
            self.send_header("Content-Type", kind)
        if self.path in ("/json", "/events", "/forgetful"):
            self.send_session()
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def send_session(self) -> None:
        """A new one in the answer to a handshake, else that of the request, if it has one."""
        session = self.headers["Mcp-Session-Id"]
        if self.is_handshake:
            self.server.begun.append(session := f"session-{len(self.server.begun)}")
        if session is not None:
            self.send_header("Mcp-Session-Id", session)

    def begin_stream(self, kind: str) -> None:
        self.send_response(200)
        self.send_header("Content-Type", kind)
        self.send_header("Connection", "close")
        self.close_connection = True
        if self.path == "/events":
            self.send_session()
        self.end_headers()

    def cut_within_an_event(self) -> None:
        """A stream that breaks within the event after e1, of which only the id was read."""
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        piece = b"id: e1\nretry: 20\ndata:\n\nid: e2\ndata: half of\n"
        self.wfile.write(f"{len(piece):x}\r\n".encode() + piece + b"\r\n")
        self.close_connection = True

    def events(self, events: list[tuple[dict[str, Any] | None, str]]) -> None:
        self.begin_stream("text/event-stream; charset=utf-8")
        for message, name in events:
            data = "" if message is None else json.dumps(message, indent=1)
            lines = [f"id: {name}"] * bool(name) + ["retry: 20"] * (message is None)
            lines += [f"data: {line}" for line in data.split("\n")]
            self.wfile.write((": a comment\r\n" + "\r\n".join(lines) + "\r\n\r\n").encode())
            self.wfile.flush()


def text_result(text: str, **more: Any) -> dict[str, Any]:
    return {"content": [{"type": "text", "text": text}], **more}


def result_of(message: dict[str, Any], tools: list[dict[str, Any]], path: str) -> dict[str, Any]:
    method, params = message["method"], message.get("params", {})
    match method:
        case "initialize" if path == "/plain":
            data = {"supported": ["2026-07-28"], "requested": params["protocolVersion"]}
            return {"error": {"code": -32022, "message": "unsupported version", "data": data}}
        case "initialize":
            assert params["clientInfo"]["name"] == "plait"
            return {"result": {"protocolVersion": "2025-06-18", "capabilities": {}, "serverInfo": {}}}
        case "tools/list":
            first = int(params.get("cursor", 0))
            more = {"nextCursor": str(first + 2)} if first + 2 < len(tools) else {}
            return {"result": {"tools": tools[first : first + 2], **more}}
        case "tools/call":
            return call(params["name"], params["arguments"])
    return {"error": {"code": -32601, "message": f"no method {method}"}}


def call(name: str, given: dict[str, Any]) -> dict[str, Any]:
    match name:
        case "weather":
            return {"result": text_result(f"Rain in {given['city']}", resultType="complete")}
        case "say":
            return {"result": text_result(given.get("text", "nothing"))}
        case "long":
            return {"result": text_result("x" * given.get("size", 100_000))}
        case "fail":
            return {"result": text_result("no luck today", isError=True)}
    return {"error": {"code": -32602, "message": f"there is no tool {name}"}}


def _endless(handler: _Handler, message: dict[str, Any]) -> None:
    handler.begin_stream("text/event-stream")
    while True:
        handler.wfile.write(b'data: {"jsonrpc":"2.0","method":"notifications/progress"}\n\n' * 100)


def _no_line_end(handler: _Handler, message: dict[str, Any]) -> None:
    handler.begin_stream("text/event-stream")
    while True:
        handler.wfile.write(b"data: " + b"x" * 100_000)


def _huge(handler: _Handler, message: dict[str, Any]) -> None:
    handler.begin_stream("application/json")
    while True:
        handler.wfile.write(b'"' + b"x" * 1_000_000)


def _silent(handler: _Handler, message: dict[str, Any]) -> None:
    time.sleep(1.5)


def _trickle(handler: _Handler, message: dict[str, Any]) -> None:
    handler.begin_stream("text/event-stream")
    while True:
        handler.wfile.write(b": still here\n\n")
        time.sleep(0.05)


def _requests(handler: _Handler, message: dict[str, Any]) -> None:
    if "id" not in message or "method" not in message:
        handler.answer(202, b"")
        return
    handler.events([({"jsonrpc": "2.0", "id": i, "method": "ping"}, "") for i in range(1000, 1100)])


def _body(body: bytes, status: int = 200, kind: str = "application/json", **headers: str) -> Hostile:
    return lambda handler, message: handler.answer(status, body, kind, **headers)


def _head(handler: _Handler, message: dict[str, Any]) -> None:
    handler.wfile.write(b"HTTP/1.1 200 OK\r\n")
    while True:
        handler.wfile.write(b"X-Header: " + b"y" * 10_000 + b"\r\n")


def _short(handler: _Handler, message: dict[str, Any]) -> None:
    handler.wfile.write(b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 100\r\n\r\n{")
    handler.close_connection = True


def _circle(handler: _Handler, message: dict[str, Any]) -> None:
    if message.get("method") == "tools/list":
        result = {"tools": [], "nextCursor": "again"}
        handler.answer(200, json.dumps({"jsonrpc": "2.0", "id": message["id"], "result": result}).encode())
    elif "id" in message:
        handler.reply(message)
    else:
        handler.answer(202, b"")


def _forgetful(handler: _Handler, message: dict[str, Any]) -> None:
    """The first call of each session finds that there is none."""
    is_first = handler.server.methods("/forgetful").count("tools/call") == 1
    if message.get("method") == "tools/call" and is_first:
        handler.answer(404, b"")
    elif "id" in message:
        handler.reply(message)
    else:
        handler.answer(202, b"")


def _locked(handler: _Handler, message: dict[str, Any]) -> None:
    if handler.headers["Authorization"] not in ("Bearer secret-of-client", "Bearer secret-of-operator"):
        handler.answer(401, b"", WWW_Authenticate="Bearer")
    elif "id" in message:
        handler.reply(message)
    else:
        handler.answer(202, b"")


def _upgrade(handler: _Handler, message: dict[str, Any]) -> None:
    handler.wfile.write(b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: x\r\nConnection: Upgrade\r\n\r\n")
    handler.close_connection = True


Hostile = Callable[[_Handler, dict[str, Any]], None]
HOSTILE: dict[str, Hostile] = {
    "/endless": _endless,
    "/no-line-end": _no_line_end,
    "/huge": _huge,
    "/silent": _silent,
    "/trickle": _trickle,
    "/requests": _requests,
    "/head": _head,
    "/short": _short,
    "/circle": _circle,
    "/upgrade": _upgrade,
    "/forgetful": _forgetful,
    "/locked": _locked,
    "/redirect": _body(b"", 307, Location="http://127.0.0.1:1/other"),
    "/html": _body(b"<html>", kind="text/html"),
    "/no-json": _body(b'{"jsonrpc": "2.0", "id": 1, "resu'),
    "/list": _body(b"[]"),
    "/deep": _body(b'{"a":' * 100 + b"1" + b"}" * 100),
    "/compressed": _body(b"\x1f\x8b", Content_Encoding="gzip"),
    "/other-answer": _body(b'{"jsonrpc": "2.0", "id": 99, "result": {}}'),
    "/no-result": _body(b'{"jsonrpc": "2.0", "id": 1}'),
    "/version": _body(b'{"jsonrpc": "2.0", "id": 1, "result": {"protocolVersion": "1999-01-01"}}'),
    "/error": _body(b'{"jsonrpc": "2.0", "id": 1, "error": {"code": -32000, "message": "go away"}}'),
    "/down": _body(b"", 503),
}


@contextlib.contextmanager
def serving_mcp() -> Iterator[McpTestServer]:
    """A server of all paths, in a thread."""
    server = McpTestServer()
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
        thread.join(5)
