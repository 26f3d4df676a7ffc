"""A stored file as clients read it, and its content."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from functools import partial
from typing import TYPE_CHECKING, Literal

import msgspec

from plait.server.store.rows import Rows, StoredRow
from plait.typed_values import decode_json

if TYPE_CHECKING:
    from plait.server.store.store import Store

CONTENT = "content"  # the parts of a file
EXPIRES = (3600, 30 * 86_400)  # seconds that `expires_after` may have
Purpose = Literal["batch", "batch_output"]


class FileObject(msgspec.Struct, kw_only=True, frozen=True):
    """A stored file. `expires_at`: when it is deleted, if that was requested."""

    id: str
    object: Literal["file"] = "file"
    bytes: int
    created_at: int
    expires_at: int | None = None
    filename: str
    purpose: Purpose
    status: Literal["processed"] = "processed"
    status_details: None = None


async def read_parts(store: Store, row: StoredRow) -> AsyncGenerator[bytes, None]:
    """A file's content in parts. It ends early if the file is deleted meanwhile."""
    number = -1
    while (
        found := await store.run(partial(Rows.next_part, row=row, name=CONTENT, after=number))
    ) is not None:
        number, body = found
        yield body


def purpose_of(row: StoredRow) -> str:
    return decode_json(row.body, FileObject).purpose
