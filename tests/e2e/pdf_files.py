"""PDF files as scanners, writers and attackers make them, written from their objects."""

from __future__ import annotations

import zlib
from collections.abc import Sequence

__all__ = ["bomb", "locked", "pdf", "scripted"]


def _file(objects: Sequence[bytes], trailer: bytes = b"") -> bytes:
    """A whole file of objects 1, 2, …, of which the first is the catalog."""
    out, places = bytearray(b"%PDF-1.7\n%\xe2\xe3\xcf\xd3\n"), []
    for number, content in enumerate(objects, 1):
        places.append(len(out))
        out += b"%d 0 obj\n%b\nendobj\n" % (number, content)
    start = len(out)
    out += b"xref\n0 %d\n0000000000 65535 f \n" % (len(objects) + 1)
    out += b"".join(b"%010d 00000 n \n" % place for place in places)
    size = len(objects) + 1
    out += b"trailer\n<< /Size %d /Root 1 0 R %b >>\nstartxref\n%d\n%%%%EOF\n" % (size, trailer, start)
    return bytes(out)


def _stream(data: bytes, more: bytes = b"") -> bytes:
    return b"<< /Length %d %b >>\nstream\n%b\nendstream" % (len(data), more, data)


def _text(lines: Sequence[str]) -> bytes:
    """The drawing of some lines, one below the other."""
    shown = [line.replace("\\", "\\\\").replace("(", "\\(").replace(")", "\\)") for line in lines]
    body = "".join(f"({line}) Tj T*\n" for line in shown)
    return f"BT /F1 12 Tf 14 TL 72 720 Td\n{body}ET".encode("latin-1")


def pdf(*pages: Sequence[str] | None, catalog: bytes = b"", trailer: bytes = b"") -> bytes:
    """A file with these lines on its pages; None: a page that is a picture."""
    contents = [
        _stream(b"q 200 0 0 200 72 500 cm /Im1 Do Q") if lines is None else _stream(_text(lines))
        for lines in pages
    ]
    return _with_pages(contents, catalog, trailer)


def _with_pages(contents: Sequence[bytes], catalog: bytes = b"", trailer: bytes = b"") -> bytes:
    font = b"<< /Type /Font /Subtype /Type1 /BaseFont /Helvetica /Encoding /WinAnsiEncoding >>"
    image = b"/Type /XObject /Subtype /Image /Width 2 /Height 2 /ColorSpace /DeviceGray /BitsPerComponent 8"
    first = 5  # after the catalog, the list of pages, the font and the picture
    kids = b" ".join(b"%d 0 R" % (first + 2 * i) for i in range(len(contents)))
    objects = [
        b"<< /Type /Catalog /Pages 2 0 R %b >>" % catalog,
        b"<< /Type /Pages /Count %d /Kids [%b] >>" % (len(contents), kids),
        font,
        _stream(b"\x00\xff\xff\x00", image),
    ]
    resources = b"/Resources << /Font << /F1 3 0 R >> /XObject << /Im1 4 0 R >> >>"
    for i, content in enumerate(contents):
        page = b"<< /Type /Page /Parent 2 0 R /MediaBox [0 0 612 792] %b /Contents %d 0 R >>"
        objects += [page % (resources, first + 2 * i + 1), content]
    return _file(objects, trailer)


def locked() -> bytes:
    """A file that only a password opens."""
    empty = b"<" + b"00" * 32 + b">"
    rules = b"/Encrypt << /Filter /Standard /V 1 /R 2 /Length 40 /P -44 /O %b /U %b >>" % (empty, empty)
    return pdf(["secret"], trailer=rules + b" /ID [<00112233445566778899aabbccddeeff> <00>]")


def scripted() -> bytes:
    """A file with a script that should run when it is opened, and a font of which the matrix is code."""
    script = b"/OpenAction << /S /JavaScript /JS (app.alert\\(1\\); window.hurt = 1) >>"
    plain = pdf(["Harmless to read"], catalog=script)
    code = b"/FontMatrix [1 2 3 4 5 (1\\); globalThis.hurt = 1//)]"
    return plain.replace(b"/BaseFont /Helvetica", b"/BaseFont /Helvetica " + code)


def bomb(num_bytes: int) -> bytes:
    """A small file of which a single page has so many bytes of text when it is unpacked."""
    line = (
        b"1 0 0 1 72 720 Tm (all work and no play) Tj\n"  # all at one place: what is off the page is no text
    )
    text = b"BT /F1 12 Tf 14 TL 72 720 Td\n" + line * (num_bytes // len(line)) + b"ET"
    return _with_pages([_stream(zlib.compress(text, 9), b"/Filter /FlateDecode")])
