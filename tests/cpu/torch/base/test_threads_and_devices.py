"""Calls in forked children, devices as the planner's facts, and gradients that are taken once."""

import sys
import threading
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from heedful.core.base import forks
from heedful.core.base.device import KNOWN
from heedful.torch.base import arrays, device, forked
from heedful.torch.base.once import once

# A child.


@pytest.fixture
def stranded(monkeypatch) -> None:
    """Calls run on a thread of their own, as in a forked child."""

    def on_own_thread(function: Any) -> Any:
        made: list[Any] = []
        thread = threading.Thread(target=lambda: made.append(function()))
        thread.start()
        thread.join()
        return made[0]

    monkeypatch.setattr(forks, "is_stranded", lambda: True)
    monkeypatch.setattr(forks, "on_own_thread", on_own_thread)


def modes(*arguments: Any) -> tuple[Any, ...]:
    told = torch.is_inference_mode_enabled(), torch.is_grad_enabled()
    return (*told, torch.is_autocast_enabled("cpu"), threading.get_ident(), *arguments)


@pytest.mark.parametrize("inference", [False, True])
@pytest.mark.parametrize("grad", [False, True])
def test_in_a_child_a_call_runs_on_another_thread_with_the_modes_of_its_own(
    stranded, inference, grad
):
    with torch.inference_mode(inference), torch.set_grad_enabled(grad):
        wanted = modes("a", 2)
        found = forked.on_own_thread(modes, "a", 2)
    assert found[3] != wanted[3]
    assert (*found[:3], *found[4:]) == (*wanted[:3], *wanted[4:])


def test_elsewhere_a_call_runs_where_it_is(monkeypatch):
    monkeypatch.setattr(forks, "is_stranded", lambda: False)
    assert forked.on_own_thread(modes, 5) == modes(5)


@pytest.mark.parametrize("fails", [False, True])
def test_steps_of_a_call_run_without_autocast_which_is_on_again_after_it(fails):
    def function() -> Any:
        found.append(torch.is_autocast_enabled("cpu"))
        if fails:
            raise KeyError
        return modes()

    found: list[bool] = []
    with torch.autocast("cpu"):
        if fails:
            with pytest.raises(KeyError):
                forked.on_own_thread(function)
        else:
            assert forked.on_own_thread(function)[2] is False
        assert torch.is_autocast_enabled("cpu")
    assert found == [False] and not torch.is_autocast_enabled("cpu")


@pytest.mark.parametrize("forked_badly", [False, True])
def test_a_gpu_of_the_parent_is_refused_in_a_child_and_nothing_else(monkeypatch, forked_badly):
    monkeypatch.setattr(torch.cuda, "_is_in_bad_fork", lambda: forked_badly)
    forked.check_device(torch.device("cpu"))
    if not forked_badly:
        forked.check_device(torch.device("cuda:1"))
        return
    with pytest.raises(RuntimeError) as caught:
        forked.check_device(torch.device("cuda:1"))
    assert str(caught.value) == f"q is on cuda:1: {forked.FORKED}"


# Devices.


@pytest.fixture
def figures(monkeypatch) -> Any:
    """The figures that torch has of a GPU."""
    said = SimpleNamespace(
        name="a GPU",
        major=9,
        minor=0,
        gcnArchName="gfx942:sramecc+",
        multi_processor_count=17,
        shared_memory_per_block=1000,
        shared_memory_per_block_optin=2000,
        L2_cache_size=3000,
    )
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: said)
    monkeypatch.setattr(torch.version, "hip", None)
    for kept in (device.device_spec, device._versions):
        kept.cache_clear()
    yield said
    device.device_spec.cache_clear()


@pytest.mark.parametrize(("hip", "arch", "shared"), [(None, "sm_90", 2000), ("6", "gfx942", 1000)])
def test_a_gpu_is_what_torch_says_of_it(figures, monkeypatch, hip, arch, shared):
    monkeypatch.setattr(torch.version, "hip", hip)
    found = device.device_spec(torch.device("cuda:0"))
    assert (found.arch, found.name, found.units) == (arch, "a GPU", 17)
    assert (found.shared_bytes, found.l2_bytes) == (shared, 3000)


def test_a_cpu_has_as_many_units_as_torch_has_threads(figures, monkeypatch):
    monkeypatch.setattr(torch, "get_num_threads", lambda: 7)
    found = device.device_spec(torch.device("cpu"))
    assert found.units == 7 and found.arch == KNOWN["CPU"].arch


def test_devices_that_no_kernel_knows_are_refused(figures, monkeypatch):
    with pytest.raises(ValueError, match="q must be on a CPU, CUDA or ROCm device, got meta"):
        device.device_spec(torch.device("meta"))
    monkeypatch.setattr(sys, "platform", "win32")
    with pytest.raises(ValueError, match="q must be on the CPU, got cuda:0: "):
        device.device_spec(torch.device("cuda:0"))
    device.device_spec(torch.device("cpu"))


@pytest.mark.parametrize("has_gpu", [False, True])
def test_a_toolchain_knows_the_packs_and_validated_backends_of_its_device(
    figures, monkeypatch, has_gpu
):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: has_gpu)
    monkeypatch.setattr(device.validations, "validated", lambda spec: ("validated", spec.arch))
    monkeypatch.setattr(device.packs, "backends", lambda arch: ("packs", arch))
    default = "sm_90" if has_gpu else KNOWN["CPU"].arch
    for given, arch in ((None, default), (torch.device("cuda:0"), "sm_90")):
        found = device.toolchain(given)
        assert found.packs == ("packs", arch) and found.validated == ("validated", arch)
        assert found.torch == device.numbers(torch.__version__) and found.jax is None
        assert found.triton == (device.compiler() and device.compiler().numbers)  # pyright: ignore


# Arrays.


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.int64])
def test_specs_say_dtype_strides_and_where_memory_begins(dtype):
    memory = torch.zeros(64, dtype=torch.uint8)
    for begin in (0, 8):
        size = 4 * dtype.itemsize
        x = memory[begin : begin + size].view(dtype).view(2, 2).T
        for made, aligned in ((arrays.array_spec(x), begin == 0), (arrays.abstract_spec(x), True)):
            assert made.dtype == str(dtype).partition(".")[2] == arrays.dtype_name(dtype)
            assert (made.shape, made.strides, made.device) == ((2, 2), (1, 2), x.device)
            assert made.aligned is aligned


# Gradients that are taken once.


class Twice(torch.autograd.Function):
    """Two results of one value."""

    seen: list[Any] = []

    @staticmethod
    def forward(ctx, x):
        ctx.set_materialize_grads(False)
        return x * 2, x * 3

    @staticmethod
    @once
    def backward(ctx, *grads):
        Twice.seen.append([None if g is None else g.requires_grad for g in grads])
        first, second = grads
        parts = [g * n for g, n in ((first, 2), (second, 3)) if g is not None]
        return sum(parts)


@pytest.mark.parametrize("which", [0, 1])
def test_a_result_that_nobody_differentiates_has_no_gradient_to_depend_on(which):
    x = torch.ones(3, requires_grad=True)
    for create in (False, True):
        result = Twice.apply(x)[which]  # pyright: ignore[reportOptionalSubscript]
        (grad,) = torch.autograd.grad(result.sum(), x, create_graph=create)
        assert grad.tolist() == [which + 2.0] * 3 and grad.requires_grad == create
        if create:
            with pytest.raises(RuntimeError, match="differentiate twice"):
                grad.sum().backward()


@pytest.mark.parametrize("depends", [False, True])
def test_a_gradient_of_a_gradient_raises_whatever_came_in(depends):
    x = torch.ones(3, requires_grad=True)
    cotangent = torch.ones(3, requires_grad=depends)
    out, _ = Twice.apply(x)  # pyright: ignore[reportGeneralTypeIssues]
    (grad,) = torch.autograd.grad(out, x, cotangent, create_graph=True)
    assert cotangent.requires_grad == depends
    with pytest.raises(RuntimeError, match="differentiate twice"):
        grad.sum().backward()
