from __future__ import annotations

import subprocess
import sys
import threading

from prometheus_client.parser import text_string_to_metric_families

from plait.config import ServerConfig
from plait.engine.front import Front
from tests.server.conftest import Answer, Client, serving, start, wait_until
from tests.server.fake import fake_front
from tests.server.real_engine import engine_front


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
        go.wait(10)
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
    code = "import sys; sys.modules['torch'] = None; import plait.server.metrics"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_help_loads_no_metrics() -> None:
    code = "import sys, plait.cli.main; sys.exit('prometheus_client' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
