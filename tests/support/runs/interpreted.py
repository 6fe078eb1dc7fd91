"""Checks run by Triton's interpreter.

The interpreter must be chosen before any kernel is imported, so they run in a process of their own,
which a test file starts on itself: its checks are marked `interpreted`, and one test marked
`starts_interpreter` calls `pass_in_the_interpreter(__file__)`.
"""

import os
import subprocess
import sys

import pytest

INTERPRETING = os.environ.get("TRITON_INTERPRET") == "1"
interpreted = pytest.mark.skipif(not INTERPRETING, reason="runs in the interpreting process")
# Set where somebody runs the test files in both kinds of processes himself.
APART = "TEST_INTERPRETER_APART"
starts_interpreter = pytest.mark.skipif(
    INTERPRETING or APART in os.environ, reason="starts the interpreting process"
)


def pass_in_the_interpreter(file: str) -> None:
    """AssertionError, with what pytest printed, unless every check of the file passes there."""
    command = [sys.executable, "-m", "pytest", "-x", "-p", "no:cacheprovider", file]
    # Under xdist's variables the inner run would take itself for a worker.
    kept = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST_")}
    done = subprocess.run(
        command, env={**kept, "TRITON_INTERPRET": "1"}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-1000:]
    assert " passed" in done.stdout and " failed" not in done.stdout, done.stdout[-1000:]
