from __future__ import annotations

import subprocess
import sys
import threading

from prometheus_client.parser import text_string_to_metric_families

from plait.config import ServerConfig
from plait.frontend.frontend import Front
from plait.server.gateway.vllm_metrics import RENAMED
from tests.patience import PATIENCE_S
from tests.server.conftest import Answer, Client, serving, start, wait_until
from tests.server.fake import fake_front
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
