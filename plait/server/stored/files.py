"""/v1/files: files of requests that a batch reads, and those of answers that it writes.

A file is stored in parts of a megabyte, as it arrives. An answer of a batch is a part with its line's number.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING
from urllib.parse import quote

import msgspec
from msgspec import Struct, field
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from plait.config import MIB
from plait.errors import InvalidField
from plait.server.http.errors import BodyTooLarge
from plait.server.http.transfer import new_id, read_pieces
from plait.server.store.errors import InUse, NotStored
from plait.server.store.rows import Rows, StoredRow
from plait.server.stored.file_objects import CONTENT, EXPIRES, FileObject, purpose_of, read_parts
from plait.server.stored.multipart import FormReader, boundary_of
from plait.server.stored.routes import (
    Deleted,
    StoredCall,
    StoredList,
    StoredRoute,
    as_json,
    number_of,
    page_of,
)
from plait.typed_values import decode_json

if TYPE_CHECKING:
    from plait.server.store.store import Store

PART_BYTES = MIB
MAX_NAME = 255
MAX_PAGE = 10_000
FORM_BYTES = 64 * 1024  # of a form, apart from its file


class Upload(Struct):
    """A form that arrives: its file's row, and its fields."""

    row: StoredRow | None = None
    filename: str = ""
    size: int = 0
    fields: dict[str, str] = field(default_factory=dict)


async def create_file(call: StoredCall) -> FileObject:
    """Store a file that a form sends. Raises BodyTooLarge, BadBody, InvalidField and StoreFull."""
    upload = Upload()
    try:
        await _receive(call, call.request, upload)
        return await _settle(call.store, upload)
    except BaseException:
        if upload.row is not None:
            row = upload.row
            await call.store.run(lambda rows: rows.delete(row), deletes=True)
        raise


async def _receive(call: StoredCall, request: Request, upload: Upload) -> None:
    most = call.store.max_file_bytes
    boundary = boundary_of(request.headers.get("content-type", ""))
    length = request.headers.get("content-length", "0")
    if length.isascii() and length.isdigit() and int(length[:20]) > most + FORM_BYTES:
        raise _too_large(most)
    form = FormReader(read_pieces(request, most + FORM_BYTES), boundary)
    while (part := await form.next_part()) is not None:
        if part.name != "file":
            upload.fields[part.name[:64]] = await form.field()
            continue
        if upload.row is not None:
            raise InvalidField("file: the form has two; send one", "file")
        upload.filename = _clean_name(part.filename or "")
        row = upload.row = await _begin_file(call.store, call.tenant)
        number, waiting = 0, bytearray()
        while piece := await form.read():
            waiting += piece
            upload.size += len(piece)
            if upload.size > most:
                raise _too_large(most)
            if len(waiting) >= PART_BYTES:
                await _write(call.store, row, number, bytes(waiting))
                number, waiting = number + 1, bytearray()
        if waiting:
            await _write(call.store, row, number, bytes(waiting))


async def _begin_file(store: Store, tenant: str) -> StoredRow:
    row = StoredRow(
        id=new_id("file"), kind="file", tenant=tenant, created=store.now(), body=b"{}", status="uploading"
    )
    return await store.run(lambda rows: rows.add(row))


async def _write(store: Store, row: StoredRow, number: int, body: bytes) -> None:
    await store.run(lambda rows: rows.add_part(row, CONTENT, number, body))


async def _settle(store: Store, upload: Upload) -> FileObject:
    """Check the fields, and have the file appear."""
    purpose, row = upload.fields.get("purpose"), upload.row
    if purpose != "batch":
        raise InvalidField(
            f"purpose: {(purpose or '')!r:.80} is not batch, which is what files are for here", "purpose"
        )
    if row is None or not upload.size:
        raise InvalidField("file: the form has none, or it is empty; send a file of lines of JSON", "file")
    expires = read_expiry(
        {
            name: upload.fields[f"expires_after[{name}]"]
            for name in ("anchor", "seconds")
            if f"expires_after[{name}]" in upload.fields
        },
        row.created,
    )
    found = FileObject(
        id=row.id,
        bytes=upload.size,
        created_at=row.created,
        expires_at=expires,
        filename=upload.filename,
        purpose="batch",
    )
    settled, body = replace(row, expires=expires), msgspec.json.encode(found)
    await store.run(lambda rows: rows.change(settled, body, "processed"))
    return found


def read_expiry(found: dict[str, str], created: int) -> int | None:
    """`expires_after` as a time; None: the file goes with the store's own age. Raises InvalidField."""
    if not found:
        return None
    if found.get("anchor", "created_at") != "created_at":
        raise InvalidField(
            f"expires_after.anchor: {found['anchor']!r:.80} is not created_at", "expires_after"
        )
    seconds = number_of("expires_after.seconds", found.get("seconds", ""), *EXPIRES)
    return created + (seconds or 0)


async def get_file(call: StoredCall) -> Response:
    """What is known of a file."""
    return as_json((await _row(call)).body)


async def list_files(call: StoredCall) -> StoredList:
    """A page of the files, of one `purpose` if the query says so."""
    query, purpose = call.page(most=MAX_PAGE, usual=MAX_PAGE), call.query("purpose")

    def read(rows: Rows) -> StoredList:
        found = (row for row in rows.iterate(call.tenant, "file", query) if row.status == "processed")
        return page_of(
            ((row.id, row.body) for row in found if purpose in (None, "", purpose_of(row))), query.limit
        )

    return await call.store.run(read)


async def get_content(call: StoredCall) -> Response:
    """The file itself."""
    row = await _row(call)
    found = decode_json(row.body, FileObject)
    headers = {
        "Content-Length": str(found.bytes),
        "Content-Disposition": f"attachment; filename*=UTF-8''{quote(found.filename)}",
        "X-Content-Type-Options": "nosniff",
    }
    return StreamingResponse(read_parts(call.store, row), 200, headers, "application/octet-stream")


async def delete_file(call: StoredCall) -> Deleted:
    """Delete a file. Raises InUse while a batch reads or writes it."""

    def delete(rows: Rows) -> None:
        row = rows.get(call.tenant, "file", call.id)
        if row.is_working or rows.is_in_use(row.id):
            raise InUse(f"{call.id}: a batch uses this file; cancel the batch, or wait until it is done")
        rows.delete(row)

    await call.store.run(delete, deletes=True)
    return Deleted(id=call.id, object="file")


def _clean_name(sent: str) -> str:
    """A name without folders and without what cannot be printed."""
    name = sent.replace("\\", "/").rpartition("/")[2]
    return "".join(c for c in name if c.isprintable())[:MAX_NAME] or "file.jsonl"


def _too_large(most: int) -> BodyTooLarge:
    return BodyTooLarge(
        f"file: it has more than {most} bytes, a quarter of --store-limit or 200 MiB; split it"
    )


async def _row(call: StoredCall) -> StoredRow:
    def read(rows: Rows) -> StoredRow:
        row = rows.get(call.tenant, "file", call.id)
        if row.is_working:
            raise NotStored(f"the file {call.id!r:.80} is not whole yet")
        return row

    return await call.store.run(read)


ROUTES = (
    StoredRoute("POST", "/v1/files", create_file),
    StoredRoute("GET", "/v1/files", list_files),
    StoredRoute("GET", "/v1/files/{id}", get_file),
    StoredRoute("GET", "/v1/files/{id}/content", get_content),
    StoredRoute("DELETE", "/v1/files/{id}", delete_file),
)
