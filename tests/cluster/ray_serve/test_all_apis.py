"""Every API through Ray Serve's proxy and a gateway gives what `plait serve` gives.

It is the first test of this folder. Whole replies have the same bytes, but for ids, times and cached tokens.
An event of a stream has the tokens of one plan, which depends on measured times, so streams are compared by
all that their events say.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping

import pytest

from tests.cluster.ray_serve.running import Body, RunningCluster
from tests.cluster.test_apis import DRAWS, VARIES, make_generating, make_others
from tests.contract.wire import Client

pytest.importorskip("ray", reason="the extra [cluster] is not installed")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.ray,
    pytest.mark.timeout(300),
    pytest.mark.filterwarnings("ignore"),
]
GRPC_NBYTES = 4 << 20  # of a message, by default
UNCACHED = re.compile(rb'("input_tokens":)\d+')  # of a prompt: two engines have two caches
TEXTS = {"text", "content", "response", "delta", "arguments"}
COUNTS = {"completion_tokens", "prompt_tokens", "output_tokens", "eval_count", "prompt_eval_count"}


def read_leaves(value: object, keys: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], object]]:
    """The plain values of JSON, each with the keys that lead to it."""
    if isinstance(value, Mapping):
        for key, each in value.items():
            yield from read_leaves(each, (*keys, key))
    elif isinstance(value, list):
        for each in value:
            yield from read_leaves(each, keys)
    else:
        yield keys, value


def merge_events(body: bytes) -> dict[tuple[str, ...], list[object]]:
    """What a stream's events say, by keys: texts and scores joined, other words once, last counts."""
    found: dict[tuple[str, ...], list[object]] = {}
    lines = [line.removeprefix(b"data: ") for line in body.splitlines()]
    for line in lines:
        for keys, value in read_leaves(json.loads(line) if line.startswith(b"{") else {}):
            known = found.setdefault(keys, [])
            if keys[-1] in TEXTS and isinstance(value, str):
                known[:] = ["".join([*map(str, known), value])]
            elif value is None:  # of an event without scores, of which there are more or less
                continue
            elif "logprob" in " ".join(keys) or keys[-1] == "tokens":
                known.append(value)
            elif isinstance(value, bool | str) and not keys[-1].endswith("_at"):
                known += [] if known[-1:] == [value] else [value]
            elif keys[-1] in COUNTS:
                known[:] = [value]
    return found


def test_answers_through_ray_are_those_of_plait_serve(running: RunningCluster, alone: int) -> None:
    plain, clustered = (Client(f"http://127.0.0.1:{port}") for port in (alone, running.port))
    model = {"model": plain.get("/v1/models").json["data"][0]["id"]}
    requests = [request for i, draw in enumerate(DRAWS) for request in make_generating({**draw, **model}, i)]
    requests += [*make_generating({**DRAWS[0], **model}, 0)]  # cached
    requests += [(path, {**model, **body}) for path, body in make_others()]
    statuses = []
    for path, body in requests:
        answers = plain.post(path, body), clustered.post(path, body)
        for answer in answers:
            for pattern, instead in VARIES[:1] if body.get("stream") else VARIES:
                answer.body = pattern.sub(instead, answer.body)
            if path == "/v1/messages":
                answer.body = UNCACHED.sub(rb"\g<1>0", answer.body)
        wanted, found = answers
        assert found.status == wanted.status, (path, body, found.body)
        assert found.headers.get("content-type") == wanted.headers.get("content-type")
        if body.get("stream"):
            assert merge_events(found.body) == merge_events(wanted.body), (path, body)
            assert found.body.count(b"[DONE]") == wanted.body.count(b"[DONE]")
        else:
            assert found.body == wanted.body, (path, body)
        statuses.append(found.status)
    assert len(requests) >= 100
    assert sum(status == 200 for status in statuses) >= 90


def test_bodies_and_replies_of_more_than_four_mib_pass_the_proxy(running: RunningCluster, alone: int) -> None:
    plain, clustered = (Client(f"http://127.0.0.1:{port}") for port in (alone, running.port))
    vectors: Body = {"input": [[i % 250 + 1] for i in range(1200)]}
    wanted, found = (client.post("/v1/embeddings", vectors) for client in (plain, clustered))
    assert wanted.status == found.status == 200, found.body[:500]
    assert found.body == wanted.body
    assert len(found.body) > GRPC_NBYTES
    long: Body = {"prompt": "word " * (GRPC_NBYTES // 5 + 1)}
    wanted, found = (client.post("/tokenize", long) for client in (plain, clustered))
    assert wanted.status == found.status == 400, found.body[:500]
    assert found.body == wanted.body
    assert b"maximum context length is 512 tokens" in found.body  # so the gateway has read all of it
