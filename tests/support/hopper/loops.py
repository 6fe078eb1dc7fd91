"""The loop that counts of compiled Hopper kernels."""

from itertools import product

import pytest

from heedful.core.base.device import DeviceSpec
from heedful.core.call.mask import MaskSpec
from heedful.inspector.nvidia import Sass, inspect_cubin
from heedful.launch import compiler
from heedful.launch.spec import KernelCall
from support.problems.grids import slow_but

FLAGS = (False, True)
MASKS = {"full": MaskSpec(), "causal": MaskSpec.of(True), "window": MaskSpec.of(True, (1023, 0))}


def each_loop(test):
    """Gives a test the head dims, masks and results whose loops are meant to be bare: by default
    the causal mask at head dim 64."""
    names = {spec: name for name, spec in MASKS.items()}
    every = slow_but({(MASKS["causal"], 64, True)}, product(MASKS.values(), (128, 64), FLAGS))

    def name(value) -> str:
        is_flag = isinstance(value, bool)
        return ("lse" if value else "out") if is_flag else names.get(value, str(value))

    return pytest.mark.parametrize("mask, head_dim, lse", every, ids=name)(test)


def bare_loop(call: KernelCall, device: DeviceSpec) -> Sass:
    """The loop of a kernel that fits an SM, without predicates, shared memory or spills in it."""
    made = compiler.artifact(call, device.arch)
    assert made.shared_bytes <= device.shared_bytes
    loop = inspect_cubin(made.code).loop
    assert loop is not None
    assert not (loop.predicated or loop.shared or loop.spills)
    return loop
