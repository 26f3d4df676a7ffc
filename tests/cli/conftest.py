"""A command line without a model: `plait.llm.llm` is replaced by one that generates given words."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from plait.cli.common import progress
from plait.cli.main import run
from plait.engine.admission import USUAL_SERVICE, ServiceOptions
from plait.errors import PlaitError
from plait.request import Request, SamplingParams


@dataclass
class Result:
    """What one command line did."""

    code: int
    out: str
    err: str


@dataclass
class FakeEngine:
    """Stands for everything behind `LLM`: records the requests, and generates `words`."""

    words: tuple[str, ...] = ("Hello", " world")
    error: BaseException | None = None
    at_load: BaseException | None = None
    tokenizer: object | None = field(default_factory=object)
    settings: dict[str, Any] = field(default_factory=dict)
    prompts: list[Any] = field(default_factory=list)
    params: list[SamplingParams] = field(default_factory=list)
    chats: list[list[dict[str, str]]] = field(default_factory=list)
    step_kind: str = "9 launches of 3 native kernels, one call"
    max_model_len: int = 1024
    unkept: str | None = None
    closed: int = 0
    cancelled: int = 0

    def llm(self, model: str, *, on_progress: Any = None, **settings: Any) -> SimpleNamespace:
        if self.at_load is not None:
            raise self.at_load
        if on_progress is not None:
            on_progress("reading", 1, 2)
        self.settings = {"model": model, **settings}
        shown = {"step_kind": self.step_kind, "unkept": self.unkept}
        return SimpleNamespace(front=self, close=self.close, **shown)

    @property
    def name(self) -> str:
        return "fake"

    def close(self) -> None:
        self.closed += 1

    def prepare(
        self,
        prompt: Any,
        params: SamplingParams,
        *,
        add_special: bool = True,
        terms: ServiceOptions = USUAL_SERVICE,
    ) -> Request:
        self.prompts.append(prompt)
        self.params.append(params)
        return Request("r", (1, 2, 3), params, adapter=terms.adapter)

    def prepare_chat(
        self, messages: list[dict[str, str]], params: SamplingParams, terms: ServiceOptions = USUAL_SERVICE
    ) -> Request:
        self.chats.append(messages)
        return self.prepare([1, 2, 3], params, terms=terms)

    def submit(self, request: Request) -> FakeStream:
        return FakeStream(self)


@dataclass
class FakeStream:
    engine: FakeEngine

    def cancel(self) -> None:
        self.engine.cancelled += 1

    def __iter__(self) -> Iterator[SimpleNamespace]:
        for n, word in enumerate(self.engine.words, 1):
            yield SimpleNamespace(text=word, token_ids=(n,), num_tokens=n, error=None, finish_reason=None)
        if isinstance(self.engine.error, PlaitError):
            yield SimpleNamespace(text="", token_ids=(), num_tokens=0, error=self.engine.error)
        elif self.engine.error is not None:
            raise self.engine.error


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> FakeEngine:
    fake = FakeEngine()
    module = ModuleType("plait.llm.llm")
    module.LLM = fake.llm  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "plait.llm.llm", module)
    return fake


@pytest.fixture
def plait(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Callable[..., Result]:
    """Run one command line in this process."""
    logger = logging.getLogger("plait")
    monkeypatch.setattr(logger, "handlers", logger.handlers)  # a command sends the log to stderr: undone here
    monkeypatch.setattr(logger, "level", logger.level)
    monkeypatch.setattr(logger, "propagate", logger.propagate)

    def call(*arguments: str) -> Result:
        code = run(list(arguments))
        out, err = capfd.readouterr()
        return Result(code, out, err)

    return call


@pytest.fixture(autouse=True)
def no_lines_of_progress(monkeypatch: pytest.MonkeyPatch) -> None:
    """A slow machine must not add lines to the stderr that tests count."""
    monkeypatch.setattr(progress, "EVERY_S", 3600.0)
