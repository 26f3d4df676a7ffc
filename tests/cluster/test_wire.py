"""What is not sealed by the other end is never decoded, and no stranger is served."""

from __future__ import annotations

import contextlib
import socket
import struct

import pytest

from plait.cluster.connection import HANDSHAKE_S
from plait.cluster.replica_server import ReplicaServer
from plait.cluster.resume_points import ReplicaReport
from plait.cluster.wire import (
    NONCE_NBYTES,
    PREFACE,
    CancelLease,
    FrameReader,
    FrameWriter,
    LeaseEvent,
    LeaseEvents,
    MessageDecoder,
    OpenLease,
    PointsReport,
    SessionKeys,
    ToGateway,
    ToReplica,
    draw_nonce,
    encode_message,
)
from plait.errors import EngineError, InvalidField
from plait.request import Event, Request
from plait.worker.protocol import MAX_FRAME_NBYTES, BadFrame, WireMessage, encode_event
from tests.cluster.replicas import ThreadEngine, make_card, make_request
from tests.patience import PATIENCE_S

KEY = b"k" * 32


def test_frames_arrive_whole_in_any_chunks() -> None:
    writer, reader = FrameWriter(KEY), FrameReader(KEY)
    bodies = [b"", b"one", b"x" * 5000]
    sent = b"".join(writer.seal(body) for body in bodies)
    found = [body for at in range(0, len(sent), 7) for body in reader.feed(sent[at : at + 7])]
    assert found == bodies


@pytest.mark.parametrize("at", [3, 4, 19, 20, -1])
def test_a_frame_with_a_changed_byte_is_refused(at: int) -> None:
    sent = bytearray(FrameWriter(KEY).seal(b"a body"))
    sent[at] ^= 1
    with pytest.raises(BadFrame):
        assert not [*FrameReader(KEY).feed(bytes(sent) + b"more")]


@pytest.mark.parametrize("order", [(0, 0), (1,), (0, 2), (1, 0)])
def test_frames_that_are_repeated_lost_or_exchanged_are_refused(order: tuple[int, ...]) -> None:
    writer = FrameWriter(KEY)
    frames = [writer.seal(b"same"), writer.seal(b"same"), writer.seal(b"same")]
    with pytest.raises(BadFrame, match="changed, lost or repeated"):
        list(FrameReader(KEY).feed(b"".join(frames[i] for i in order)))


def test_a_frame_that_is_sent_back_is_refused() -> None:
    keys = SessionKeys.derive(KEY, draw_nonce(), draw_nonce())
    sent = FrameWriter(keys.to_replica).seal(b"a body")
    with pytest.raises(BadFrame):
        list(FrameReader(keys.to_gateway).feed(sent))


def test_a_length_beyond_the_limit_is_refused_before_anything_is_kept() -> None:
    head = struct.pack(">I16s", MAX_FRAME_NBYTES + 1, b"")
    with pytest.raises(BadFrame, match="the limit is"):
        list(FrameReader(KEY).feed(head))


@pytest.mark.parametrize(
    "message",
    [
        OpenLease(7, make_request("a", 5, n=2, timeout_s=1.5)),
        OpenLease(7, make_request("a", 5), 3),
        PointsReport(ReplicaReport(1, 5, 2, (b"p" * 16,), begins=True), 7),
        CancelLease(7, None),
        LeaseEvents((LeaseEvent(3, encode_event(7, Event("a~7", 1, (5, 6)))),)),
        LeaseEvents((LeaseEvent(0, encode_event(7, Event("a~7", 0, finish_reason="error"))),)),
        make_card(),
    ],
    ids=lambda message: type(message).__name__,
)
def test_messages_arrive_as_they_were(message: WireMessage) -> None:
    decoders = MessageDecoder[ToReplica](ToReplica), MessageDecoder[ToGateway](ToGateway)
    body, is_request = encode_message(message), isinstance(message, OpenLease | CancelLease)
    assert decoders[0 if is_request else 1].decode(body) == message


def test_errors_arrive_with_class_text_and_field() -> None:
    failed = Event("a~7", 0, finish_reason="error", error=InvalidField("seed: it is odd", "seed"))
    body = encode_message(LeaseEvents((LeaseEvent(0, encode_event(7, failed)),)))
    found = MessageDecoder[ToGateway](ToGateway).decode(body)
    assert isinstance(found, LeaseEvents)
    assert found.events[0].event.more is not None
    error = found.events[0].event.more.error
    assert isinstance(error, InvalidField)
    assert (str(error), error.param) == ("seed: it is odd", "seed")


@pytest.mark.parametrize("body", [b"", b"\xc1", b"\x93\x01\x02\x03", b"\x92\x09\x01", b"\x80"])
def test_a_body_that_is_no_message_is_refused(body: bytes) -> None:
    with pytest.raises(BadFrame, match="no message"):
        MessageDecoder[ToGateway](ToGateway).decode(body)


def test_what_cannot_be_written_is_an_error_of_the_request() -> None:
    with pytest.raises(EngineError, match="cannot be sent"):
        encode_message(OpenLease(1, Request("\udcff", (1,), make_request("a").params)))


def test_a_stranger_gets_no_proof_and_no_card() -> None:
    engine = ThreadEngine()
    server = ReplicaServer(engine, make_card())
    try:
        for proof in (b"\0" * 32, SessionKeys.derive(b"wrong" * 6, b"n" * 32, b"m" * 32).gateway_proof):
            with socket.create_connection(server.address[:2], timeout=HANDSHAKE_S + 1) as sock:
                greeting = sock.recv(len(PREFACE) + NONCE_NBYTES, socket.MSG_WAITALL)
                assert greeting.startswith(PREFACE)
                sock.sendall(b"m" * NONCE_NBYTES + proof)
                with contextlib.suppress(ConnectionResetError):
                    assert sock.recv(1) == b""
        assert server.num_open == 0
    finally:
        server.close()
        engine.close()


def test_a_lease_that_never_arrives_is_not_held_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("plait.cluster.replica_server.HOLD_S", 0.05)
    engine = ThreadEngine()
    server = ReplicaServer(engine, make_card())
    try:
        server.hold("gateway", 1).result(PATIENCE_S)
    finally:
        server.close()
        engine.close()
