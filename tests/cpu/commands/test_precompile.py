"""What GPU tests launch is compiled without a GPU, under the names that their calls look for."""

import json
import os
import pickle
import subprocess
import sys
from pathlib import Path

import pytest

from support.problems.cases import Case

pytest.importorskip("triton")

ROOT = Path(__file__).parents[3]
TEST = "tests/device/portable/test_kernels.py::test_whole_tiles_are_within_the_budget"
CASE = Case(seqlen_q=200, seqlen_k=333, head_dim=64, dtype="bfloat16", page_size=7, backward=False)

# Prints what became of the kernels that a call of the case is to be launched with.
FOUND = """
import json
import pickle
import sys

import heedful
from heedful.launch.compiler import artifact
from support.runs import standin
from support.problems.cases import build
from support.runs.prepared import Prepared

with standin.gpu("H200") as gpu:
    built = build(pickle.loads(bytes.fromhex(sys.argv[1])))
    Prepared("portable").forward(built.problem, built.x, None)
for code in gpu.loads:
    artifact(code.call, code.target)
print(json.dumps(heedful.counters))
"""


def run(folder: Path, *command: str, **variables: str) -> str:
    environment = os.environ | {"HEEDFUL_CACHE_DIR": str(folder)} | variables
    paths = [str(ROOT / name) for name in ("src", "tests", "tools")]
    environment |= {"PYTHONPATH": os.pathsep.join([*paths, *filter(None, sys.path)])}
    done = subprocess.run(
        [sys.executable, *command],
        env=environment,
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.slow
def test_a_call_finds_what_was_compiled_for_its_test(tmp_path):
    pack, again = tmp_path / "pack", [pickle.dumps(CASE).hex()]
    said = run(tmp_path, "-m", "precompile", "--pack", str(pack), f"{TEST}[{CASE}]")
    assert "0 tests ended early" in said
    compiled = len(list((tmp_path / "kernels").glob("*.kernel")))
    assert compiled > 0
    found = json.loads(run(tmp_path, "-c", FOUND, *again))
    assert found["disk_hits"] == compiled and "compiles" not in found
    found = json.loads(run(tmp_path / "other", "-c", FOUND, *again, HEEDFUL_PACK=str(pack)))
    assert found["pack_hits"] == compiled and "compiles" not in found


def test_a_list_compiles_nothing(tmp_path):
    said = run(tmp_path, "-m", "precompile", "--list", f"{TEST}[{CASE}]")
    assert " kernels; 0 tests ended early" in said
    assert not list(tmp_path.rglob("*.kernel"))
