"""One model, which is loaded at startup and stays as long as the server runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from plait.config import ServerConfig
from plait.errors import InvalidField
from plait.server.api import validate
from plait.server.gateway.exchange import Exchange
from plait.server.gateway.request_context import Health, LoadingState
from plait.server.gateway.served_models import (
    ChosenModel,
    ServedFacts,
    ServedModels,
    facts_of_adapter,
    facts_of_front,
)
from plait.server.http.errors import NotReady

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry

    from plait.frontend.frontend import Front


class OnlyModel(ServedModels):
    """One model, which is loaded at startup and stays as long as the server runs."""

    def __init__(self, loading: LoadingState, config: ServerConfig) -> None:
        self.loading, self._config = loading, config

    @property
    def stopping(self) -> bool:
        return self.loading.stopping

    @property
    def fault(self) -> BaseException | None:
        return None if self.loading.front is None else self.loading.front.fault

    def begin(self) -> None:
        """It is loaded by a thread of its own already."""

    def look_around(self) -> None:
        """There is nothing to do."""

    def stop(self) -> None:
        self.loading.stop()

    def close(self) -> None:
        if self.loading.front is not None:
            self.loading.front.close(drain=False)

    async def choose(self, asked: object, exchange: Exchange, keep_alive: object = None) -> ChosenModel:
        return self.look_up(asked)

    def look_up(self, asked: object) -> ChosenModel:
        front = self.loading.ready()
        served = self._find_name(front)
        if isinstance(asked, str) and asked != served and asked in front.adapters:
            return ChosenModel(front, served, asked, asked)
        if self._config.any_model_name:
            return ChosenModel(front, served, validate.any_model_name(asked) or served)
        validate.check_model(asked, served, front.adapters)
        return ChosenModel(front, served, served)

    def list_facts(self) -> list[ServedFacts]:
        front = self.loading.ready()
        return [facts_of_front(front, self._find_name(front))]

    def facts_of(self, asked: object) -> ServedFacts:
        found = self.look_up(asked)
        facts = facts_of_front(found.front, found.served if found.adapter else found.name)
        return facts_of_adapter(facts, found.adapter) if found.adapter else facts

    async def load(self, asked: object) -> ServedFacts:
        return self.facts_of(asked)

    async def unload(self, asked: object) -> ServedFacts:
        found = self.look_up(asked)
        text = f"model: {found.served!r} is this server's only model and stays; start the server with"
        raise InvalidField(f"{text} --keep-alive, or stop it", "model")

    def fronts(self) -> Mapping[str, Front]:
        front = self.loading.front
        return {} if front is None else {self._find_name(front): front}

    def registries(self) -> Sequence[CollectorRegistry]:
        if self.loading.front is None:
            raise NotReady("the model is loading, and has no metrics yet; /health says how far it is")
        return [front.loop.registry for front in self.fronts().values()]

    def check_capacity(self) -> None:
        self.loading.check_capacity()

    def readiness(self) -> tuple[int, str]:
        return self.loading.readiness()

    def liveness(self) -> tuple[int, str]:
        return self.loading.liveness()

    def health(self) -> tuple[int, Health]:
        return self.loading.health()

    def _find_name(self, front: Front) -> str:
        """The model's name, which clients send and replies carry."""
        return self._config.served_model_name or front.name
