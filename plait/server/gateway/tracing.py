"""OpenTelemetry: one span for each request, sent to a collector. Its packages are an extra, imported late."""

from __future__ import annotations

import logging
import re
from typing import TYPE_CHECKING, Any

from plait.config import ServerConfig
from plait.errors import ConfigError
from plait.server.gateway.exchange import Exchange, log_fields
from plait.version import __version__

if TYPE_CHECKING:
    from opentelemetry.sdk.trace.export import SpanExporter

logger = logging.getLogger("plait.server")
NS = 1_000_000_000
EXPORT_TIMEOUT_S = 3.0  # the end of the server waits for the last spans so long
# our name in the log: the attribute, in OpenTelemetry's words where it has them
ATTRIBUTES = {
    "id": "http.request.id",
    "method": "http.request.method",
    "path": "url.path",
    "status": "http.response.status_code",
    "key": "plait.key",
    "model": "gen_ai.request.model",
    "prompt_tokens": "gen_ai.usage.input_tokens",
    "output_tokens": "gen_ai.usage.output_tokens",
    "cached_tokens": "plait.cached_tokens",
    "finish": "gen_ai.response.finish_reasons",
    "queue_ms": "plait.queue_ms",
    "ttft_ms": "plait.time_to_first_token_ms",
}
SUMS = ("num_preemptions", "num_steps", "num_drafted_tokens", "num_accepted_tokens")


class Tracing:
    """Makes the spans of OpenTelemetry. `traceparent` (W3C) of a request is the parent of its span."""

    def __init__(self, exporter: SpanExporter) -> None:
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        resource = Resource.create({"service.name": "plait", "service.version": __version__})
        self.provider = TracerProvider(resource=resource, shutdown_on_exit=True)
        self.provider.add_span_processor(BatchSpanProcessor(exporter))
        self._tracer = self.provider.get_tracer("plait.server", __version__)
        self._propagator = TraceContextTextMapPropagator()

    def record(self, exchange: Exchange, ended_ns: int) -> None:
        """Make the trace's span of a request that has ended; it is sent from a thread of its own."""
        from opentelemetry.trace import SpanKind, StatusCode

        span = self._tracer.start_span(
            f"{exchange.method} {exchange.route}",
            context=self._propagator.extract({"traceparent": exchange.traceparent}),
            kind=SpanKind.SERVER,
            start_time=exchange.began_ns,
            attributes=_attributes(exchange, (ended_ns - exchange.began_ns) / NS),
        )
        if exchange.status >= 500:
            span.set_status(StatusCode.ERROR)
        span.end(ended_ns)


def recorder(config: ServerConfig) -> Tracing | None:
    """The recorder of traces; None if no traces are requested. Raises ConfigError without its packages."""
    if config.otlp_endpoint is None:
        return None
    if not re.match(r"https?://[^/?#\s]+/", config.otlp_endpoint):
        given, example = config.otlp_endpoint, "http://collector:4318/v1/traces"
        raise ConfigError(f"otlp_endpoint: {given!r} is no URL with a path; give one as {example}")
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    except ImportError as error:
        text = "otlp_endpoint: traces need OpenTelemetry: pip install 'plait-engine[otel]', or leave it out"
        raise ConfigError(text) from error
    logger.info("traces go to %s", config.otlp_endpoint)
    return Tracing(OTLPSpanExporter(endpoint=config.otlp_endpoint, timeout=EXPORT_TIMEOUT_S))


def _attributes(exchange: Exchange, seconds: float) -> dict[str, Any]:
    known = log_fields(exchange, seconds)
    found = {name: known[key] for key, name in ATTRIBUTES.items() if known.get(key) not in (None, "", ())}
    traces = [*exchange.traces()]
    if traces:
        found["http.route"] = exchange.route
        found["plait.cache_miss_cause"] = traces[0].miss_cause
        found |= {f"plait.{name}": sum(getattr(trace, name) for trace in traces) for name in SUMS}
    return found
