"""The engine: requests in, events out, one step at a time. A plain object without a thread.

Nothing here knows text or tensors. A fault belongs to the request that causes it: after a failed step its
sequences run again one by one, and only those that fail alone are failed.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Protocol

from plait.errors import ContextTooLong, EngineError, InvalidField, PlaitError
from plait.ops.seed import choice_seed
from plait.request import Event, Request
from plait.schedule.plan import Plan, Sampled, SamplingBatch
from plait.schedule.scheduler import Scheduler
from plait.schedule.sequence import Sequence as TokenSequence
from plait.schedule.sequence import Update

OnEvent = Callable[[Event], None]


class Runner(Protocol):
    """Computes a step: one answer for every row of `sampling`, in order."""

    def execute(self, plan: Plan, sampling: SamplingBatch) -> list[Sampled]: ...


@dataclass(slots=True)
class OpenRequest:
    """A request that has choices without an end. `open`: sequence id by choice index."""

    request: Request
    on_event: OnEvent
    open: dict[int, int] = field(default_factory=dict)


class Engine:
    """Owns the open requests. Not thread-safe: one thread calls everything (`engine.loop.EngineLoop`).

    Events are delivered during `step` and `cancel`, on the caller's thread. An `on_event` that raises has its
    request cancelled; the last of such faults are in `reader_faults` as (request id, exception).
    """

    def __init__(self, runner: Runner, scheduler: Scheduler, *, vocab_size: int, max_model_len: int) -> None:
        self.runner, self.scheduler = runner, scheduler
        self.vocab_size, self.max_model_len = vocab_size, max_model_len
        self.num_steps = self.num_prompt_tokens = self.num_output_tokens = 0
        self.reader_faults: deque[tuple[str, Exception]] = deque(maxlen=16)
        self._requests: dict[str, OpenRequest] = {}
        self._ids = count(1)
        self._seeds = random.SystemRandom()

    def submit(self, request: Request, on_event: OnEvent) -> None:
        """Queue a request; `on_event` gets new tokens, and a `finish_reason` once for each choice.

        Raises InvalidField, ContextTooLong, CapacityError (it can never fit) or QueueFull (not now).
        """
        self.validate(request)
        if request.id in self._requests:
            raise InvalidField(f"request id {request.id!r} is in use by an open request", "id")
        sequences = self._sequences(request)
        self.scheduler.add(*sequences)
        self._requests[request.id] = OpenRequest(request, on_event, {seq.index: seq.id for seq in sequences})
        self.num_prompt_tokens += len(request.prompt_token_ids)

    def validate(self, request: Request) -> None:
        """Every check that does not depend on who else is there; safe from any thread."""
        params, length = request.params, len(request.prompt_token_ids)
        if not length:
            raise InvalidField("prompt: it has no tokens; send at least one", "prompt")
        bad = next((i for i in request.prompt_token_ids if not 0 <= i < self.vocab_size), None)
        if bad is not None:
            raise InvalidField(f"prompt: token id {bad} is outside 0..{self.vocab_size - 1}", "prompt")
        bad = next((i for i in params.logit_bias if not 0 <= i < self.vocab_size), None)
        if bad is not None:
            raise InvalidField(
                f"logit_bias: token id {bad} is outside 0..{self.vocab_size - 1}", "logit_bias"
            )
        if params.max_tokens is not None and params.min_tokens > params.max_tokens:
            raise InvalidField(
                f"min_tokens: {params.min_tokens} is more than max_tokens ({params.max_tokens})", "min_tokens"
            )
        needed = length + (0 if params.max_tokens == 0 else max(params.min_tokens, 1))
        if needed > self.max_model_len:
            raise ContextTooLong(
                f"the prompt has {length} tokens and at least {needed - length} must follow; the context is "
                f"{self.max_model_len} tokens: shorten the prompt, or start with a larger --max-model-len",
                "prompt",
            )
        self.scheduler.check_fits(length, self._max_len(request))

    def cancel(self, request_id: str, index: int | None = None) -> None:
        """End a request, or one choice of it, in any phase: what it holds is free at once.

        Each open choice gets a last event with finish_reason "cancelled". Unknown ids and finished requests
        are left alone: who cancels cannot know what has finished meanwhile.
        """
        entry = self._requests.get(request_id)
        if entry is None:
            return
        for choice in [i for i in entry.open if index is None or i == index]:
            self._end(entry, Event(request_id, choice, finish_reason="cancelled"))

    def step(self) -> bool:
        """Plan, run and commit one step. False if there was nothing to do."""
        plan = self.scheduler.plan()
        if plan is None:
            return False
        try:
            sampled = self.runner.execute(plan, self.scheduler.sampling(plan))
        except Exception as error:
            self._recover(plan, error)
            return True
        try:
            updates = self.scheduler.commit(plan, sampled)
        except EngineError as error:
            self._recover(plan, error)
            return True
        self.num_steps += 1
        for update in updates:
            self._deliver(update)
        return True

    def refuse(self, request: Request, on_event: OnEvent, error: Exception) -> None:
        """Tell a request that was never opened why, by events: for callers that can no longer raise."""
        entry = OpenRequest(request, on_event)
        for choice in range(request.params.n):
            self._emit(entry, _failure(request.id, choice, error))

    def fail_all(self, error: Exception) -> None:
        """End every open request with this error. Trusts only the list of requests: the engine is dead."""
        requests, self._requests = self._requests, {}
        for entry in requests.values():
            for choice in entry.open:
                self._emit(entry, _failure(entry.request.id, choice, error))

    @property
    def open_requests(self) -> Sequence[str]:
        return tuple(self._requests)

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work

    def stats(self) -> Mapping[str, int]:
        """The scheduler's numbers, and totals since the start; safe from any thread."""
        return {
            **self.scheduler.stats(),
            "num_steps": self.num_steps,
            "num_prompt_tokens": self.num_prompt_tokens,
            "num_output_tokens": self.num_output_tokens,
        }

    def _sequences(self, request: Request) -> list[TokenSequence]:
        params = request.params
        seed = self._seeds.getrandbits(63) if params.seed is None else params.seed
        return [
            TokenSequence(
                id=next(self._ids),
                request_id=request.id,
                index=index,
                token_ids=list(request.prompt_token_ids),
                params=params,
                stop_token_ids=request.stop_token_ids,
                max_len=self._max_len(request),
                seed=choice_seed(seed, index),
                wants_prompt_logprobs=params.prompt_logprobs is not None and index == 0,
            )
            for index in range(params.n)
        ]

    def _max_len(self, request: Request) -> int:
        """Tokens a choice of this request has when it must end."""
        if request.params.max_tokens is None:
            return self.max_model_len
        return min(len(request.prompt_token_ids) + request.params.max_tokens, self.max_model_len)

    def _deliver(self, update: Update) -> None:
        entry = self._requests.get(update.request_id)
        if entry is None or update.index not in entry.open:  # cancelled by an event of the same step
            return
        self.num_output_tokens += len(update.token_ids)
        event = Event(
            update.request_id,
            update.index,
            token_ids=update.token_ids,
            logprobs=update.logprobs,
            prompt_logprobs=update.prompt_logprobs,
            finish_reason=update.finish_reason,
            stop_token_id=update.stop_token_id,
        )
        if update.finish_reason is not None:
            self._end(entry, event)
        else:
            self._emit(entry, event)

    def _recover(self, plan: Plan, error: Exception) -> None:
        """A step failed: the sequence that was alone in it is failed, several are tried one by one."""
        if len(plan.chunks) > 1:
            self.scheduler.isolate()
            return
        seq_id = plan.chunks[0].seq_id
        for entry in [*self._requests.values()]:
            for choice, open_id in [*entry.open.items()]:
                if open_id == seq_id:
                    self._end(entry, _failure(entry.request.id, choice, error))

    def _end(self, entry: OpenRequest, event: Event) -> None:
        """Close a choice, if its reader has not done so meanwhile, and send its last event."""
        seq_id = entry.open.pop(event.index, None)
        if seq_id is None:
            return
        self.scheduler.cancel(seq_id)
        if not entry.open:
            del self._requests[entry.request.id]
        self._emit(entry, event)

    def _emit(self, entry: OpenRequest, event: Event) -> None:
        try:
            entry.on_event(event)
        except Exception as error:
            # Its reader is broken and cannot be told; nobody else may suffer, and the fault must be seen.
            entry.on_event = _nobody
            self.reader_faults.append((entry.request.id, error))
            self.cancel(entry.request.id)


def _failure(request_id: str, choice: int, error: Exception) -> Event:
    """The last event of a choice that failed; what is not ours is wrapped, its cause kept."""
    shown = error
    if not isinstance(error, PlaitError):
        shown = EngineError(f"the engine failed at this request: {type(error).__name__}: {error}")
        shown.__cause__ = error
    return Event(request_id, choice, finish_reason="error", error=shown)


def _nobody(event: Event) -> None:
    """Where the events of a request go whose reader is broken."""
