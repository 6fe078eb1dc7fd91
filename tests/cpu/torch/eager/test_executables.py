"""How a bound program runs on torch's memory: its scratch, its launches, torch's own functions."""

import importlib.util
from contextlib import nullcontext
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch._C._dynamo import guards

from heedful.core.base.arrays import ArraySpec
from heedful.core.planning.sizes import Workspace
from heedful.launch.spec import Program
from heedful.torch.eager import execute, zeros

CPU = torch.device("cpu")
NAMES = {
    "raw_stream": (torch._C, "_cuda_getCurrentRawStream"),
    "current_device": (torch._C, "_cuda_getDevice"),
    "_is_capturing": (torch._C, "_cuda_isCurrentStreamCapturing"),
    "_empty_strided": (guards, "_empty_strided_cuda"),
}


@pytest.mark.parametrize("name", NAMES)
def test_a_torch_with_a_gpu_is_asked_by_functions_of_its_own(name, monkeypatch):
    owner, own = NAMES[name]
    monkeypatch.setattr(owner, own, refuse, raising=False)
    assert getattr(loaded(), name) is refuse
    monkeypatch.delattr(owner, own)
    assert getattr(loaded(), name) is not refuse


def refuse(*_):
    raise AssertionError("not to be called")


def loaded() -> Any:
    """Another copy of the module, which looks at torch anew."""
    spec = importlib.util.spec_from_file_location("heedful.torch.eager.execute", execute.__file__)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Kernels:
    """Kernels that note what they are launched with, at a first call and bound."""

    def __init__(self):
        self.first: list[tuple] = []
        self.bound: list[tuple] = []

    def run(self, numbers, addresses, stream) -> None:
        self.first.append((list(addresses), stream))

    def bind(self, numbers):
        return lambda addresses, stream: self.bound.append((addresses, stream))


@pytest.fixture
def machine(monkeypatch):
    monkeypatch.setattr(execute, "current_device", lambda: None)
    monkeypatch.setattr(execute, "raw_stream", lambda _: 5)
    monkeypatch.setattr(execute, "_is_capturing", lambda: False)
    monkeypatch.setattr(zeros, "_of_stream", {})
    monkeypatch.setattr(zeros, "unpooled", lambda n, _: torch.ones(n, dtype=torch.uint8))


def scratch(nbytes: int, zeroed: bool = False) -> Workspace:
    return Workspace(f"of {nbytes}", ArraySpec.contiguous((nbytes,), "uint8"), zeroed)


def executable(kernels: Kernels, patch, *spaces: Workspace, before=0, once=False) -> Any:
    patch.setattr(execute, "ProgramKind", lambda *_: kernels)
    patch.setattr(torch.cuda, "device", lambda _: nullcontext())
    case = execute.Case(Program((), spaces), "sm_90", CPU, [], {}, range(before))
    numbers = (*case.outputs, 10**12, 0.5)
    run = partial(case.once, numbers) if once else case.bind(numbers)
    return lambda tensors: run([tensor.data_ptr() for tensor in tensors])


@pytest.mark.parametrize("before", [0, 7])
def test_other_numbers_are_no_sizes_of_scratch(before, machine, monkeypatch):
    """Sizes come between what comes before and the numbers of the kernels."""
    kernels = Kernels()
    spaces = scratch(5), scratch(9, True), scratch(300, True)
    made, fresh = [], execute.maker(CPU)

    def make(shape, strides, dtype):
        made.append((shape, strides, dtype))
        return fresh(shape, strides, dtype)

    monkeypatch.setattr(execute, "maker", lambda _: make)
    monkeypatch.setattr(zeros, "MOST_BYTES", 767)
    executable(kernels, monkeypatch, *spaces, before=before, once=True)([])
    ((addresses, stream),) = kernels.first
    assert len(addresses) == 3 and stream == 5 and addresses[2] - addresses[1] == 256
    assert made == [((size,), (1,), torch.uint8) for size in (256, 768)]


def test_what_comes_once_binds_no_kernel(machine, monkeypatch):
    kernels, tensor = Kernels(), torch.zeros(3)
    launched = ([tensor.data_ptr()], 5)
    executable(kernels, monkeypatch, once=True)([tensor])
    assert kernels.first == [launched] and not kernels.bound
    run = executable(kernels, monkeypatch)
    for times in (1, 2, 3):
        run([tensor])
        assert kernels.first == [launched] and kernels.bound == [launched] * times


@pytest.mark.parametrize("zeroed", [False, True], ids=["scratch", "zeroed"])
def test_the_limit_holds_scratch_of_either_sort(zeroed, machine, monkeypatch):
    monkeypatch.setenv("HEEDFUL_WORKSPACE_LIMIT_MB", "1")
    for once in (False, True):
        executable(Kernels(), monkeypatch, scratch(2**20, zeroed), once=once)
        with pytest.raises(ValueError, match=f"allows {2**20} bytes of scratch, this call needs"):
            executable(Kernels(), monkeypatch, scratch(2**20 + 1, zeroed), once=once)([])


def test_no_bytes_need_no_region():
    def none() -> torch.Tensor:
        raise AssertionError("a region for nothing")

    assert zeros.Zeros(256, none).take(0) == 0


def test_a_region_has_room_for_many_calls_that_count_a_little():
    """A fill is a launch: one is to do for a thousand calls of 64 counters."""
    region = SimpleNamespace(fills=0, data_ptr=lambda: 2**20, numel=lambda: zeros.REGION_BYTES)

    def fill() -> None:
        region.fills += 1

    region.zero_ = fill
    pool = zeros.Zeros(256, lambda: region)  # pyright: ignore[reportArgumentType]
    for _ in range(1024):
        pool.take(4 * 64)
    assert region.fills == 1
    pool.take(1)
    assert region.fills == 2


def test_a_region_is_bytes_of_the_device_that_asks(monkeypatch):
    event = SimpleNamespace(record_event=lambda: None, wait_event=lambda _: None)
    monkeypatch.setattr(torch.cuda, "device", lambda _: nullcontext())
    monkeypatch.setattr(torch.cuda, "current_stream", lambda *_: event)
    region = zeros.unpooled(256, torch.device("meta"))
    assert (region.dtype, region.shape, region.device.type) == (torch.uint8, (256,), "meta")
