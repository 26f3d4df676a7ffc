"""/metrics: the numbers of every model and of HTTP, in Prometheus's text format."""

from __future__ import annotations

from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from starlette.responses import Response

from plait.server.gateway.joined_metrics import join_metrics
from plait.server.gateway.middleware import Traffic
from plait.server.gateway.served_models import ServedModels
from plait.server.gateway.vllm_metrics import aliases


def exposition(models: ServedModels, traffic: Traffic) -> Response:
    """The metrics as they are now; also while the server stops, because requests still run then.

    Raises NotReady while the only model loads, because there is no engine yet.
    """
    text = b"".join(generate_latest(join_metrics([(registry, {})])) for registry in models.registries())
    text += generate_latest(join_metrics([(traffic.registry, traffic.labels)]))
    if traffic.config.metrics_vllm_names:
        fronts = models.fronts().items()
        renamed = (aliases(front.loop.registry, name, front.healthy) for name, front in fronts)
        text += generate_latest(join_metrics((registry, {}) for registry in renamed))
        text += generate_latest(join_metrics([(traffic.per_request.registry, traffic.labels)]))
    return Response(text, headers={"Content-Type": CONTENT_TYPE_LATEST, "Cache-Control": "no-store"})
