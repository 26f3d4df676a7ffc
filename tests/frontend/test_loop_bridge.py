from __future__ import annotations

import asyncio
import gc
import threading
import weakref
from contextlib import suppress
from typing import Any

import pytest

from plait.frontend.loop_bridge import LoopBridge, LoopBridges, wake_together
from plait.request import Event


def test_events_that_come_together_wake_the_loop_once_and_keep_their_order() -> None:
    async def turns() -> None:
        loop, woken = asyncio.get_running_loop(), []
        real = loop.call_soon_threadsafe
        patched: Any = loop
        patched.call_soon_threadsafe = lambda *given: (woken.append(1), real(*given))
        bridge, inboxes = LoopBridge(loop), [asyncio.Queue[Event](), asyncio.Queue[Event]()]

        def work() -> None:
            for i in range(100):
                bridge.put(inboxes[i % 2], Event("a", i))

        thread = threading.Thread(target=work)
        thread.start()
        thread.join()  # the loop cannot run meanwhile
        found = [[(await inbox.get()).index for _ in range(50)] for inbox in inboxes]
        assert found == [[*range(0, 100, 2)], [*range(1, 100, 2)]]
        assert len(woken) == 1
        bridge.put(inboxes[0], Event("a", 7))
        assert (await inboxes[0].get()).index == 7
        assert len(woken) == 2

    asyncio.run(turns())


def test_a_loop_has_one_bridge_and_one_that_is_closed_is_left_alone() -> None:
    bridges = LoopBridges()

    async def find() -> LoopBridge:
        loop = asyncio.get_running_loop()
        assert bridges.of(loop) is bridges.of(loop)
        return bridges.of(loop)

    first, second = asyncio.run(find()), asyncio.run(find())
    assert first is not second
    first.put(asyncio.Queue(), Event("a", 0))


def test_a_closed_loop_is_not_kept() -> None:
    bridges = LoopBridges()

    async def find() -> weakref.ref[LoopBridge]:
        return weakref.ref(bridges.of(asyncio.get_running_loop()))

    first = asyncio.run(find())
    asyncio.run(find())
    gc.collect()
    assert first() is None


def test_a_loop_that_closes_while_it_is_called_harms_no_one(monkeypatch: pytest.MonkeyPatch) -> None:
    loop = asyncio.new_event_loop()
    loop.close()
    monkeypatch.setattr(loop, "is_closed", lambda: False)  # it was open when it was looked at
    LoopBridge(loop).put(asyncio.Queue[Event](), Event("a", 0))


def test_events_of_one_message_wake_each_loop_behind_the_last_of_them() -> None:
    async def turns() -> None:
        loop, woken = asyncio.get_running_loop(), list[int]()
        bridge, inbox = LoopBridge(loop), asyncio.Queue[Event]()
        real = loop.call_soon_threadsafe
        patched: Any = loop
        patched.call_soon_threadsafe = lambda *given: (woken.append(1), real(*given))
        with wake_together():
            for i in range(16):
                bridge.put(inbox, Event("a", i))
            assert not woken
        assert len(woken) == 1
        assert [(await inbox.get()).index for _ in range(16)] == [*range(16)]
        with suppress(ValueError), wake_together():
            bridge.put(inbox, Event("a", 16))
            raise ValueError
        assert (await inbox.get()).index == 16
        bridge.put(inbox, Event("a", 17))
        assert (await inbox.get()).index == 17
        assert len(woken) == 3

    asyncio.run(turns())
