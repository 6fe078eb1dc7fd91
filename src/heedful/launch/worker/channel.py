"""The messages between a process and its worker: whole messages over a pair of sockets.

A message is its length in 8 bytes, a letter that says what it is, and the rest. Sockets, because a
write to one whose other end is gone can be told to send no SIGPIPE, which would end programs that
do not handle it.
"""

import socket
import struct
import time

# The worker's first message: the toolchain that it found. A call to compile; a compiled kernel as a
# file of the cache; why there is none; that nobody asked for long and the worker ends.
HELLO, CALL, KERNEL, ERROR, BYE = (letter.encode() for letter in "HCKEB")
_LENGTH = struct.Struct(">Q")
MOST_BYTES = 1 << 30
_NO_SIGNAL = getattr(socket, "MSG_NOSIGNAL", 0)


def send(channel: socket.socket, kind: bytes, data: bytes = b"") -> None:
    """Raises OSError where the other end is gone."""
    channel.sendall(_LENGTH.pack(1 + len(data)) + kind + data, _NO_SIGNAL)


def receive(channel: socket.socket, deadline: float | None = None) -> tuple[bytes, bytes]:
    """The next message: its letter and the rest. deadline: of time.monotonic.

    Raises EOFError where the other end is gone, TimeoutError after the deadline.
    """
    (length,) = _LENGTH.unpack(_read(channel, _LENGTH.size, deadline))
    if not 0 < length <= MOST_BYTES:
        raise EOFError(f"a message of {length} bytes")
    message = _read(channel, length, deadline)
    return message[:1], message[1:]


def _read(channel: socket.socket, size: int, deadline: float | None) -> bytes:
    message = bytearray()
    while len(message) < size:
        if deadline is not None:
            channel.settimeout(max(0.001, deadline - time.monotonic()))
        try:
            part = channel.recv(min(size - len(message), 1 << 20))
        except ConnectionError:
            part = b""
        if not part:
            raise EOFError("the other end is gone")
        message += part
    return bytes(message)
