"""A store that holds chosen transactions before or behind the disk, until a test lets them go."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from plait.server.store.database import Database
from plait.server.store.rows import Rows
from plait.server.store.seal import Seal
from plait.server.store.store import Store

T = TypeVar("T")


class Hold:
    """Transactions of one function. `is_there`: one is held; `gate`: lets all of them go."""

    def __init__(self, name: str, *, behind: bool) -> None:
        self.name, self.is_behind = name, behind
        self.is_there, self.gate = asyncio.Event(), asyncio.Event()

    async def wait(self) -> None:
        """Be held."""
        self.is_there.set()
        await self.gate.wait()


class HeldStore(Store):
    """`holds`: by the names of the functions that a transaction runs."""

    def __init__(self, path: Path) -> None:
        super().__init__(Database(str(path), Seal()), 64 << 20, 86_400.0)
        self.holds: list[Hold] = []

    def hold(self, name: str, *, behind: bool) -> Hold:
        """Hold the transactions of a function: before they reach the disk, or `behind` it."""
        self.holds.append(Hold(name, behind=behind))
        return self.holds[-1]

    async def run(self, work: Callable[[Rows], T], *, deletes: bool = False, reads: bool = False) -> T:
        """As the store's."""
        name = getattr(work, "__qualname__", "")
        found = [one for one in self.holds if name.endswith(one.name) and not one.gate.is_set()]
        for one in found:
            if not one.is_behind:
                await one.wait()
        result = await super().run(work, deletes=deletes, reads=reads)
        for one in found:
            if one.is_behind:
                await one.wait()
        return result
