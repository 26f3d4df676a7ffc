"""One HTTP/1.1 exchange with an allowed server, bounded in bytes.

It follows no redirect, keeps no cookie, uses no proxy and decodes no compression, so nothing but the address
on the operator's list is ever reached, and no answer grows on its way in. The caller bounds the time.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
import socket
import ssl
from collections.abc import AsyncIterator, Mapping

import httptools
from msgspec import Struct, field

from plait.config import KIB, MIB
from plait.server.mcp.allowed import McpServer
from plait.server.mcp.errors import McpCutOff, McpFailed
from plait.version import __version__

CONNECT_S = 10.0
READ_BYTES = 64 * KIB
MAX_ANSWER_HEAD = 64 * KIB
MAX_ANSWER_BYTES = 8 * MIB  # of one body, also of one that is a stream of events
_INFORMATION = range(100, 200)


class HttpAnswer(Struct):
    """A status, headers by their names in lower case, and the body as it comes."""

    status: int
    headers: Mapping[str, str]
    body: AsyncIterator[bytes]

    @property
    def media_type(self) -> str:
        return self.headers.get("content-type", "").partition(";")[0].strip().lower()

    async def read(self) -> bytes:
        """The whole body. Raises McpFailed for one that is too large or ends early."""
        return b"".join([piece async for piece in self.body])


class _Parsed(Struct):
    """What the parser has found so far, as its callbacks."""

    status: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    pieces: list[bytes] = field(default_factory=list)
    has_head: bool = False
    is_done: bool = False
    parser: httptools.HttpResponseParser | None = None

    def on_header(self, name: bytes, value: bytes) -> None:
        self.headers[name.decode("latin-1").lower()] = value.decode("latin-1").strip()

    def on_headers_complete(self) -> None:
        assert self.parser is not None
        self.status = self.parser.get_status_code()
        self.has_head = self.status not in _INFORMATION
        if not self.has_head:
            self.headers.clear()

    def on_body(self, body: bytes) -> None:
        self.pieces.append(body)

    def on_message_complete(self) -> None:
        self.is_done = self.has_head


@functools.cache
def _trust() -> ssl.SSLContext:
    return ssl.create_default_context()


@contextlib.asynccontextmanager
async def send_http(
    server: McpServer, method: str, headers: Mapping[str, str], body: bytes = b""
) -> AsyncIterator[HttpAnswer]:
    """Send a request on a connection of its own; the answer's body is read inside the context.

    Raises McpFailed where there is no whole answer.
    """
    reader, writer = await _connect(server)
    try:
        try:
            writer.write(_write_head(server, method, headers, len(body)) + body)
            await writer.drain()
            yield await _read_head(reader, server)
        except OSError as error:
            raise McpFailed(f"{server.label}: the connection broke: {_reason(error)}") from error
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            raise McpFailed(f"{server.label}: the answer is no HTTP/1.1: {str(error)[:100]}") from error
    finally:
        writer.transport.abort()  # no farewell to a peer that may not read it


async def _connect(server: McpServer) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    trust = _trust() if server.is_secure else None
    try:
        async with asyncio.timeout(CONNECT_S):
            return await asyncio.open_connection(server.host, server.port, ssl=trust, limit=READ_BYTES)
    except TimeoutError:
        raise McpFailed(f"{server.label}: no connection within {CONNECT_S:g} s") from None
    except (OSError, ValueError) as error:  # ValueError: a host name that IDNA has no form for
        raise McpFailed(f"{server.label}: no connection: {_reason(error)}") from error


def _reason(error: Exception) -> str:
    """What went wrong, without the address, which is the operator's."""
    if isinstance(error, ssl.SSLError):
        return error.reason or "TLS failed"
    if isinstance(error, socket.gaierror):
        return "its host name is not known"
    if isinstance(error, OSError) and error.errno is not None:
        return os.strerror(error.errno)
    return "no address of it answered" if isinstance(error, OSError) else type(error).__name__


def _write_head(server: McpServer, method: str, headers: Mapping[str, str], length: int) -> bytes:
    fixed = {
        "Host": server.authority,
        "User-Agent": f"plait/{__version__}",
        "Accept-Encoding": "identity",
        "Connection": "close",
        **({"Content-Length": str(length)} if length or method == "POST" else {}),
    }
    lines = [f"{method} {server.target} HTTP/1.1", *(f"{k}: {v}" for k, v in {**headers, **fixed}.items())]
    return ("\r\n".join(lines) + "\r\n\r\n").encode("latin-1")


async def _read_head(reader: asyncio.StreamReader, server: McpServer) -> HttpAnswer:
    found = _Parsed()
    parser = found.parser = httptools.HttpResponseParser(found)
    size = 0
    while not found.has_head:
        data = await reader.read(READ_BYTES)
        size += len(data)
        if not data:
            raise McpFailed(f"{server.label}: it closed the connection without an answer")
        if size > MAX_ANSWER_HEAD + READ_BYTES:
            raise McpFailed(f"{server.label}: the head of the answer has over {MAX_ANSWER_HEAD} bytes")
        parser.feed_data(data)
    if found.headers.get("content-encoding", "identity").lower() != "identity":
        raise McpFailed(f"{server.label}: the answer is compressed, which was not requested")
    return HttpAnswer(found.status, dict(found.headers), _read_body(reader, found, server))


async def _read_body(reader: asyncio.StreamReader, found: _Parsed, server: McpServer) -> AsyncIterator[bytes]:
    size, parser = 0, found.parser
    assert parser is not None
    while True:
        for piece in found.pieces:
            size += len(piece)
            if size > MAX_ANSWER_BYTES:
                raise McpFailed(f"{server.label}: the answer has over {MAX_ANSWER_BYTES} bytes")
            yield piece
        found.pieces.clear()
        if found.is_done:
            return
        try:
            data = await reader.read(READ_BYTES)
        except OSError as error:
            raise McpCutOff(f"{server.label}: the connection broke: {_reason(error)}") from error
        if data:
            parser.feed_data(data)
        elif "content-length" in found.headers or "transfer-encoding" in found.headers:
            raise McpCutOff(f"{server.label}: the answer ended early")
        else:
            return
