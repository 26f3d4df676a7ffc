from __future__ import annotations

import contextlib
import json
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from plait.config import ServerConfig
from plait.frontend.frontend import Front
from plait.server.gateway.vllm_metrics import RENAMED
from tests.patience import PATIENCE_S
from tests.server.conftest import Answer, Client, serving, start, wait_until
from tests.server.fake import EchoLoop, fake_front
from tests.server.real_engine import BLOCK, NUM_BLOCKS, engine_front


def samples(answer: Answer) -> dict[str, float]:
    families = text_string_to_metric_families(answer.body.decode())
    return {
        sample.name + "".join(f"{{{value}}}" for value in sample.labels.values()): sample.value
        for family in families
        for sample in family.samples
    }


def test_metrics_say_what_was_served() -> None:
    with serving(engine_front()) as client:
        before = samples(client.get("/metrics"))
        assert client.complete("Hello", max_tokens=5, ignore_eos=True).status == 200
        answer = client.get("/metrics")
        after = samples(answer)
    assert answer.status == 200
    assert answer.headers["content-type"].startswith("text/plain; version=")
    assert answer.headers["cache-control"] == "no-store"
    assert before["plait_output_tokens_total"] == 0
    assert after["plait_output_tokens_total"] == 5
    assert after["plait_prompt_tokens_total"] == len("Hello") + 1
    assert after["plait_requests_total{length}"] == 1
    assert after["plait_time_to_first_token_seconds_count"] == 1
    assert after["plait_inter_token_latency_seconds_count"] == 4
    assert after["plait_steps_total"] == after["plait_step_seconds_count"] >= 5
    assert after["plait_requests_running"] == 0


def test_metrics_are_refused_with_a_reason_while_the_model_loads() -> None:
    go = threading.Event()

    def load(report: object) -> Front:
        go.wait(PATIENCE_S)
        return fake_front()

    running = start(load, ServerConfig(port=0))
    try:
        client = Client(running.url)
        assert wait_until(lambda: client.get("/health").json["status"] == "loading")
        answer = client.get("/metrics")
        assert answer.status == 503
        assert answer.error["code"] == "not_ready"
        assert "loading" in answer.error["message"]
    finally:
        go.set()
        running.stop()


def test_the_route_knows_no_torch() -> None:
    code = "import sys; sys.modules['torch'] = None; import plait.server.app"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_help_loads_no_metrics() -> None:
    code = "import sys, plait.cli.main; sys.exit('prometheus_client' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_http_is_counted_by_route_method_and_status() -> None:
    with serving(engine_front(), api_key=("one",)) as client:
        client.headers = {"x-api-key": "one"}
        client.complete("Hello", max_tokens=2)
        client.get("/v1/models/bigrams")
        client.get("/v1/models/other")
        client.request("PROPFIND", "/no/such/path")
        client.request("GET", "/v1/models", headers={"x-api-key": "wrong"})
        found = samples(client.get("/metrics"))
    assert found["plait_http_requests_total{POST}{/v1/completions}{200}"] == 1
    assert found["plait_http_requests_total{GET}{/v1/models/{id}}{200}"] == 1
    assert found["plait_http_requests_total{GET}{/v1/models/{id}}{404}"] == 1
    assert found["plait_http_requests_total{other}{other}{404}"] == 1
    assert found["plait_http_requests_total{GET}{/v1/models}{401}"] == 1
    assert found["plait_http_requests_open"] == 1
    assert found["plait_http_request_seconds_count{/v1/completions}"] == 1


def test_vllms_names_say_what_ours_say() -> None:
    with serving(engine_front(), metrics_vllm_names=True, served_model_name="m") as client:
        client.complete("Hello there, you", max_tokens=5, ignore_eos=True)
        text = client.get("/metrics").body.decode()
    found = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if sample.name.startswith("vllm:"):
                assert sample.labels["model_name"] == "m"
                assert sample.labels["engine"] == "0"
                rest = [v for k, v in sample.labels.items() if k not in {"model_name", "engine"}]
                found[sample.name + "".join(f"{{{value}}}" for value in rest)] = sample.value
    assert found["vllm:generation_tokens_total"] == 5
    assert found["vllm:prompt_tokens_total"] == len("Hello there, you") + 1
    assert found["vllm:request_success_total{length}"] == 1
    assert found["vllm:request_success_total{abort}"] == 0
    assert found["vllm:time_to_first_token_seconds_count"] == 1
    assert found["vllm:time_to_first_token_seconds_bucket{+Inf}"] == 1
    assert found["vllm:num_preemptions_total"] == 0
    assert found["vllm:num_requests_running"] == found["vllm:num_requests_waiting"] == 0
    assert found["vllm:kv_cache_usage_perc"] == 0
    (config,) = (name for name in found if name.startswith("vllm:cache_config_info"))
    assert found[config] == 1
    assert config.removeprefix("vllm:cache_config_info") == f"{{{BLOCK}}}{{{NUM_BLOCKS - 1}}}"
    assert found["vllm:iteration_tokens_total_count"] >= 5
    assert found["vllm:prefix_cache_queries_total"] >= 0
    assert found["vllm:engine_healthy"] == 1
    assert found["vllm:request_prefill_time_seconds_count"] == 1
    assert found["vllm:request_time_per_output_token_seconds_count"] == 1
    assert found["vllm:request_params_max_tokens_sum"] == 5
    missing = [name for name in RENAMED.values() if not any(key.startswith(name) for key in found)]
    assert missing == []


def test_vllms_names_are_there_only_if_requested() -> None:
    with serving(engine_front()) as client:
        assert b"vllm:" not in client.get("/metrics").body


def test_metrics_have_no_times_of_creation() -> None:
    with serving(engine_front(), metrics_vllm_names=True) as client:
        client.complete("Hello", max_tokens=2)
        text = client.get("/metrics").body.decode()
    assert "plait_http_request_seconds_count" in text
    assert "_created" not in text


POLLED = ("/health", "/metrics")
CHAT = [{"role": "user", "content": "HANG"}]
HANGING: dict[str, dict[str, Any]] = {  # of every API a request that ends when its client leaves
    "/v1/completions": {"prompt": ["HANG", "HANG"], "stream": False},
    "/v1/chat/completions": {"messages": CHAT, "n": 2, "stream": False},
    "/v1/responses": {"input": "HANG", "stream": False},
    "/v1/messages": {"model": "default", "messages": CHAT, "max_tokens": 9, "stream": False},
    "/v1/embeddings": {"input": ["HANG", "HANG"]},
    "/rerank": {"query": "HANG", "documents": ["HANG"]},
    "/api/generate": {"model": "default", "prompt": "HANG", "stream": False},
    "/api/chat": {"model": "default", "messages": CHAT, "stream": False},
    "/api/embed": {"model": "default", "input": "HANG"},
    "/completion": {"prompt": "HANG", "stream": False},
}


@contextlib.contextmanager
def leaving(client: Client, path: str, body: dict[str, Any], num_missing: int = 0) -> Iterator[None]:
    """A client that has sent a request, but for the last bytes of its body, and leaves at the end."""
    raw = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    with socket.create_connection(client.address, timeout=PATIENCE_S) as sock:
        sock.sendall(f"{head}Content-Length: {len(raw)}\r\n\r\n".encode() + raw[: len(raw) - num_missing])
        yield


def ended(client: Client) -> dict[str, float]:
    """Requests that generate, by their outcome."""
    counts: dict[str, float] = {}
    for family in text_string_to_metric_families(client.get("/metrics").body.decode()):
        for sample in family.samples:
            if sample.name != "plait_http_requests_ended_total" or sample.labels["route"] in POLLED:
                continue
            outcome = sample.labels["outcome"]
            counts[outcome] = counts.get(outcome, 0) + sample.value
    return counts


def test_every_request_ends_in_one_count_whatever_its_client_does() -> None:
    with serving(fake_front()) as client:
        left = 0
        for path, body in HANGING.items():
            for more in ({}, {"stream": True}) if "stream" in body else ({},):
                with leaving(client, path, {**body, **more}):
                    assert wait_until(lambda: client.get("/health").json["engine"]["running"])
                left += 1
                assert wait_until(lambda count=left: ended(client) == {"cancelled": count}), path
                assert wait_until(lambda: not client.get("/health").json["engine"]["running"])
        assert client.complete("Hello", stream=True).status == client.complete("Hello").status == 200
        assert client.complete("Hello", n=0).status == 400
        assert client.complete("BROKEN").status == 500
        assert client.complete("BOOM!", stream=True).events[-1]["error"]["code"] == "engine_error"
        assert wait_until(lambda: sum(ended(client).values()) == left + 5)
        assert ended(client) == {"cancelled": left, "finished": 2, "rejected": 1, "error": 2}
        assert samples(client.get("/metrics"))["plait_http_requests_open"] == 1


def test_clients_that_leave_before_the_engine_has_their_request_are_counted() -> None:
    front, go = fake_front(), threading.Event()
    with serving(front) as client:
        with leaving(client, "/v1/completions", {"prompt": "half a body"}, num_missing=3):
            assert wait_until(lambda: samples(client.get("/metrics"))["plait_http_requests_open"] == 2)
        assert wait_until(lambda: ended(client) == {"cancelled": 1})
        prepare = front.prepare

        def wait(*given: Any, **more: Any) -> Any:
            assert go.wait(PATIENCE_S)
            return prepare(*given, **more)

        front.prepare = wait  # type: ignore[method-assign]
        with leaving(client, "/v1/completions", {"prompt": ["one", "two"], "n": 3}):
            assert wait_until(lambda: samples(client.get("/metrics"))["plait_http_requests_open"] == 2)
        assert wait_until(lambda: ended(client) == {"cancelled": 2})
        go.set()
        assert client.complete("After").status == 200
        assert isinstance(front.loop, EchoLoop)
        assert len(front.loop.requests) == 1
