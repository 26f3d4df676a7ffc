"""Several models in one server: each is loaded when a request names it, and unloaded when it is idle.

Names and facts are here; what is in memory is `residents`. All runs on the event loop's thread.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING

from plait.config import ServerConfig
from plait.errors import InvalidField, ModelNotFound
from plait.server.api import validate
from plait.server.api.validate import DEFAULT_MODEL
from plait.server.gateway.exchange import Exchange
from plait.server.gateway.request_context import Health
from plait.server.gateway.served_models import (
    NO_FOLDER,
    ChosenModel,
    PullStep,
    ServedFacts,
    ServedModels,
    facts_of_adapter,
)
from plait.server.http.errors import NotReady
from plait.server.models.catalog import LOOK_EVERY_S, ModelCatalog, ModelEntry
from plait.server.models.folder_changes import FolderChanges
from plait.server.models.hosted import HostedModel
from plait.server.models.placement import RESIDENCE_S
from plait.server.models.pool_health import find_readiness, join_health
from plait.server.models.residents import ResidentModels, make_stopping_error, make_vanished_error
from plait.server.ollama.wire import read_keep_alive

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry

    from plait.frontend.frontend import Front

logger = logging.getLogger("plait.server")
FOLLOW_EVERY_S = 10.0  # between two looks at the folder that no request causes


class ModelPool(ServedModels):
    """The models of a catalogue, as the handlers of HTTP see them."""

    keeps_time = True

    def __init__(self, catalog: ModelCatalog, config: ServerConfig, residents: ResidentModels) -> None:
        self._catalog, self._config, self._residents = catalog, config, residents
        self._scan: asyncio.Task[None] | None = None
        folder = catalog.folder
        changes = partial(FolderChanges, is_taken=catalog.has_name, offline=catalog.is_offline)
        self._changes = None if folder is None else changes(folder)
        self._follow_catalog()
        if catalog.num_named:
            residents.first = next(iter(residents.models.values()))

    # As `ServedModels`

    @property
    def stopping(self) -> bool:
        return self._residents.stopping

    @property
    def fault(self) -> BaseException | None:
        return self._residents.fault

    def begin(self) -> None:
        """Load the first named model, as a server of one model does; read what the files of all say."""
        if self._residents.first is not None:
            self._residents.want(self._residents.first)
        self._learning = asyncio.ensure_future(self._learn_all())

    def look_around(self) -> None:
        self._residents.look_around()
        if self._catalog.is_due(FOLLOW_EVERY_S) and not self.stopping:
            self._rescan()

    def stop(self) -> None:
        self._residents.stop()

    def close(self) -> None:
        self._residents.close()

    async def choose(self, asked: object, exchange: Exchange, keep_alive: object = None) -> ChosenModel:
        keep_s = None if keep_alive is None else read_keep_alive(keep_alive)
        self._check_open()
        model, name, adapter = await self._find_anew(asked)
        front = await self._residents.hold(model)
        exchange.release = partial(self._residents.release, model, keep_s)
        return ChosenModel(front, model.name, name, adapter)

    def look_up(self, asked: object) -> ChosenModel:
        self._check_open()
        model, name, adapter = self._find(asked)
        if model.front is None:
            raise NotReady(f"the model {model.name!r} is not loaded; a request for text has it loaded")
        return ChosenModel(model.front, model.name, name, adapter)

    def list_facts(self) -> list[ServedFacts]:
        now = self._residents.clock()
        models = [model for model in self._residents.models.values() if not model.has_vanished]
        return [model.facts(now, RESIDENCE_S) for model in models]

    def facts_of(self, asked: object) -> ServedFacts:
        model, _, adapter = self._find(asked)
        found = model.facts(self._residents.clock(), RESIDENCE_S)
        return facts_of_adapter(found, adapter) if adapter else found

    async def load(self, asked: object) -> ServedFacts:
        self._check_open()
        model, *_ = await self._find_anew(asked)
        model.failure, model.is_unwanted = None, False
        await self._residents.learn(model)
        if refusal := self._residents.budget.refusal(model):
            raise model.too_large(refusal)
        if model.has_vanished:
            raise make_vanished_error(model)
        if model.phase not in ("loading", "loaded") or (model.phase == "loading" and model.loading.stopping):
            self._residents.want(model)
        return self.facts_of(model.name)

    async def unload(self, asked: object) -> ServedFacts:
        model, *_ = self._find(asked)
        model.is_wanted, model.is_unwanted = False, model.phase in ("loading", "loaded")
        if model in self._residents.queue and not model.waiters:
            self._residents.queue.remove(model)
        if model.phase == "loading" and not model.waiters:
            model.loading.stop()
        if model.is_idle:
            self._residents.unload(model, "requested")
        return self.facts_of(model.name)

    async def pull(self, asked: str) -> AsyncIterator[PullStep]:
        job = self._in_folder().pull(asked)

        async def follow() -> AsyncIterator[PullStep]:
            async for step in job.follow():
                yield step
            await self._look_again()

        return follow()

    async def copy(self, asked: object, destination: str) -> None:
        entry = await self._find_entry(asked)
        await asyncio.to_thread(self._in_folder().copy, entry, destination)
        await self._look_again()

    async def delete(self, asked: object) -> None:
        entry = await self._find_entry(asked)
        await asyncio.to_thread(self._in_folder().delete, entry)
        await self._look_again()

    async def _find_entry(self, asked: object) -> ModelEntry:
        """The very model of that name: an adapter, or just any name, is none.

        Raises InvalidField and ModelNotFound.
        """
        if not isinstance(asked, str) or asked == DEFAULT_MODEL:
            raise InvalidField("model: name the model itself", "model")
        with contextlib.suppress(ModelNotFound):
            await self._find_anew(asked)  # it looks at the folder again
        return self._catalog.find(asked)

    def _in_folder(self) -> FolderChanges:
        """Changes of the models' folder. Raises InvalidField where there is none."""
        self._check_open()
        if self._changes is None:
            raise InvalidField(f"model: {NO_FOLDER}", "model")
        return self._changes

    async def _look_again(self) -> None:
        """Look at the folder now, and not with the eyes of a look that began before."""
        if self._scan is not None:
            await asyncio.shield(self._scan)
        self._catalog.forget_look()
        await asyncio.shield(self._rescan())

    def fronts(self) -> Mapping[str, Front]:
        models = [*self._residents.models.values()]
        return {model.name: front for model in models if (front := model.front) is not None}

    def registries(self) -> Sequence[CollectorRegistry]:
        return [self._residents.metrics.join(self.fronts()), self._residents.metrics.registry]

    def check_capacity(self) -> None:
        """Which model's queue a request needs is not known before its body is read."""

    def readiness(self) -> tuple[int, str]:
        return find_readiness(self.stopping, self._residents.first)

    def liveness(self) -> tuple[int, str]:
        return 200, "stopping" if self.stopping else "up"

    def health(self) -> tuple[int, Health]:
        found = join_health(self.readiness(), [*self._residents.models.values()], self._residents.first)
        return 200 if found.status == "ok" else 503, found

    # Which models there are

    def _find(self, asked: object) -> tuple[HostedModel, str, str]:
        """The model that a request names, its name for the reply, and the adapter that is named, or "".

        Raises InvalidField and ModelNotFound.
        """
        name = validate.any_model_name(asked) if self._config.any_model_name else ""
        try:
            entry = self._catalog.find(asked)
        except ModelNotFound:
            for model in self._residents.models.values():
                if isinstance(asked, str) and asked in model.adapters:
                    return model, asked, asked
            if not name:
                raise
            entry = self._catalog.find(None)
        if entry.name not in self._residents.models:
            self._follow_catalog()
        return self._residents.models[entry.name], name or entry.name, ""

    async def _find_anew(self, asked: object) -> tuple[HostedModel, str, str]:
        """As `_find`, after another look at the folder if there is no such model."""
        with contextlib.suppress(ModelNotFound):
            return self._find(asked)
        if self._catalog.is_due(LOOK_EVERY_S):
            await asyncio.shield(self._rescan())
        return self._find(asked)

    def _rescan(self) -> asyncio.Task[None]:
        """Look at the folder in a thread; requests that come meanwhile wait for the same look."""

        async def scan() -> None:
            if await asyncio.to_thread(self._catalog.refresh):
                self._follow_catalog()
                await self._learn_all()

        if self._scan is None or self._scan.done():
            self._scan = asyncio.ensure_future(scan())
        return self._scan

    def _follow_catalog(self) -> None:
        """Have a `HostedModel` for each entry; one that has vanished from the folder ends when it is idle."""
        entries = {entry.name: entry for entry in self._catalog.entries}
        before = self._residents.models
        found = {name: before.get(name) or HostedModel(entry) for name, entry in entries.items()}
        for name, entry in entries.items():
            model, before_it = found[name], found[name].entry.stamp
            model.entry, model.has_vanished = entry, False
            if before_it != entry.stamp:
                logger.info("%s: its files have changed", name)
                model.follow_files()
        vanished = [model for name, model in before.items() if name not in entries]
        for model in vanished:
            if model.phase != "unloaded":
                model.is_unwanted = model.has_vanished = True
                found[model.name] = model
        self._residents.models = found
        for model in vanished:
            if model.phase == "unloaded":
                self._residents.forget(model)

    async def _learn_all(self) -> None:
        for model in [*self._residents.models.values()]:
            await self._residents.learn(model)

    def _check_open(self) -> None:
        if self.stopping:
            raise make_stopping_error()
