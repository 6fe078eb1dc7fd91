"""Tests side by side: what workers are told before they load anything."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("xdist")

TESTS = Path(__file__).parents[2]
PLUGIN = """
import os
from pathlib import Path

if worker := os.environ.get("PYTEST_XDIST_WORKER"):
    Path(__file__).with_name(worker).write_text(os.environ.get("OMP_NUM_THREADS", "any"))
"""


@pytest.mark.parametrize("given, threads", [({}, "1"), ({"OMP_NUM_THREADS": "3"}, "3")])
def test_a_worker_has_one_thread_before_its_plugins_are_loaded(tmp_path, given, threads):
    (tmp_path / "reads_threads.py").write_text(PLUGIN)
    told = ("OMP_NUM_THREADS", "PYTEST_XDIST_WORKER", "PYTEST_ADDOPTS")
    environment = {name: value for name, value in os.environ.items() if name not in told} | given
    environment["PYTHONPATH"] = os.pathsep.join([str(tmp_path), *filter(None, sys.path)])
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-n",
        "1",
        "-p",
        "reads_threads",
        "-k",
        "test_what_stands_for_an_int_is_that_int",
    ]
    command += ["-p", "no:cacheprovider", str(TESTS / "pure" / "test_numbers.py")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert (tmp_path / "gw0").read_text() == threads, done.stdout + done.stderr
