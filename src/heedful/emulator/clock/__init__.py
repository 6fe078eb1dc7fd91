"""The clock: recorded waves replayed on a compute unit, and from it the time of a launch.

`fingerprint()` names this state of the clock. Tables that it made carry it, so that a change of any
rule or number makes them stale.
"""

import hashlib
from pathlib import Path


def fingerprint() -> str:
    """Twelve hexadecimal digits that change with any source of the clock."""
    digest = hashlib.sha256()
    for path in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:12]
