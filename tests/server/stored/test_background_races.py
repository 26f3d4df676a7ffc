"""Responses in the background that are cancelled, or begun, while something else of them is stored."""

from __future__ import annotations

import threading
import zlib
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
from openai import OpenAI, RateLimitError

from plait.server.responses.items import Response
from plait.server.responses.state import ResponseKeeper
from plait.server.store.rows import Rows, StoredRow
from plait.server.stored import background
from plait.server.stored.background import BackgroundRunner
from tests.patience import PATIENCE_S

MODEL = "default"


def test_a_response_that_is_cancelled_while_its_end_is_stored_has_ended(
    alice: OpenAI, monkeypatch: pytest.MonkeyPatch
) -> None:
    packs, may_go, cancels = threading.Event(), threading.Event(), threading.Event()

    def compress(raw: bytes) -> bytes:
        packs.set()
        assert may_go.wait(PATIENCE_S)
        return zlib.compress(raw)

    plain = BackgroundRunner.cancel

    async def cancel(self: BackgroundRunner, tenant: str, response_id: str) -> None:
        cancels.set()  # the event loop does nothing else before the cancellation waits
        await plain(self, tenant, response_id)

    monkeypatch.setattr(background, "zlib", SimpleNamespace(compress=compress, decompress=zlib.decompress))
    monkeypatch.setattr(BackgroundRunner, "cancel", cancel)
    events = iter(alice.responses.create(model=MODEL, input="text", background=True, stream=True))
    first: Any = next(events)
    with ThreadPoolExecutor(1) as pool:
        assert packs.wait(PATIENCE_S)
        cancelled = pool.submit(alice.responses.cancel, first.response.id)
        assert cancels.wait(PATIENCE_S)
        may_go.set()
        assert cancelled.result(PATIENCE_S).status == "completed"
    seen = [first, *events]
    assert seen[-1].type == "response.completed"
    again = [*alice.responses.retrieve(first.response.id, stream=True)]
    assert [event.to_dict() for event in again] == [event.to_dict() for event in seen]


def test_responses_that_begin_together_are_bounded(alice: OpenAI, monkeypatch: pytest.MonkeyPatch) -> None:
    adds, may_go = threading.Event(), threading.Event()
    plain = ResponseKeeper.add

    def add(self: ResponseKeeper, rows: Rows, response: Response) -> StoredRow:
        adds.set()
        assert may_go.wait(PATIENCE_S)
        return plain(self, rows, response)

    monkeypatch.setattr(background, "MAX_PER_KEY", 1)
    monkeypatch.setattr(ResponseKeeper, "add", add)

    def begin() -> Any:
        return alice.responses.create(model=MODEL, input="HANG", background=True)

    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(begin)
        assert adds.wait(PATIENCE_S)
        second = pool.submit(begin)
        try:
            with pytest.raises(RateLimitError, match="1 responses of this key are in work already"):
                second.result(10.0)  # the first one's row is not stored yet
        finally:
            may_go.set()
        alice.responses.cancel(first.result(PATIENCE_S).id)
