"""Which model is loaded next, and which are unloaded for it: decided from numbers alone.

The model that waits longest is next, and no other overtakes it. Idle models make place for it, those first
that were used longest ago. A model stays for `RESIDENCE_S` after it was loaded, so that requests for two
models that do not fit together cannot have the server load all the time. A model that is never idle yields
after the next one has waited for `PATIENCE_S`: its open requests end, and new ones wait in turn. It yields
for `YIELD_S` of every `CYCLE_S` only, because one long stream must not keep all other requests waiting.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from plait.server.models.hosted import HostedModel

RESIDENCE_S = 5.0
PATIENCE_S = 20.0
YIELD_S, CYCLE_S = 20.0, 80.0
MAX_LOADING = 2  # at the same time: each reads its files, and compiles


@dataclass(frozen=True, slots=True)
class MemoryBudget:
    """What all loaded models may take together. `nbytes`, `max_loaded`: None means no limit."""

    nbytes: int | None = None
    max_loaded: int | None = None

    def refusal(self, model: HostedModel) -> str:
        """Why a model never fits, with the numbers; "" if it may."""
        need = model.files.need if model.files is not None else 0
        if self.nbytes is None or need <= self.nbytes:
            return ""
        return (
            f"it takes about {_mib(need)} and all models may take {_mib(self.nbytes)}; give the server a "
            "larger --models-memory, or a smaller model"
        )

    def has_place(self, model: HostedModel, others: Collection[HostedModel]) -> bool:
        """Whether a model fits next to these; one that is not refused fits alone, whatever it grew to."""
        if not others:
            return True
        if self.max_loaded is not None and len(others) >= self.max_loaded:
            return False
        return self.nbytes is None or model.need + sum(one.need for one in others) <= self.nbytes


@dataclass(frozen=True, slots=True)
class Placement:
    """What is to be done now. `yielding`: busy models that get no new requests until `head` has its place."""

    start: Sequence[HostedModel] = ()
    unload: Sequence[HostedModel] = ()
    yielding: Sequence[HostedModel] = ()


def place(
    queue: Sequence[HostedModel], models: Iterable[HostedModel], budget: MemoryBudget, now: float
) -> Placement:
    """What to load and unload for the models in `queue`, all of which fit alone; times are in seconds."""
    held = [model for model in models if model.phase != "unloaded"]
    start: list[HostedModel] = []
    for model in queue:
        if sum(one.phase == "loading" for one in held) + len(start) >= MAX_LOADING:
            break
        if budget.has_place(model, [*held, *start]):
            start.append(model)
            continue
        unload, yielding = _make_place(model, [*held, *start], budget, now)
        return Placement(start, unload, yielding)
    return Placement(start)


def _make_place(
    model: HostedModel, held: Sequence[HostedModel], budget: MemoryBudget, now: float
) -> tuple[list[HostedModel], list[HostedModel]]:
    """(idle models to unload, busy ones that are to yield) so that `model` fits; nothing if it cannot yet."""
    closing = [one for one in held if one.phase == "closing"]
    left = [one for one in held if one not in closing]
    unload: list[HostedModel] = []
    idle = [one for one in left if one.is_idle and now - one.loaded_s >= RESIDENCE_S]
    for one in sorted(idle, key=lambda one: one.used_s):
        if budget.has_place(model, left):
            break
        left.remove(one)
        unload.append(one)
    if budget.has_place(model, left):
        return unload, []
    impatient_s = now - model.queued_s - PATIENCE_S
    if impatient_s < 0 or impatient_s % CYCLE_S >= YIELD_S:
        return [], []
    yielding: list[HostedModel] = []
    busy = [one for one in left if one.phase == "loaded" and now - one.loaded_s >= RESIDENCE_S]
    for one in sorted(busy, key=lambda one: one.loaded_s):
        if budget.has_place(model, left):
            break
        left.remove(one)
        yielding.append(one)
    return (unload, yielding) if budget.has_place(model, left) else ([], [])


def _mib(nbytes: int) -> str:
    return f"{nbytes / (1 << 20):.0f} MiB"
