"""The reply of /v1/responses: a chat's reply as items and named events."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, TypeVar

import msgspec
from msgspec import UNSET

from plait.request import Request, RequestTrace
from plait.server.api.content_blocks import BlockKind, BlockReply, BlockStep, ReplyBlock
from plait.server.api.reply import ChatPlan, Usage
from plait.server.http.transfer import new_id
from plait.server.responses.items import (
    DeltaEvent,
    DoneEvent,
    ErrorEvent,
    InConversation,
    InputDetails,
    ItemEvent,
    ItemStatus,
    ItemType,
    OutputItem,
    OutputPart,
    PartEvent,
    Response,
    ResponseEvent,
    ResponseStatus,
    ResponseUsage,
    StateEvent,
)
from plait.server.responses.mcp_tools import redact
from plait.server.responses.request import NAMES, ResponsesRequest
from plait.server.responses.state import ResponseKeeper, Stored

if TYPE_CHECKING:
    from plait.frontend.deltas import Delta
    from plait.server.http.errors import Problem


class ResponsesReply(BlockReply):
    """One reply of /v1/responses, whole or as events; both are the same items in the end.

    A call that was cut is an incomplete item, as in its events.
    """

    def __init__(
        self,
        model: str,
        asked: ResponsesRequest,
        chat: ChatPlan,
        places: Sequence[str] = (),
        keeper: ResponseKeeper | None = None,
    ) -> None:
        super().__init__(chat, NAMES, places)
        self.keeper, self._stored, self.in_background = keeper, Stored(), asked.background
        self.head = msgspec.structs.replace(_head(model, asked, chat.request), store=keeper is not None)
        self._ids: list[str] = []  # of the items
        self._num_sent = 0
        self._last: Response | None = None  # what was stored, and is then sent

    @property
    def warning(self) -> str:
        return super().warning or self._stored.warning

    def whole(self, traces: Iterable[RequestTrace | None] = ()) -> Response:
        is_cut = self.blocks.finish_reason == "length"
        return msgspec.structs.replace(
            self.head,
            store=self._stored.is_stored(self.keeper),
            status="incomplete" if is_cut else "completed",
            incomplete_details={"reason": "max_output_tokens"} if is_cut else None,
            completed_at=None if is_cut else int(time.time()),
            output=self._output(),
            usage=_usage(self._total_usage()),
        )

    def push(self, delta: Delta) -> list[BlockStep]:
        steps = super().push(delta)
        self._ids += (new_id(self._prefix(step.block), "_") for step in steps if step.what == "open")
        return steps

    def _output(self) -> list[OutputItem]:
        """The items so far."""
        return [self._item(block) for block in self.blocks.all]

    def _total_usage(self) -> Usage:
        return self.count.usage()

    def _prefix(self, block: ReplyBlock) -> str:
        """What the id of a block's item begins with."""
        return _PREFIXES[block.kind]

    def _place(self, block: ReplyBlock) -> int:
        """The place of a block's item in the output."""
        return block.index

    def begin(self) -> Iterator[ResponseEvent]:
        yield self._event(StateEvent, "response.created", response=self.head)
        if self.in_background:
            yield self._event(StateEvent, "response.queued", response=self.head)
        running = msgspec.structs.replace(self.head, status="in_progress")
        yield self._event(StateEvent, "response.in_progress", response=running)

    def events(self, i: int, delta: Delta) -> Iterator[ResponseEvent]:
        for step in self.push(delta):
            yield from self._events(step)

    def end(self) -> Iterator[ResponseEvent]:
        response, warning = self._last or self.whole(), self.warning or UNSET
        yield self._event(StateEvent, f"response.{response.status}", response=response, warning=warning)

    def fail(self, problem: Problem) -> Iterator[ResponseEvent]:
        found = {"code": problem.code, "message": problem.message, "param": problem.param}
        yield self._event(ErrorEvent, "error", **found)
        yield self._event(StateEvent, "response.failed", response=self.end_early("failed", problem))

    def end_early(self, status: ResponseStatus, problem: Problem | None = None) -> Response:
        """The response of a reply that failed or was cancelled, with the output so far."""
        found = msgspec.structs.replace(self.head, status=status, output=self._output())
        if problem is None:
            return found
        code = "rate_limit_exceeded" if problem.status == 429 else "server_error"
        return msgspec.structs.replace(found, error={"code": code, "message": problem.message})

    async def keep(self, whole: msgspec.Struct) -> msgspec.Struct:
        assert isinstance(whole, Response)
        if self.keeper is None:
            return whole
        self._stored = await self.keeper.save(whole)
        return msgspec.structs.replace(whole, store=self._stored.is_stored(self.keeper))

    async def keep_streamed(self) -> None:
        if self.keeper is not None:
            self._last = self.whole()
            self._stored = await self.keeper.save(self._last)
            self._last = msgspec.structs.replace(self._last, store=self._stored.is_stored(self.keeper))

    def _events(self, step: BlockStep) -> Iterator[ResponseEvent]:
        block, index = step.block, self._place(step.block)
        name, is_call = f"response.{_EVENTS[block.kind]}", block.kind == "call"
        at: dict[str, object] = {"item_id": self._ids[block.index], "output_index": index}
        if not is_call:
            at["content_index"] = 0
        match step.what:
            case "open":
                item = msgspec.structs.replace(self._item(block), status="in_progress")
                if not is_call:
                    item = msgspec.structs.replace(item, content=[])
                yield self._event(ItemEvent, "response.output_item.added", output_index=index, item=item)
                if not is_call:
                    yield self._event(PartEvent, "response.content_part.added", part=_part(block), **at)
            case "grow":
                logprobs = step.logprobs if block.kind == "text" else UNSET
                yield self._event(DeltaEvent, f"{name}.delta", delta=step.text, logprobs=logprobs, **at)
            case "close":
                if not is_call:
                    logprobs = block.logprobs if block.kind == "text" else UNSET
                    yield self._event(DoneEvent, f"{name}.done", text=block.text, logprobs=logprobs, **at)
                    yield self._event(PartEvent, "response.content_part.done", part=_part(block), **at)
                elif block.is_whole:
                    call = {"arguments": block.text, "name": block.name}
                    yield self._event(DoneEvent, f"{name}.done", **call, **at)
                item = self._item(block)
                yield self._event(ItemEvent, "response.output_item.done", output_index=index, item=item)

    def _item(self, block: ReplyBlock) -> OutputItem:
        status: ItemStatus = "completed" if block.is_whole else "incomplete"
        item, parts = OutputItem(self._ids[block.index], status, _TYPES[block.kind]), [_part(block)]
        match block.kind:
            case "reasoning":
                return msgspec.structs.replace(item, summary=[], content=parts)
            case "text":
                return msgspec.structs.replace(item, role="assistant", content=parts)
        return msgspec.structs.replace(item, call_id=block.id, name=block.name, arguments=block.text)

    def _event(self, event: type[E], kind: str, **fields: object) -> E:
        self._num_sent += 1
        return event(type=kind, sequence_number=self._num_sent - 1, **fields)


E = TypeVar("E", bound=ResponseEvent)
_PREFIXES = {"reasoning": "rs", "text": "msg", "call": "fc"}
_TYPES: Mapping[BlockKind, ItemType] = {"reasoning": "reasoning", "text": "message", "call": "function_call"}
_EVENTS = {"reasoning": "reasoning_text", "text": "output_text", "call": "function_call_arguments"}


def _part(block: ReplyBlock) -> OutputPart:
    if block.kind == "reasoning":
        return OutputPart("reasoning_text", block.text)
    return OutputPart("output_text", block.text, [], [*block.logprobs])


def _head(model: str, asked: ResponsesRequest, request: Request) -> Response:
    """The fields of a response that come from its request, before there is any output."""
    return Response(
        id=new_id("resp", "_"),
        status="queued" if asked.background else "in_progress",
        background=asked.background,
        previous_response_id=asked.previous_response_id,
        conversation=None if asked.conversation_id is None else InConversation(asked.conversation_id),
        created_at=int(time.time()),
        instructions=asked.instructions,
        max_output_tokens=asked.max_output_tokens,
        metadata=asked.metadata,
        model=model,
        parallel_tool_calls=asked.parallel_tool_calls,
        reasoning={"effort": asked.reasoning.effort, "summary": None},
        temperature=request.params.temperature,
        text={"format": asked.text.format or {"type": "text"}},
        tool_choice=asked.tool_choice,
        max_tool_calls=asked.max_tool_calls,
        tools=[redact(tool) for tool in asked.tools],
        top_logprobs=asked.top_logprobs or 0,
        top_p=request.params.top_p,
    )


def _usage(found: Usage) -> ResponseUsage:
    return ResponseUsage(
        input_tokens=found.prompt_tokens,
        input_tokens_details=InputDetails(found.prompt_tokens_details.cached_tokens),
        output_tokens=found.completion_tokens,
        output_tokens_details=found.completion_tokens_details,
        total_tokens=found.total_tokens,
    )
