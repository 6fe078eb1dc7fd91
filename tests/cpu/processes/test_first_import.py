"""What a first use imports."""

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

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


MOST_MODULES = 101
# What a first call without gradients does without: most have rules of transforms, of caches, of
# splits or of files that are not there.
_UNNEEDED = """
torch.eager.recorded torch.eager.saved torch.eager.written torch.eager.pages torch.operands.apart
torch.operands.cache_checks torch.traced.autograd_rules torch.traced.batching torch.traced.sharded
core.call.describe_cache masks.ranges masks.flashmask masks.relative kernels.args.portable
launch.bind.portable launch.bind.portable_cache launch.code.cache launch.code.folder launch.record
"""
_MODULES = """
import sys
import torch
before = {*sys.modules}
import heedful
q = torch.randn(1, 4, 1, 16, requires_grad=True)
with torch.no_grad():
    heedful.flash_attn_func(q, q, q)
unneeded = {f"heedful.{name}" for name in sys.argv[1].split()}
assert unneeded.isdisjoint(sys.modules), unneeded & {*sys.modules}
heedful.flash_attn_func(q, q, q).sum().backward()
print(sum(name.startswith("heedful.") for name in {*sys.modules} - before))
from heedful.integrations.torch import sdpa
with sdpa():
    torch.nn.functional.scaled_dot_product_attention(q, q, q).sum().backward()
print(*sorted({name for name in {*sys.modules} - before if not name.startswith("heedful.")}))
"""


def test_a_first_call_imports_what_it_needs_and_no_compiler(tmp_path):
    """To load torch's takes longer than to load torch, Triton's as long as half a first call."""
    env = {**os.environ, "PYTHONPATH": str(Path(heedful.__file__).parents[1])}
    command = [sys.executable, "-c", _MODULES, _UNNEEDED]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    count, *found = done.stdout.split()
    # Each takes about a millisecond of every process, and 150 ms over torch alone are the bar.
    assert "heedful" in found and int(count) <= MOST_MODULES
    heavy = ("torch._dynamo", "torch._inductor", "triton", "torch.distributed", "jax", "numpy")
    assert not [name for name in found if name.startswith(heavy)]


def test_a_function_that_is_constant_when_traced_is_what_torch_makes_of_one():
    from heedful.torch.traced.private import constant_when_traced

    def one():
        pass

    def other():
        pass

    assert vars(constant_when_traced(one)) == vars(torch.compiler.assume_constant_result(other))


def test_what_a_first_call_does_without_is_there():
    for name in _UNNEEDED.split():
        assert find_spec(f"heedful.{name}"), name
