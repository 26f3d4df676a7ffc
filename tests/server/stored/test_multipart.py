"""Forms are read as they arrive, whatever way they are cut, and what is none is refused."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from plait.errors import RequestError
from plait.server.http.errors import BadBody, UnsupportedMedia
from plait.server.stored.multipart import FormReader, boundary_of

HEAD = b'Content-Disposition: form-data; name="%s"%s\r\n\r\n'
FILE = b"line one\r\n--b\r\nline two\r\n\r\n-- \r\n--boundarx"
FORM = b"".join(
    (
        b"before\r\n--boundary\r\n",
        HEAD % (b"purpose", b""),
        b"batch\r\n--boundary\r\nContent-Type: text/plain\r\n",
        HEAD % (b"file", rb'; filename="a\"b;.jsonl"'),
        FILE,
        b"\r\n--boundary\r\n",
        HEAD % (b"empty", b""),
        b"\r\n--boundary--\r\nbehind",
    )
)


def parts_of(body: bytes, size: int) -> list[tuple[str, str | None, bytes]]:
    async def arriving() -> AsyncIterator[bytes]:
        for at in range(0, len(body), size):
            yield body[at : at + size]

    async def read() -> list[tuple[str, str | None, bytes]]:
        form, found = FormReader(arriving(), b"boundary"), []
        while (part := await form.next_part()) is not None:
            content = b""
            while piece := await form.read():
                content += piece
            found.append((part.name, part.filename, content))
        return found

    return asyncio.run(read())


@pytest.mark.parametrize("size", [1, 2, 7, 11, 64, 10_000])
def test_parts_are_the_same_however_a_form_is_cut(size: int) -> None:
    assert parts_of(FORM, size) == [
        ("purpose", None, b"batch"),
        ("file", 'a"b;.jsonl', FILE),
        ("empty", None, b""),
    ]


def test_parts_that_are_not_read_are_skipped() -> None:
    async def read() -> list[str]:
        async def arriving() -> AsyncIterator[bytes]:
            yield FORM

        form, found = FormReader(arriving(), b"boundary"), []
        while (part := await form.next_part()) is not None:
            found.append(part.name)
        return found

    assert asyncio.run(read()) == ["purpose", "file", "empty"]


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b"", "ends before its last boundary"),
        (FORM[:100], "ends before its last boundary"),
        (FORM.replace(b"--boundary--", b"--boundary"), "a line break behind a boundary|ends before"),
        (b"--boundaryXX", "something else than a line break"),
        (b"--boundary\r\nContent-Type: x\r\n\r\nx\r\n--boundary--", "has no `Content-Disposition"),
        (b"--boundary\r\n" + b"a: b\r\n" * 3000, "bytes of headers"),
        ((b"--boundary\r\n" + HEAD % (b"x", b"") + b"\r\n") * 20, "more than 16 parts"),
    ],
)
def test_what_is_no_form_is_refused(body: bytes, words: str) -> None:
    with pytest.raises(BadBody, match=words):
        parts_of(body, 13)


def test_a_long_field_is_refused() -> None:
    async def read() -> None:
        async def arriving() -> AsyncIterator[bytes]:
            yield b"--boundary\r\n" + HEAD % (b"purpose", b"") + b"x" * 10_000

        form = FormReader(arriving(), b"boundary")
        await form.next_part()
        await form.field()

    with pytest.raises(BadBody, match="more than 4096 bytes"):
        asyncio.run(read())


def test_boundaries_are_read_from_the_content_type() -> None:
    assert boundary_of("multipart/form-data; boundary=abc") == b"abc"
    assert boundary_of('Multipart/Form-Data; charset=x; Boundary="a b"') == b"a b"
    for wrong in (
        "",
        "application/json",
        "multipart/form-data",
        f"multipart/form-data; boundary={'x' * 71}x",
    ):
        with pytest.raises(UnsupportedMedia):
            boundary_of(wrong)
    assert issubclass(UnsupportedMedia, RequestError)
