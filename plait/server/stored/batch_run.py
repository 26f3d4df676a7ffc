"""Runs batches: each line of a stored file through the application, at low priority.

Every answer is stored as it is done, as the part of an output file that has the number of its line, in one
transaction with the counts. So a batch that the server's end interrupts goes on with the lines that have no
answer, and its files are in the order of its input.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncGenerator, Callable, Coroutine, Mapping
from contextlib import aclosing
from typing import TYPE_CHECKING, Any

import msgspec
from msgspec import Struct

from plait.config import MIB
from plait.server.http.transfer import new_id
from plait.server.openai.batch import PAUSES_S, Line, answer_line, has_failed
from plait.server.store.rows import StoredRow
from plait.server.stored.batch_objects import (
    MAX_ERRORS,
    MAX_LINES,
    BatchFault,
    BatchFaults,
    BatchObject,
    BatchStatus,
    BatchWork,
    RequestCounts,
    read_request,
)
from plait.server.stored.file_objects import CONTENT, FileObject, read_parts
from plait.typed_values import decode_json

if TYPE_CHECKING:
    from plait.server.store.rows import Rows
    from plait.server.store.store import Store
    from plait.server.stored.inner import InnerApp

AT_ONCE = 8  # lines of one batch in work
MAX_LINE_BYTES = 8 * MIB
ENDED = frozenset({"completed", "failed", "expired", "cancelled"})
KEY_GONE = "the API key that made this batch is no longer one of this server's"


class BatchRun(Struct):
    """One batch in work. `places`: shared by all batches, so that they take turns.

    `app_of`: the application under a tenant's key; None: there is no such key. `is_cancelled`: by its client.
    """

    store: Store
    row: StoredRow
    work: BatchWork
    places: asyncio.Semaphore
    app_of: Callable[[str], InnerApp | None]
    is_cancelled: bool = False

    @property
    def batch(self) -> BatchObject:
        return self.work.batch

    @property
    def has_ended(self) -> bool:
        return self.batch.status in ENDED

    async def run(self) -> None:
        """Run the batch to its end, or go on with it. Raises CapacityErrors of the store."""
        try:
            async with asyncio.timeout(max(self.batch.expires_at - self.store.now(), 0)):
                if self.batch.status != "validating" or await self._validate():
                    await self._begin_files()
                    await self._answer()
                    await self._finish("completed")
        except TimeoutError:
            if not self.has_ended:
                await self._expire()

    async def mark_cancelling(self) -> bool:
        """Have the batch say that its client has cancelled it. False: another call did, or it has ended."""
        if self.is_cancelled or self.has_ended:
            return False
        self.is_cancelled, before = True, self.batch.status
        self._hold(msgspec.structs.replace(self.batch, status="cancelling", cancelling_at=self.store.now()))
        body = msgspec.json.encode(self.work)

        def write(rows: Rows) -> None:
            if rows.get(self.row.tenant, "batch", self.row.id).is_working:  # else its end was before this
                self.row = rows.change(self.row, body, "cancelling")

        try:
            await self.store.run(write)
        except BaseException:
            self.is_cancelled = False  # the client may try again
            if not self.has_ended:
                self._hold(msgspec.structs.replace(self.batch, status=before, cancelling_at=None))
            raise
        return True

    async def cancel(self) -> None:
        """End the batch with the answers that there are, unless it has ended meanwhile."""
        if not self.has_ended:
            await self._finish("cancelled")

    async def fail(self, code: str, message: str) -> None:
        """End the batch with an error."""
        faults = BatchFaults(data=[BatchFault(code=code, message=message)])
        await self._change(status="failed", failed_at=self.store.now(), errors=faults)

    async def _validate(self) -> bool:
        """Read the whole input. False: it is no batch, which the batch says now."""
        seen: set[str] = set()
        faults: list[BatchFault] = []
        total = 0
        async with aclosing(self._lines()) as lines:
            async for line in lines:
                total += 1
                fault, name = line.fault, line.custom_id or ""
                if not fault and name in seen:
                    fault = f"line {line.number}: custom_id {name!r:.80} is there twice"
                seen.add(name)
                if fault:
                    faults.append(BatchFault(code="invalid_line", message=fault, line=line.number))
                if total > MAX_LINES:
                    text = f"the file has more than {MAX_LINES} requests; split it"
                    faults.append(BatchFault(code="too_many_requests", message=text))
                if total > MAX_LINES or len(faults) >= MAX_ERRORS:
                    break
        if not total:
            faults.append(BatchFault(code="empty_file", message="the file has no request"))
        now = self.store.now()
        if faults:
            await self._change(status="failed", failed_at=now, errors=BatchFaults(data=faults))
            return False
        counts = RequestCounts(total=total)
        await self._change(status="in_progress", in_progress_at=now, request_counts=counts)
        return True

    async def _lines(self) -> AsyncGenerator[Line, None]:
        """The requests of the input. Parts are parsed in a thread, some of them at a time."""
        row, endpoint = self.row, self.batch.endpoint
        source = await self.store.run(lambda rows: rows.get(row.tenant, "file", row.refers))
        rest, number = b"", 0
        async for part in read_parts(self.store, source):
            whole, mark, rest = (rest + part).rpartition(b"\n")
            if len(rest) > MAX_LINE_BYTES:
                number += 1
                yield Line(number, None, fault=f"line {number}: it has more than {MAX_LINE_BYTES} bytes")
                return
            texts = whole.split(b"\n") if mark else []
            for line in await asyncio.to_thread(_read, texts, number, endpoint):
                yield line
            number += len(texts)
        for line in _read([rest], number, endpoint):
            yield line

    async def _begin_files(self) -> None:
        """Make the rows of both output files, unless an earlier run has."""
        if self.work.output_id:
            return
        now, seconds = self.store.now(), self.work.output_expires_s
        made = [
            FileObject(
                id=new_id("file"),
                bytes=0,
                created_at=now,
                filename=f"{self.batch.id}_{what}.jsonl",
                expires_at=None if seconds is None else now + seconds,
                purpose="batch_output",
            )
            for what in ("output", "error")
        ]
        self._hold_files(made[0].id, made[1].id)

        def write(rows: Rows) -> None:
            for file in made:
                body = msgspec.json.encode(file)
                rows.add(
                    StoredRow(
                        id=file.id,
                        kind="file",
                        tenant=self.row.tenant,
                        created=now,
                        body=body,
                        status="writing",
                        expires=file.expires_at,
                    )
                )
            self.row = rows.change(self.row, msgspec.json.encode(self.work), self.batch.status)

        async def store() -> None:
            try:
                await self.store.run(write)
            except BaseException:
                self._hold_files("", "")  # there are none: it is tried again
                raise

        await _run_whole(store())

    async def _files(self) -> tuple[StoredRow, StoredRow]:
        def read(rows: Rows) -> tuple[StoredRow, StoredRow]:
            ids, tenant = self.work, self.row.tenant
            return rows.get(tenant, "file", ids.output_id), rows.get(tenant, "file", ids.error_id)

        return await self.store.run(read)

    async def _answer(self) -> None:
        """Answer all lines that have no answer."""
        output, errors = await self._files()
        done = await self._count_answers(output, errors)
        async with aclosing(self._lines()) as lines, asyncio.TaskGroup() as group:
            mine = asyncio.Semaphore(AT_ONCE)

            async def answer(line: Line) -> None:
                try:
                    async with self.places:
                        await self._answer_line(line, output, errors)
                finally:
                    mine.release()

            async for line in lines:
                if line.number not in done:
                    await mine.acquire()
                    group.create_task(answer(line))

    async def _count_answers(self, output: StoredRow, errors: StoredRow) -> set[int]:
        """The lines that have an answer; the counts are theirs again, whatever was interrupted."""

        def read(rows: Rows) -> tuple[set[int], set[int]]:
            return rows.part_numbers(output, CONTENT), rows.part_numbers(errors, CONTENT)

        good, bad = await self.store.run(read)
        total = self.batch.request_counts.total
        counts = RequestCounts(total=total, completed=len(good), failed=len(bad))
        self._hold(msgspec.structs.replace(self.batch, request_counts=counts))
        return good | bad

    async def _answer_line(self, line: Line, output: StoredRow, errors: StoredRow) -> None:
        app = self.app_of(self.row.tenant)
        while app is not None and (wait_s := app.account.wait_s()) > 0:
            await asyncio.sleep(min(wait_s, 5.0))
            app = self.app_of(self.row.tenant)  # keys may change while it waits
        if app is None:
            answer = _refuse(line, {"code": "key_removed", "message": KEY_GONE})
        else:
            pauses = itertools.chain(PAUSES_S, itertools.repeat(PAUSES_S[-1]))
            answer = await answer_line(app, line, lambda: None, pauses)
        failed = has_failed(answer)
        await self._write(line.number, errors if failed else output, answer, failed=failed)

    async def _write(self, number: int, target: StoredRow, answer: object, *, failed: bool) -> None:
        """Store one answer and the counts that it changes."""
        counts = self.batch.request_counts
        name = "failed" if failed else "completed"
        counts = msgspec.structs.replace(counts, **{name: getattr(counts, name) + 1})
        text = msgspec.json.encode(answer) + b"\n"
        await self._change(lambda rows: rows.add_part(target, CONTENT, number, text), request_counts=counts)

    async def _expire(self) -> None:
        """Answer with an error what has no answer, and end."""
        if self.work.output_id:
            output, errors = await self._files()
            done = await self._count_answers(output, errors)
            fault = {
                "code": "batch_expired",
                "message": "the batch was not done within its completion_window",
            }
            async with aclosing(self._lines()) as lines:
                async for line in lines:
                    if line.number not in done:
                        await self._write(line.number, errors, _refuse(line, fault), failed=True)
        await self._finish("expired")

    async def _finish(self, status: BatchStatus) -> None:
        """Have the files appear that have lines, and the batch say how it ended: in one transaction."""
        now, files = self.store.now(), await self._files() if self.work.output_id else ()
        if files:
            await self._count_answers(*files)
        ending = {"status": status, "finalizing_at": now, f"{status}_at": now}

        def settle(rows: Rows) -> BatchWork:
            ids: dict[str, str] = {}
            for name, row in zip(("output_file_id", "error_file_id"), files, strict=False):
                if size := rows.parts_length(row, CONTENT):
                    file = decode_json(row.body, FileObject)
                    body = msgspec.json.encode(msgspec.structs.replace(file, bytes=size))
                    ids[name] = rows.change(row, body, "processed").id
                else:
                    rows.delete(row)
            batch = msgspec.structs.replace(self.batch, **ending, **ids)
            work = msgspec.structs.replace(self.work, batch=batch, output_id="", error_id="")
            rows.change(self.row, msgspec.json.encode(work), status)
            return work

        async def store() -> None:
            self.work = await self.store.run(settle)

        await _run_whole(store())

    def _hold_files(self, output_id: str, error_id: str) -> None:
        self.work = msgspec.structs.replace(self.work, output_id=output_id, error_id=error_id)

    def _hold(self, batch: BatchObject) -> None:
        self.work = msgspec.structs.replace(self.work, batch=batch)

    async def _change(self, also: Callable[[Rows], None] | None = None, **fields: object) -> None:
        """Change fields of the batch here and in the store, in one transaction with `also`."""
        self._hold(msgspec.structs.replace(self.batch, **fields))
        body, status = msgspec.json.encode(self.work), self.batch.status

        def write(rows: Rows) -> None:
            if also is not None:
                also(rows)
            self.row = rows.change(self.row, body, status)

        await self.store.run(write)


async def _run_whole(work: Coroutine[Any, Any, None]) -> None:
    """Have `work` end, also when the caller is cancelled meanwhile: then the cancellation comes behind it.

    Else the store could have what the batch in memory has not.
    """
    running = asyncio.ensure_future(work)
    try:
        await asyncio.shield(running)
    except asyncio.CancelledError:
        await asyncio.wait({running})
        raise


def _refuse(line: Line, fault: Mapping[str, str]) -> dict[str, object]:
    """The line of output of a request that is not made."""
    return {"id": new_id("batch_req", "_"), "custom_id": line.custom_id, "response": None, "error": fault}


def _read(texts: list[bytes], number: int, endpoint: str) -> list[Line]:
    return [read_request(i, text, endpoint) for i, text in enumerate(texts, number + 1) if text.strip()]
