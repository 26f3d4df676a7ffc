"""The engine: requests in, events out, one step at a time. A plain object without a thread.

Where the device samples by itself, the next step is planned and launched while one runs, and the engine
commits one step behind, so that the device does not wait for the host.

Nothing here knows text or tensors. A fault belongs to the request that causes it. So after a failed step its
sequences run again one by one, and only those that fail alone are failed.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

from msgspec.structs import replace

from plait.engine.adapters import no_adapters
from plait.engine.admission import OnEvent, OpenChoice, OpenRequest, RequestLimits, failure_event
from plait.engine.flight import Flight, NotLaunched, StepRunner, count_decoded, count_steps
from plait.engine.grammar_guide import GrammarGuide, refuse_guides
from plait.engine.metrics import Metrics
from plait.engine.sequences import SequenceMaker, add_steps, list_alone, list_choices
from plait.errors import DeadlineExceeded, DeviceLost, EngineError, InvalidField
from plait.request import Event, FinishReason, Request
from plait.schedule.plan import Chunk, StepPlan
from plait.schedule.scheduler import NOTHING, Drafts, Scheduler
from plait.schedule.speculate import Speculation
from plait.schedule.turns import Update

T = TypeVar("T")
MAX_FORCED = 8  # tokens that must come, computed as a draft
AUDIT_AFTER_S = 0.5  # of idleness, so that work that comes in bursts does not wait for an audit
RETRY_S = 0.001  # when there is work and no step is possible, for example until a guide is compiled
MAX_TRIES = 3  # of a sequence with failing steps, when the memory that they move may be the cause
log = logging.getLogger("plait.engine")
trace_log = logging.getLogger("plait.trace")


class Engine:
    """Owns the open requests. Not thread-safe: one thread calls everything (`engine.thread.EngineLoop`).

    Events are delivered during `step` and `cancel`. If `on_event` raises, that is logged and its request is
    cancelled. `guided` makes the guides of a request's choices. `clock`: seconds, as the scheduler's.
    """

    def __init__(
        self,
        runner: StepRunner,
        scheduler: Scheduler,
        *,
        vocab_size: int,
        max_model_len: int,
        speculation: Speculation | None = None,
        guided: Callable[[Request], Sequence[GrammarGuide]] = refuse_guides,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.runner, self.scheduler, self.speculation, self.clock = runner, scheduler, speculation, clock
        self._maker = SequenceMaker(canvas := scheduler.limits.canvas, vocab_size)
        self.limits = RequestLimits(vocab_size, max_model_len, has_canvas=canvas is not None)
        self.metrics, self.adapters, self.guided = Metrics(scheduler, clock), no_adapters(), guided
        self._requests: dict[str, OpenRequest] = {}
        self._choices: dict[int, OpenChoice] = {}  # by sequence id
        self._is_audited = True
        self._flight: Flight | None = None  # launched ahead of the step that was committed last
        self._landed_s = 0.0  # when that was
        self.num_ahead = 0  # steps that were launched while another one ran

    def submit(self, request: Request, on_event: OnEvent, arrival_s: float | None = None) -> None:
        """Queue a request; `on_event` gets new tokens, and a `finish_reason` once for each choice.

        `arrival_s`: when it came, on this engine's clock; None: now. Raises InvalidField, ContextTooLong,
        CapacityError (it can never fit) or QueueFull (not now).
        """
        self._is_audited = False
        request = self.limits.admit(request)
        if request.id in self._requests:
            raise InvalidField(f"request id {request.id!r} is in use by an open request", "id")
        arrived = self.clock() if arrival_s is None else arrival_s
        place = self.adapters.place(request.adapter, request.cache_salt)
        leaders = self._maker.make(request, arrived, place, self.guided)
        self.scheduler.add(*leaders)
        entry = self._requests[request.id] = OpenRequest(request, on_event)
        for seq in list_choices(request, leaders):
            choice = entry.open[seq.index] = OpenChoice(entry, seq, arrived)
            self._choices.update(dict.fromkeys(choice.member_ids, choice))
            if seq.num_output_tokens:  # it has begun, and its start was counted, in another engine
                choice.first_scheduled_s = choice.first_token_s = choice.last_token_s = self.clock()
        if not request.resumed:
            self.metrics.count_request(len(request.prompt_token_ids))

    def cancel(self, request_id: str, index: int | None = None) -> None:
        """End a request, or one choice of it, in any phase: what it holds is free at once.

        Each open choice gets a last event: "cancelled", or "stop" with an `index`: a stop string ended it.
        Unknown and finished ids are ignored, because the caller cannot know what has ended meanwhile.
        """
        self._is_audited = False
        if (entry := self._requests.get(request_id)) is None:
            return
        for choice in [c for i, c in entry.open.items() if index is None or i == index]:
            reason: FinishReason = "cancelled" if index is None else "stop"
            self._end(choice, Event(request_id, choice.sequence.index, finish_reason=reason))

    def step(self) -> bool:
        """Commit one plan, which may be several decode steps. False: there was nothing to do.

        Where its ticket allows it, the next plan is made and launched before that. Raises DeviceLost, after
        which the engine is of no more use.
        """
        self._is_audited, speculation = False, self.speculation
        began = speculation.begin() if speculation else None
        has_ended = self._end_hopeless()
        if (flight := self._flight) is None:
            drafts, is_observed = self._drafts()
            is_compared = speculation is not None and speculation.is_comparing(drafts)
            plan = self.scheduler.plan(drafts, is_observed=is_observed, is_compared=is_compared)
            if plan is None:
                return has_ended
            flight = self._flight = self._launch(plan)
        self._flight = self._launch_ahead(flight)
        num_tokens = self._land(flight)
        self._ask(lambda s: s.charge(num_tokens, began), None)
        return True

    def _launch(self, plan: StepPlan) -> Flight:
        began = self.clock()
        self._record_start(plan, began)
        try:
            ticket = self.runner.launch(plan, self.scheduler.sampling(plan))
        except Exception as error:
            ticket = NotLaunched(error)
        return Flight(plan, ticket, began)

    def _launch_ahead(self, flight: Flight) -> Flight | None:
        """Launch the step after one that runs, if it can be planned before that one's tokens are known."""
        if self.speculation is not None or not flight.ticket.can_be_followed:
            return None
        plan = self.scheduler.plan_ahead(flight.plan)
        self.num_ahead += plan is not None
        return None if plan is None else self._launch(plan)

    def _land(self, flight: Flight) -> int:
        """Wait for a step, commit its plan, deliver what it brings: so many tokens, 0 if some had none."""
        plan = flight.plan
        try:
            sampled = flight.ticket.wait()
        except DeviceLost:  # no step can run in this process, so none is tried again here
            raise
        except Exception as error:
            self._recover(plan, error)
            return 0
        ended = self.clock()
        try:
            updates = self.scheduler.commit(plan, sampled)
        except EngineError as error:
            self._recover(plan, error)
            return 0
        # A step that was launched ahead began to run when the one before it ended.
        seconds, self._landed_s = ended - max(flight.began, self._landed_s), ended
        num_steps = count_steps(plan, sampled)
        add_steps(plan, self._choices, num_steps - plan.num_steps)  # below 0: a stop token saved some
        nbytes = self.scheduler.memory.pools.count_moved(plan)
        self.metrics.count_steps(num_steps, plan.num_tokens, seconds)
        self.scheduler.costs.observe_plan(plan, num_steps, nbytes, seconds)
        self._show_progress(plan, ended)
        for update in updates:
            self._deliver(update, ended)
        return count_decoded(plan, updates)

    def step_or_wait(self) -> None:
        """`step`; where there is work and no step was possible, wait a moment. Raises what escapes a step."""
        if not self.step() and self.has_work:
            time.sleep(RETRY_S)

    @property
    def idle_s(self) -> float | None:
        """How long to wait for work before an `audit` is due; None: for ever, as there was one after work."""
        return None if self._is_audited else AUDIT_AFTER_S

    def audit(self) -> str:
        """Check the scheduler's block tables and repair them; returns what was wrong, and logs it.

        For idle moments: a wrong entry costs memory or time, and is no reason to end any request.
        """
        self._is_audited = True
        try:
            wrong = self.scheduler.repair()
        except Exception as error:  # the engine serves as before
            log.exception("the block tables are wrong and could not be repaired")
            return str(error)
        if wrong:
            self.metrics.num_repairs += 1
            log.error("the block tables were wrong and are repaired: %s", wrong)
        return wrong

    def refuse(self, request: Request, on_event: OnEvent, error: Exception) -> None:
        """Report by events why a request was never opened: for callers that can no longer raise."""
        entry = OpenRequest(request, on_event)
        self.metrics.count_refused(request.params.n)
        for choice in range(request.params.n):
            self._emit(entry, failure_event(request.id, choice, error))

    def fail_all(self, error: Exception) -> None:
        """End every open request with this error. Uses only the list of requests, as the engine is dead."""
        requests, self._requests = self._requests, {}
        for entry in requests.values():
            for index, choice in entry.open.items():
                self._emit(entry, self._last(choice, failure_event(entry.request.id, index, error)))

    def requests_in(self, plan: StepPlan) -> list[str]:
        """The ids of the requests in a plan or in the step that still runs, each once."""
        running: tuple[Chunk, ...] = self._flight.plan.chunks if self._flight else ()
        choices = (self._choices.get(chunk.seq_id) for chunk in (*running, *plan.chunks))
        return list(dict.fromkeys(choice.entry.request.id for choice in choices if choice is not None))

    @property
    def used_adapters(self) -> set[int]:
        return {choice.sequence.adapter for choice in self._choices.values()}

    @property
    def open_requests(self) -> Sequence[str]:
        return tuple(self._requests)

    @property
    def has_work(self) -> bool:
        return self._flight is not None or self.scheduler.has_work

    def stats(self) -> Mapping[str, int]:
        """The scheduler's numbers, and totals since startup; safe from any thread."""
        return {
            **self.scheduler.stats(),
            "num_places": self.scheduler.limits.max_num_seqs,
            **self.metrics.count_totals(),
        }

    def _end_hopeless(self) -> bool:
        """End choices past their deadline, or with a guide that cannot be followed. Returns if there were."""
        expired = [self._choices.get(seq_id) for seq_id in self.scheduler.expire(self.clock())]
        for choice in filter(None, expired):
            self._fail(choice, DeadlineExceeded(choice.overdue()))
        lost = [(choice, error) for choice in self._choices.values() if (error := choice.misguided_by)]
        for choice, error in lost:
            self._fail(choice, error)
        return bool(expired or lost)

    def _drafts(self) -> tuple[Drafts, bool]:
        """(draft tokens by sequence id, whether the drafter must read the tokens of the next step)."""
        speculation = self.speculation
        if speculation is None or speculation.rests(drafting := self.scheduler.list_drafting()):
            return {}, False
        num_left = sum(s.num_left for s in self.scheduler.running)
        num_rows = min(num_left, self.scheduler.limits.max_num_batched_tokens)
        found = self._ask(lambda speculation: speculation.drafts(drafting, num_rows), NOTHING)
        forced = {
            s.id: t for s in drafting if s.guide is not None and (t := s.guide.find_forced()[:MAX_FORCED])
        }
        return {**found, **forced}, self.speculation is not None and not self.speculation.is_resting

    def _ask(self, call: Callable[[Speculation], T], otherwise: T) -> T:
        """Call speculation. A failure turns it off from then on, and must not end any request."""
        if self.speculation is None:
            return otherwise
        try:
            return call(self.speculation)
        except Exception:
            log.exception("speculation failed and is off from now on; replies are the same, only slower")
            self.speculation = None
            return otherwise

    def _record_start(self, plan: StepPlan, now: float) -> None:
        add_steps(plan, self._choices, plan.num_steps)
        for choice in [self._choices[chunk.seq_id] for chunk in plan.chunks]:
            if choice.first_scheduled_s is None:  # a prompt's cached tokens count once, as the prompt does
                choice.first_scheduled_s, seq = now, choice.sequence
                self.metrics.count_start(now - choice.arrival_s, 0 if seq.index else seq.num_cached_tokens)

    def _show_progress(self, plan: StepPlan, now: float) -> None:
        """Emit how far the prompts in a step are, before the token that a prompt's last chunk brings."""
        for chunk in plan.chunks:
            choice = self._choices.get(chunk.seq_id)
            if choice is None or choice.first_token_s is not None or choice.first_scheduled_s is None:
                continue
            request, seq = choice.entry.request, choice.sequence
            if request.shows_progress and not request.resumed and seq.index == 0:  # resumed: more is computed
                progress, cached = (chunk.end, now - choice.first_scheduled_s), seq.num_cached_tokens
                event = Event(seq.request_id, 0, num_cached_tokens=cached, prompt_progress=progress)
                self._emit(choice.entry, event)

    def _deliver(self, update: Update, now: float) -> None:
        choice = self._choices.get(update.seq_id)
        # Cancelled by an event of the same step; or the beam of a choice that had ended before a restart.
        if choice is None or update.seq_id != choice.sequence.id:
            return
        if choice.misguided_by:  # in this very step: none of its tokens may be emitted
            self._fail(choice, choice.misguided_by)
            return
        self._count(choice, update, now)
        if update.event.finish_reason is not None:
            self._end(choice, update.event)
        else:
            self._emit(choice.entry, update.event)

    def _count(self, choice: OpenChoice, update: Update, now: float) -> None:
        num_tokens = len(update.event.token_ids)
        if update.num_drafted:
            choice.num_drafted_tokens += update.num_drafted
            choice.num_accepted_tokens += update.num_accepted
            self.metrics.count_draft(update.num_drafted, update.num_accepted)
            self._ask(lambda s: s.observe(update.seq_id, update.num_drafted, update.num_accepted), None)
        if not num_tokens:
            return
        choice.num_failures = 0
        if choice.first_token_s is None:
            choice.first_token_s = now
            self.metrics.count_first(num_tokens, now - choice.arrival_s)
        else:
            self.metrics.count_next(num_tokens, now - choice.last_token_s)
        choice.last_token_s = now

    def _recover(self, plan: StepPlan, error: Exception) -> None:
        """After a failed step, fail the sequence that was alone in it; several are tried one by one.

        If the step also moved memory, of any sequence, the cause may be the move, so there are more tries.
        A step that was launched after it has read what it left, and is dropped.
        """
        self.metrics.num_failed_steps += 1
        self._flight = None
        self.scheduler.isolate()  # before the sequence ends: nothing that it leaves may be found by others
        if (alone := list_alone(plan, self._choices)) is None:
            return
        alone[0].num_failures += 1
        if not plan.moves or alone[0].num_failures >= MAX_TRIES:
            for choice in alone:
                self._fail(choice, error)

    def _fail(self, choice: OpenChoice, error: Exception) -> None:
        self._end(choice, failure_event(choice.entry.request.id, choice.sequence.index, error))

    def _end(self, choice: OpenChoice, event: Event) -> None:
        """Close a choice, if its reader has not done so meanwhile, and send its last event."""
        entry, seq_id = choice.entry, choice.sequence.id
        if self._choices.pop(seq_id, None) is None:
            return
        for member in choice.member_ids:
            self._choices.pop(member, None)
        del entry.open[event.index]
        if choice.is_searched and entry.open:  # other choices still need its beams
            heir = next(iter(entry.open.values()))
            self._choices.update(dict.fromkeys(heir.member_ids, heir))
        else:
            self.scheduler.cancel(seq_id)
        if choice.sequence.guide is not None:
            choice.sequence.guide.is_wanted = False
        self._ask(lambda s: s.forget(choice.sequence, event.finish_reason), None)
        if not entry.open:
            del self._requests[entry.request.id]
        self._emit(entry, self._last(choice, event))

    def _last(self, choice: OpenChoice, event: Event) -> Event:
        """The last event of a choice, with its trace, which is counted and logged."""
        assert event.finish_reason is not None
        trace = choice.trace(self.clock(), event.finish_reason)
        self.metrics.count_end(trace)
        trace_log.debug("%s", trace)
        return replace(event, trace=trace, num_cached_tokens=trace.num_cached_tokens)

    def _emit(self, entry: OpenRequest, event: Event) -> None:
        try:
            entry.on_event(event)
        except Exception:
            # The reader is broken and gets no more events. The fault is logged; other requests go on.
            entry.on_event = lambda _: None
            log.exception("the reader of %s failed, and its request is ended", entry.request.id)
            self.cancel(entry.request.id)
