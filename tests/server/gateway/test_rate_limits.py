"""Rate limits of a key in each minute: both sides of every edge, on a clock of the test's own."""

from __future__ import annotations

import threading

import pytest

from plait.server.gateway.api_keys import Account, Allowance, Bucket, Key, RateLimits, _span
from plait.server.http.errors import RateLimited, problem
from tests.server.conftest import serving, wait_until
from tests.server.fake import EchoLoop, fake_front
from tests.server.real_engine import engine_front

ASKED = {"prompt": "Hi", "max_tokens": 1}


class Time:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def account(time: Time, **allowed: int) -> Account:
    return Account(Allowance(**allowed), time)


def test_a_minute_of_requests_and_not_one_more() -> None:
    time = Time()
    mine = account(time, requests_per_minute=3)
    for _ in range(3):
        mine.admit()
    with pytest.raises(RateLimited, match="3 requests a minute") as found:
        mine.admit()
    assert found.value.wait_s == pytest.approx(20)
    answer = problem(found.value)
    assert (answer.status, answer.code) == (429, "rate_limit_exceeded")
    assert answer.headers["Retry-After"] == "20"
    assert answer.headers["retry-after-ms"] == "20000"
    assert answer.headers["x-ratelimit-remaining-requests"] == "0"
    assert answer.headers["x-ratelimit-reset-requests"] == "1m0s"
    time.now += 20
    mine.admit()
    with pytest.raises(RateLimited):
        mine.admit()


def test_tokens_are_paid_when_they_are_used_and_debts_are_waited_for() -> None:
    time = Time()
    mine = account(time, tokens_per_minute=60)
    mine.admit()
    mine.pay(59)
    mine.admit()
    mine.pay(31)
    with pytest.raises(RateLimited, match="60 tokens a minute") as found:
        mine.admit()
    assert found.value.wait_s == pytest.approx(30, abs=0.01)
    assert mine.headers()["x-ratelimit-remaining-tokens"] == "0"
    time.now += 31
    mine.admit()
    assert mine.headers()["x-ratelimit-remaining-tokens"] == "1"


def test_open_requests_are_bounded_until_one_ends() -> None:
    mine = account(Time(), max_requests=2)
    mine.admit()
    mine.admit()
    with pytest.raises(RateLimited, match="2 requests open"):
        mine.admit()
    mine.leave()
    mine.admit()


def test_a_refused_request_costs_nothing() -> None:
    mine = account(Time(), max_requests=1, requests_per_minute=2)
    mine.admit()
    for _ in range(5):
        with pytest.raises(RateLimited):
            mine.admit()
    mine.leave()
    mine.admit()
    assert mine.headers()["x-ratelimit-remaining-requests"] == "0"


def test_a_bucket_never_holds_more_than_a_minute() -> None:
    bucket = Bucket(10, 0.0)
    bucket.take(4, 0.0)
    assert bucket.level(6.0) == pytest.approx(7)
    assert bucket.level(1e6) == 10


def test_other_keys_and_limits_keep_what_was_used() -> None:
    time, one, two = Time(), Key("one", b"1", Allowance(requests_per_minute=2)), Key("two", b"2")
    limits = RateLimits([one, two], time)
    limits.account(one).admit()
    open_account = limits.account(two)
    open_account.admit()
    limits.change([Key("one", b"new", Allowance(requests_per_minute=3)), Key("three", b"3")])
    assert limits.account(one).headers()["x-ratelimit-remaining-requests"] == "2"
    with pytest.raises(KeyError):
        limits.account(two)
    open_account.leave()
    limits.change([one])
    limits.change([Key("one", b"1")])
    assert limits.account(one).headers() == {}
    for _ in range(10):
        limits.account(one).admit()


def test_what_is_not_limited_has_no_headers() -> None:
    mine = account(Time())
    for _ in range(1000):
        mine.admit()
    mine.pay(10**9)
    assert mine.headers() == {}


@pytest.mark.parametrize(
    ("seconds", "shown"), [(0, "0ms"), (0.02, "20ms"), (1.5, "1.5s"), (59, "59s"), (360, "6m0s")]
)
def test_durations_are_written_as_openai_writes_them(seconds: float, shown: str) -> None:
    assert _span(seconds) == shown


def test_a_key_is_limited_and_the_others_are_not() -> None:
    with serving(fake_front(), api_key=("a:one rpm=2", "b:two")) as client:
        answers = [client.post("/v1/completions", ASKED, x_api_key="one") for _ in range(3)]
        assert [answer.status for answer in answers] == [200, 200, 429]
        assert answers[0].headers["x-ratelimit-limit-requests"] == "2"
        assert answers[0].headers["x-ratelimit-remaining-requests"] == "1"
        refused = answers[2]
        assert refused.error["code"] == "rate_limit_exceeded"
        assert 0 < int(refused.headers["retry-after"]) <= 30
        assert 0 < int(refused.headers["retry-after-ms"]) <= 30_000
        assert client.request("GET", "/v1/models", headers={"x-api-key": "one"}).status == 200
        other = client.post("/v1/completions", ASKED, x_api_key="two")
        assert other.status == 200
        assert not any(name.startswith("x-ratelimit") for name in other.headers)


def test_prompts_and_outputs_are_paid_for() -> None:
    with serving(engine_front(), tokens_per_minute=1000) as client:
        asked = {"prompt": "Hello", "max_tokens": 94, "ignore_eos": True, "n": 2}
        assert client.post("/v1/completions", asked).status == 200
        left = int(client.post("/v1/completions", ASKED).headers["x-ratelimit-remaining-tokens"])
        assert 1000 - 200 - 10 <= left <= 1000 - 194 + 10


def test_who_owes_tokens_waits() -> None:
    with serving(engine_front(), tokens_per_minute=50) as client:
        asked = {"prompt": "Hello", "max_tokens": 90, "ignore_eos": True}
        assert client.post("/v1/completions", asked).status == 200
        refused = client.post("/v1/completions", asked)
        assert refused.status == 429
        assert "50 tokens a minute" in refused.error["message"]


def test_a_key_may_have_so_many_requests_open() -> None:
    front = fake_front()
    with serving(front, max_requests_per_key=1) as client:
        more = {"max_tokens": 1500, "ignore_eos": True}
        slow = threading.Thread(target=client.complete, args=("SLOW",), kwargs=more)
        slow.start()
        assert wait_until(lambda: front.stats()["running"] == 1)
        refused = client.complete("Hi")
        assert (refused.status, refused.headers["retry-after"]) == (429, "1")
        assert isinstance(front.loop, EchoLoop)
        front.loop.hurry.set()
        slow.join()
        assert client.complete("Hi", max_tokens=1).status == 200
