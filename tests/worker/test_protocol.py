from __future__ import annotations

import logging
import math
import os
import sys
from dataclasses import dataclass
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plait.config import EngineConfig
from plait.errors import BadFile, ContextTooLong, EngineError, InvalidField, OutOfMemory
from plait.loading.text_side import TextSource
from plait.request import Event, Grammar, Request, SamplingParams, ThinkingBudget, TokenLogprobs
from plait.server.gateway.access_log import TextFormat
from plait.server.http.errors import NotReady
from plait.spec.model import AttentionSpec, BranchSpec, MlpSpec, ModelSpec, NormSpec, ParallelSpec, Recurrent
from plait.spec.positions import RopeSpec
from plait.spec.recurrent import Mamba2Spec
from plait.spec.values import encode_spec_value
from plait.worker import protocol
from plait.worker.child import WireLog
from plait.worker.protocol import (
    BadFrame,
    Cancel,
    Events,
    Fault,
    Frames,
    FromChild,
    FromFront,
    Hello,
    SharedStatus,
    Submit,
    decode_error,
    decode_event,
    decode_spec,
    encode_error,
    encode_event,
    frame,
)
from plait.worker.start_process import new_status


def crossed(message: protocol.WireMessage, kinds: object = FromFront) -> protocol.WireMessage:
    (found,) = Frames[protocol.WireMessage](kinds).feed(frame(message))
    return found


def test_a_request_crosses_whole() -> None:
    request = Request(
        "r",
        (1, 2, 3),
        SamplingParams(seed=-(2**63), logit_bias={3: -1.5}, stop=("ä",), temperature=0.5),
        frozenset([4, 5]),
        boundaries=(2,),
        cache_salt="salt",
        priority=-3,
        timeout_s=1.5,
        resumed=((1, 2), None, ()),
        grammar=Grammar("regex", "a+", "structured_outputs"),
        thinking=ThinkingBudget(5, "<think>", "</think>", (7,)),
    )
    assert crossed(Submit(7, request, 1.25)) == Submit(7, request, 1.25)
    config = EngineConfig(max_num_seqs=3, set=("a=1",), speculate="ngram")
    assert crossed(Hello("a:b", "m", config, {"plait": 10})) == Hello("a:b", "m", config, {"plait": 10})


@pytest.mark.parametrize(
    "event",
    [
        Event("r", 1, (5,), num_cached_tokens=3),
        Event("r", 0, (5, 6), (TokenLogprobs(5, -0.1, ((5, -0.1), (6, -math.inf))), TokenLogprobs(6, -2.0))),
        Event("r", 0, prompt_logprobs=(), finish_reason="stop", stop_token_id=2),
        Event("r", 0, finish_reason="length", embedding=(0.1, 1e-30)),
    ],
)
def test_an_event_crosses_whole(event: Event) -> None:
    found = crossed(Events((encode_event(9, event),)), FromChild)
    assert isinstance(found, Events)
    assert decode_event("r", found.events[0]) == event
    assert found.events[0].key == 9


def test_errors_cross_by_class_message_and_field() -> None:
    event = Event("r", 0, finish_reason="error", error=InvalidField("n: too many", "n"))
    found = crossed(Events((encode_event(9, event),)), FromChild)
    assert isinstance(found, Events)
    error = decode_event("r", found.events[0]).error
    assert isinstance(error, InvalidField)
    assert (str(error), error.param) == ("n: too many", "n")
    fault = crossed(Fault(ContextTooLong("too long", "prompt")), FromChild)
    assert isinstance(fault, Fault)
    assert isinstance(fault.error, ContextTooLong)


def test_encode_error_rewords_errors_that_are_not_plaits() -> None:
    for error, kind, says in (
        (MemoryError(), OutOfMemory, "out of memory"),
        (OSError(2, "No such file or directory", "/x"), BadFile, "/x: No such file"),
        (RuntimeError("[enforce fail] DefaultCPUAllocator: can't"), OutOfMemory, "DefaultCPUAllocator"),
        (KeyError("x"), EngineError, "KeyError: 'x'"),
        (NotReady("later"), protocol.errors.CapacityError, "later"),
    ):
        found = decode_error(*encode_error(error))
        assert type(found) is kind
        assert says in str(found)
    assert type(decode_error("os.system", "boo", None)) is EngineError
    assert type(decode_error("annotations", "boo", None)) is EngineError


@given(st.binary(max_size=200))
def test_bytes_that_are_no_message_are_refused_and_nothing_else_happens(junk: bytes) -> None:
    frames = Frames[protocol.WireMessage](FromChild)
    try:
        for message in frames.feed(junk):
            assert isinstance(message, protocol.WireMessage)
    except BadFrame:
        pass


def test_frames_are_bounded_and_of_the_right_side(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(BadFrame, match="a frame of 4294967295 bytes"):
        list(Frames(FromFront).feed(b"\xff" * 4))
    with pytest.raises(BadFrame, match="no message"):
        list(Frames(FromFront).feed(frame(Events(()))))
    monkeypatch.setattr(protocol, "MAX_FRAME_NBYTES", 10)
    with pytest.raises(EngineError, match="is more than the engine's process takes"):
        frame(Hello("x" * 20, "m", EngineConfig(), {}))


@given(st.lists(st.integers(1, 50), min_size=1))
def test_messages_arrive_whole_however_they_are_cut(cuts: list[int]) -> None:
    sent = [Cancel(i, None if i % 2 else i) for i in range(40)]
    data, frames, found = b"".join(map(frame, sent)), Frames[Cancel](FromFront), []
    for i in range(10_000):
        size = cuts[i % len(cuts)]
        found += frames.feed(data[:size])
        data = data[size:]
        if not data:
            break
    assert found == sent


def test_a_spec_crosses_whole() -> None:
    attention = AttentionSpec(4, 2, 8, 0.5, RopeSpec(8, scaling={"rope_type": "linear", "factor": 2.0}))
    pair = ParallelSpec({"attn": attention, "ssm": Mamba2Spec(2, 4, 8, 1, 4)})
    layer = (BranchSpec("mix", pair, NormSpec(), NormSpec(1e-5), 0.5), BranchSpec("mlp", MlpSpec(32), None))
    spec = ModelSpec("falcon", 16, 100, (layer, layer), NormSpec(kind="layer"), 2048, logit_softcap=30.0)
    assert decode_spec(encode_spec_value(spec)) == spec
    for wrong in ({"": "os"}, {"": "Norm", "size": 3}, [1], {"": "Norm"}):
        with pytest.raises(BadFrame):
            decode_spec(wrong)


def test_protocol_packs_the_mixer_of_a_plug_in_as_what_it_is_derived_from() -> None:
    @dataclass(frozen=True, slots=True)
    class Decay(Recurrent):
        size: int

    spec = ModelSpec("decay", 16, 100, ((BranchSpec("decay", Decay(4), None),),), NormSpec(), 64)
    ((_, found),) = decode_spec(encode_spec_value(spec)).mixers()
    assert found == Recurrent()


def test_where_a_text_lies_crosses_even_if_its_tokens_are_no_unicode() -> None:
    source = TextSource(name="m", vocab_size=3, metadata={"tokenizer.ggml.tokens": ["a", "\udcff"]})
    assert TextSource.from_json(source.to_json()) == source


def test_a_page_is_read_as_it_was_written_also_by_another_owner() -> None:
    fd = new_status(3)
    ours, theirs = SharedStatus(os.dup(fd), 3), SharedStatus(fd, 3)
    assert (ours.planned, ours.busy_since_s, ours.arriving, ours.stats(2)) == ((), 0.0, 0, (0, 0))
    theirs.planned = [5, 7]
    theirs.begin()
    theirs.beat()
    theirs.arriving = 9
    theirs.put_stats([1, 1 << 40], 6)
    assert (ours.planned, ours.arriving, ours.stats(2), ours.num_seen) == ((5, 7), 9, (1, 1 << 40), 6)
    assert 0 < ours.busy_since_s <= ours.alive_s
    theirs.rest()
    theirs.planned = []
    assert (ours.planned, ours.busy_since_s) == ((), 0.0)
    ours.close()
    theirs.close()


@pytest.mark.parametrize("salt", ["\ud800", object()])
def test_what_cannot_be_written_is_an_error_of_its_request(salt: object) -> None:
    """It used to end the supervisor, and with it every open request."""
    request = Request("r", (1,), SamplingParams(), cache_salt=salt)  # type: ignore[arg-type]
    with pytest.raises(EngineError, match="a Submit cannot be sent"):
        frame(Submit(1, request, 0.0))


def test_a_traceback_of_the_engine_is_logged_in_lines_as_one_of_the_front(
    caplog: pytest.LogCaptureFixture,
) -> None:
    sent: list[protocol.WireMessage] = []
    wire = WireLog(SimpleNamespace(send=sent.append))  # type: ignore[arg-type]
    try:
        raise ValueError("bad")
    except ValueError:
        made = logging.LogRecord("plait", logging.ERROR, __file__, 1, "it %s", ("ends",), sys.exc_info())
    wire.emit(made)
    logged = crossed(sent[0], FromChild)
    assert isinstance(logged, protocol.Logged)
    logged.log()
    lines = TextFormat().format(caplog.records[0]).splitlines()
    assert lines[0].endswith("ERROR it ends")
    assert (lines[1], lines[-1]) == ("Traceback (most recent call last):", "ValueError: bad")
