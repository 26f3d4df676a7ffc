"""GET /metrics: the numbers of the engine and of HTTP in Prometheus's text format."""

from __future__ import annotations

from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from starlette.responses import Response

from plait.server.gateway.middleware import Traffic
from plait.server.gateway.request_context import LoadingState
from plait.server.gateway.vllm_metrics import aliases
from plait.server.http.errors import NotReady


def exposition(loading: LoadingState, traffic: Traffic) -> Response:
    """The metrics as they are now; also while the server stops, because requests still run then.

    Raises NotReady while the model loads, because there is no engine yet.
    """
    if loading.front is None:
        raise NotReady("the model is loading, and has no metrics yet; /health says how far it is")
    text = generate_latest(loading.front.loop.registry) + generate_latest(traffic.registry)
    if traffic.config.metrics_vllm_names:
        name = traffic.config.served_model_name or loading.front.name
        text += generate_latest(aliases(loading.front.loop.registry, name, loading.front.healthy))
        text += generate_latest(traffic.per_request.registry)
    return Response(text, headers={"Content-Type": CONTENT_TYPE_LATEST, "Cache-Control": "no-store"})
