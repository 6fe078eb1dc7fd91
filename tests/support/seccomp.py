"""Filters of system calls, as containers have them: for the process that asks, and all it starts.

    python seccomp.py ACTION CALLS COMMAND...

denies the named calls (`CALLS`, with commas between) in a command. ACTION: `EPERM` or `kill`.
"""

import ctypes
import os
import platform
import struct
import sys

IS_SUPPORTED = sys.platform == "linux" and platform.machine() == "x86_64"
# Numbers of x86-64. "process" is how processes are made, and leaves threads.
CALLS = {"clone": 56, "fork": 57, "vfork": 58, "execve": 59, "socketpair": 53, "connect": 42}
CALLS |= {"clone3": 435, "mkdir": 83}
_X86_64, _ALLOW, _KILL, _ERRNO = 0xC000003E, 0x7FFF0000, 0x80000000, 0x50000
_THREAD, _NOT_THERE = 0x10000, 38
_LOAD, _EQUAL, _BITS, _RETURN = 0x20, 0x15, 0x45, 0x06


def deny(calls: list[str], action: str) -> None:
    """Denies calls from now on, in this process and those that it starts. "process" stands for all
    calls that start one. Raises OSError where the system has no such filters."""
    answer = _KILL if action == "kill" else _ERRNO | 1
    rules = [(_LOAD, 0, 0, 4), (_EQUAL, 1, 0, _X86_64), (_RETURN, 0, 0, _ALLOW), (_LOAD, 0, 0, 0)]
    for name in calls:
        if name != "process":
            rules += [(_EQUAL, 0, 1, CALLS[name]), (_RETURN, 0, 0, answer)]
            continue
        # libc asks by the older call then, whose flags a filter can read.
        rules += [(_EQUAL, 0, 1, CALLS["clone3"]), (_RETURN, 0, 0, _ERRNO | _NOT_THERE)]
        for old in ("fork", "vfork"):
            rules += [(_EQUAL, 0, 1, CALLS[old]), (_RETURN, 0, 0, answer)]
        rules += [(_EQUAL, 0, 4, CALLS["clone"]), (_LOAD, 0, 0, 16), (_BITS, 1, 0, _THREAD)]
        rules += [(_RETURN, 0, 0, answer), (_RETURN, 0, 0, _ALLOW)]
    rules.append((_RETURN, 0, 0, _ALLOW))
    code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *rule) for rule in rules))
    program = struct.pack("H6xP", len(rules), ctypes.addressof(code))
    libc = ctypes.CDLL(None, use_errno=True)
    for words in ((38, 1, 0, 0, 0), (22, 2, program, 0, 0)):
        if libc.prctl(*words):
            raise OSError(ctypes.get_errno(), "prctl")


if __name__ == "__main__":
    deny(sys.argv[2].split(","), sys.argv[1])
    os.execv(sys.argv[3], sys.argv[3:])
