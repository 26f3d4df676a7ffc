"""Traces: one span for each request, as a child of the span in the client's `traceparent`."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from importlib import import_module
from typing import Any

import pytest

from plait.config import ServerConfig
from plait.errors import ConfigError
from plait.server.gateway import tracing
from tests.server.conftest import serving, wait_until
from tests.server.real_engine import engine_front

export = import_module("opentelemetry.sdk.trace.export.in_memory_span_exporter")
TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


@pytest.fixture
def spans(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    exporter = export.InMemorySpanExporter()
    made = tracing.Tracing(exporter)
    monkeypatch.setattr(tracing, "recorder", lambda config: made)

    def finished() -> Any:
        made.provider.force_flush()
        return [span for span in exporter.get_finished_spans() if "/v1/" in span.name]

    yield finished
    made.provider.shutdown()


def test_a_request_is_one_span_of_its_trace_with_the_engines_numbers(spans: Any) -> None:
    with serving(engine_front(), api_key=("alice:one",)) as client:
        asked = {"prompt": "Hello", "max_tokens": 5, "ignore_eos": True}
        parent = f"00-{TRACE}-{PARENT}-01"
        assert client.post("/v1/completions", asked, x_api_key="one", traceparent=parent).status == 200
        assert wait_until(lambda: len(spans()) == 1)
    (span,) = spans()
    assert span.name == "POST /v1/completions"
    assert f"{span.context.trace_id:032x}" == TRACE
    assert f"{span.parent.span_id:016x}" == PARENT
    found = dict(span.attributes)
    assert found["http.response.status_code"] == 200
    assert found["gen_ai.usage.input_tokens"] == 6
    assert found["gen_ai.usage.output_tokens"] == 5
    assert found["gen_ai.response.finish_reasons"] == ("length",)
    assert found["plait.key"] == "alice"
    assert found["plait.num_steps"] >= 5
    assert "Hello" not in str(found)
    assert span.start_time < span.end_time


@pytest.mark.parametrize("sent", ["", "nonsense", f"00-{'0' * 32}-{PARENT}-01"])
def test_without_a_parent_that_is_one_a_trace_begins(spans: Any, sent: str) -> None:
    with serving(engine_front()) as client:
        assert client.request("GET", "/v1/models", headers={"traceparent": sent}).status == 200
        assert wait_until(lambda: len(spans()) == 1)
    (span,) = spans()
    assert span.parent is None


def test_without_the_packages_the_option_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.http.trace_exporter", None)
    with pytest.raises(ConfigError, match=r"plait-engine\[otel\]"):
        tracing.recorder(ServerConfig(otlp_endpoint="http://localhost:4318/v1/traces"))
    assert tracing.recorder(ServerConfig()) is None


@pytest.mark.parametrize("given", ["collector:4318", "http://", "http://collector:4318", "ftp://x/v1/traces"])
def test_an_endpoint_that_no_trace_can_reach_is_refused(given: str) -> None:
    with pytest.raises(ConfigError, match=r"otlp_endpoint: .*; give one as http://collector:4318"):
        tracing.recorder(ServerConfig(otlp_endpoint=given))


def test_an_endpoint_is_where_traces_go() -> None:
    made = tracing.recorder(ServerConfig(otlp_endpoint="http://localhost:1/v1/traces"))
    assert made is not None
    made.provider.shutdown()
