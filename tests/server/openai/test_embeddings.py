"""/v1/embeddings: vectors through the engine like any other request, in every form clients ask for."""

from __future__ import annotations

import base64
import dataclasses
import http.client
import json
import math
import struct
from typing import Any

import pytest
from openai import OpenAI

from plait.engine.thread import EngineLoop
from plait.server.openai.embeddings import MAX_INPUTS
from tests.contract.wire import Answer, Client
from tests.server.conftest import serving, wait_until
from tests.server.fake import BOS, CONTEXT, HIDDEN_SIZE, EchoLoop, embedding
from tests.server.real_engine import engine_front

PATH = "/v1/embeddings"


def embed(client: Client, **body: Any) -> Answer:
    return client.post(PATH, {"model": client.model, **body})


def vectors(answer: Answer) -> list[list[float]]:
    assert answer.status == 200, answer.body
    entries = answer.json["data"]
    assert [entry["index"] for entry in entries] == list(range(len(entries)))
    assert {entry["object"] for entry in entries} == {"embedding"}
    return [entry["embedding"] for entry in entries]


def unit(vector: tuple[float, ...]) -> list[float]:
    return [value / math.hypot(*vector) for value in vector]


def test_a_text_is_a_vector_of_length_one(client: Client) -> None:
    answer = embed(client, input="hello")
    (vector,) = vectors(answer)
    assert vector == pytest.approx(unit(embedding([ord("o")], "last")), abs=1e-6)
    assert answer.json["object"] == "list"
    assert answer.json["model"] == client.model
    assert answer.json["usage"] == {"prompt_tokens": 6, "total_tokens": 6}  # with the beginning of text


def test_every_form_of_input_and_their_order(client: Client) -> None:
    ids = [[1, 2, 3], [4, 7]]
    assert vectors(embed(client, input=ids[0])) == vectors(embed(client, input=[ids[0]]))
    want = [vectors(embed(client, input=one))[0] for one in ids]
    assert vectors(embed(client, input=ids)) == want
    texts = ["a", "bb", "a", "ccc"]
    found = vectors(embed(client, input=texts))
    assert found == [vectors(embed(client, input=text))[0] for text in texts]
    assert found[0] == found[2] != found[1]


def test_the_mean_of_all_tokens_if_requested(client: Client) -> None:
    (vector,) = vectors(embed(client, input="abc", pooling="mean"))
    assert vector == pytest.approx(unit(embedding([BOS, *b"abc"], "mean")), abs=1e-6)
    (bare,) = vectors(embed(client, input="abc", pooling="mean", add_special_tokens=False))
    assert bare == pytest.approx(unit(embedding(list(b"abc"), "mean")), abs=1e-6)


def test_as_it_is_without_normalisation_and_cut_if_requested(client: Client) -> None:
    raw = embedding([ord("w")], "last")
    assert vectors(embed(client, input="w", normalize=False)) == [list(raw)]
    (cut,) = vectors(embed(client, input="w", dimensions=3))
    assert cut == pytest.approx(unit(raw[:3]), abs=1e-6)


def test_base64_holds_the_same_numbers(client: Client) -> None:
    (want,) = vectors(embed(client, input="hi"))
    (text,) = vectors(embed(client, input="hi", encoding_format="base64"))
    assert isinstance(text, str)
    assert list(struct.unpack(f"<{HIDDEN_SIZE}f", base64.b64decode(text))) == want


def test_openai_s_client_reads_both_forms(openai: OpenAI, client: Client) -> None:
    plain = openai.embeddings.create(model=client.model, input=["one", "two"], encoding_format="float")
    packed = openai.embeddings.create(model=client.model, input=["one", "two"])
    assert [e.embedding for e in plain.data] == [e.embedding for e in packed.data]
    assert plain.usage.total_tokens == 8


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "input"),
        ({"input": []}, "input"),
        ({"input": ["a", 1]}, "input"),
        ({"input": [[]]}, "input[0]"),
        ({"input": ["a"] * (MAX_INPUTS + 1)}, "input"),
        ({"input": ["a", "b" * CONTEXT]}, "input[1]"),
        ({"input": [70000]}, "input"),
        ({"input": "a", "dimensions": 0}, "dimensions"),
        ({"input": "a", "dimensions": HIDDEN_SIZE + 1}, "dimensions"),
        ({"input": "a", "encoding_format": "int8"}, "encoding_format"),
        ({"input": "a", "pooling": "cls"}, "pooling"),
        ({"input": "a", "truncate_prompt_tokens": 5}, "truncate_prompt_tokens"),
        ({"input": "a", "cache_salt": ""}, "cache_salt"),
    ],
)
def test_what_cannot_be_done_is_refused_by_name(client: Client, body: dict[str, Any], param: str) -> None:
    answer = embed(client, **body)
    assert answer.status == 400
    assert answer.error["param"] == param
    assert param.split("[")[0] in answer.error["message"]


def test_a_context_that_is_too_short_says_so(client: Client) -> None:
    error = embed(client, input="b" * CONTEXT).error
    assert error["code"] == "context_length_exceeded"
    assert str(CONTEXT) in error["message"]
    assert str(CONTEXT + 1) in error["message"]


def test_more_inputs_than_the_engine_takes_at_once(client: Client) -> None:
    found = vectors(embed(client, input=[chr(97 + i % 26) for i in range(200)]))
    assert found[3] == found[3 + 26] == found[3 + 7 * 26 - 26]
    assert len(found) == 200


def test_the_engine_s_refusal_is_the_answer(client: Client) -> None:
    assert embed(client, input=["a", "REFUSE"]).status == 503
    assert embed(client, input="FULL").error["type"] in {"rate_limit_error", "server_error"}


def test_unknown_fields_are_reported(client: Client) -> None:
    answer = embed(client, input="a", user="me", strange=1)
    assert answer.headers["x-plait-ignored"] == "user,strange"


def test_a_client_that_leaves_ends_its_request(client: Client, engine: EchoLoop) -> None:
    connection = http.client.HTTPConnection(*client.address)
    body = json.dumps({"model": client.model, "input": "HANG"})
    connection.request("POST", PATH, body, {"Content-Type": "application/json"})
    assert wait_until(lambda: engine.stats()["running"] == 1)
    connection.close()
    assert wait_until(lambda: engine.stats()["running"] == 0)


def test_through_the_engine_vectors_do_not_depend_on_company() -> None:
    front = engine_front()
    try:
        with serving(front) as client:
            texts = [f"text number {i} " * (i % 40 + 1) for i in range(90)]
            for pooling in ("last", "mean"):
                many = vectors(embed(client, input=texts, pooling=pooling))
                for i in (0, 17, 89):
                    assert vectors(embed(client, input=texts[i], pooling=pooling)) == [many[i]]
            assert wait_until(lambda: front.stats()["num_running"] == 0)
    finally:
        front.close()


def test_a_list_longer_than_the_queue_is_computed_piece_by_piece() -> None:
    front = engine_front()
    try:
        assert isinstance(front.loop, EngineLoop)
        scheduler = front.loop.engine.scheduler
        scheduler.limits = dataclasses.replace(scheduler.limits, max_waiting=3, max_num_seqs=2)
        front.loop.max_open = 5
        with serving(front) as client:
            assert len(vectors(embed(client, input=[f"text {i}" for i in range(20)]))) == 20
            answer = client.complete(["a"] * 6, max_tokens=2)
            assert (answer.status, answer.error["param"]) == (400, "prompt")
            assert "6 prompts" in answer.error["message"]
            assert client.complete(["a"] * 5, max_tokens=2).status == 200
    finally:
        front.close()
