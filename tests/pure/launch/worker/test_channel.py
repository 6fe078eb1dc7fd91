"""Messages between a process and its worker, in pieces as a socket gives them."""

import socket
import threading
import time

import pytest

from heedful.launch.worker import channel


@pytest.mark.parametrize("cut", [1, 5, -2, -1])
def test_a_message_in_two_pieces_is_whole(cut):
    near, far = socket.socketpair()
    sent = bytearray()

    class Pieces:
        def sendall(self, data, flags=0):
            sent.extend(data)

    channel.send(Pieces(), b"k", b"some bytes")  # type: ignore[arg-type]  (a stand-in for a socket)
    with near, far:
        far.sendall(sent[:cut])
        later = threading.Timer(0.05, far.sendall, [sent[cut:]])
        later.start()
        assert channel.receive(near) == (b"k", b"some bytes")
        later.join()


def test_an_end_that_is_gone_amid_a_message_is_an_end():
    near, far = socket.socketpair()
    with near:
        with far:
            channel.send(far, b"k", b"some bytes")
            near.recv(3)
        with pytest.raises(EOFError):
            channel.receive(near)


@pytest.mark.parametrize("data", [b"", b"x", bytes(3_000_000)])
def test_messages_are_whole_and_one_after_the_other(data):
    near, far = socket.socketpair()
    with near, far:
        both = [(b"K", data), (b"E", b"")]
        sender = threading.Thread(
            target=lambda: [channel.send(far, kind, told) for kind, told in both]
        )
        sender.start()
        assert [channel.receive(near) for _ in both] == both
        sender.join()


@pytest.mark.parametrize(
    ("length", "is_one"),
    [(0, False), (1, True), (channel.MOST_BYTES, True), (channel.MOST_BYTES + 1, False)],
)
def test_a_message_of_no_or_of_too_many_bytes_is_the_end(length, is_one, monkeypatch):
    """Before it is read."""
    read = channel._read
    seen = []

    def noted(near, size, deadline):
        seen.append(size)
        return read(near, size, deadline) if size == 8 else b"K" + bytes(3)

    monkeypatch.setattr(channel, "_read", noted)
    near, far = socket.socketpair()
    with near, far:
        far.sendall(length.to_bytes(8, "big"))
        if is_one:
            assert channel.receive(near) == (b"K", bytes(3)) and seen == [8, length]
        else:
            with pytest.raises(EOFError, match=f"a message of {length} bytes"):
                channel.receive(near)


def test_a_deadline_is_of_the_whole_message():
    near, far = socket.socketpair()
    with near, far:
        far.sendall((9).to_bytes(8, "big") + b"K")
        began = time.monotonic()
        with pytest.raises(TimeoutError):
            channel.receive(near, began + 0.1)
        assert time.monotonic() - began >= 0.1
        # One that is over still gives what is there.
        far.sendall(b"12345678" + (1).to_bytes(8, "big") + b"B")
        near.settimeout(5)
        assert channel._read(near, 8, None) == b"12345678"
        assert channel.receive(near, time.monotonic() - 1) == (b"B", b"")


def test_an_end_that_breaks_off_is_an_end_and_a_message_to_it_an_error():
    near, far = socket.socketpair()
    far.close()
    with near:
        with pytest.raises(OSError):
            channel.send(near, b"K", b"x")
        with pytest.raises(EOFError, match="the other end is gone"):
            channel.receive(near)

    class Reset:
        def recv(self, size):
            raise ConnectionResetError

    with pytest.raises(EOFError, match="the other end is gone"):
        channel.receive(Reset())  # type: ignore[arg-type]  (a stand-in for a socket)
