"""Looking after the head of a Ray cluster, with a socket in its place."""

from __future__ import annotations

import asyncio
import socket

import pytest

from plait.cluster.ray_serve import head
from plait.cluster.ray_serve.head import HeadWatch


def test_a_head_is_gone_after_two_looks_without_it_and_is_there_again_with_the_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(head, "PAUSE_S", 0.02)
    monkeypatch.setattr(head, "MAX_MISSED", 3)
    seen: list[bool] = []

    async def wait_for(is_there: bool, after: int) -> int:
        async with asyncio.timeout(5):
            while is_there not in seen[after:]:
                await asyncio.sleep(0.005)
        return seen.index(is_there, after)

    async def look() -> None:
        listener = socket.create_server(("127.0.0.1", 0))
        port = listener.getsockname()[1]
        watching = asyncio.create_task(HeadWatch(f"127.0.0.1:{port}", seen.append).run())
        await wait_for(True, 0)
        listener.close()
        num_closed = len(seen)
        first_gone = await wait_for(False, num_closed)
        assert first_gone - num_closed >= 1  # one look may have begun before
        with socket.create_server(("127.0.0.1", port)):
            await wait_for(True, first_gone)
        watching.cancel()

    asyncio.run(look())
