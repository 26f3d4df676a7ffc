"""Close a listening socket without resets: connections that the kernel has taken are accepted first."""

from __future__ import annotations

import asyncio
import ctypes
import select
import socket
import struct
import sys
from collections.abc import Iterable
from contextlib import suppress

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
