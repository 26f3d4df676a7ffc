"""Programs that people use, against a real server: OpenAI's client, Anthropic's, llm, and lm-eval's requests.

OpenAI's client reads strictly here: a field that is missing, or of another type than it declares, raises.
Two of its types are not what OpenAI itself sends: chunks of completions before the last, and embeddings in
base64, which it asks for unasked. These are read leniently.
"""

from __future__ import annotations

import asyncio
import json
import math
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from openai import AsyncOpenAI, NotFoundError, OpenAI

from tests.contract.wire import Client
from tests.e2e.conftest import serve
from tests.lazy_modules import import_lazily

if TYPE_CHECKING:
    from anthropic import Anthropic

anthropic_client = import_lazily("anthropic")

MODEL = "smol"
ASK: Any = [{"role": "user", "content": "Name three colors."}]


@pytest.fixture(scope="module")
def url(smollm2: Path) -> Iterator[str]:
    with serve(smollm2, "--max-model-len", "1024", "--served-model-name", MODEL) as server:
        yield server.url


@pytest.fixture(scope="module")
def openai(url: str) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{url}/v1", api_key="x", max_retries=0, _strict_response_validation=True) as found:
        yield found


@pytest.fixture(scope="module")
def lenient(url: str) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{url}/v1", api_key="x", max_retries=0) as found:
        yield found


@pytest.fixture(scope="module")
def anthropic(url: str) -> Iterator[Anthropic]:
    with anthropic_client.Anthropic(
        base_url=url, api_key="x", max_retries=0, _strict_response_validation=True
    ) as found:
        yield found


class TestOpenAI:
    def test_chat(self, openai: OpenAI) -> None:
        asked: Any = {"model": MODEL, "messages": ASK, "temperature": 0, "max_completion_tokens": 24}
        whole = openai.chat.completions.create(**asked, logprobs=True, top_logprobs=2)
        said = [
            chunk.choices[0].delta.content or ""
            for chunk in openai.chat.completions.create(**asked, stream=True)
        ]
        choice = whole.choices[0]
        assert "".join(said) == choice.message.content
        assert choice.logprobs is not None
        assert len(choice.logprobs.content or ()) >= len(said) - 2
        assert whole.usage is not None
        assert whole.usage.total_tokens == whole.usage.prompt_tokens + whole.usage.completion_tokens
        assert whole._request_id

    def test_the_stream_helper(self, openai: OpenAI) -> None:
        """`chat.completions.stream` puts chunks together itself, and checks them while it does."""
        with openai.chat.completions.stream(
            model=MODEL,
            messages=ASK,
            temperature=0,
            max_tokens=200,  # more than the reply has: a cut one is an error to this helper
            stream_options={"include_usage": True},
        ) as stream:
            kinds = {event.type for event in stream}
            found = stream.get_final_completion()
        assert {"chunk", "content.delta"} <= kinds
        assert found.choices[0].message.content
        assert found.usage is not None
        assert 0 < found.usage.completion_tokens < 200

    def test_completions(self, openai: OpenAI, lenient: OpenAI) -> None:
        asked: Any = {"model": MODEL, "prompt": "One, two,", "temperature": 0, "max_tokens": 8, "logprobs": 1}
        whole = openai.completions.create(**asked)
        assert whole.choices[0].logprobs is not None
        assert len(whole.choices[0].logprobs.tokens or ()) == 8
        chunks = list(lenient.completions.create(**asked, stream=True))
        assert "".join(chunk.choices[0].text for chunk in chunks) == whole.choices[0].text

    def test_models(self, openai: OpenAI) -> None:
        assert [model.id for model in openai.models.list()] == [MODEL]
        assert openai.models.retrieve(MODEL).object == "model"
        with pytest.raises(NotFoundError):
            openai.models.retrieve("other")

    def test_embeddings(self, openai: OpenAI, lenient: OpenAI) -> None:
        """The client asks for base64 unasked, and decodes it."""
        plain = openai.embeddings.create(model=MODEL, input=["a cat", "a dog"], encoding_format="float")
        packed = lenient.embeddings.create(model=MODEL, input=["a cat", "a dog"])
        for one, other in zip(plain.data, packed.data, strict=True):
            assert one.embedding == pytest.approx(other.embedding, abs=1e-6)

    def test_many_streams_of_one_client(self, url: str) -> None:
        async def main() -> list[str]:
            async with AsyncOpenAI(base_url=f"{url}/v1", api_key="x", max_retries=0) as openai:

                async def one() -> str:
                    stream = await openai.chat.completions.create(
                        model=MODEL, messages=ASK, temperature=0, max_tokens=12, stream=True
                    )
                    return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

                return await asyncio.gather(*(one() for _ in range(6)))

        assert len(set(asyncio.run(main()))) == 1

    def test_a_stream_that_is_left(self, openai: OpenAI) -> None:
        asked: Any = {"model": MODEL, "messages": ASK, "max_tokens": 900}
        with openai.chat.completions.create(**asked, stream=True, extra_body={"ignore_eos": True}) as stream:
            next(iter(stream))
        assert openai.chat.completions.create(**{**asked, "max_tokens": 1}).choices


class TestAnthropic:
    def test_messages(self, anthropic: Anthropic) -> None:
        more = {"temperature": 0}  # no parameter of this client any more
        asked: Any = {"model": MODEL, "messages": ASK, "max_tokens": 16, "extra_body": more}
        whole = anthropic.messages.create(**asked)
        assert whole.content[0].type == "text"
        with anthropic.messages.stream(**asked) as stream:
            assert "".join(stream.text_stream) == whole.content[0].text
            assert stream.get_final_message().usage.output_tokens == whole.usage.output_tokens

    def test_count_tokens(self, anthropic: Anthropic) -> None:
        asked: Any = {"model": MODEL, "messages": ASK}
        count = anthropic.messages.count_tokens(**asked).input_tokens
        usage = anthropic.messages.create(max_tokens=1, **asked).usage
        assert count == usage.input_tokens + (usage.cache_read_input_tokens or 0)


def run_llm(home: Path, *arguments: str) -> str:
    """The output of simonw's `llm`, without the plugins that are installed next to it."""
    environment = {**os.environ, "LLM_USER_PATH": str(home), "LLM_LOAD_PLUGINS": "", "OPENAI_API_KEY": "x"}
    command = [sys.executable, "-m", "llm", *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, input="")
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def llm_home(url: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    home = tmp_path_factory.mktemp("llm")
    models = [
        {"model_id": "here", "model_name": MODEL, "api_base": f"{url}/v1"},
        {"model_id": "text", "model_name": MODEL, "api_base": f"{url}/v1", "completion": True},
    ]
    (home / "extra-openai-models.yaml").write_text(json.dumps(models), encoding="utf-8")  # JSON is YAML
    return home


@pytest.mark.parametrize("model", ["here", "text"])
def test_llm_prompts_streamed_and_whole(llm_home: Path, model: str) -> None:
    options = ("-o", "temperature", "0", "-o", "max_tokens", "12", "-o", "seed", "1")
    streamed = run_llm(llm_home, "-m", model, "Name three colors.", *options)
    assert streamed.strip()
    assert run_llm(llm_home, "-m", model, "--no-stream", "Name three colors.", *options) == streamed


def scores(client: Client, contexts: list[list[int]], ends: list[list[int]]) -> list[tuple[float, bool]]:
    """What lm-eval's local-completions model makes of one batch: (log-likelihood, whether it is greedy).

    It sends the tokens of context and continuation, and requests one token more, with echo and one
    alternative. It leaves the generated token out, and compares floats for equality.
    """
    body = {
        "model": client.model,
        "prompt": [context + end for context, end in zip(contexts, ends, strict=True)],
        "temperature": 0,
        "max_tokens": 1,
        "logprobs": 1,
        "seed": 1234,
        "echo": True,
    }
    answer = client.post("/v1/completions", body)
    assert answer.status == 200, answer.body
    found = []
    for choice in sorted(answer.json["choices"], key=lambda choice: choice["index"]):
        lists, start = choice["logprobs"], len(contexts[choice["index"]])
        values, tops = lists["token_logprobs"][start:-1], lists["top_logprobs"][start:-1]
        is_greedy = all(value == max(top.values()) for value, top in zip(values, tops, strict=True))
        found.append((sum(values), is_greedy))
    return found


def test_lm_eval_scores_continuations(url: str) -> None:
    client = Client(url, MODEL)

    def ids(text: str) -> list[int]:
        asked = {"prompt": text, "add_special_tokens": False}
        found: list[int] = client.post("/tokenize", asked).json["tokens"]
        return found

    asked: dict[str, Any] = {"max_tokens": 5, "return_token_ids": True, "ignore_eos": True}
    greedy = client.complete(ids("The sun rises in the"), **asked).json["choices"][0]["token_ids"]
    contexts = [ids("The sun rises in the"), ids("The sun rises in the"), ids("Two and two is")]
    ends = [greedy, ids(" xylophone"), ids(" four, and")]
    found = scores(client, contexts, ends)
    assert [is_greedy for _, is_greedy in found[:2]] == [True, False]
    assert all(value < 0 and math.isfinite(value) for value, _ in found)
    alone = [scores(client, [context], [end])[0] for context, end in zip(contexts, ends, strict=True)]
    assert alone == found


def test_lm_eval_generates_until_a_stop(url: str) -> None:
    """Its other request: several prompts, `stop` from the task, and the texts by index."""
    body = {
        "prompt": ["Q: What is red?\nA:", "Q: What is blue?\nA:"],
        "model": MODEL,
        "max_tokens": 24,
        "temperature": 0,
        "stop": ["\n", "Q:", "<|im_end|>"],
        "seed": 1234,
    }
    choices = Client(url, MODEL).post("/v1/completions", body).json["choices"]
    assert [choice["index"] for choice in choices] == [0, 1]
    assert all("\n" not in choice["text"] for choice in choices)


def test_lm_eval_finds_the_servers_tokenizer(url: str) -> None:
    client = Client(url, MODEL)
    assert "eos_token" in client.get("/tokenizer_info").json
    tokens = client.post("/tokenize", {"prompt": "test", "add_special_tokens": False}).json["tokens"]
    assert isinstance(tokens, list)
