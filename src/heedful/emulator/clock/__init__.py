"""The clock: recorded waves replayed on a compute unit, and from it the time of a launch.

`fingerprint()` names this state of its rules and numbers. Tables that it made carry it, so that a
change of any makes them stale. May import all of `emulator`.
"""

import hashlib
from pathlib import Path

# The modules that decide about times.
_RULES = ("constants", "grid", "replay", "work")


def fingerprint() -> str:
    """Twelve hexadecimal digits that change with any source that decides about times."""
    digest = hashlib.sha256()
    for name in _RULES:
        digest.update((Path(__file__).parent / f"{name}.py").read_bytes())
    return digest.hexdigest()[:12]
