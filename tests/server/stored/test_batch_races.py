"""Batches that are cancelled while something else of them is stored. No test depends on time."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import msgspec
import pytest
from starlette.types import Message, Receive, Scope, Send

from plait.server.store.errors import StoreFull
from plait.server.store.rows import StoredRow
from plait.server.stored.batch_objects import BatchObject, BatchWork
from plait.server.stored.batch_runner import BatchRunner
from plait.server.stored.file_objects import CONTENT, FileObject
from plait.typed_values import decode_json
from tests.patience import PATIENCE_S
from tests.server.stored.held_store import HeldStore

if TYPE_CHECKING:
    from plait.server.gateway.middleware import Traffic
    from plait.server.gateway.served_models import ServedModels

CHAT = "/v1/chat/completions"


class App:
    """Answers each line; one with HANG never. `hangs`: such a line has come."""

    def __init__(self) -> None:
        self.hangs, self.account = asyncio.Event(), object()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        message: Message = await receive()
        if b"HANG" in message["body"]:
            self.hangs.set()
            await asyncio.Event().wait()
        headers = [(b"content-type", b"application/json")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": b"{}"})


class Bench:
    """A runner of batches over a store that can be held."""

    def __init__(self, folder: Path) -> None:
        self.store, self.app = HeldStore(folder / "s.db"), App()
        found: Any = self.app
        self.app.account = self
        self.runner = BatchRunner(self.store, cast("Traffic", None), cast("ServedModels", self))
        self.runner._app_of = lambda tenant: found  # type: ignore[method-assign]

    def wait_s(self) -> float:
        """As a key's account, which has no limits."""
        return 0.0

    def readiness(self) -> tuple[int, str]:
        """As models that are loaded."""
        return 200, "ready"

    async def begin(self, *contents: str) -> StoredRow:
        """A batch in work, of one request for each text."""
        now = self.store.now()
        lines = [
            json.dumps({"custom_id": str(i), "url": CHAT, "body": {"messages": [{"content": text}]}})
            for i, text in enumerate(contents)
        ]
        file = FileObject(id="file-in", bytes=1, created_at=now, filename="in", purpose="batch")
        batch = BatchObject(
            id="batch_1", endpoint=CHAT, input_file_id=file.id, created_at=now, expires_at=now + 86_400
        )
        work = BatchWork(batch=batch)

        def add(rows: Any) -> StoredRow:
            common: dict[str, Any] = {"tenant": "alice", "created": now}
            body = msgspec.json.encode(file)
            source = rows.add(StoredRow(id=file.id, kind="file", body=body, status="processed", **common))
            rows.add_part(source, CONTENT, 0, "\n".join(lines).encode())
            body = msgspec.json.encode(work)
            made: StoredRow = rows.add(
                StoredRow(id=batch.id, kind="batch", body=body, status=batch.status, refers=file.id, **common)
            )
            return made

        row = await self.store.run(add)
        self.runner.launch(row, work)
        return row

    async def read(self) -> BatchObject:
        """The batch as clients see it."""
        row = await self.store.run(lambda rows: rows.get("alice", "batch", "batch_1"))
        return decode_json(row.body, BatchWork).batch

    async def ended(self) -> BatchObject:
        """The batch when nothing works for it any more."""
        for _, task in [*self.runner._runs.values()]:
            await asyncio.wait({task})
            assert task.cancelled() or task.exception() is None
        return await self.read()


def run(folder: Path, test: Callable[[Bench], Coroutine[Any, Any, None]]) -> None:
    async def check() -> None:
        bench = Bench(folder)
        try:
            await test(bench)
        finally:
            await bench.runner.close()
            bench.store.close()

    asyncio.run(asyncio.wait_for(check(), PATIENCE_S))


def test_a_batch_that_is_cancelled_while_its_end_is_stored_has_ended(tmp_path: Path) -> None:
    async def check(bench: Bench) -> None:
        end = bench.store.hold("settle", behind=True)
        row = await bench.begin("one")
        await end.is_there.wait()
        cancelling = asyncio.create_task(bench.runner.cancel(row))
        await bench.read()  # behind what the cancellation has stored
        end.gate.set()
        await cancelling
        found = await bench.ended()
        assert (found.status, found.output_file_id is not None) == ("completed", True)

    run(tmp_path, check)


def test_a_batch_that_is_cancelled_twice_is_cancelled(tmp_path: Path) -> None:
    async def check(bench: Bench) -> None:
        row = await bench.begin("one", "HANG")
        await bench.app.hangs.wait()
        end = bench.store.hold("settle", behind=False)
        cancelling = [asyncio.create_task(bench.runner.cancel(row))]
        await end.is_there.wait()
        cancelling.append(asyncio.create_task(bench.runner.cancel(row)))
        await bench.read()
        end.gate.set()
        await asyncio.gather(*cancelling)
        found = await bench.ended()
        assert (found.status, found.request_counts.completed) == ("cancelled", 1)

    run(tmp_path, check)


@pytest.mark.parametrize("behind", [False, True])
def test_a_batch_that_is_cancelled_while_its_files_are_made_is_cancelled(
    tmp_path: Path, *, behind: bool
) -> None:
    async def check(bench: Bench) -> None:
        files = bench.store.hold("_begin_files.<locals>.write", behind=behind)
        row = await bench.begin("one")
        await files.is_there.wait()
        cancelling = asyncio.create_task(bench.runner.cancel(row))
        while (await bench.read()).status != "cancelling":
            await asyncio.sleep(0)
        files.gate.set()
        await cancelling
        assert (await bench.ended()).status == "cancelled"

    run(tmp_path, check)


def test_a_cancellation_that_could_not_be_stored_can_be_sent_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def check(bench: Bench) -> None:
        row = await bench.begin("HANG")
        await bench.app.hangs.wait()

        async def refuse(*_: object, **__: object) -> None:
            raise StoreFull("the disk is full")

        with monkeypatch.context() as patch:
            patch.setattr(bench.store, "run", refuse)
            with pytest.raises(StoreFull):
                await bench.runner.cancel(row)
        assert (await bench.read()).status == "in_progress"
        await bench.runner.cancel(row)
        assert (await bench.ended()).status == "cancelled"

    run(tmp_path, check)


def test_a_batch_of_which_the_files_find_no_space_waits_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("plait.server.stored.batch_runner.RETRY_S", 0.0)

    async def check(bench: Bench) -> None:
        plain, refused = bench.store.run, []

        async def refuse_once(work: Any, **more: Any) -> Any:
            if "_begin_files" in getattr(work, "__qualname__", "") and not refused:
                refused.append(work)
                raise StoreFull("the disk is full")
            return await plain(work, **more)

        monkeypatch.setattr(bench.store, "run", refuse_once)
        await bench.begin("one")
        assert (await bench.ended()).status == "completed"
        assert refused

    run(tmp_path, check)
