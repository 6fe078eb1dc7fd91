"""Bits and budgets hold as XLA compiles by default: the other tests have it compile fast
(tests/cpu/conftest.py)."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("jax")

FOLDER = Path(__file__).parent
CHECKS = [
    "test_quantised_append.py::test_keys_that_are_rotated_are_rounded_before_they_are_quantised"
    "[groups-True-torch.bfloat16]",
    "test_gradients.py::test_the_gradients_are_the_oracles[heads_q=4-causal=True-sink=True]",
]


def test_a_forward_its_gradients_and_an_append_are_right_by_xlas_own_settings():
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    kept = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST_")}
    done = subprocess.run(
        [*command, *(str(FOLDER / name) for name in CHECKS)],
        env=kept | {"XLA_FLAGS": ""},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-1000:]
