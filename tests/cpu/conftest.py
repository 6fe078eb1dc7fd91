"""CPU tests use small tensors, which more threads only slow down: on a machine that other
processes keep busy, a parallel loop waits whole time slices for its last thread."""

import os
from importlib.metadata import version
from importlib.util import find_spec

import pytest
import torch

# Devices that JAX's tests spread work over; read when JAX is first used. Each program runs once or
# twice: most of the time went into compiling it. One test takes XLA's own settings
# (jax/test_xlas_own_settings.py).
XLA_FLAGS = (
    "--xla_force_host_platform_device_count=4 --xla_backend_optimization_level=0"
    " --xla_llvm_disable_expensive_passes=true --xla_cpu_parallel_codegen_split_count=1"
)
if find_spec("jaxlib") and version("jaxlib").startswith("0.10."):
    # The older emitters compile in half of the time. They round a number in 200,000 to e4m3fnuz
    # otherwise. A newer XLA has the others alone, and stops at flags that it does not know.
    XLA_FLAGS += " --xla_cpu_use_fusion_emitters=false"
os.environ.setdefault("XLA_FLAGS", XLA_FLAGS)


@pytest.fixture(autouse=True)
def ranks_are_said(request):
    """JAX's tests run as jax's own do: no rank is promoted without a word."""
    if "jax" not in request.module.__name__.split("."):
        yield
        return
    import jax

    with jax.numpy_rank_promotion("raise"):
        yield


@pytest.fixture(autouse=True)
def one_thread():
    """One intra-operation thread for the test, then as before."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
