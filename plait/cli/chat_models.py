"""What `plait chat` and `plait run` talk with, and the model in this process."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Protocol

from plait.cli.common.progress import Clock
from plait.request import SamplingParams

if TYPE_CHECKING:
    from plait.frontend.deltas import Delta
    from plait.llm.llm import LLM

Message = dict[str, str]


class Reply(Protocol):
    """A reply that is being written; iterate it once. Its `clock` has run since the message was sent."""

    clock: Clock

    def __iter__(self) -> Iterator[Delta]: ...

    def cancel(self) -> None: ...


class ChatModel(Protocol):
    """A model to talk with. `max_model_len`: tokens of its context."""

    @property
    def name(self) -> str: ...

    @property
    def max_model_len(self) -> int: ...

    def ask(self, messages: list[Message], params: SamplingParams) -> Reply:
        """Send the conversation. Raises RequestError where it is refused."""

    def close(self) -> None: ...


class LocalReply:
    """The reply of a model in this process."""

    def __init__(self, stream: Iterable[Delta], num_prompt_tokens: int) -> None:
        self._stream, self.clock = stream, Clock(num_prompt_tokens)

    def __iter__(self) -> Iterator[Delta]:
        return iter(self._stream)

    def cancel(self) -> None:
        self._stream.cancel()  # type: ignore[attr-defined]


class LocalModel:
    """A model in this process. adapter: the name of the one that writes; "": none."""

    def __init__(self, llm: LLM, adapter: str = "") -> None:
        self._llm, self._front, self._adapter = llm, llm.front, adapter

    @property
    def name(self) -> str:
        return self._front.name

    @property
    def max_model_len(self) -> int:
        return self._front.max_model_len

    def ask(self, messages: list[Message], params: SamplingParams) -> LocalReply:
        from plait.engine.admission import ServiceOptions

        request = self._front.prepare_chat(messages, params, ServiceOptions(adapter=self._adapter))
        num_prompt_tokens = len(request.prompt_token_ids)
        return LocalReply(self._front.submit(request), num_prompt_tokens)

    def close(self) -> None:
        self._llm.close()
