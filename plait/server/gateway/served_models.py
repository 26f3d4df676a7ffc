"""The models behind a server, as its handlers see them: one that is loaded at startup, or several.

`models/only` is the first, `models/pool` the second.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

from msgspec import Struct

from plait import resource_limits
from plait.engine.fingerprint import NO_FINGERPRINT, Fingerprint
from plait.errors import InvalidField
from plait.server.gateway.exchange import Exchange
from plait.server.gateway.request_context import Health, LoadingProgress

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry

    from plait.frontend.frontend import Front

Stage = Literal["loaded", "loading", "unloaded", "failed"]
NO_FOLDER = "this server has no folder of models that may change; start it with --models-dir"


class PullStep(Struct, frozen=True):
    """How far a fetch is. `commit` and the numbers of bytes are there once the Hub has listed the model."""

    text: str
    commit: str = ""
    total: int = 0
    completed: int = 0


class ChosenModel(Struct, frozen=True):
    """A loaded model that a request has chosen. `served`: its name; `name`: what the reply calls it;
    `adapter`: the name of the one that the request chose with it, or "".
    """

    front: Front
    served: str
    name: str
    adapter: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedFacts:
    """What is known of a model, loaded or not; None: not known before it is loaded.

    `created`: seconds since 1970; `size`: bytes of its weight files; `memory`: bytes that its engine holds;
    `device_memory`: bytes of a GPU that it held once it was loaded, 0 on a CPU;
    `expires`: seconds since 1970 when it is unloaded, None: never; `error`: why it could not be loaded;
    `parent`: of an adapter, the model that it changes.
    """

    name: str
    created: int
    stage: Stage
    front: Front | None = None
    aliases: Sequence[str] = ()
    progress: LoadingProgress | None = None
    error: str = ""
    max_model_len: int | None = None
    abilities: Sequence[str] | None = None
    family: str = ""
    fingerprint: Fingerprint = NO_FINGERPRINT
    template: str = ""
    size: int | None = None
    memory: int | None = None
    device_memory: int = 0
    expires: float | None = None
    num_open: int = 0
    parent: str = ""


class ServedModels(ABC):
    """All models of a server. Only for the event loop's thread, but for `fronts` and `registries`."""

    keeps_time = False  # whether `keep_alive` of a request means something

    @property
    @abstractmethod
    def stopping(self) -> bool:
        """Whether no new requests are accepted."""

    @property
    @abstractmethod
    def fault(self) -> BaseException | None:
        """Why nothing can be served any more, if that is so."""

    @abstractmethod
    def begin(self) -> None:
        """Called once, when the event loop runs."""

    @abstractmethod
    def look_around(self) -> None:
        """Called once a second."""

    @abstractmethod
    def stop(self) -> None:
        """Accept no new requests from now on; running ones go on."""

    @abstractmethod
    def close(self) -> None:
        """End every engine; blocks. From any thread."""

    @abstractmethod
    async def choose(self, asked: object, exchange: Exchange, keep_alive: object = None) -> ChosenModel:
        """The model that a request names, loaded; it stays until `exchange.release` is called.

        Raises InvalidField, ModelNotFound and CapacityErrors.
        """

    @abstractmethod
    def look_up(self, asked: object) -> ChosenModel:
        """A model that is loaded. Raises NotReady for one that is not, and what `choose` raises."""

    @abstractmethod
    def list_facts(self) -> list[ServedFacts]:
        """All models, the first first. Raises NotReady while nothing is known."""

    @abstractmethod
    def facts_of(self, asked: object) -> ServedFacts:
        """One model. Raises InvalidField and ModelNotFound."""

    @abstractmethod
    async def load(self, asked: object) -> ServedFacts:
        """Have a model loaded; does not wait for it. Raises what `choose` raises."""

    @abstractmethod
    async def unload(self, asked: object) -> ServedFacts:
        """Have a model unloaded when its open requests have ended; does not wait for that.

        Raises InvalidField and ModelNotFound.
        """

    async def pull(self, asked: str) -> AsyncIterator[PullStep]:
        """Fetch a model of the Hub into the models' folder: how far that is.

        Raises InvalidField where there is no folder, and for what is no such name, and QueueFull; the
        iterator raises CheckpointError and what else the fetch raises.
        """
        raise InvalidField(f"model: {NO_FOLDER}", "model")

    async def copy(self, asked: object, destination: str) -> None:
        """Have a model under another name, too. Raises as `pull`, and ModelNotFound."""
        raise InvalidField(f"model: {NO_FOLDER}", "model")

    async def delete(self, asked: object) -> None:
        """Delete the files of a model of the folder. Raises as `copy`."""
        raise InvalidField(f"model: {NO_FOLDER}", "model")

    @abstractmethod
    def fronts(self) -> Mapping[str, Front]:
        """The loaded models, by name."""

    @abstractmethod
    def registries(self) -> Sequence[CollectorRegistry]:
        """Metrics of the models and of what is done with them. Raises NotReady while there are none."""

    @abstractmethod
    def check_capacity(self) -> None:
        """Raises QueueFull or EngineError if any request that came now would be refused."""

    @abstractmethod
    def readiness(self) -> tuple[int, str]:
        """The HTTP status of /ready and why: 200 if a request that came now would be taken."""

    @abstractmethod
    def liveness(self) -> tuple[int, str]:
        """The HTTP status of /live and why: 503 if only restarting the server could help."""

    @abstractmethod
    def health(self) -> tuple[int, Health]:
        """The HTTP status of /health and its body."""


def list_abilities(front: Front) -> list[str]:
    """What a model can, in Ollama's words; "embedding" is for models that do nothing else."""
    if not front.head.generates:
        return ["embedding"]
    found = ["completion"]
    if front.reply_format.tools is not None:
        found.append("tools")
    if front.reply_format.reasoning is not None:
        found.append("thinking")
    return found


def facts_of_adapter(found: ServedFacts, name: str) -> ServedFacts:
    """An adapter of a model: what is the model's own stays with it."""
    of_adapter = replace(found, name=name, parent=found.name, aliases=(), num_open=0)
    return replace(of_adapter, size=None, memory=None)


def facts_of_adapters(found: ServedFacts) -> list[ServedFacts]:
    """The adapters of a loaded model."""
    return [] if found.front is None else [facts_of_adapter(found, name) for name in found.front.adapters]


def facts_of_front(front: Front, name: str) -> ServedFacts:
    """What is known of a loaded model."""
    template = front.chat_template
    return ServedFacts(
        name=name,
        created=front.created,
        stage="loaded",
        front=front,
        max_model_len=front.max_model_len,
        abilities=list_abilities(front),
        family=front.spec.family,
        fingerprint=front.fingerprint,
        template=template.source if template else "",
        device_memory=front.loop.device_nbytes,
    )


def measure_front(front: Front) -> int | None:
    """Bytes of memory that a model's engine holds now; None: not known."""
    from plait.worker.client import EngineProcess

    pid = front.loop.pid if isinstance(front.loop, EngineProcess) else None
    return None if pid is None else resource_limits.process_memory(pid)
