"""A client of MCP servers over their Streamable HTTP transport: it lists tools and calls them.

It speaks the versions with a handshake (2025-03-26 to 2025-11-25) and the one without (2026-07-28), which a
server is spoken to in where it refuses the handshake. It offers a server nothing: requests of the server are
answered with `method not found`, but for `ping`.

Each message is a POST on a connection of its own; the answer is one JSON object or a stream of events. A
stream that breaks is requested again from its last event, as the server's `id` allows.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import AsyncIterator, Mapping
from types import MappingProxyType

import msgspec
from msgspec import Struct

from plait.errors import RequestError, clip_text
from plait.server.http.transfer import INLINE_BYTES, decode_object
from plait.server.mcp.allowed import McpServer
from plait.server.mcp.errors import McpCutOff, McpFailed
from plait.server.mcp.events import EventReader
from plait.server.mcp.http_client import HttpAnswer, send_http
from plait.server.mcp.messages import (
    MAX_SERVER_TOOLS,
    MAX_TOOL_NAME,
    Json,
    McpResult,
    McpTool,
    McpToolPage,
    RpcError,
    ServerHello,
    read_as,
)
from plait.version import __version__

HANDSHAKES = ("2025-11-25", "2025-06-18", "2025-03-26")
PLAIN_VERSION = "2026-07-28"  # each request says all that it needs, and there is no session
UNSUPPORTED_VERSION, NO_METHOD, INTERNAL = -32022, -32601, -32603
MAX_PAGES, MAX_MESSAGES, MAX_SERVER_REQUESTS, MAX_BREAKS = 64, 10_000, 16, 8
FAREWELL_S = 5.0  # to end a session, and as long to cancel a call
RETRY_MS = 1000  # until a stream that broke is requested again, if its server does not say
META = "io.modelcontextprotocol/"
_SESSION = re.compile(r"[\x21-\x7e]{1,1024}")
_IN_HEADER = re.compile(r"[\x20-\x7e]{1,256}")
_INFO = {"name": "plait", "version": __version__}
NO_HEADERS: Mapping[str, str] = MappingProxyType({})
_farewells: set[asyncio.Task[None]] = set()  # the loop itself keeps no task alive


class _SessionGone(Exception):
    """The server no longer knows the session, so it has not read the request."""


class _Answer(Struct):
    """The message that answers a request, and the headers that it came with."""

    message: Json
    headers: Mapping[str, str]


class McpClient:
    """One session with a server; it begins with the first request. Not for two tasks at a time.

    `headers`: sent with every request. `timeout_s`: for each list and each call.
    """

    def __init__(
        self, server: McpServer, headers: Mapping[str, str] = NO_HEADERS, timeout_s: float = 60.0
    ) -> None:
        bearer = {"Authorization": f"Bearer {server.token}"} if server.token else {}
        self.server, self._timeout_s = server, timeout_s
        names = {name.lower() for name in headers}
        self._headers = {**{k: v for k, v in bearer.items() if k.lower() not in names}, **headers}
        self._version = self._session = ""
        self._last_number = 0
        self._open_number: int | None = None  # of a request that has no answer yet

    async def list_tools(self) -> list[McpTool]:
        """All tools, each name once. Raises McpFailed."""
        async with self._in_time("tools/list"):
            found: dict[str, McpTool] = {}
            cursor, seen = None, set[str]()
            for _ in range(MAX_PAGES):
                asked: Json = {} if cursor is None else {"cursor": cursor}
                answer = await self._ask("tools/list", asked)
                page = read_as(self.server.label, answer, McpToolPage, "the list of tools")
                for tool in page.tools:
                    if tool.name and len(tool.name) <= MAX_TOOL_NAME:
                        found.setdefault(tool.name, tool)
                if len(found) > MAX_SERVER_TOOLS:
                    raise self._make_error(f"it lists more than {MAX_SERVER_TOOLS} tools")
                cursor = page.next_cursor
                if cursor is None:
                    return [*found.values()]
                if cursor in seen:
                    raise self._make_error("its list of tools comes back to a page that was read")
                seen.add(cursor)
            raise self._make_error(f"its list of tools has more than {MAX_PAGES} pages")

    async def call_tool(self, name: str, arguments: Mapping[str, object]) -> McpResult:
        """Call a tool once. Raises McpFailed; a failure of the tool itself is a result."""
        async with self._in_time("tools/call"):
            answer = await self._ask("tools/call", {"name": name, "arguments": dict(arguments)})
        result = read_as(self.server.label, answer, McpResult, "the result of the call")
        if result.result_type != "complete":
            raise self._make_error(f"it asks for more than the arguments ({result.result_type!r:.40})")
        return result

    def close(self) -> None:
        """Cancel what is open, and end the session. Returns at once; a task says both to the server."""
        if self._session or self._open_number is not None:
            task = asyncio.get_running_loop().create_task(self._say_farewell())
            _farewells.add(task)
            task.add_done_callback(_farewells.discard)

    async def _say_farewell(self) -> None:
        """Each message has its own time: a server that is slow to hear the first gets the other."""
        if self._open_number is not None and self._version != PLAIN_VERSION:
            params: Json = {"requestId": self._open_number, "reason": "the client left"}
            with contextlib.suppress(McpFailed, TimeoutError):
                async with asyncio.timeout(FAREWELL_S):
                    await self._notify("notifications/cancelled", params)
        if self._session:
            with contextlib.suppress(McpFailed, TimeoutError):
                async with asyncio.timeout(FAREWELL_S):
                    async with send_http(self.server, "DELETE", self._protocol_headers()):
                        pass

    @contextlib.asynccontextmanager
    async def _in_time(self, what: str) -> AsyncIterator[None]:
        try:
            async with asyncio.timeout(self._timeout_s):
                yield
        except TimeoutError:
            raise self._make_error(f"{what} took longer than {self._timeout_s:g} s") from None

    def _make_error(self, text: str) -> McpFailed:
        return McpFailed(f"{self.server.label}: {text}")

    async def _ask(self, method: str, params: Json) -> object:
        """The result of a request, in a session that is begun where there is none."""
        if not self._version:
            await self._begin()
        try:
            return _result(self.server.label, (await self._exchange(method, params)).message)
        except _SessionGone:
            self._version = self._session = ""
        await self._begin()
        try:
            return _result(self.server.label, (await self._exchange(method, params)).message)
        except _SessionGone:
            raise self._make_error("it ends each session as soon as it has begun") from None

    async def _begin(self) -> None:
        params: Json = {"protocolVersion": HANDSHAKES[0], "capabilities": {}, "clientInfo": _INFO}
        answer = await self._exchange("initialize", params)
        refusal = answer.message.get("error")
        if refusal is not None:
            found = read_as(self.server.label, refusal, RpcError, "its error")
            if found.code == UNSUPPORTED_VERSION and PLAIN_VERSION in found.supported_versions:
                self._version = PLAIN_VERSION
                return
        result = _result(self.server.label, answer.message)
        hello = read_as(self.server.label, result, ServerHello, "the result of initialize")
        if hello.protocol_version not in HANDSHAKES:
            versions = ", ".join((*HANDSHAKES, PLAIN_VERSION))
            raise self._make_error(f"it speaks MCP {hello.protocol_version!r:.40}; known are {versions}")
        session = answer.headers.get("mcp-session-id", "")
        if session and not _SESSION.fullmatch(session):
            raise self._make_error("its session id has other than 1 to 1024 visible characters")
        self._version, self._session = hello.protocol_version, session
        await self._notify("notifications/initialized", {})

    async def _notify(self, method: str, params: Json) -> None:
        await self._post({"jsonrpc": "2.0", "method": method, **({"params": params} if params else {})})

    async def _post(self, message: Json) -> None:
        """Send a message that has no answer."""
        body = msgspec.json.encode(message)
        async with send_http(self.server, "POST", self._protocol_headers(), body) as answer:
            if not 200 <= answer.status < 300:
                raise await self._refusal(answer)

    def _protocol_headers(self) -> dict[str, str]:
        found = {**self._headers, "Content-Type": "application/json"}
        found["Accept"] = "application/json, text/event-stream"
        if self._version:
            found["MCP-Protocol-Version"] = self._version
        if self._session:
            found["Mcp-Session-Id"] = self._session
        return found

    async def _exchange(self, method: str, params: Json) -> _Answer:
        """Send a request and read until its answer has come."""
        self._last_number += 1
        number, headers = self._last_number, self._protocol_headers()
        if self._version == PLAIN_VERSION:
            meta = {"protocolVersion": PLAIN_VERSION, "clientInfo": _INFO, "clientCapabilities": {}}
            params = {**params, "_meta": {META + name: value for name, value in meta.items()}}
            headers["Mcp-Method"] = method
            if isinstance(name := params.get("name"), str):
                headers["Mcp-Name"] = self._name_in_header(name)
        body = msgspec.json.encode({"jsonrpc": "2.0", "id": number, "method": method, "params": params})
        self._open_number = number if method != "initialize" else None
        async with send_http(self.server, "POST", headers, body) as answer:
            found = await self._read(answer, number)
        if isinstance(found, EventReader):
            found = await self._resume(found, number)
        self._open_number = None
        return found

    def _name_in_header(self, name: str) -> str:
        if not _IN_HEADER.fullmatch(name) or name != name.strip():
            raise self._make_error(f"the name of its tool {name!r:.80} fits into no header")
        return name

    async def _read(self, answer: HttpAnswer, number: int) -> _Answer | EventReader:
        """The answer to a request. An EventReader: the stream broke before it, and can be requested again."""
        if answer.status == 404 and self._session:
            raise _SessionGone
        if answer.media_type == "text/event-stream" and answer.status == 200:
            events, found = EventReader(), None
            with contextlib.suppress(McpCutOff):
                found = await self._read_events(events, answer, number)
            if found is not None:
                return found
            if not events.last_id:
                raise self._make_error("its stream ended without an answer")
            return events
        if answer.media_type != "application/json":
            raise await self._refusal(answer)
        message = await self._decode(await answer.read())
        if answer.status != 200 and not isinstance(message.get("error"), dict):
            raise await self._refusal(answer)
        if answer.status == 200 and not _answers(message, number):
            raise self._make_error("it answered another request than the one that it got")
        return _Answer(message, answer.headers)

    async def _read_events(self, events: EventReader, answer: HttpAnswer, number: int) -> _Answer | None:
        count = num_requests = 0
        async for event in events.read(answer.body):
            count += 1
            if count > MAX_MESSAGES:
                raise self._make_error(f"it sent {MAX_MESSAGES} messages and no answer")
            message = await self._decode(event.data)
            if _answers(message, number):
                return _Answer(message, answer.headers)
            if "method" in message and "id" in message and self._version != PLAIN_VERSION:
                num_requests += 1
                if num_requests > MAX_SERVER_REQUESTS:
                    raise self._make_error(f"it sent more than {MAX_SERVER_REQUESTS} requests of its own")
                await self._reply(message)
        return None

    async def _reply(self, message: Json) -> None:
        """Answer a request of the server."""
        reply: Json = {"jsonrpc": "2.0", "id": message["id"]}
        if message["method"] == "ping":
            reply["result"] = {}
        else:
            reply["error"] = {"code": NO_METHOD, "message": "this client offers nothing"}
        await self._post(reply)

    async def _resume(self, events: EventReader, number: int) -> _Answer:
        """Ask for the rest of a stream that broke, behind the last event that it brought."""
        for _ in range(MAX_BREAKS):
            await asyncio.sleep((RETRY_MS if events.retry_ms is None else events.retry_ms) / 1000)
            headers = {**self._protocol_headers(), "Accept": "text/event-stream"}
            headers["Last-Event-ID"] = events.last_id
            del headers["Content-Type"]
            async with send_http(self.server, "GET", headers) as answer:
                if answer.status == 404 and self._session:
                    # The request was read before: it must not be sent again.
                    raise self._make_error("its session ended before the answer came")
                if answer.status != 200 or answer.media_type != "text/event-stream":
                    raise await self._refusal(answer)
                found = None
                with contextlib.suppress(McpCutOff):
                    found = await self._read_events(events, answer, number)
            if found is not None:
                return found
        raise self._make_error(f"its stream broke {MAX_BREAKS + 1} times before the answer came")

    async def _decode(self, body: bytes) -> Json:
        try:
            if len(body) <= INLINE_BYTES:
                return decode_object(body)
            return await asyncio.to_thread(decode_object, body)
        except RequestError as error:
            raise self._make_error(f"it sent no JSON object: {clip_text(error, 120)}") from None

    async def _refusal(self, answer: HttpAnswer) -> McpFailed:
        """The error of a status that is no answer."""
        status = answer.status
        hints = {
            401: "it wants authorization: send `authorization` or `headers`, or set --mcp-token",
            403: "it refuses these credentials",
            405: "this URL is no MCP endpoint",
        }
        text = hints.get(status, "that is no answer of MCP over HTTP")
        if 300 <= status < 400:
            text = "redirects are not followed; the operator gives the address itself"
        elif status == 200:
            text = f"its content is {answer.media_type[:80]!r}, neither JSON nor events"
        return McpFailed(f"{self.server.label}: HTTP {status}: {text}", "http_error", status)


def _answers(message: Mapping[str, object], number: int) -> bool:
    return message.get("id") == number and "method" not in message


def _result(label: str, message: Mapping[str, object]) -> object:
    """The result in an answer. Raises McpFailed for an error."""
    if (refusal := message.get("error")) is not None:
        found = read_as(label, refusal, RpcError, "its error")
        text = f"{label}: error {found.code}: {clip_text(found.message)}"
        raise McpFailed(text, "mcp_protocol_error", found.code)
    if "result" not in message:
        raise McpFailed(f"{label}: it answered without a result", "mcp_protocol_error", INTERNAL)
    return message["result"]
