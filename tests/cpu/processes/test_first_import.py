"""What a first use imports."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

import heedful

_CODE = """
import gc, sys
import torch
found = []
on = sys.argv[1] == "on"
if not on:
    gc.disable()
import heedful
# The next object is one too many.
gc.set_threshold(1, 1, 1)
gc.callbacks.append(lambda phase, facts: found.append(phase))
heedful.flash_attn_func
gc.callbacks.clear()
assert gc.isenabled() is on
print(found.count("start"))
"""


@pytest.mark.parametrize("collector", ["on", "off"])
def test_an_import_collects_nothing_and_leaves_the_collector_as_it_was(collector):
    """A collection on the way goes through all that torch has made."""
    env = {**os.environ, "PYTHONPATH": str(Path(heedful.__file__).parents[1])}
    command = [sys.executable, "-c", _CODE, collector]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    # One may come before the import, and one behind it.
    assert int(done.stdout) <= 2
