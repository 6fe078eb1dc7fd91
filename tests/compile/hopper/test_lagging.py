"""What tests/device/hopper/test_alone.py runs with a warp that lags does have it."""

import json
import os
import subprocess
import sys

import pytest

pytest.importorskip("triton")

from heedful.launch.code.triton_compat import VERSION

pytestmark = pytest.mark.skipif(VERSION < (3, 9), reason="gl.inline_asm came with Triton 3.9")

# Kernels that were compiled before are not compiled anew: a process of its own.
_SLEEPS = """
import json
import sys
from compile.test_decode import buffers_of
from heedful.core.base.device import by_name
from heedful.core.planning.plan import plan
from heedful.core.call.problem import AttentionProblem
from heedful.launch.bind import decode, hopper_decode, mla
from heedful.launch.code.triton_compat import compile_kernel
from heedful.core.registry.by_hand import forced
from heedful.launch.program.programs import program
from support.hopper import lagging

lagging.apply()
latent = {"head_dim": 576, "head_dim_v": 512, "v_in_k": True}
found = {}
for backend, bind, facts in (
    ("decode/portable", decode, {"head_dim": 128}),
    ("hopper_decode", hopper_decode, {"head_dim": 128}),
    ("mla", mla, latent),
    ("mla_swap_ab", mla, latent),
):
    if backend not in sys.argv[1:]:
        continue
    problem = AttentionProblem.dense(4, 1, 4096, 16, 1, used_k=True, **facts)
    made = plan(problem, by_name("H200"), backend=forced(backend))
    (call,) = bind.forward(problem, made, buffers_of(problem)).calls
    found[backend] = compile_kernel(call, "sm_90").asm["ptx"].count("nanosleep")
if "hopper/halves" in sys.argv[1:]:
    facts = {"head_dim": 512, "needs_grad": True, "return_lse": True}
    problem = AttentionProblem.dense(1, 512, 512, 2, **facts)
    made = plan(problem, by_name("H200"), backend=forced("hopper/halves"))
    calls = program(made, "backward").calls
    (call,) = (each for each in calls if each.kernel.function == "backward_halves")
    found["hopper/halves"] = compile_kernel(call, "sm_90").asm["ptx"].count("nanosleep")
print(json.dumps(found))
"""


# How many sleeps are in a kernel: a part is stored at one place, and at one of each consumer.
LEAST = {"decode/portable": 1, "hopper_decode": 2, "mla_swap_ab": 2, "mla": 3}
# In a cluster each consumer waits for keys and values, queries, dO, the other program twice, and
# the other consumer; the producer for two rings, and for far rows.
LEAST["hopper/halves"] = 2 * 7 + 3


@pytest.mark.parametrize(
    "backends",
    [
        ["decode/portable"],
        pytest.param(["hopper_decode", "mla_swap_ab"], marks=pytest.mark.slow),
        pytest.param(["mla"], marks=pytest.mark.slow),
        pytest.param(["hopper/halves"], marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_kernels_over_caches_sleep_before_parts_and_the_specialised_one_before_waits_too(backends):
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", _SLEEPS, *backends]
    run = subprocess.run(command, env=env, stdout=subprocess.PIPE, text=True, check=True)
    found = json.loads(run.stdout.splitlines()[0])
    assert list(found) == backends
    assert all(found[name] >= LEAST[name] for name in backends)
    assert found.get("decode/portable", 1) == 1
