"""A response that calls tools of MCP servers: model, tool, model, … until the model has no more calls.

tools listed ──> [calls that were approved] ──> a generation ──┬──> no call: the response is whole
                                                    ^          ├──> a call that needs consent, or a function
                                                    │          │    of the client: the client goes on
                                                    └── calls <┘

The conversation of each generation is made anew from the items, so what the model sees is what the client
does. A failure of a server is an item's `error`, which the model reads, too.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import msgspec
from msgspec import UNSET

from plait.errors import ContextTooLong
from plait.request import Request
from plait.server.api.content_blocks import BlockStep, ReplyBlock, ReplyBlocks, in_words_of
from plait.server.api.reply import (
    ChatPlan,
    CompletionTokensDetails,
    PromptTokensDetails,
    TokenCount,
    Usage,
    run_plan,
)
from plait.server.http.transfer import new_id
from plait.server.mcp.messages import McpTool
from plait.server.openai import chat
from plait.server.responses.input_items import ResponseConversation
from plait.server.responses.items import (
    DeltaEvent,
    DoneEvent,
    ItemEvent,
    ItemStatus,
    OutputItem,
    Response,
    ResponseEvent,
    ServerEvent,
    server_call,
)
from plait.server.responses.mcp_calls import McpCaller, PendingCall, list_item, show_tool
from plait.server.responses.mcp_tools import (
    OfferedTool,
    RequestedServer,
    choose_among,
    name_with_label,
    offer_tools,
)
from plait.server.responses.reply import ResponsesReply
from plait.server.responses.request import NAMES, ReadRequest
from plait.server.responses.state import Item, ResponseKeeper

if TYPE_CHECKING:
    from plait.server.gateway.request_context import RequestContext

MAX_ROUNDS = 32  # generations of one response; the model gets no server's tools in the last one
NO_TOKENS = 16  # of a context, that a generation needs at least
LEFT = "max_tool_calls was reached, so the call was not made"


class McpReply(ResponsesReply):
    """One reply of /v1/responses with `mcp` tools, whole or as events."""

    has_rounds = True

    def __init__(
        self,
        model: str,
        read: ReadRequest,
        planned: ChatPlan,
        keeper: ResponseKeeper | None,
        caller: McpCaller,
        pending: Sequence[PendingCall],
    ) -> None:
        super().__init__(model, read.asked, planned, (), keeper)
        self.requests: Sequence[Request] = ()
        self._read, self._caller, self._pending = read, caller, pending
        self._offered: dict[str, OfferedTool] = {}
        self._done: list[OutputItem] = []  # before the blocks of this round
        self._called: dict[int, OutputItem] = {}  # calls of this round, by their blocks
        self._usages: list[Usage] = []  # of the rounds before this one
        self._num_rounds = self._num_calls = 0
        self._is_over = self._is_full = False

    # ---- rounds

    def advance(
        self, context: RequestContext, threads: Executor | None
    ) -> AsyncIterator[ResponseEvent] | None:
        return None if self._is_over else self._advance(context, threads)

    async def _advance(
        self, context: RequestContext, threads: Executor | None
    ) -> AsyncIterator[ResponseEvent]:
        self.requests = ()
        if self._num_rounds:
            is_cut = self.blocks.finish_reason == "length"
            waits = any(block.kind == "call" and self._source(block) is None for block in self.blocks.all)
            calls = [block for block in self.blocks.all if self._is_callable(block)]
            async for event in self._call_all(context, calls, is_cut=is_cut):
                yield event
            if is_cut or waits or not calls:
                self._is_over = True
                return
        else:
            async for event in self._list_all():
                yield event
            for pending in self._pending:
                async for event in self._call_pending(context, pending):
                    yield event
        await self._plan_next(context, threads)

    async def _plan_next(self, context: RequestContext, threads: Executor | None) -> None:
        """Begin the next round, or end the response where the context has no place for one."""
        if self._num_rounds:
            self._usages.append(self.count.usage())
            self._done += [self._item(block) for block in self.blocks.all]
            self._called.clear()
            self._ids.clear()
            self.blocks = ReplyBlocks(self.chat)
        try:
            planned = await run_plan(partial(self._plan, context), threads)
            loose = await self._find_loose(context, planned.request)
            if loose:
                for tool in loose:
                    free = msgspec.structs.replace(tool.tool, input_schema={"type": "object"})
                    self._offered[tool.name] = replace(tool, tool=free)
                planned = await run_plan(partial(self._plan, context), threads)
        except ContextTooLong:
            if not any(item.type == "mcp_call" for item in self._done):
                raise
            self._is_full = True
        if self._is_full:
            self._is_over = True
            return
        self._num_rounds += 1
        self.chat, self.blocks, self.requests = planned, ReplyBlocks(planned), [planned.request]
        self.count = TokenCount(self.requests)

    def _plan(self, context: RequestContext) -> ChatPlan:
        """The chat of the next round. Raises RequestErrors."""
        asked, sent = self._read.asked, {**self._read.sent}
        found, functions = self._conversation(), self._functions()
        sent.pop("tools", None)
        sent.pop("tool_choice", None)
        if functions:
            sent["tools"] = functions
            is_first = not any(item.type == "mcp_call" for item in self._done)
            # A call that was demanded has been made in the first round.
            sent["tool_choice"] = choose_among(asked.tool_choice, self._offered) if is_first else "auto"
        if asked.max_output_tokens is not None:
            left = asked.max_output_tokens - sum(usage.completion_tokens for usage in self._usages)
            if left <= 0:
                self._is_full = True
                return self.chat
            sent["max_completion_tokens"] = left
        context.exchange.num_asked_tokens = 0  # one generation at a time
        with in_words_of(NAMES, found.places):
            asking = {**sent, "messages": found.messages, "stream": asked.stream}
            return chat.plan_chat(context, asking, NAMES)

    def _functions(self) -> list[object]:
        """The client's functions, and the servers' tools while they may be called."""
        sent = self._read.sent.get("tools")
        found = [*sent] if isinstance(sent, list) else []
        if self._read.asked.tool_choice == "none":
            return []
        if self._num_rounds < MAX_ROUNDS - 1 and self._has_calls_left():
            found += [tool.as_function() for tool in self._offered.values()]
        return found

    def _has_calls_left(self) -> bool:
        most = self._read.asked.max_tool_calls
        return most is None or self._num_calls < most

    def _conversation(self) -> ResponseConversation:
        names = {(tool.source.label, tool.tool.name): tool.name for tool in self._offered.values()}

        def name_tool(label: str, name: str) -> str:
            return names.get((label, name)) or name_with_label(label, name)

        output: list[Item] = [msgspec.to_builtins(item) for item in self._done]
        return self._read.conversation(name_tool, output)

    async def _find_loose(self, context: RequestContext, request: Request) -> list[OfferedTool]:
        """Tools with schemas that no grammar can hold a call to: their arguments are then free.

        Else a schema of a server would fail the whole response.
        """
        front, found = context.front, []
        offered = [*self._offered.values()]
        first = len(self._functions()) - len(offered)
        for grammar in front.list_untried(request):
            number = (grammar.param or "").removeprefix("tools[").partition("]")[0]
            if not number.isdigit() or int(number) < first or front.grammars is None:
                continue
            verdict = await asyncio.wrap_future(front.grammars.submit(grammar, context.tenant))
            if not verdict.is_good:
                found.append(offered[int(number) - first])
        return found

    # ---- what is done between them

    async def _list_all(self) -> AsyncIterator[ResponseEvent]:
        """List the tools of each server, if no item has them already."""
        listed: list[tuple[RequestedServer, Sequence[McpTool]]] = []
        for source in self._read.servers:
            known = self._caller.find_list(source, [*self._read.earlier, *self._own_input()])
            if known is not None:
                listed.append((source, known))
                continue
            index, item = len(self._done), list_item(source)
            at = {"item_id": item.id, "output_index": index}
            yield self._event(ItemEvent, "response.output_item.added", output_index=index, item=item)
            yield self._event(ServerEvent, "response.mcp_list_tools.in_progress", **at)
            tools, error = await self._caller.list_tools(source)
            listed.append((source, tools))
            chosen = [show_tool(tool) for tool in source.choose(tools)]
            item = msgspec.structs.replace(item, tools=chosen, error=error or None)
            self._done.append(item)
            state = "failed" if error else "completed"
            yield self._event(ServerEvent, f"response.mcp_list_tools.{state}", **at)
            yield self._event(ItemEvent, "response.output_item.done", output_index=index, item=item)
        taken = frozenset(_function_name(tool) for tool in self._functions())
        self._offered = {tool.name: tool for tool in offer_tools(listed, taken)}

    def _own_input(self) -> Sequence[Item]:
        found = self._read.asked.input
        return () if isinstance(found, str) else found

    async def _call_pending(self, context: RequestContext, call: PendingCall) -> AsyncIterator[ResponseEvent]:
        """Make a call that the client has approved."""
        index, item = len(self._done), call.item(new_id("mcp", "_"))
        at = {"item_id": item.id, "output_index": index}
        yield self._event(ItemEvent, "response.output_item.added", output_index=index, item=item)
        yield self._event(ServerEvent, "response.mcp_call.in_progress", **at)
        yield self._event(DoneEvent, "response.mcp_call_arguments.done", arguments=call.arguments, **at)
        offered = (one for one in self._offered.values() if one.source.label == call.label)
        tool = next((one for one in offered if one.tool.name == call.name), None)
        item = await self._run(context, item, tool)
        self._done.append(item)
        for event in self._finish(item, index):
            yield event

    async def _call_all(
        self, context: RequestContext, calls: Iterable[ReplyBlock], *, is_cut: bool
    ) -> AsyncIterator[ResponseEvent]:
        """Make the calls of this round, one after the other."""
        for block in calls:
            item, index = self._item(block), self._place(block)
            if is_cut:
                item = msgspec.structs.replace(item, status="incomplete")
            else:
                item = await self._run(context, item, self._source(block))
            self._called[block.index] = item
            for event in self._finish(item, index):
                yield event

    async def _run(self, context: RequestContext, item: OutputItem, tool: OfferedTool | None) -> OutputItem:
        """A call's item once it was made, or was not."""
        if not self._has_calls_left():
            return self._caller.refuse(item, LEFT)
        self._num_calls += 1
        found = await self._caller.call(item, tool)
        if not isinstance(found.output, str) or await self._fits(context, found.output):
            return found
        text = (
            f"its result has {len(found.output)} characters and does not fit into the context; ask for less"
        )
        return self._caller.refuse(found, text)

    async def _fits(self, context: RequestContext, text: str) -> bool:
        """Whether the model's context has a place for a result, besides what it has to hold already."""
        front = context.front
        others = [item.output for item in self._called.values() if isinstance(item.output, str)]
        others += [item.output for item in self._done if isinstance(item.output, str)] * (
            not self._num_rounds
        )
        num_begun = self.count.usage().completion_tokens if self._num_rounds else 0
        left = front.max_model_len - len(self.chat.request.prompt_token_ids) - num_begun - NO_TOKENS
        if len(text) > left * 64:  # no token is so long throughout a text
            return False
        whole = "".join([*others, text])
        ids = await asyncio.to_thread(front.encode, whole, add_special=False, allow_special=False)
        return len(ids) <= left

    def _finish(self, item: OutputItem, index: int) -> Iterator[ResponseEvent]:
        if item.status != "incomplete":
            at = {"item_id": item.id, "output_index": index}
            yield self._event(ServerEvent, f"response.mcp_call.{item.status}", **at)
        yield self._event(ItemEvent, "response.output_item.done", output_index=index, item=item)

    def close(self) -> None:
        super().close()
        self._caller.close()

    # ---- blocks as items

    def _source(self, block: ReplyBlock) -> OfferedTool | None:
        """The tool that a block calls without asking; None: it is no such call."""
        tool = self._offered.get(block.name) if block.kind == "call" else None
        return None if tool is None or tool.source.needs_consent(tool.tool) else tool

    def _is_callable(self, block: ReplyBlock) -> bool:
        return block.is_whole and block.index not in self._called and self._source(block) is not None

    def _prefix(self, block: ReplyBlock) -> str:
        if block.kind != "call" or block.name not in self._offered:
            return super()._prefix(block)
        return "mcpr" if self._source(block) is None else "mcp"

    def _place(self, block: ReplyBlock) -> int:
        return len(self._done) + block.index

    def _output(self) -> list[OutputItem]:
        return [*self._done, *super()._output()]

    def _total_usage(self) -> Usage:
        now = [self.count.usage()] if self._num_rounds and not self._is_full else []
        return add_usages([*self._usages, *now])

    def _item(self, block: ReplyBlock) -> OutputItem:
        tool = self._offered.get(block.name) if block.kind == "call" else None
        if tool is None:
            return super()._item(block)
        if block.index in self._called:
            return self._called[block.index]
        label, name, item_id = tool.source.label, tool.tool.name, self._ids[block.index]
        if block.is_whole and tool.source.needs_consent(tool.tool):
            found = OutputItem(item_id, UNSET, "mcp_approval_request", name=name, arguments=block.text)
            return msgspec.structs.replace(found, server_label=label)
        status: ItemStatus = "in_progress" if block.is_whole else "incomplete"
        return server_call(item_id, status, (label, name), block.text)

    def _events(self, step: BlockStep) -> Iterator[ResponseEvent]:
        block = step.block
        if block.kind != "call" or block.name not in self._offered:
            yield from super()._events(step)
            return
        index = self._place(block)
        at = {"item_id": self._ids[block.index], "output_index": index}
        item = self._item(block)
        if self._source(block) is None:
            # The item has all that the client is to decide about, so it comes once.
            if step.what == "close":
                yield self._event(ItemEvent, "response.output_item.added", output_index=index, item=item)
                yield self._event(ItemEvent, "response.output_item.done", output_index=index, item=item)
            return
        match step.what:
            case "open":
                item = msgspec.structs.replace(item, status="in_progress")
                yield self._event(ItemEvent, "response.output_item.added", output_index=index, item=item)
                yield self._event(ServerEvent, "response.mcp_call.in_progress", **at)
            case "grow":
                yield self._event(DeltaEvent, "response.mcp_call_arguments.delta", delta=step.text, **at)
            case "close" if block.is_whole:
                yield self._event(DoneEvent, "response.mcp_call_arguments.done", arguments=block.text, **at)
            case "close":
                yield self._event(ItemEvent, "response.output_item.done", output_index=index, item=item)

    def whole(self, traces: Iterable[object] = ()) -> Response:
        found = super().whole(())
        if not self._is_full:
            return found
        why = {"reason": "max_output_tokens"}
        return msgspec.structs.replace(found, status="incomplete", incomplete_details=why, completed_at=None)


def _function_name(tool: object) -> str:
    function = tool.get("function") if isinstance(tool, Mapping) else None
    return str(function.get("name")) if isinstance(function, Mapping) else ""


def add_usages(usages: Sequence[Usage]) -> Usage:
    """The tokens of several generations: each has read its own prompt."""
    details = [usage.completion_tokens_details.reasoning_tokens for usage in usages]
    cached = [usage.prompt_tokens_details.cached_tokens for usage in usages]
    prompt = sum(usage.prompt_tokens for usage in usages)
    completion = sum(usage.completion_tokens for usage in usages)
    return Usage(
        prompt_tokens=prompt,
        completion_tokens=completion,
        total_tokens=prompt + completion,
        completion_tokens_details=CompletionTokensDetails(reasoning_tokens=sum(details)),
        prompt_tokens_details=PromptTokensDetails(cached_tokens=sum(cached)),
    )
