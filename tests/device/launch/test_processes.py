"""Forked children on a GPU: they are told at once what they cannot do, and the parent goes on."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

import heedful

pytestmark = pytest.mark.gpu

_FORK = """
import os, signal
import torch
import heedful

q, k, v = (torch.randn(1, 128, 8, 64, device="cuda", dtype=torch.bfloat16) for _ in range(3))
leaves = [t.clone().requires_grad_() for t in (q, k, v)]
cache = torch.zeros(2, 1, 256, 8, 64, device="cuda", dtype=torch.bfloat16)
lengths = torch.zeros(1, device="cuda", dtype=torch.int32)

def decode():
    return heedful.flash_attn_with_kvcache(q, *cache, k=k, v=v, cache_seqlens=lengths)

want, _ = heedful.flash_attn_func(q, k, v), decode()
pending = heedful.flash_attn_func(*leaves)
calls = {
    "known": lambda: heedful.flash_attn_func(q, k, v),
    "new": lambda: heedful.flash_attn_func(q, k, v, causal=True),
    "decode": decode,
    "backward": lambda: pending.backward(pending),
}
for name, call in calls.items():
    child = os.fork()
    if child == 0:
        signal.alarm(60)
        try:
            call()
        except RuntimeError as error:
            told = "fork" in str(error) or (name == "backward" and "initialization" in str(error))
            os._exit(0 if told else 3)
        os._exit(4)
    assert os.waitpid(child, 0)[1] == 0, name
assert torch.equal(heedful.flash_attn_func(q, k, v), want)
pending.backward(pending)
"""


def test_a_child_of_a_process_that_used_the_gpu_is_told_so():
    env = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(Path(heedful.__file__).parents[1]), *sys.path]),
    }
    done = subprocess.run(
        [sys.executable, "-c", _FORK], env=env, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
