"""What an operator sees: keys, limits, open and ended requests; and what it never has."""

from __future__ import annotations

import hashlib
import threading
import time
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest

from plait.server.gateway.api_keys import Account, Allowance, Key
from plait.server.gateway.exchange import Exchange
from plait.server.gateway.operator_views import VIEWS, LoggedRequests
from plait.server.gateway.request_log import RequestLog
from tests.server.conftest import Client, serving, wait_until
from tests.server.fake import fake_front

SECRET, ADMIN = "s3cret-of-alice", "s3cret-of-the-operator"
PATHS = [view.path for view in VIEWS]


@pytest.fixture(scope="module")
def server() -> Iterator[Client]:
    keys = (f"alice:{SECRET} rpm=1000 tpm=9000 open=7", f"sha256:{hashlib.sha256(b'other').hexdigest()}")
    with serving(fake_front(), api_key=keys, admin_key=ADMIN) as client:
        yield client


def seen(client: Client, path: str, key: str = ADMIN) -> Any:
    answer = client.request("GET", path, headers={"Authorization": f"Bearer {key}"})
    assert answer.status == 200, answer.body
    assert SECRET.encode() not in answer.body
    assert ADMIN.encode() not in answer.body
    assert hashlib.sha256(SECRET.encode()).hexdigest().encode() not in answer.body
    return answer.json


def ask(client: Client, text: str, request_id: str, **more: Any) -> Any:
    body = {"messages": [{"role": "user", "content": text}], "max_tokens": 50, **more}
    headers = {"Authorization": f"Bearer {SECRET}", "X-Request-Id": request_id}
    return client.post("/v1/chat/completions", body, **headers)


@pytest.mark.parametrize("path", PATHS)
def test_only_the_admin_key_opens_a_view(server: Client, path: str) -> None:
    for headers in ({}, {"Authorization": f"Bearer {SECRET}"}, {"x-api-key": "guess"}):
        answer = server.request("GET", path, headers=headers)
        assert (answer.status, answer.error["code"]) == (401, "invalid_api_key")
    assert server.post(path, {}, Authorization=f"Bearer {ADMIN}").status == 405


def test_a_server_without_an_admin_key_shows_nothing() -> None:
    with serving(fake_front()) as client:
        answers = [client.get(path) for path in PATHS]
        assert [answer.status for answer in answers] == [403] * len(PATHS)
        assert "--admin-key sets none here" in answers[0].error["message"]


def test_keys_have_names_limits_and_usage_and_no_secret(server: Client) -> None:
    before = time.time()
    assert ask(server, "Hi", "req-usage").status == 200
    assert server.request("GET", "/v1/models", headers={"x-api-key": SECRET}).status == 200
    found = seen(server, "/admin/keys")
    assert found["needed"] is True
    alice, other = found["data"]
    assert (alice["name"], other["name"][:4]) == ("alice", "key-")
    limits = [alice[key] for key in ("requests_per_minute", "tokens_per_minute", "max_requests")]
    assert limits == [1000, 9000, 7]
    assert 900 <= alice["remaining_requests"] <= 1000
    assert 0 < alice["remaining_tokens"] <= 9000
    assert alice["num_requests"] >= 2
    assert before <= alice["last_used"] <= time.time()
    assert set(other) == {"name", "num_open_requests", "num_requests"}  # no limits, never used


def test_what_remains_of_a_key_is_what_its_buckets_hold() -> None:
    now = [100.0]
    account = Account(Allowance(requests_per_minute=60, tokens_per_minute=600), lambda: now[0])
    account.admit()
    account.pay(650)
    assert account.count_remaining() == (59, 0)  # what is owed is not shown as less than nothing
    now[0] += 30
    assert account.count_remaining() == (60, 250)
    assert Account(Allowance(), lambda: 0.0).count_remaining() == (None, None)


def test_open_requests_are_shown_with_how_far_they_are(server: Client) -> None:
    thread = threading.Thread(target=ask, args=(server, "SLOW " + "words " * 20, "req-open"))
    thread.start()
    try:
        found: list[Any] = []

        def is_generating() -> bool:
            found[:] = [one for one in seen(server, "/admin/requests")["data"] if one["id"] == "req-open"]
            return bool(found) and found[0]["state"] == "generating"

        assert wait_until(is_generating)
        (one,) = found
        assert (one["key"], one["model"], one["path"]) == ("alice", "fake", "/v1/chat/completions")
        assert one["output_tokens"] > 0
        assert one["prompt_tokens"] > 50
        assert one["seconds"] > 0
        assert seen(server, "/admin/keys")["data"][0]["num_open_requests"] == 1
    finally:
        thread.join()
    assert seen(server, "/admin/requests")["data"] == []  # the operator's own are no news
    assert seen(server, "/admin/requests")["engines"] == {"fake": {"running": 0, "waiting": 0}}


def test_an_ended_request_is_found_by_its_id(server: Client) -> None:
    assert ask(server, "Find me, my text is private", "req-find").status == 200
    assert ask(server, "Hi", "req-bad", temperature=99).status == 400
    assert wait_until(lambda: bool(seen(server, "/admin/log?id=req-find")["data"]))
    (line,) = seen(server, "/admin/log?id=req-find")["data"]
    assert (line["status"], line["key"], line["model"]) == (200, "alice", "fake")
    assert line["prompt_tokens"] > 20
    assert line["ms"] > 0
    assert abs(line["time"] - time.time()) < 60
    assert "private" not in str(line)
    (bad,) = seen(server, "/admin/log?id=req-bad")["data"]
    assert bad["status"] == 400
    assert bad["reason"].startswith("invalid_value (temperature)")
    latest = seen(server, "/admin/log?limit=1")["data"]
    assert [one["id"] for one in latest] == ["req-bad"]
    assert seen(server, "/admin/log?key=nobody")["data"] == []
    everything = seen(server, "/admin/log?limit=1000")
    assert not any(one["path"].startswith("/admin/") and one["status"] == 200 for one in everything["data"])
    msgspec.convert(everything, LoggedRequests)


@pytest.mark.parametrize("limit", ["0", "1001", "-1", "x", "1e2", "%D9%A3", "9" * 5000])
def test_a_limit_that_is_none_is_refused(server: Client, limit: str) -> None:
    answer = server.request("GET", f"/admin/log?limit={limit}", headers={"Authorization": f"Bearer {ADMIN}"})
    assert answer.status == 400
    assert "from 1 to 1000" in answer.error["message"]


def test_limits_are_those_of_the_server_and_its_models(server: Client) -> None:
    found = seen(server, "/admin/limits")
    assert found["max_body_bytes"] == 8 << 20
    assert found["models"]["fake"]["max_model_len"] == 2048
    assert "requests_per_minute" not in found  # there is none for all keys


def test_the_log_in_memory_is_bounded_and_the_latest_come_first() -> None:
    log = RequestLog(capacity=3)
    for i in range(5):
        log.record(Exchange(f"req-{i}", "POST", "/v1/x", key=Key("k", b""), route="/v1/x", status=200), 0.1)
    log.record(Exchange("req-view", "GET", "/admin/keys", route="/admin/keys", status=200), 0.1)
    log.record(Exchange("req-health", "GET", "/health", route="/health", status=200), 0.1)
    assert [one["id"] for one in log.find(10)] == ["req-4", "req-3", "req-2"]
    assert [one["id"] for one in log.find(2)] == ["req-4", "req-3"]
    assert log.find(10, id="req-0") == []
    log.record(Exchange("req-view", "GET", "/admin/keys", route="/admin/keys", status=401), 0.1)
    assert log.find(1)[0]["id"] == "req-view"  # a wrong key is news
