"""`plait bench serve`: the load on a server of this process, and what is counted of it. No time counts."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from plait.bench.serve.client import RequestOutcome, ServerTarget, ask, open_session
from plait.bench.serve.load_generator import Arrivals, drive, runner
from plait.bench.serve.run import (
    ServeJob,
    ServeSide,
    Started,
    bench_serve,
    medians,
    ratios,
    reach,
    tokens_per_word,
)
from plait.bench.serve.score import score
from plait.bench.serve.server_process import census, flags, free_port, read_health, read_metrics
from plait.bench.serve.workload import Leaving, Length, Turn, Workload
from plait.errors import ConfigError, EngineError
from tests.server.conftest import Client, serving, wait_until
from tests.server.fake import EchoLoop, fake_front

SHORT = Workload(input_len=Length(8, 16), output_len=Length(6, 6), max_len=2048)
BOTH = pytest.mark.parametrize("chat", [True, False])


@pytest.fixture(scope="module")
def engine() -> EchoLoop:
    return EchoLoop()


@pytest.fixture(scope="module")
def server(engine: EchoLoop) -> Iterator[Client]:
    front = fake_front()
    front.loop = engine
    with serving(front) as client:
        yield client


@pytest.fixture
def target(server: Client) -> ServerTarget:
    return ServerTarget(name="fake", base_url=server.base_url, model="fake")


def said(text: str, **more: Any) -> Workload:
    """Every client says `text`."""
    return replace(SHORT, records=[[(text, "")]], **more)


def one(target: ServerTarget, turn: Turn) -> RequestOutcome:
    async def talk() -> RequestOutcome:
        async with open_session(target) as session:
            messages = [{"role": "user", "content": turn.text}]
            return await ask(session, target, messages, turn, RequestOutcome(0, 0, 0.0))

    with runner() as loop:
        return loop.run(talk())


@BOTH
@pytest.mark.parametrize("stream", [True, False])
def test_every_reply_is_counted_with_the_servers_own_lengths(
    target: ServerTarget, chat: bool, stream: bool
) -> None:
    run = drive(replace(target, chat=chat, stream=stream), SHORT, Arrivals(num_prompts=7, concurrency=3))
    assert [one.error for one in run.outcomes] == [""] * 7
    assert [one.output_len for one in run.outcomes] == [6] * 7
    facts = score(run.outcomes, run.duration_s)
    assert (facts["completed"], facts["failed"], facts["total_output_tokens"]) == (7, 0, 42)
    assert facts["total_cached_tokens"] == 21  # the fake finds three of each prompt
    assert facts["max_concurrent_requests"] <= 3
    assert (facts["p99_ttft_ms"] is not None) == stream
    assert run.client()["cpu_s"] > 0


def test_the_engine_gets_what_the_seed_says(target: ServerTarget, engine: EchoLoop) -> None:
    asked = []
    for seed in (3, 3, 4):
        engine.requests.clear()
        drive(target, replace(SHORT, seed=seed), Arrivals(num_prompts=4, concurrency=1))
        asked.append(
            [(r.prompt_token_ids, r.params.max_tokens, r.params.ignore_eos) for r in engine.requests]
        )
    assert len(asked[0]) == 4
    assert asked[0] == asked[1]
    assert asked[0] != asked[2]
    assert asked[0][0][1:] == (6, True)


@BOTH
def test_a_chat_carries_every_reply_before_it(target: ServerTarget, engine: EchoLoop, chat: bool) -> None:
    engine.requests.clear()
    drive(replace(target, chat=chat), replace(SHORT, turns=3), Arrivals(num_prompts=3))
    prompts = [bytes(i for i in r.prompt_token_ids if i < 256) for r in engine.requests]
    assert len(prompts) == 3
    assert prompts[1].startswith(prompts[0])
    assert prompts[2].startswith(prompts[1])
    assert len(prompts[1]) > len(prompts[0]) + 6  # the reply, and the next question


@pytest.mark.parametrize(
    ("text", "kind"),
    [("FULL", "429 queue_full"), ("BOOM", "in stream: "), ("REFUSE", "503"), ("BROKEN", "500 ")],
)
def test_errors_are_counted_by_kind(
    target: ServerTarget, text: str, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The engine's refusal comes from a thread. On a busy machine that may take longer than the server waits,
    # and then the refusal is in the stream.
    monkeypatch.setattr("plait.server.gateway.request_context.FIRST_WAIT_S", 30.0)
    run = drive(target, said(text), Arrivals(num_prompts=3))
    facts = score(run.outcomes, run.duration_s)
    assert (facts["completed"], facts["failed"]) == (0, 3)
    ((found, count),) = facts["errors"].items()
    assert found.startswith(kind)
    assert count == 3
    assert facts["error_examples"][found]
    assert facts["refused"] == (3 if kind[:3] in ("429", "503") else 0)
    assert (facts["p50_refusal_ms"] is None) == (facts["refused"] == 0)


def test_a_server_that_is_not_there_is_an_error_of_each_request() -> None:
    nobody = ServerTarget(name="x", base_url=f"http://127.0.0.1:{free_port()}", model="m")
    run = drive(nobody, SHORT, Arrivals(num_prompts=2))
    assert [one.error for one in run.outcomes] == ["cannot connect"] * 2


def test_a_reply_that_does_not_come_is_a_timeout(target: ServerTarget, engine: EchoLoop) -> None:
    found = one(replace(target, timeout_s=0.2), Turn("HANG", 1, 4))
    assert found.error == "timeout"
    assert wait_until(lambda: engine.stats()["running"] == 0)


@pytest.mark.parametrize(("stream", "tokens"), [(True, 0), (False, 0), (False, 9)])
def test_who_leaves_before_any_text_cancels(
    target: ServerTarget, engine: EchoLoop, stream: bool, tokens: int
) -> None:
    found = one(replace(target, stream=stream), Turn("HANG", 1, 50, Leaving(tokens, 0.1)))
    assert found.is_cancelled
    assert not found.error
    assert found.output_len == 0
    assert wait_until(lambda: engine.stats()["running"] == 0)


@BOTH
def test_who_leaves_within_a_reply_cancels(target: ServerTarget, engine: EchoLoop, chat: bool) -> None:
    found = one(replace(target, chat=chat), Turn("SLOW tide", 1, 1000, Leaving(5, 0.0)))
    assert found.is_cancelled
    assert 5 <= found.output_len < 1000
    assert wait_until(lambda: engine.stats()["running"] == 0)


def test_cancels_of_a_load_are_counted_apart(target: ServerTarget, engine: EchoLoop) -> None:
    load = said("SLOW and steady", cancel_rate=1.0, output_len=Length(40, 40))
    run = drive(target, load, Arrivals(num_prompts=6, concurrency=6))
    facts = score(run.outcomes, run.duration_s)
    assert facts["cancelled"] == 6
    assert facts["completed"] == facts["failed"] == facts["total_output_tokens"] == 0
    assert wait_until(lambda: engine.stats()["running"] == 0)


def test_a_load_ends_when_its_time_is_over(target: ServerTarget) -> None:
    arrivals = Arrivals(num_prompts=None, duration_s=0.3, concurrency=2)
    run = drive(target, said("SLOW and steady"), arrivals)
    assert len(run.outcomes) >= 2  # without its time it would not have ended
    assert all(one.is_ok for one in run.outcomes)


def test_an_open_load_waits_for_no_one(target: ServerTarget) -> None:
    run = drive(target, said("SLOW and steady"), Arrivals(rate=1000.0, num_prompts=12, burst=4))
    assert len(run.outcomes) == 12
    assert score(run.outcomes, run.duration_s)["max_concurrent_requests"] > 4


def serve_job(*urls: str, **more: Any) -> ServeJob:
    base = ServerTarget(name="", base_url="")
    sides = [replace(base, name=f"s{i}", base_url=url) for i, url in enumerate(urls)]
    return ServeJob(sides=sides, target=base, workload=SHORT, arrivals=Arrivals(num_prompts=4), **more)


def test_sides_take_turns_with_the_same_texts(server: Client, engine: EchoLoop) -> None:
    engine.requests.clear()
    job = serve_job(server.base_url + "/v1", server.base_url, repeats=2, warm_up=0, limits={"ttft": 1e6})
    result = bench_serve(job)
    first, second = result["sides"]
    assert (first["model_id"], first["max_model_len"], first["completed"]) == ("fake", 2048, 4)
    assert [turn["completed"] for turn in second["turns"]] == [4, 4]
    assert set(result["ratios"]) == {"s1"}
    assert result["ratios"]["s1"]["output_throughput"] > 0
    assert result["workload"]["tokens_per_word"] > 3  # a byte is a token
    asked = [frozenset(r.prompt_token_ids for r in engine.requests[i : i + 4]) for i in range(0, 16, 4)]
    assert asked[0] == asked[1]
    assert asked[2] == asked[3]
    assert not asked[0] & asked[2]
    json.dumps(result)


def test_a_detailed_result_has_every_request(server: Client) -> None:
    (side,) = bench_serve(serve_job(server.base_url, is_detailed=True))["sides"]
    assert side["output_lens"] == [6] * 4
    assert len(side["ttfts"]) == len(side["generated_texts"]) == len(side["itls"]) == 4
    assert side["errors"] == {}


def test_a_server_that_fails_every_warm_up_is_not_measured(server: Client) -> None:
    job = replace(serve_job(server.base_url), workload=said("FULL"))
    with pytest.raises(EngineError, match="429 queue_full"):
        bench_serve(job)


def test_an_address_without_an_openai_server_is_refused() -> None:
    with pytest.raises(ConfigError, match="is it the address of an OpenAI server"):
        reach(ServerTarget(name="x", base_url=f"http://127.0.0.1:{free_port()}"))
    with pytest.raises(ConfigError, match="must begin with http"):
        reach(ServerTarget(name="x", base_url="ftp://nowhere"))


def test_a_page_in_place_of_a_reply_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("plait.bench.serve.run.read", lambda *_: (404, "<html>\n  <p>Not\n found</p>\n"))
    with pytest.raises(ConfigError, match=r"/v1/models answers 404: <html> <p>Not found</p>$"):
        reach(ServerTarget(name="x", base_url="http://nowhere"))


def test_a_server_without_tokenize_leaves_the_measure_of_words_open(target: ServerTarget) -> None:
    assert tokens_per_word(target) is not None
    assert tokens_per_word(replace(target, base_url=target.base_url + "/nothing")) is None


def side_with(name: str, *turns: dict[str, Any]) -> ServeSide:
    return ServeSide(ServerTarget(name=name, base_url=""), None, turns=list(turns))


def test_a_ratio_above_one_means_that_the_first_side_is_better() -> None:
    def turn(rate: float, ms: float) -> dict[str, Any]:
        names = ("request_throughput", "output_throughput", "total_token_throughput")
        from plait.bench.serve.run import RATIOS

        return dict.fromkeys(RATIOS) | dict.fromkeys(names, rate) | {"p99_ttft_ms": ms}

    found = ratios([side_with("a", turn(10, 5), turn(30, 5)), side_with("b", turn(5, 10), turn(10, 20))])
    assert found == {
        "b": {
            "request_throughput": 2.5,
            "output_throughput": 2.5,
            "total_token_throughput": 2.5,
            "p99_ttft_ms": 3.0,
        }
    }


def test_turns_become_medians_and_errors_are_added_up() -> None:
    run = [
        score(
            [RequestOutcome(0, 0, 0.0, output_len=n, e2e_s=1.0), RequestOutcome(1, 0, 0.0, error="timeout")],
            2.0,
        )
        | {"client": {"lag_p99_ms": n}}
        for n in (1, 3, 20)
    ]
    found = medians(run)
    assert found["total_output_tokens"] == 3
    assert found["errors"] == {"timeout": 3}
    assert found["client"] == {"lag_p99_ms": 20}
    assert found["request_goodput"] is None


def test_options_of_a_server_are_words_of_the_command_line() -> None:
    given = {"threads": 2, "precise": True, "prefix_cache": None, "set": ("a=1", "b=2"), "device": "cpu"}
    assert flags(given) == ["--threads", "2", "--precise", "--set", "a=1", "--set", "b=2", "--device", "cpu"]


def test_a_server_that_cannot_start_says_why(tmp_path: Path) -> None:
    job = replace(serve_job(), sides=[Started("mine", str(tmp_path / "nothing.gguf"))])
    with pytest.raises(
        EngineError, match=r"plait serve ended with code \d before it was ready: (.|\n)*nothing"
    ):
        bench_serve(job)


def test_what_a_process_holds_is_counted(server: Client) -> None:
    before = census(os.getpid())
    assert before["rss_mib"] > 1
    with Path(__file__).open(), Path(__file__).open():
        assert census(os.getpid())["fds"] >= before["fds"] + 1
    assert before["rss_mib_each"][0] <= before["rss_mib"]
    nobody = census(1 << 30)
    assert nobody.pop("rss_mib_each") == []
    assert nobody == {"processes": 0, "rss_mib": 0.0, "threads": 0, "fds": 0, "cpu_s": 0.0}
    status, health = read_health(server.base_url)
    assert (status, health["status"]) == (200, "ok")
    assert read_health(f"http://127.0.0.1:{free_port()}") == (0, {})
    assert isinstance(read_metrics(server.base_url), dict)


@pytest.fixture
def scripted() -> Callable[[bytes], RequestOutcome]:
    """What the client makes of a reply of these bytes, after which the server closes."""

    def run(reply: bytes) -> RequestOutcome:
        async def talk() -> RequestOutcome:
            async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
                await reader.readuntil(b"\r\n\r\n")
                writer.write(reply)
                await writer.drain()
                writer.close()

            async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
                port = server.sockets[0].getsockname()[1]
                target = ServerTarget(name="x", base_url=f"http://127.0.0.1:{port}", model="m")
                async with open_session(target) as session:
                    return await ask(session, target, [], Turn("", 5, 4), RequestOutcome(0, 0, 0.0))

        with runner() as loop:
            return loop.run(talk())

    return run


HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n"
ROLE = b'data: {"choices":[{"index":0,"delta":{"role":"assistant","content":""}}]}\n\n'
WORD = b'data: {"choices":[{"index":0,"delta":{"content":"a"}}]}\r\n\r\n: ping\n\n'
THOUGHT = b'data: {"choices":[{"index":0,"delta":{"reasoning_content":"hm"}}]}\n\n'


def test_a_stream_without_usage_is_counted_by_its_events(scripted: Callable[[bytes], RequestOutcome]) -> None:
    found = scripted(HEAD + b"\r\n" + ROLE + THOUGHT + WORD + WORD + b"data: [DONE]\n\n")
    assert found.is_ok
    assert (found.input_len, found.output_len, found.text, len(found.gaps_s)) == (5, 3, "aa", 2)


@pytest.mark.parametrize(
    ("reply", "kind"),
    [
        (HEAD + b"\r\n" + ROLE + WORD, "stream cut"),
        (HEAD + b"Content-Length: 900\r\n\r\n" + ROLE + WORD, "stream cut"),
        (b"", "connection cut"),
        (HEAD + b"\r\ndata: {]\n\n", "DecodeError"),
        (b"HTTP/1.1 502 Bad Gateway\r\nContent-Length: 3\r\n\r\nnah", "502"),
        (b'HTTP/1.1 400 Bad\r\nContent-Length: 16\r\n\r\n{"error":"flat"}', "400"),
    ],
)
def test_a_broken_reply_is_an_error_with_a_name(
    scripted: Callable[[bytes], RequestOutcome], reply: bytes, kind: str
) -> None:
    found = scripted(reply)
    assert found.error == kind
    assert not found.is_ok
