"""A pool of models without processes: loaders that wait for a word, and a clock that stands still."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from plait.config import EngineConfig, ServerConfig
from plait.frontend.frontend import Front
from plait.server.gateway.exchange import Exchange
from plait.server.models.catalog import ModelCatalog, ModelEntry
from plait.server.models.file_facts import FileFacts
from plait.server.models.placement import MemoryBudget
from plait.server.models.pool import ModelPool
from plait.server.models.residents import ResidentModels
from tests.patience import PATIENCE_S
from tests.server.fake import fake_front

ENGINE = EngineConfig()
SIZE = 100 << 20


@dataclass
class FakeLoader:
    """Loads a fake front. `held`: models that wait until they are taken out; `broken`: models that fail."""

    held: set[str] = field(default_factory=set)
    broken: dict[str, Exception] = field(default_factory=dict)
    loaded: list[str] = field(default_factory=list)
    fronts: list[Front] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def __call__(self, entry: ModelEntry, report: Callable[[str, int, int], None]) -> Front:
        with self.lock:
            self.loaded.append(entry.name)
        report("reading", 1, 2)
        deadline = time.monotonic() + PATIENCE_S
        while entry.name in self.held and time.monotonic() < deadline:
            report("reading", 1, 2)  # raises when the load is cancelled
            time.sleep(0.002)
        if entry.name in self.broken:
            raise self.broken[entry.name]
        front = fake_front()
        with self.lock:
            self.fronts.append(front)
        return front


@dataclass
class Clock:
    now: float = 1000.0

    def __call__(self) -> float:
        return self.now


class Bench:
    """A pool with its loader and clock."""

    def __init__(
        self,
        *names: str,
        fit: int = 2,
        sizes: dict[str, int] | None = None,
        folder: Path | None = None,
        aliases: dict[str, tuple[str, ...]] | None = None,
        **config: object,
    ) -> None:
        self.loader, self.clock = FakeLoader(), Clock()
        self.config = ServerConfig(port=0, models_dir=None if folder is None else str(folder), **config)  # type: ignore[arg-type]
        entries = [
            ModelEntry(name=name, source=name, engine=ENGINE, aliases=(aliases or {}).get(name, ()))
            for name in names
        ]
        template = ModelEntry(name="", source="", engine=ENGINE)
        catalog = ModelCatalog(entries, self.config.models_dir, template, clock=self.clock)
        given = sizes or {}
        one = FileFacts(own_name="", size=SIZE).need

        def read_files(entry: ModelEntry) -> FileFacts:
            size = given.get(entry.name, SIZE)
            return FileFacts(own_name=entry.name, size=size, max_model_len=64, abilities=("completion",))

        budget = MemoryBudget(fit * one, self.config.max_loaded_models)
        self.residents = ResidentModels(
            self.config, budget, self.loader, read_files=read_files, clock=self.clock
        )
        self.pool = ModelPool(catalog, self.config, self.residents)

    async def use(self, name: object = None, keep_alive: object = None) -> Exchange:
        """A request that holds its model until `exchange.release` is called."""
        exchange = Exchange("id", "POST", "/v1/completions")
        chosen = await self.pool.choose(name, exchange, keep_alive)
        exchange.model = chosen.served
        return exchange

    async def answer(self, name: object = None, keep_alive: object = None) -> str:
        """A request from its beginning to its end: the name of its model."""
        exchange = await self.use(name, keep_alive)
        assert exchange.release is not None
        exchange.release()
        return exchange.model

    def phases(self) -> dict[str, str]:
        return {name: model.phase for name, model in self.residents.models.items()}

    def loaded(self) -> set[str]:
        return {name for name, phase in self.phases().items() if phase == "loaded"}

    async def until(self, condition: Callable[[], bool]) -> None:
        """Wait for what threads do; the clock of the pool stands still."""
        deadline = time.monotonic() + PATIENCE_S
        while not condition():
            assert time.monotonic() < deadline, self.phases()
            await asyncio.sleep(0.002)

    async def later(self, seconds: float) -> None:
        """Let time pass, and the pool look around."""
        self.clock.now += seconds
        self.pool.look_around()
        await self.until(lambda: "closing" not in self.phases().values())
