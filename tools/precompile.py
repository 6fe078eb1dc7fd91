"""python -m precompile --jobs 8 tests/device/hopper/test_backward.py -k random: compiles what GPU
tests launch, on a machine without a GPU, into this user's cache (HEEDFUL_CACHE_DIR), and with
--pack FOLDER into a pack, which serves the tests elsewhere (HEEDFUL_PACK).

The tests run on CPU tensors that pass for a known GPU's, down to a driver that launches nothing, as
`support.runs.standin` has it. Nothing is computed: every result passes for right, and a test that
cannot go on without a GPU ends there. So this finds the kernels of nearly all tests, not of all.
Whatever it misses is compiled by the test that needs it.
"""

import argparse
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from unittest import mock

sys.path[:0] = [str(Path(__file__).parents[1] / name) for name in ("src", "tests")]

import numpy as np  # noqa: E402
import pytest  # noqa: E402
import torch  # noqa: E402
from torch.overrides import TorchFunctionMode  # noqa: E402

from heedful.core.base.device import by_name  # noqa: E402
from heedful.launch.code.identity import kernel_key  # noqa: E402
from heedful.launch.code.packs import write_pack  # noqa: E402
from heedful.launch.compiler import artifact  # noqa: E402
from heedful.launch.prebuild import compile_all, compiling  # noqa: E402
from heedful.launch.program import bound  # noqa: E402
from heedful.launch.spec import KernelCall  # noqa: E402
from heedful.launch.worker.codec import decode, encode  # noqa: E402
from support.problems import budget  # noqa: E402
from support.runs import standin  # noqa: E402


@dataclass
class Recorder:
    """A pytest plugin. calls: kernel key -> call and architecture of what was to be compiled.
    by_file: how many new ones each file of tests had. ended: tests that could not go on, and why.
    """

    calls: dict[str, tuple[KernelCall, str]] = field(default_factory=dict)
    by_file: Counter[str] = field(default_factory=Counter)
    ended: dict[str, str] = field(default_factory=dict)
    _file: str = ""

    def add(self, call: KernelCall, arch: str) -> None:
        key = kernel_key(call, arch)
        if key not in self.calls:
            # Without numbers that may be expressions in lengths: such are not to be pickled.
            self.calls[key] = decode(encode(call, arch))
            self.by_file[self._file] += 1

    def pytest_runtest_setup(self, item) -> None:
        self._file = item.path.name

    def pytest_runtest_logreport(self, report) -> None:
        if report.failed:
            said = str(report.longrepr).strip().splitlines() or [""]
            self.ended[report.nodeid] = next((x for x in reversed(said) if x[:1] == "E"), said[-1])


class _Generator(torch.Generator):
    """The CPU's, whatever device is asked for."""

    def __new__(cls, device=None):
        return super().__new__(cls)


class _Pretence(TorchFunctionMode):
    """Whatever is to lie on a GPU lies on the CPU, and what a test asks of a result holds."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is torch.Tensor.cuda:
            return args[0]
        if func in (torch.Tensor.__bool__, torch.equal):
            return True
        given = {name: _on_cpu(value) for name, value in (kwargs or {}).items()}
        return func(*map(_on_cpu, args), **given)


def _on_cpu(value):
    is_gpu = isinstance(value, str | torch.device) and str(value).partition(":")[0] == "cuda"
    return "cpu" if is_gpu else value


@contextmanager
def pretended(device: str, recorder: Recorder) -> Iterator[None]:
    """While it is open, tests that are imported anew take this machine for one with the device."""
    capability = divmod(int(by_name(device).arch.removeprefix("sm_")), 10)
    fakes = {
        torch.cuda: {
            "is_available": lambda: True,
            "device_count": lambda: 1,
            "get_device_capability": lambda _=None: capability,
            "synchronize": lambda _=None: None,
            "empty_cache": lambda: None,
        },
        torch: {"Generator": _Generator},
        torch.testing: {"assert_close": lambda *a, **k: None},
        np.testing: {
            name: lambda *a, **k: None for name in ("assert_array_equal", "assert_allclose")
        },
        budget: {
            "check": lambda *a, **k: None,
            "assert_sound": lambda *a: None,
            "over_budget": lambda *a: "",
        },
    }
    with ExitStack() as stack:
        # Whatever needs another Triton than this one is left out, as on the device.
        stack.enter_context(mock.patch.object(standin, "Toolchain", compiling))
        machine = stack.enter_context(standin.gpu(device))

        def compile_call(call: KernelCall, arch: str):
            recorder.add(call, arch)
            return machine.compile(call, arch)

        for owner, attributes in ({bound: {"compile_call": compile_call}} | fakes).items():
            for name, fake in attributes.items():
                stack.enter_context(mock.patch.object(owner, name, fake))
        stack.enter_context(_Pretence())
        yield


def collect(arguments: list[str], device: str) -> Recorder:
    """What the GPU tests that pytest selects with these arguments compile on a known device."""
    recorder = Recorder()
    with pretended(device, recorder):
        given = ["-q", "-m", "gpu", "--tb=line", "--no-summary", "-p", "no:cacheprovider"]
        pytest.main([*given, *arguments], plugins=[recorder])
    return recorder


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--device", default="H200", help="a known device (default: H200)")
    parser.add_argument("--jobs", type=int, default=1, help="kernels compiled at once")
    parser.add_argument("--pack", type=Path, help="write a pack of them into this folder, too")
    parser.add_argument("--list", action="store_true", help="compile nothing")
    known, arguments = parser.parse_known_args()
    found = collect(arguments, known.device)
    for test, reason in found.ended.items():
        print(f"ended: {test}: {reason}")
    for name, count in found.by_file.items():
        print(f"{count:5} kernels first needed by {name}")
    for name, count in Counter(c.kernel.function for c, _ in found.calls.values()).items():
        print(f"{count:5} {name}")
    print(f"{len(found.calls)} kernels; {len(found.ended)} tests ended early")
    if known.list:
        return
    compile_all(list(found.calls.values()), known.jobs)
    if known.pack is not None:
        made = {key: artifact(*call) for key, call in found.calls.items()}
        write_pack(known.pack, made, {})


if __name__ == "__main__":
    main()
