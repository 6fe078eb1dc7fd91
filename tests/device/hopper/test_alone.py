"""The kernels of a Hopper in processes of their own: with warps that lag, and under memcheck."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from support.hopper import alone
from support.hopper.device import ON_HOPPER, WITH_TRITON_3_9

pytestmark = [*ON_HOPPER, WITH_TRITON_3_9]
# Of a cache that is not split nobody waits for anybody.
WAITING = {name: facts for name, facts in alone.GRIDS.items() if facts.get("num_splits") != 1}
LAGGING = Path(alone.__file__).with_name("lagging.py")


@pytest.mark.parametrize("facts", WAITING.values(), ids=WAITING)
def test_a_warp_that_lags_misses_no_phase_of_a_barrier(facts, tmp_path):
    file = tmp_path / "out.pt"
    # Kernels that no other process should find in its cache.
    caches = {"HEEDFUL_CACHE_DIR": str(tmp_path), "TRITON_CACHE_DIR": str(tmp_path / "triton")}
    command = [sys.executable, str(LAGGING), str(file), json.dumps(facts)]
    # A call that hangs is killed with its process.
    subprocess.run(command, env=alone.environment(**caches), check=True, timeout=120)
    assert torch.equal(torch.load(file), alone.result(**facts).cpu())


@pytest.mark.slow
@pytest.mark.skipif(not shutil.which("compute-sanitizer"), reason="compute-sanitizer is not here")
@pytest.mark.parametrize("facts", alone.GRIDS.values(), ids=alone.GRIDS)
def test_memcheck_finds_no_error(facts, tmp_path):
    file = tmp_path / "out.pt"
    # PyTorch's own kernels, of namespace at, are not the subject.
    checked = ["compute-sanitizer", "--tool", "memcheck", "--error-exitcode", "9"]
    checked += ["--kernel-name-exclude", "kns=at::", sys.executable, alone.__file__]
    command = [*checked, str(file), json.dumps(facts)]
    env, pipe = alone.environment(), subprocess.PIPE
    run = subprocess.run(
        command, env=env, stdout=pipe, stderr=subprocess.STDOUT, text=True, timeout=240
    )
    assert run.returncode == 0, run.stdout[-4000:]
    assert "ERROR SUMMARY: 0 errors" in run.stdout
    assert torch.equal(torch.load(file), alone.result(**facts).cpu())
