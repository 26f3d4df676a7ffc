"""How a server of several models is, as /health and /ready report it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Literal

from msgspec import UNSET

from plait.server.gateway.request_context import TOTALS, Health, LoadingProgress, ModelHealth
from plait.server.models.hosted import HostedModel


def find_readiness(stopping: bool, first: HostedModel | None) -> tuple[int, str]:
    """The status of /ready and why. The first model is loaded before any request is taken, as where it is
    the only one; what happens to a model later does not concern the others.
    """
    if stopping:
        return 503, "stopping"
    if first is not None and first.known is None:
        return 503, "loading"
    return 200, "ready"


def join_health(ready: tuple[int, str], models: Sequence[HostedModel], first: HostedModel | None) -> Health:
    """The body of /health. `engine` and `totals`: sums over the loaded models."""
    found = {model.name: _health_of(model) for model in models}
    now: Counter[str] = Counter()
    totals: Counter[str] = Counter()
    for one in found.values():
        now.update({} if one.engine is UNSET else one.engine)
        totals.update({} if one.totals is UNSET else one.totals)
    status: Literal["ok", "loading", "unhealthy", "stopping"] = "ok"
    if ready[1] != "ready":
        status = "stopping" if ready[1] == "stopping" else "loading"
    elif any(one.status == "unhealthy" for one in found.values()):
        status = "unhealthy"
    progress = first.loading.progress if status == "loading" and first is not None else UNSET
    return Health(status=status, progress=progress, engine={**now}, totals={**totals}, models=found)


def _health_of(model: HostedModel) -> ModelHealth:
    front = model.front
    if front is None:
        if model.phase == "loading":
            return ModelHealth(status="loading", progress=model.loading.progress)
        if model.failure is not None:
            return ModelHealth(status="failed", error=model.failure.text)
        return ModelHealth(status="unloaded")
    stats, again = front.stats(), front.loading
    is_healthy = front.healthy
    return ModelHealth(
        status="ok" if is_healthy else "unhealthy" if again is None else "loading",
        progress=LoadingProgress(*again) if again is not None and not is_healthy else UNSET,
        engine={name: value for name, value in stats.items() if name not in TOTALS},
        totals={name: value for name, value in stats.items() if name in TOTALS},
    )
