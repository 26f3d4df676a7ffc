"""multipart/form-data (RFC 7578), read as it arrives: a file of any length takes a megabyte of memory."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator

from msgspec import Struct

from plait.server.http.errors import BadBody, UnsupportedMedia

MAX_PART_HEAD, MAX_PARTS, MAX_FIELD = 8 * 1024, 16, 4 * 1024
_BOUNDARY = re.compile(r"""boundary=(?:"([^"]{1,70})"|([^\s";,]{1,70}))(?![^\s;])""", re.IGNORECASE)
_PARAM = re.compile(r';\s*(name|filename)="((?:[^"\\]|\\.)*)"', re.IGNORECASE)


class FormPart(Struct, frozen=True):
    """The head of a part. `filename` None: it is a field."""

    name: str
    filename: str | None


def boundary_of(content_type: str) -> bytes:
    """The boundary in a Content-Type. Raises UnsupportedMedia."""
    found = _BOUNDARY.search(content_type)
    if not content_type.lower().startswith("multipart/form-data") or found is None:
        text = f"Content-Type is {content_type[:100]!r}; send multipart/form-data with its boundary"
        raise UnsupportedMedia(text)
    return (found[1] or found[2]).encode("latin-1", "replace")


class FormReader:
    """Reads the parts of a form in their order, each to its end. Raises BadBody for what is no form."""

    def __init__(self, pieces: AsyncIterator[bytes], boundary: bytes) -> None:
        self._pieces, self._mark = pieces, b"\r\n--" + boundary
        self._buffer = bytearray(b"\r\n")  # so that the first boundary looks like the others
        self._is_inside, self._num_parts = True, 0

    async def next_part(self) -> FormPart | None:
        """The head of the next part; None: the form has ended."""
        while await self.read():  # the rest of this part, or what precedes the first one
            pass
        await self._fill(2)
        if self._buffer[:2] == b"--":
            await self._drain()
            return None
        if self._buffer[:2] != b"\r\n":
            raise BadBody("the form has something else than a line break behind a boundary")
        self._num_parts += 1
        if self._num_parts > MAX_PARTS:
            raise BadBody(f"the form has more than {MAX_PARTS} parts")
        while (end := self._buffer.find(b"\r\n\r\n")) < 0:
            if len(self._buffer) > MAX_PART_HEAD:
                raise BadBody(f"a part of the form has more than {MAX_PART_HEAD} bytes of headers")
            await self._more()
        head = bytes(self._buffer[2:end])
        del self._buffer[: end + 4]
        self._is_inside = True
        return _read_head(head)

    async def read(self) -> bytes:
        """The next bytes of this part; empty: it has ended."""
        while self._is_inside:
            at = self._buffer.find(self._mark)
            if at == 0:
                del self._buffer[: len(self._mark)]
                self._is_inside = False
                break
            end = at if at > 0 else len(self._buffer) - len(self._mark) + 1
            if end > 0:
                found = bytes(self._buffer[:end])
                del self._buffer[:end]
                return found
            await self._more()
        return b""

    async def field(self) -> str:
        """The whole of this part as text, which must be short."""
        found = b""
        while piece := await self.read():
            found += piece
            if len(found) > MAX_FIELD:
                raise BadBody(f"a field of the form has more than {MAX_FIELD} bytes")
        return found.decode("utf-8", "replace")

    async def _fill(self, count: int) -> None:
        while len(self._buffer) < count:
            await self._more()

    async def _more(self) -> None:
        piece = await anext(self._pieces, None)
        if piece is None:
            raise BadBody("the form ends before its last boundary; send all of it")
        self._buffer += piece

    async def _drain(self) -> None:
        """Read what follows the last boundary: it is nothing, but the connection goes on behind it."""
        async for _ in self._pieces:
            pass


def _read_head(head: bytes) -> FormPart:
    for line in head.decode("utf-8", "replace").split("\r\n"):
        name, _, value = line.partition(":")
        if name.strip().lower() == "content-disposition" and value.strip().lower().startswith("form-data"):
            found = {key.lower(): re.sub(r"\\(.)", r"\1", text) for key, text in _PARAM.findall(value)}
            if "name" in found:
                return FormPart(found["name"], found.get("filename"))
    raise BadBody('a part of the form has no `Content-Disposition: form-data; name="…"`')
