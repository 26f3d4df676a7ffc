"""One model of a pool: where it is in its life, which requests hold it, and why it failed."""

from __future__ import annotations

import asyncio
import math
import re
import time
from collections.abc import Collection
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Literal

from plait.errors import PlaitError, clip_text
from plait.server.gateway.request_context import LoadingState
from plait.server.gateway.served_models import ServedFacts, Stage, facts_of_front
from plait.server.http.errors import ModelUnavailable
from plait.server.models.catalog import ModelEntry

if TYPE_CHECKING:
    from plait.frontend.frontend import Front
    from plait.server.models.file_facts import FileFacts

Phase = Literal["unloaded", "loading", "loaded", "closing"]
FIRST_PAUSE_S, MAX_PAUSE_S = 5.0, 300.0  # between two attempts to load a model that fails
MAX_ERROR_CHARS = 200
_FOLDERS = re.compile(r"(?<![\w.:/])/(?:[^/\s'\"]+/)+(?=[^/\s])")


@dataclass(frozen=True, slots=True)
class LoadFailure:
    """Why a model is not loaded again before `until_s`, after `count` failures in a row."""

    text: str
    until_s: float
    count: int


@dataclass(slots=True, eq=False)
class HostedModel:
    """One model of a pool. Only for the event loop's thread; times are the pool's clock's.

    `waiters`: requests that wait until it is loaded. `num_users`: requests that hold it: it stays while
    there are any. `yields`: its memory is for a model that has waited for long, so new requests wait.
    `held_nbytes`: what its engine was seen to hold at most; 0: not known.
    """

    entry: ModelEntry
    created: int = field(default_factory=lambda: int(time.time()))
    phase: Phase = "unloaded"
    loading: LoadingState = field(default_factory=LoadingState)
    front: Front | None = None
    waiters: list[asyncio.Future[Front]] = field(default_factory=list)
    num_users: int = 0
    is_wanted: bool = False  # to be loaded, if no request waits for it, too
    is_unwanted: bool = False  # to be unloaded as soon as no request holds it
    has_changed: bool = False  # its files, since it was loaded
    has_vanished: bool = False  # from the folder; a model of that name that comes later is another one
    is_learned: bool = False  # `files` has been read, as far as it can be
    yields: bool = False
    queued_s: float = 0.0
    loaded_s: float = 0.0
    used_s: float = 0.0
    keep_s: float = math.inf
    failure: LoadFailure | None = None
    files: FileFacts | None = None
    held_nbytes: int = 0
    known: ServedFacts | None = None

    @property
    def name(self) -> str:
        return self.entry.name

    @property
    def need(self) -> int:
        """Bytes that it takes, or will take, as far as is known."""
        return self.held_nbytes or (self.files.need if self.files is not None else 0)

    @property
    def is_idle(self) -> bool:
        """It is loaded, no request holds it, and its engine has no work: responses in the background."""
        if self.phase != "loaded" or self.num_users or self.front is None:
            return False
        stats = self.front.stats()
        return not stats.get("num_running", 0) and not stats.get("num_waiting", 0)

    @property
    def takes_requests(self) -> bool:
        """It is loaded, and its memory is not promised to another."""
        return self.phase == "loaded" and not self.yields and not self.is_unwanted

    def expires_s(self, residence_s: float) -> float:
        """When it is unloaded if no request comes: never before it was loaded for `residence_s`."""
        return max(self.used_s + self.keep_s, self.loaded_s + residence_s)

    def fail(self, error: BaseException, now: float) -> None:
        """Record that it could not be loaded, or was lost: the next attempt comes later each time."""
        count = self.failure.count + 1 if self.failure is not None else 1
        pause_s = min(FIRST_PAUSE_S * 2 ** min(count - 1, 16), MAX_PAUSE_S)
        text = str(error) if isinstance(error, PlaitError) else f"{type(error).__name__}: {error}"
        text = _FOLDERS.sub("", text)  # clients see it, and no path of this machine
        self.failure = LoadFailure(clip_text(text, MAX_ERROR_CHARS), now + pause_s, count)

    def check_failure(self, now: float) -> None:
        """Raises ModelUnavailable with the cause while it is too soon for another attempt."""
        if self.failure is not None and now < self.failure.until_s:
            wait_s = self.failure.until_s - now
            raise self.unavailable(f"it is tried again in {math.ceil(wait_s)} s at the earliest", wait_s)

    def unavailable(self, text: str, wait_s: float | None) -> ModelUnavailable:
        """The error of requests that wait for it."""
        cause = self.failure.text if self.failure is not None else "unknown"
        return ModelUnavailable(f"the model {self.name!r} cannot be loaded: {cause}; {text}", wait_s)

    def too_large(self, refusal: str) -> ModelUnavailable:
        """The error of requests for a model that never fits."""
        return ModelUnavailable(f"the model {self.name!r} does not fit: {refusal}")

    def follow_files(self) -> None:
        """Its files are others now: what is loaded of the old ones ends when it is idle."""
        self.is_learned = False
        if self.phase == "unloaded":
            self.forget_engine()
        else:
            self.has_changed = self.is_unwanted = True

    def forget_engine(self) -> None:
        """Forget what an engine showed of the files before these, and why it could not load them."""
        self.has_changed, self.known, self.failure, self.held_nbytes = False, None, None, 0

    @property
    def unload_reason(self) -> str:
        """Why it is unloaded once it is idle, as the metric has it."""
        if self.yields:
            return "memory"
        if self.has_vanished or self.has_changed:
            return "files"
        return "requested" if self.is_unwanted else "idle"

    @property
    def adapters(self) -> Collection[str]:
        """The names of its adapters; before it is loaded, of those of its options."""
        if self.front is not None:
            return self.front.adapters
        return [one.partition("=")[0] for one in self.entry.engine.lora]

    def facts(self, now: float, residence_s: float) -> ServedFacts:
        """What is known of it now."""
        stages: dict[Phase, Stage] = {"loaded": "loaded", "loading": "loading"}
        stage = stages.get(self.phase, "loading" if self.waiters or self.is_wanted else "unloaded")
        if stage == "unloaded" and self.failure is not None:
            stage = "failed"
        expires_s = self.expires_s(residence_s)
        is_for_ever = self.phase != "loaded" or not math.isfinite(expires_s)
        return replace(
            self.known or self._facts_of_files(),
            name=self.name,
            created=self.created,
            stage=stage,
            front=self.front,
            aliases=self.entry.aliases,
            progress=self.loading.progress if self.phase == "loading" else None,
            error=self.failure.text if self.failure is not None and stage == "failed" else "",
            size=self.files.size if self.files is not None else None,
            memory=self.need or None,
            device_memory=self.front.loop.device_nbytes if self.front is not None else 0,
            expires=None if is_for_ever else time.time() + max(expires_s - now, 0.0),
            num_open=self.num_users + len(self.waiters),
        )

    def learn(self, front: Front) -> None:
        """Remember what the loaded model shows, for when it is unloaded; nothing of its text side stays."""
        self.known = replace(facts_of_front(front, self.name), front=None)

    def _facts_of_files(self) -> ServedFacts:
        files = self.files
        if files is None:
            return ServedFacts(name=self.name, created=self.created, stage="unloaded")
        return ServedFacts(
            name=self.name,
            created=self.created,
            stage="unloaded",
            max_model_len=files.max_model_len,
            abilities=files.abilities,
            family=files.family,
            template=files.template,
        )
