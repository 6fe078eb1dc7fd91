"""What a call does on the host: Python functions of heedful, and what they do to tensors."""

import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import heedful

ROOT = Path(heedful.__file__).parent
# What makes a tensor, by whether it moves what is in one.
VIEWS = {"transpose", "view", "squeeze", "unsqueeze", "permute", "flatten", "expand", "detach"}
COPIES = {"copy_", "contiguous", "clone", "to", "fill_", "zero_", "cat", "pad"}


def counted(call: Callable[[], Any]) -> Counter[str]:
    """Python functions of heedful that a call enters, and what they do to tensors."""
    counts: Counter[str] = Counter()

    def note(frame, event, argument) -> None:
        name = frame.f_code.co_filename
        if not name.startswith(str(ROOT)):
            counts["made"] += event == "call" and frame.f_code.co_name == "_poisoned"
            return
        if event == "call":
            # How a buffer is filled is another matter: the stand-in's driver wants it anew.
            counts["functions"] += "launch/" not in name and frame.f_code.co_name[0] != "<"
        elif event == "c_call":
            done = getattr(argument, "__name__", "")
            counts["views"] += done in VIEWS
            counts["copies"] += done in COPIES
            counts["made"] += done.startswith(("empty", "new_empty", "zeros"))

    sys.setprofile(note)
    try:
        call()
    finally:
        sys.setprofile(None)
    return counts


def known(call: Callable[[], Any]) -> Counter[str]:
    """What a call does that came before."""
    for _ in range(4):
        call()
    return counted(call)
