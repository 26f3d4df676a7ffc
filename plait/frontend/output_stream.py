"""The text of a request while it is generated: events become deltas, one choice at a time.

Runs on the thread or loop that reads the stream, never on the engine's thread.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from queue import SimpleQueue
from typing import TYPE_CHECKING

from plait.frontend.deltas import Delta, Gathered, TextLogprob, TokenInterval, join_events
from plait.frontend.loop_bridge import LoopBridges
from plait.request import Event, FinishReason, Request, RequestTrace, SamplingParams, TokenLogprobs
from plait.text.output import Content, OutputDelta, OutputParser
from plait.text.output.deltas import merge_deltas
from plait.text.reply_format import ReplyReader
from plait.text.stops.expressions import open_matcher
from plait.text.tokenizers.tokenizer import StreamDecoder, Tokenizer

if TYPE_CHECKING:  # commands have no event loop, and would start later for it
    import asyncio


class Reading:
    """Reads the text of one choice. `parser` None: all of it is content.

    `matched`: the stop string that ended it; `has_ended`: that, or as many calls as were allowed. Text after
    that is dropped.
    """

    def __init__(self, params: SamplingParams, parser: OutputParser | None) -> None:
        self._parser, self._min_tokens = parser, params.min_tokens
        self._stop = open_matcher(params.stop, params.stop_regex, params.include_stop_str_in_output)
        self._is_plain = parser is None and not params.is_ended_by_text  # most: nothing is looked for
        self._content_in = self._content_out = self._num_tokens = 0

    @property
    def matched(self) -> str | None:
        return self._stop.matched

    @property
    def has_ended(self) -> bool:
        if self._is_plain:
            return False
        return self._stop.matched is not None or (self._parser is not None and self._parser.has_enough)

    @property
    def num_reasoning_tokens(self) -> int:
        return self._parser.num_reasoning_tokens if self._parser else 0

    @property
    def num_held(self) -> int:
        """Characters of the text so far that may or may not be shown, or never are, at its end."""
        waiting = self._parser.num_held if self._parser else 0
        return waiting + self._content_in - self._content_out

    def push(self, text: str) -> list[OutputDelta]:
        """The text of one more token; returns what can be emitted now."""
        self._num_tokens += 1
        if self._is_plain:
            self._content_in += len(text)
            self._content_out = self._content_in
            return [Content(text)] if text else []
        return self._until_stop(self._parser.push(text) if self._parser else [Content(text)])

    def finish(self, text: str, *, is_cut: bool = False) -> list[OutputDelta]:
        """The end, with the last of its text: what was held back comes out. `is_cut`: by a limit."""
        parts: list[OutputDelta] = [Content(text)]
        if self._parser:
            parts = [*self._parser.push(text, 0), *self._parser.finish(is_cut=is_cut)]
        shown_parts = self._until_stop(parts)
        held = "" if self.has_ended else self._stop.flush()
        self._content_out += len(held)
        return [*shown_parts, *([Content(held)] if held else [])]

    def _until_stop(self, parts: list[OutputDelta]) -> list[OutputDelta]:
        shown_parts: list[OutputDelta] = []
        for part in parts:
            if self.matched is not None:
                break
            if isinstance(part, Content):
                self._content_in += len(part.text)
                # min_tokens keeps stop strings asleep.
                is_asleep = self._num_tokens <= self._min_tokens
                shown = part.text if is_asleep else self._stop.push(part.text)[0]
                self._content_out += len(shown)
                part = Content(shown)
            if not isinstance(part, Content) or part.text:
                shown_parts.append(part)
        return shown_parts


LAST_WORD_S = 60.0  # how long to wait for the engine's trace of a choice that a stop string ended


class ChoiceText:
    """The text of one choice as it grows. Without a tokenizer there are only token ids."""

    def __init__(
        self, index: int, request: Request, tokenizer: Tokenizer | None, reader: ReplyReader | None = None
    ) -> None:
        params = request.params
        self.index, self._tokenizer, self.done = index, tokenizer, False
        shown = reader.shown if reader else frozenset[int]()
        self._decoder = (
            StreamDecoder(tokenizer, params.skip_special_tokens, request.prompt_token_ids, shown)
            if tokenizer
            else None
        )
        self._reading = Reading(params, reader.parser() if reader else None)
        self._is_read = reader is not None
        self._num_tokens = self._decoded = 0
        self._pending: deque[tuple[int, int, TokenLogprobs | None]] = (
            deque()
        )  # (starts at character, id, logprobs)

    @property
    def num_tokens(self) -> int:
        """Of the reply, with those of the stop string that ended it."""
        return self._num_tokens

    @property
    def ends_itself(self) -> bool:
        """Whether the text ended the choice: a stop string, or what a reader of replies takes for one."""
        return self._reading.has_ended

    def push(self, event: Event) -> Delta | None:
        """What this event adds, or None if nothing can be shown yet."""
        if self.done:
            return None
        if (progress := event.prompt_progress) is not None:
            cached = event.num_cached_tokens
            return Delta(self.index, "", num_cached_tokens=cached, prompt_progress=progress)
        reading, parts = self._reading, []
        for i, token_id in enumerate(event.token_ids):
            self._num_tokens += 1
            logprobs = event.logprobs[i] if event.logprobs else None
            self._pending.append((self._decoded, token_id, logprobs))
            text = self._decoder.push(token_id) if self._decoder else ""
            self._decoded += len(text)
            parts += reading.push(text)
            if reading.has_ended:
                break
        finish, has_ended = event.finish_reason, reading.has_ended
        if finish is not None and not has_ended:
            rest = self._decoder.flush() if self._decoder else ""
            self._decoded += len(rest)
            parts += reading.finish(rest, is_cut=finish == "length")
            has_ended = reading.has_ended
        if not parts and finish is None and not has_ended and self._tokenizer and not event.prompt_logprobs:
            return None
        return self._delta(event, merge_deltas(parts) if len(parts) > 1 else parts, has_ended)

    def _delta(self, event: Event, parts: Sequence[OutputDelta], has_ended: bool) -> Delta:
        reading = self._reading
        finish: FinishReason | None = "stop" if has_ended else event.finish_reason
        self.done = finish is not None
        everything = self._tokenizer is None or (self.done and not has_ended)
        passed, ready = self._decoded - reading.num_held, []
        while self._pending and (everything or self._pending[0][0] < passed):
            ready.append(self._pending.popleft())
        logprobs = [entry[2] for entry in ready if entry[2] is not None]
        return Delta(
            index=self.index,
            text="".join([part.text for part in parts if isinstance(part, Content)]),
            token_ids=tuple([entry[1] for entry in ready]),
            logprobs=tuple(self._text_logprob(lp) for lp in logprobs) if logprobs else None,
            prompt_logprobs=_each(self._text_logprob, event.prompt_logprobs),
            finish_reason=finish,
            stop_reason=reading.matched if has_ended else event.stop_token_id,
            num_cached_tokens=event.num_cached_tokens,
            num_tokens=self._num_tokens,
            error=None if has_ended else event.error,
            embedding=event.embedding,
            parts=tuple(parts) if self._is_read else (),
            num_reasoning_tokens=reading.num_reasoning_tokens,
        )

    def _text_logprob(self, lp: TokenLogprobs) -> TextLogprob:
        top = tuple(self._one(token_id, value) for token_id, value in lp.top)
        return self._one(lp.token_id, lp.logprob, top)

    def _one(self, token_id: int, value: float, top: tuple[TextLogprob, ...] = ()) -> TextLogprob:
        if not self._tokenizer:
            return TextLogprob(f"token_id:{token_id}", token_id, b"", value, top)
        return TextLogprob(
            self._tokenizer.token_text(token_id), token_id, self._tokenizer.token_bytes(token_id), value, top
        )


def _each(
    fn: Callable[[TokenLogprobs], TextLogprob], values: tuple[TokenLogprobs, ...] | None
) -> tuple[TextLogprob, ...] | None:
    return None if values is None else tuple(fn(v) for v in values)


def _rest(events: SimpleQueue[Event] | asyncio.Queue[Event]) -> Iterator[Event]:
    """What waits in a queue by now."""
    while not events.empty():  # its only reader is here
        yield events.get_nowait()


class OutputStream:
    """The text of one request while it is generated; iterate it, plainly or with `async for`, once.

    A delta has the tokens of one plan, which is mostly one. A plain reader, and a patient one, receives the
    tokens of all the plans behind which it has fallen at once.
    Leaving early, or `cancel()`, frees what the request holds before the next plan. `reader` separates
    content, thinking and calls. `bridges`: the event-loop bridges, shared by streams that are read on the
    same loops.
    """

    def __init__(
        self,
        request: Request,
        tokenizer: Tokenizer | None,
        cancel: Callable[[str, int | None], None],
        reader: ReplyReader | None = None,
        bridges: LoopBridges | None = None,
    ) -> None:
        self.request, self._cancel_request = request, cancel
        self.num_arrived = 0  # tokens that the engine has sent, of all choices
        self._bridges = bridges or LoopBridges()
        self._choices = [ChoiceText(i, request, tokenizer, reader) for i in range(request.params.n)]
        self._mutex = threading.RLock()  # entered as it is, it is cheaper than by its condition
        self._lock = threading.Condition(self._mutex)
        self._waiting: deque[Event] = deque()
        self._sink: Callable[[Event], None] | None = None
        self._is_patient = False
        self._is_read = request.params.is_ended_by_text or reader is not None
        self._ends_early = request.params.is_ended_by_text or (reader is not None and reader.ends_early)
        self._paces: list[TokenInterval] = []  # by choice; none: every event wakes the reader
        self._gathered: list[Gathered] = []  # by choice; none: every delta is emitted
        self._traces: dict[int, RequestTrace | None] = {}  # by choice; there once the engine is done with it
        self._num_open = len(self._choices)

    def on_event(self, event: Event) -> None:
        """Called by the engine's thread; only passes the event on."""
        with self._mutex:
            self.num_arrived += len(event.token_ids)
            if event.finish_reason is not None:
                self._traces[event.index] = event.trace
                self._lock.notify_all()
            self._waiting.append(event)
            if self._wakes(event) and self._sink:
                self._bring(self._sink)

    def be_patient(self) -> None:
        """For readers that need the end alone: they are woken when a choice has ended, not by every step.

        Without effect where text ends a choice, because a reader must then look for stop strings or calls.
        """
        self._is_patient = not self._is_read

    def gather(self, interval: int) -> None:
        """For readers that pay for every delta: it has `interval` tokens (`TokenInterval`). Call it first.

        Where text may end a choice, its reader is woken for every token all the same, to end it in time.
        """
        if interval == 1:
            return
        self._gathered = [Gathered(interval) for _ in self._choices]
        if not self._ends_early:
            with self._lock:
                self._paces = [TokenInterval(interval) for _ in self._choices]
                for event in self._waiting:  # some may have come already
                    self._paces[event.index].is_due(event)

    def cancel(self) -> None:
        """Stop generating. Safe at any time, from any thread, also after the end."""
        self._cancel_request(self.request.id, None)

    def trace(self, index: int) -> RequestTrace | None:
        """Where the time of a choice that has ended went; None if the engine never took it.

        The engine reports a choice that a stop string ended one step later: this waits for it.
        """
        with self._lock:
            self._lock.wait_for(lambda: index in self._traces, LAST_WORD_S)
            return self._as_read(index, self._traces.get(index))

    @property
    def traces(self) -> Mapping[int, RequestTrace | None]:
        """The traces that have arrived already, by choice."""
        with self._lock:
            return {index: self._as_read(index, trace) for index, trace in self._traces.items()}

    def _as_read(self, index: int, trace: RequestTrace | None) -> RequestTrace | None:
        """With the tokens of the reply: behind a stop string the engine had made some more by then."""
        choice = self._choices[index]
        return replace(trace, num_output_tokens=choice.num_tokens) if trace and choice.ends_itself else trace

    @property
    def done(self) -> bool:
        return not self._num_open

    def __iter__(self) -> Iterator[Delta]:
        events: SimpleQueue[Event] = SimpleQueue()
        self._connect(events.put)
        try:
            while not self.done:
                for event in join_events([events.get(), *_rest(events)]):
                    yield from self._deltas(event)
        finally:
            self._leave()

    async def __aiter__(self) -> AsyncIterator[Delta]:
        import asyncio

        events: asyncio.Queue[Event] = asyncio.Queue()
        bridge = self._bridges.of(asyncio.get_running_loop())
        self._connect(lambda event: bridge.put(events, event))
        try:
            while not self.done:
                event = await events.get()
                # A client that reads slowly does not get all that has piled up at once.
                joined = join_events([event, *_rest(events)]) if self._is_patient else (event,)
                for i, event in enumerate(joined):
                    if i:
                        await asyncio.sleep(0)  # long texts are read on the loop of all other clients
                    for delta in self._deltas(event):
                        yield delta
        finally:
            self._leave()

    def _connect(self, sink: Callable[[Event], None]) -> None:
        with self._lock:
            self._bring(sink)
            self._sink = sink

    def _bring(self, sink: Callable[[Event], None]) -> None:
        while self._waiting:
            sink(self._waiting.popleft())

    def _wakes(self, event: Event) -> bool:
        if self._paces:
            is_due = self._paces[event.index].is_due(event)
            return is_due or not self._gathered[event.index].has_emitted
        return event.finish_reason is not None or not self._is_patient

    def _deltas(self, event: Event) -> Sequence[Delta]:
        delta = self._choices[event.index].push(event)
        if delta is not None and delta.finish_reason is not None:  # a choice has one such delta
            self._num_open -= 1
            if delta.finish_reason == "stop" and event.finish_reason is None:
                # A stop string: the engine does not know it.
                self._cancel_request(self.request.id, event.index)
        if self._gathered and event.prompt_progress is None:
            return self._gathered[event.index].push(event, delta)
        return () if delta is None else (delta,)

    def _leave(self) -> None:
        if not self.done:
            self.cancel()
