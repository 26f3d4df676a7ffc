"""Server-sent events, read as the HTML standard has them: what an MCP server may answer with."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator

from msgspec import Struct

MAX_ID, MAX_RETRY_MS = 1024, 60_000
_LINE_END = re.compile(rb"\r\n|\n|\r")


class SentEvent(Struct):
    """The data of an event, and its id. `data` "": an event that has only an id."""

    data: bytes
    id: str


class EventReader:
    """Reads events from pieces of a body. `last_id` and `retry_ms` are for going on after a break."""

    def __init__(self) -> None:
        self.last_id = ""
        self.retry_ms: int | None = None
        self._data: list[bytes] = []
        self._id = ""  # of the event that has not ended

    async def read(self, body: AsyncIterator[bytes]) -> AsyncIterator[SentEvent]:
        """The events of a body; one that its end cuts is none."""
        self._data, self._id = [], self.last_id
        pieces: list[bytes] = []  # of a line that has not ended
        after_return = False
        async for piece in body:
            # The break of a line may be cut between its two characters.
            piece = piece[1:] if after_return and piece.startswith(b"\n") else piece
            after_return = piece.endswith(b"\r")
            *lines, rest = _LINE_END.split(piece)
            for line in lines:
                found = self._take(b"".join([*pieces, line]))
                pieces.clear()
                if found is not None:
                    yield found
            pieces.append(rest)

    def _take(self, line: bytes) -> SentEvent | None:
        if not line:
            data, self._data = b"\n".join(self._data), []
            self.last_id = self._id
            return SentEvent(data, self.last_id) if data else None
        name, _, value = line.partition(b":")
        value = value.removeprefix(b" ")
        match name:
            case b"data":
                self._data.append(value)
            case b"id" if len(value) <= MAX_ID and value.isascii() and value.decode().isprintable():
                self._id = value.decode()
            case b"retry" if value.isdigit() and len(value) < 10:
                self.retry_ms = min(int(value), MAX_RETRY_MS)
        return None
