"""Tasks for a client that may disconnect: they are cancelled then, and awaited. Ids of requests."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Coroutine
from typing import Any, TypeVar

from starlette.types import Receive

from plait.errors import Cancelled

T = TypeVar("T")


async def until_disconnect(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`, which is cancelled when the client goes away. Raises Cancelled then.

    The body must have been read, so that `receive` returns only when the client leaves.
    """
    running = asyncio.ensure_future(work)
    watching = asyncio.ensure_future(wait_disconnect(receive))
    try:
        await asyncio.wait({running, watching}, return_when=asyncio.FIRST_COMPLETED)
        if running.done():
            return running.result()
        raise Cancelled("the client went away")
    finally:
        await cancel_tasks(running, watching)


async def wait_disconnect(receive: Receive) -> None:
    """Wait until the client has disconnected."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def cancel_tasks(*tasks: asyncio.Future[Any]) -> None:
    """Cancel tasks and wait until they have ended."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def new_id(prefix: str, mark: str = "-") -> str:
    """`prefix`-… with 122 random bits, of letters and digits."""
    return f"{prefix}{mark}{uuid.uuid4().hex}"
