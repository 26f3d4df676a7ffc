"""Listening sockets: closed without resets, and https with a certificate that can be replaced meanwhile."""

from __future__ import annotations

import asyncio
import ctypes
import logging
import os
import select
import socket
import ssl
import struct
import sys
from collections.abc import Iterable
from contextlib import suppress

from plait.config import ServerConfig
from plait.errors import ConfigError

HANDSHAKE_S = 0.2  # from the kernel's answer to a connection to the client's, over a long way
MAX_TURNS = 1000  # of the loop, where new connections cannot be refused meanwhile
SO_ATTACH_FILTER = 26  # asm-generic/socket.h
# For a TCP socket a packet begins with its TCP header. The filter drops those with SYN and without ACK.
_NO_SYN = (
    (0x30, 0, 0, 13),  # load the byte of flags
    (0x54, 0, 0, 0x12),  # keep SYN and ACK
    (0x15, 0, 1, 0x02),  # SYN alone?
    (0x06, 0, 0, 0),  # then drop it
    (0x06, 0, 0, 0xFFFFFFFF),
)


async def drain(sockets: Iterable[socket.socket]) -> None:
    """Let the event loop accept every connection that is complete; on Linux no further one begins.

    Then the sockets can be closed. A client of which the first packet was dropped sends it again after a
    second. Then the next server answers it, or it is refused, which is no reset.
    """
    listening = [sock for sock in sockets if sock.fileno() >= 0]
    for sock in listening:
        with suppress(OSError):
            refuse_handshakes(sock)
    await asyncio.sleep(HANDSHAKE_S)
    for _ in range(MAX_TURNS):
        if not select.select(listening, (), (), 0)[0]:
            return
        await asyncio.sleep(0)


def refuse_handshakes(sock: socket.socket) -> None:
    """Begin no more connections; those that have begun go on. Raises OSError where that cannot be."""
    if sys.platform != "linux":
        raise OSError("the kernel has no filter for it")
    code = b"".join(struct.pack("HBBI", *line) for line in _NO_SYN)
    held = ctypes.create_string_buffer(code, len(code))
    program = struct.pack("HP", len(_NO_SYN), ctypes.addressof(held))
    sock.setsockopt(socket.SOL_SOCKET, SO_ATTACH_FILTER, program)


logger = logging.getLogger("plait.server")


class Certificate:
    """The server's certificate and key, as TLS uses them. New handshakes use what was loaded last."""

    def __init__(self, cert: str, key: str) -> None:
        self.context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        self.context.set_alpn_protocols(["http/1.1"])
        self._cert, self._key = cert, key
        self._loaded = self._stamp()
        self._load()

    def reload(self) -> None:
        """Load the files as they are now. Raises ConfigError, and keeps what was loaded before."""
        self._loaded = self._stamp()
        self._check()
        self._load()
        logger.info("the TLS certificate was loaded again")

    def reload_changed(self) -> None:
        """Load the files if they are others than at the last time; a failure is logged."""
        if self._stamp() == self._loaded:
            return
        try:
            self.reload()
        except ConfigError as error:
            logger.error("%s; the certificate of before stays in use", error)

    def _check(self) -> None:
        """Try them in a context of their own: half a change must not reach the one in use."""
        _load_chain(ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), self._cert, self._key)

    def _load(self) -> None:
        _load_chain(self.context, self._cert, self._key)

    def _stamp(self) -> tuple[tuple[int, int, int] | None, ...]:
        return _file_stamp(self._cert), _file_stamp(self._key)


def certificate(config: ServerConfig) -> Certificate | None:
    """None: plain HTTP. Raises ConfigError for files that cannot be used."""
    if config.tls_cert is None or config.tls_key is None:
        return None
    return Certificate(config.tls_cert, config.tls_key)


def _load_chain(context: ssl.SSLContext, cert: str, key: str) -> None:
    try:
        context.load_cert_chain(cert, key, password=_no_password)
    except (OSError, ValueError) as error:  # ssl.SSLError is an OSError
        advice = "give the PEM files of a certificate and of its key"
        text = f"tls_cert, tls_key: {cert} and {key} cannot be used: {error}; {advice}"
        raise ConfigError(text) from error


def _no_password() -> str:
    raise ValueError("the key is encrypted; give one that is not, readable by the server alone")


def _file_stamp(path: str) -> tuple[int, int, int] | None:
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size, found.st_ino
