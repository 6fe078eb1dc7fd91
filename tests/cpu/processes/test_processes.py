"""Calls in forked children, from threads that outlive the main one, and as the interpreter ends."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import heedful
from heedful.torch.base import forked
from support.problems.grids import slow_but

needs_fork = pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this system")


def run(code: str, *arguments: str) -> subprocess.CompletedProcess:
    env = {**os.environ, "PYTHONPATH": str(Path(heedful.__file__).parents[1])}
    # Threads of torch's that a child lacks are what this is about.
    env.pop("OMP_NUM_THREADS", None)
    command = [sys.executable, "-c", code, *arguments]
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=120)


# Operations of these sizes are split over torch's threads, which are started before the fork.
_FORK = """
import os, signal
import numpy, torch
from heedful import flash_attn_func, flash_attn_varlen_func, flash_attn_with_kvcache

torch.set_num_threads(2)
q, k, v, slanted, dout = torch.randn(5, 2, 600, 4, 32)
slanted = slanted.transpose(1, 3).contiguous().transpose(1, 3)
half = q.bfloat16(), k.bfloat16(), v.bfloat16()
leaves = [t.clone().requires_grad_() for t in (q, k, v)]
bias = torch.randn(1, 4, 600, 600, requires_grad=True)
cu = torch.tensor([0, 200, 600, 1200], dtype=torch.int32)
packed = [t.reshape(1200, 4, 32) for t in (q, k, v)]
lengths, prefix = torch.tensor([0, 500], dtype=torch.int32), (k[0], v[0])
ones = torch.ones(())

def gradients(*inputs, **options):
    out = flash_attn_func(*inputs[:3], **options)
    return torch.autograd.grad(out, inputs, ones.expand(out.shape))

def decode(**options):
    cache = torch.from_numpy(numpy.zeros((2, 2, 1100, 4, 32), numpy.float32))
    out = flash_attn_with_kvcache(q, *cache, cache_seqlens=lengths, **options)
    return out, cache

def autocast():
    with torch.autocast("cpu", torch.bfloat16):
        return flash_attn_func(q, k, v, causal=True)

CASES = {
    "plain": lambda: flash_attn_func(q, k, v),
    "lse": lambda: flash_attn_func(q, k, v, causal=True, return_lse=True),
    "bfloat16": lambda: flash_attn_func(*half, window_size=(64, 0)),
    "copied": lambda: flash_attn_func(slanted, k, slanted, return_lse=True),
    "dropout": lambda: flash_attn_func(q, k, v, 0.25, dropout_seed=7),
    "packed": lambda: flash_attn_varlen_func(*packed, cu, cu, 600, 600, causal=True),
    "gradients": lambda: gradients(*leaves, causal=True),
    "gradient of the bias": lambda: gradients(*leaves, bias, bias=bias),
    "append": lambda: decode(k=k, v=v, causal=True),
    "prefix": lambda: decode(k=k, v=v, causal=True, shared_prefix=prefix),
    "autocast": autocast,
}

def content(results):
    results = results if isinstance(results, tuple) else (results,)
    return [t.detach().view(torch.uint8).numpy().tobytes() for t in results]

torch.randn(1000, 1000).exp_()
want = {name: content(case()) for name, case in CASES.items()}
assert want["plain"] != want["lse"]
children = {}
for name, case in CASES.items():
    children[name] = os.fork()
    if children[name] == 0:
        signal.alarm(40)
        same = content(case()) == want[name] == content(case())
        os._exit(0 if same else 3)
codes = {name: os.waitpid(child, 0)[1] for name, child in children.items()}
assert not any(codes.values()), codes
assert want["plain"] == content(CASES["plain"]())
"""


@needs_fork
def test_a_forked_child_gets_the_parents_bits_and_does_not_hang():
    done = run(_FORK)
    assert done.returncode == 0, done.stderr


_MODES = """
import os, signal
import torch
from heedful import flash_attn_func

def modes():
    signal.alarm(60)
    try:
        q = torch.randn(1, 300, 4, 32)
        with torch.inference_mode():
            out = flash_attn_func(q, q, q, return_lse=True)[0]
            assert out.is_inference() and torch.is_inference_mode_enabled()
        out = flash_attn_func(q, q, q)
        assert not out.is_inference() and not out.requires_grad
        q.requires_grad_()
        out = flash_attn_func(q, q, q)
        assert out.requires_grad
        with torch.no_grad():
            assert not flash_attn_func(q, q, q).requires_grad
        try:
            flash_attn_func(q, q, q, num_splits=-1)
        except ValueError as error:
            assert "num_splits" in str(error)
        grandchild = os.fork()
        if grandchild == 0:
            signal.alarm(50)
            leaves = [q.detach().requires_grad_() for _ in range(3)]
            out = flash_attn_func(*leaves)
            torch.autograd.grad(out, leaves, torch.ones(()).expand(out.shape))
            os._exit(0)
        assert os.waitpid(grandchild, 0)[1] == 0
        os._exit(0)
    finally:
        import traceback
        traceback.print_exc()
        os._exit(1)

torch.set_num_threads(2)
flash_attn_func(*torch.randn(3, 1, 300, 4, 32), return_lse=True)
child = os.fork()
if child == 0:
    modes()
assert os.waitpid(child, 0)[1] == 0
"""


@needs_fork
def test_modes_errors_and_a_child_of_a_child_are_as_ever():
    done = run(_MODES)
    assert done.returncode == 0, done.stderr


def test_a_gpu_that_the_parent_used_is_refused_in_a_child_with_the_way_out(monkeypatch):
    monkeypatch.setattr(torch.cuda, "_is_in_bad_fork", lambda: True)
    with pytest.raises(RuntimeError, match="cuda:1: .*forked.*'spawn'"):
        forked.check_device(torch.device("cuda:1"))
    forked.check_device(torch.device("cpu"))
    monkeypatch.setattr(torch.cuda, "_is_in_bad_fork", lambda: False)
    forked.check_device(torch.device("cuda:1"))


# Enough scores for threads of the backend's own.
_LATE = """
import atexit, sys, threading, time
import torch
import heedful

torch.set_num_threads(2)
q, k, v = torch.randn(3, 1, 1500, 4, 32)

def call():
    return heedful.flash_attn_func(q, k, v, causal=True, return_lse=True)[0]

def late():
    threading.main_thread().join()
    time.sleep(0.3)
    assert torch.equal(call(), want)
    print("late thread")

def at_exit():
    assert torch.equal(call(), want)
    print("at exit")

want = None
if "before" in sys.argv:
    want = call()
atexit.register(at_exit)
threading.Thread(target=late).start()
if want is None:
    want = torch.nn.functional.scaled_dot_product_attention(
        *(t.transpose(1, 2).double() for t in (q, k, v)), is_causal=True
    ).transpose(1, 2)
    torch.equal = lambda a, b: (a.double() - b).abs().max() < 1e-5
"""


@pytest.mark.parametrize("first", slow_but({"before"}, ["before", "only"]))
def test_a_thread_that_outlives_the_main_one_and_atexit_may_call(first):
    done = run(_LATE, first)
    assert done.returncode == 0 and done.stderr == ""
    assert done.stdout == "late thread\nat exit\n"


def test_where_no_more_threads_can_be_had_the_calling_one_does_the_work():
    done = run(
        "import threading, torch, heedful\n"
        "torch.set_num_threads(2)\n"
        "q = torch.randn(1, 1500, 4, 32)\n"
        "started = []\n"
        "class Few(threading.Thread):\n"
        "    def start(self):\n"
        "        if started:\n"
        '            raise RuntimeError("can\'t start new thread")\n'
        "        started.append(self)\n"
        "        super().start()\n"
        "plain, threading.Thread = threading.Thread, Few\n"
        "short = heedful.flash_attn_func(q, q, q, return_lse=True, backend='cpu')\n"
        "assert len(started) == 1 and not started[0].join(60)\n"
        "threading.Thread = plain\n"
        "full = heedful.flash_attn_func(q, q, q, return_lse=True, backend='cpu')\n"
        "assert all(torch.equal(a, b) for a, b in zip(short, full))\n"
    )
    assert done.returncode == 0, done.stderr
