"""Models whose heads are shared out over ranks by transformers' own plans."""

import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("accelerate", reason="transformers shares models out by means of accelerate")


@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_a_model_shared_by_two_ranks_equals_the_whole_one(family):
    command = [sys.executable, "-m", "support.integrations.tensor_parallel", family]
    tests = Path(__file__).parents[2]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tests, timeout=240)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.count("agrees") == 2
