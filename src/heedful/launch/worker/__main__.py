"""python -m heedful.launch.worker FD SECONDS FOLDER: compiles kernels for the process at the other
end of a socket, one after the other, until that process is gone or has asked for nothing for
SECONDS. FOLDER, which holds what compilers write, is removed then."""

import json
import os
import shutil
import signal
import socket
import sys
import threading
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import Any

from heedful.launch.code import store
from heedful.launch.code.artifact import remedy
from heedful.launch.code.identity import cache_key, toolchain
from heedful.launch.worker.channel import BYE, CALL, ERROR, HELLO, KERNEL, receive, send
from heedful.launch.worker.codec import decode

_FILES_HELP = "the compiler's files lie in the system's temporary folder, or in that of TMPDIR"


def serve(channel: socket.socket, idle_seconds: float, folder: str) -> None:
    """Sends a first message, then answers, until nothing was asked for so long. folder: of this
    process alone."""
    _prefer_to_be_killed()
    from heedful.launch.code.triton_compat import compile_artifact

    asked: SimpleQueue[bytes] = SimpleQueue()
    threading.Thread(target=_listen, args=(channel, asked, folder), daemon=True).start()
    send(channel, HELLO, toolchain().encode())
    while True:
        try:
            request = asked.get(timeout=idle_seconds)
        except Empty:
            send(channel, BYE)
            _end(folder)
        try:
            call, arch = decode(request)
            made = store.dump(cache_key(call, arch), compile_artifact(call, arch))
        except Exception as error:
            send(channel, ERROR, json.dumps(_reported(error)).encode())
        else:
            send(channel, KERNEL, made)


def _listen(channel: socket.socket, asked: SimpleQueue[bytes], folder: str) -> None:
    """Notices that the other process is gone while a kernel is compiled, too."""
    while True:
        try:
            kind, data = receive(channel)
        except (EOFError, OSError):
            _end(folder)
        if kind == CALL:
            asked.put(data)


def _end(folder: str) -> None:
    """Ends this process and those that it started, such as an assembler, and removes their
    files."""
    # Never what `tempfile` names: that is the system's folder if this one is gone.
    shutil.rmtree(folder, ignore_errors=True)
    if os.getpgrp() == os.getpid():
        os.killpg(0, signal.SIGKILL)
    os._exit(0)


def _prefer_to_be_killed() -> None:
    """Asks the system to kill this process before the one that asked, if memory runs out."""
    with suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
        file.write("500")


def _reported(error: Exception) -> dict[str, Any]:
    """The error's message with advice, and whether the machine or the compiler is at fault."""
    text = str(error) or repr(error)
    helps = remedy(error, _FILES_HELP) or remedy(error.__cause__, _FILES_HELP)
    return {"text": text if text.endswith(helps) else text + helps, "machine": helps != ""}


if __name__ == "__main__":
    # An assembler that outlives this process is not to hold it open.
    os.set_inheritable(int(sys.argv[1]), False)
    serve(socket.socket(fileno=int(sys.argv[1])), float(sys.argv[2]), sys.argv[3])
