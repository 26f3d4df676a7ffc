"""Templates from strangers behind a server: their cost falls on their own request, and on no other."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from plait.frontend.frontend import Front, Language
from plait.server.app import PLAN_THREADS
from plait.spec.model import ModelSpec, NormSpec
from plait.text.chat.jinja import JinjaTemplate
from plait.text.chat.sandbox import Sandbox, SandboxLimits
from tests.contract.wire import Answer, Client
from tests.server.conftest import serving, wait_until
from tests.server.fake import CONTEXT, EOS, HIDDEN_SIZE, VOCAB_SIZE, ByteTokenizer, EchoLoop

POWER = "{% if messages[0].content == 'x' %}{{ 9**(9**9) }}{% endif %}{{ messages[0].content }}"


class SplittingTokenizer(ByteTokenizer):
    """Finds no control token in any text."""

    def split_special(self, text: str) -> list[int | str]:
        return [text]

    def has_special(self, text: str) -> bool:
        return False

    def token_id(self, text: str) -> int | None:
        return None


@contextmanager
def templated(source: str, limits: SandboxLimits, **config: object) -> Iterator[tuple[Client, Front]]:
    """A server that renders chats with this template."""
    tokenizer, sandbox = SplittingTokenizer(), Sandbox(limits)
    template = JinjaTemplate("strange", {"default": source}, tokenizer, {}, sandbox)
    template.start()
    spec = ModelSpec("fake", HIDDEN_SIZE, VOCAB_SIZE, (), NormSpec(), CONTEXT)
    front = Front("fake", spec, CONTEXT, EchoLoop(), Language(tokenizer, template, {}, frozenset({EOS})))
    with serving(front, **config) as client:
        yield client, front


def content(answer: Answer) -> str:
    return str(answer.json["choices"][0]["message"]["content"])


def test_a_chat_that_computes_without_end_harms_no_other(tmp_path: Path) -> None:
    """One key has more chats that compute for minutes than there are threads; another key is answered."""
    keys = tmp_path / "keys"
    keys.write_text("greedy: first\nmodest: second\n")
    # Nothing ends the computation but the end of the server.
    # Long enough that nothing ends while the other key is served.
    limits = SandboxLimits(timeout_s=600.0, clock_s=600.0, wait_s=600.0)
    config = {"api_key_file": str(keys)}
    ended: list[Answer] = []
    with templated(POWER, limits, **config) as (client, front):
        greedy = Client(client.base_url, "fake", {"authorization": "Bearer first"})
        modest = Client(client.base_url, "fake", {"authorization": "Bearer second"})
        threads = [
            threading.Thread(target=lambda: ended.append(greedy.chat("x"))) for _ in range(PLAN_THREADS + 2)
        ]
        for thread in threads:
            thread.start()
        assert isinstance(front.chat_template, JinjaTemplate)
        children = front.chat_template._sandbox._children
        assert wait_until(lambda: 0 in children)
        for _ in range(3):
            assert client.get("/health").status == 200
            assert content(modest.chat("Hello")) == "Hello"
        assert not ended
        for thread in threads:
            while thread.is_alive():
                front.chat_template.close()
                thread.join(0.05)
    assert {answer.status for answer in ended} == {503}  # which is no fault of what was sent
    assert all("ended by the system; try again" in answer.error["message"] for answer in ended)


def test_a_chat_with_a_slow_template_is_refused_and_the_next_served() -> None:
    with templated(POWER, SandboxLimits(timeout_s=0.3, clock_s=120.0)) as (client, _):
        assert content(client.chat("Hello")) == "Hello"
        refused = client.chat("x")
        assert (refused.status, refused.error["code"]) == (400, "bad_template")
        assert "did not finish" in refused.error["message"]
        assert content(client.chat("Hello")) == "Hello"


def test_arguments_that_a_template_does_not_read_are_refused_and_hints_reported() -> None:
    with templated(POWER, SandboxLimits()) as (client, _):
        refused = client.chat("hi", chat_template_kwargs={"shout": True})
        assert (refused.status, refused.error["param"]) == (400, "chat_template_kwargs")
        answer = client.chat("hi", reasoning_effort="high", chat_template_kwargs={"enable_thinking": True})
        assert answer.headers["x-plait-ignored"] == "reasoning_effort,chat_template_kwargs.enable_thinking"


def test_a_template_that_cannot_be_read_refuses_chats_and_nothing_else() -> None:
    deep = "{{ " + "(" * 20_000 + "1" + ")" * 20_000 + " }}"
    with templated(deep, SandboxLimits()) as (client, _):
        for path, body in (
            ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}]}),
            ("/v1/responses", {"input": "hi"}),
            ("/tokenize", {"messages": [{"role": "user", "content": "hi"}]}),
        ):
            refused = client.post(path, body)
            assert (refused.status, refused.error["code"]) == (400, "bad_template")
            assert "nested too deeply" in refused.error["message"]
            assert "--chat-template" in refused.error["message"]
        assert (
            client.post("/v1/completions", {"prompt": "hi", "max_tokens": 2}).json["choices"][0]["text"]
            == "hi"
        )
