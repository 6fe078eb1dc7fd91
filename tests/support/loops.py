"""The loop that counts of compiled Hopper kernels."""

import pytest

from heedful.core.device import DeviceSpec
from heedful.core.mask import MaskSpec
from heedful.inspector.nvidia import Sass, inspect_cubin
from heedful.launch import compiler
from heedful.launch.spec import KernelCall

MASKS = {"full": MaskSpec(), "causal": MaskSpec.of(True), "window": MaskSpec.of(True, (1023, 0))}


def each_loop(test):
    """Gives a test the head dims, masks and results whose loops are meant to be bare."""
    slow = pytest.param(True, marks=pytest.mark.slow)
    test = pytest.mark.parametrize("lse", [False, slow], ids=["", "lse"])(test)
    test = pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)(test)
    return pytest.mark.parametrize("head_dim", [64, 128])(test)


def bare_loop(call: KernelCall, device: DeviceSpec) -> Sass:
    """The loop of a kernel that fits an SM, without predicates, shared memory or spills in it."""
    made = compiler.artifact(call, device.arch)
    assert made.shared_bytes <= device.shared_bytes
    loop = inspect_cubin(made.code).loop
    assert loop is not None
    assert not (loop.predicated or loop.shared or loop.spills)
    return loop
