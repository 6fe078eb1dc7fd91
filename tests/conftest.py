"""What every test stands on: tiers (gpu, slow), fixed seeds, and threads that do not fight."""

import atexit
import gc
import os
import random
import sys
from functools import cache

import pytest
from hypothesis import HealthCheck, settings

# 0 in `make test`; what `make test-random` draws is printed.
SEED = int(os.environ.get("TEST_SEED", "0"))

# The same examples in every run, so that a red test is red again; no deadline, since the first
# example of a test may import torch or compile a kernel.
settings.register_profile(
    "heedful", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow]
)
# Fresh examples: `make test-random`.
settings.register_profile("fresh", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("heedful")


# By reason how many tests are left out; where no others were asked for they are skipped one by one.
LEFT_OUT = pytest.StashKey[dict[str, int]]()
# Set where long grids are run, too.
RUN_SLOW = "TEST_RUN_SLOW"


def pytest_addoption(parser):
    parser.addoption("--run-slow", action="store_true", help="run the long grids too")


def pytest_configure(config):
    if config.getoption("--run-slow"):
        # Also of the processes that tests start.
        os.environ[RUN_SLOW] = "1"
    if config.getoption("dist", "no") != "no":
        # One thread a worker: many that wait in a loop for each other take ten times as long. Said
        # before workers start, whose plugins may load NumPy before they read this file.
        os.environ.setdefault("OMP_NUM_THREADS", "1")


@pytest.hookimpl(wrapper=True)
def pytest_collection(session):
    """Modules and test items live to the end: nobody is to look for garbage among them, which took
    a tenth of the time of what torch compiles."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()
        gc.freeze()
        # At 700 new objects it takes a seventh of what torch traces, a tenth of what is emulated.
        gc.set_threshold(100_000, 20, 100)
        # What is frozen is not collected when the process ends, which nanobind has much to say
        # about. Pytest looks for garbage before that, for two seconds where nothing is frozen.
        atexit.register(gc.unfreeze)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config, items):
    wants_slow = config.getoption("-m").strip() == "slow" or RUN_SLOW in os.environ
    gpu_reason = None
    run, left = [], {}
    for item in items:
        if " at 0x" in item.nodeid:
            raise pytest.UsageError(f"a test is named by an address: {item.nodeid}")
        reason = ""
        if item.get_closest_marker("gpu"):
            gpu_reason = reason = _no_gpu() if gpu_reason is None else gpu_reason
        if not reason and not wants_slow and item.get_closest_marker("slow"):
            reason = "a long grid: --run-slow or -m slow"
        if reason:
            item.add_marker(pytest.mark.skip(reason=reason))
            left.setdefault(reason, []).append(item)
        else:
            run.append(item)
    if run:
        # To hand out and report thousands of tests that are skipped takes seconds.
        config.stash[LEFT_OUT] = {reason: len(some) for reason, some in left.items()}
        config.hook.pytest_deselected(items=[item for some in left.values() for item in some])
        items[:] = run


def _no_gpu() -> str:
    """Why no GPU test can run here; empty if they can."""
    try:
        import torch
    except ImportError:
        return "needs a GPU, and torch is not installed"
    if not torch.cuda.is_available():
        return "needs a GPU, and torch.cuda.is_available() is False here"
    return ""


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node, error):
    node.config.stash[LEFT_OUT] = getattr(node, "workeroutput", {}).get("left_out", {})


def pytest_sessionfinish(session):
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["left_out"] = session.config.stash.get(LEFT_OUT, {})


def pytest_terminal_summary(terminalreporter, config):
    for reason, count in config.stash.get(LEFT_OUT, {}).items():
        terminalreporter.write_line(f"{count} left out: {reason}")
    if SEED:
        terminalreporter.write_line(f"seed {SEED}: again by make test-random SEED={SEED}")


@pytest.fixture(autouse=True)
def fixed_seeds():
    """Every test begins from the same random state, whatever ran before it."""
    random.seed(SEED)
    if numpy := sys.modules.get("numpy"):
        numpy.random.seed(SEED)
    if torch := sys.modules.get("torch"):
        seed = torch.manual_seed if _has_accelerator() else torch.default_generator.manual_seed
        seed(SEED)


@cache
def _has_accelerator() -> bool:
    """Whether torch has generators beside the CPU's. Where it has none, `torch.manual_seed` keeps
    for each what it is to do once there is one, and a stack trace: 0.6 ms a call."""
    import torch

    return torch.accelerator.is_available()
