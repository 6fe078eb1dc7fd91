"""Messages between a process and its worker, in pieces as a socket gives them."""

import socket
import threading

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
