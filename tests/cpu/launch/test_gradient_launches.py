"""What a backward hands to the driver: the operands it was given or copies of them, wherever the
call before lay, of whatever lengths it was, and whichever device is the current one."""

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("triton")

import torch
from torch import Tensor

import heedful
from heedful.torch.eager import backends, execute
from heedful.torch.eager.calls import CALLS, KINDS, LATEST
from support import launches
from support.runs import standin

attend: Any = heedful.flash_attn_func


def forget() -> None:
    """As in a process that has seen no call."""
    for known in (CALLS, KINDS, LATEST, backends.FAMILIES):
        known.clear()


def leaves(rows: int, dtype=torch.float16) -> list[Tensor]:
    return [torch.zeros(2, rows, 4, 64, dtype=dtype, requires_grad=True) for _ in range(3)]


def off_by_one(t: Tensor) -> Tensor:
    """At an address that is no multiple of 16 bytes."""
    return t.new_zeros(t.numel() + 1)[1:].view(t.shape)


def told(gpu: standin.Gpu, first: int) -> list[tuple]:
    """All of the launches since but where arrays lie."""
    return [
        (
            launch.kernel,
            launch.grid,
            {n: v for n, v in launch.arguments.items() if n not in launch.memory},
            launch.promises,
            launch.constants,
        )
        for launch in gpu.launches[first:]
    ]


@pytest.mark.parametrize("extra", ["bias", "sink", "bias sink"])
def test_gradients_of_a_bias_and_a_sink_of_new_lengths_are_launched_as_those_of_a_first_call(extra):
    def backward(gpu: standin.Gpu, rows: int) -> list[tuple]:
        made = {"bias": torch.zeros(rows, rows), "sink": torch.zeros(4)}
        learnt: dict[str, Any] = {name: made[name].requires_grad_() for name in extra.split()}
        out = attend(*leaves(rows), **learnt)
        first = len(gpu.launches)
        out.backward(torch.zeros_like(out))
        assert all(t.grad is not None and t.grad.shape == t.shape for t in learnt.values())
        return told(gpu, first)

    with standin.gpu() as gpu:
        known = [backward(gpu, rows) for rows in (70, 50, 40)]
        for rows, launched in zip((70, 50, 40), known, strict=True):
            forget()
            assert backward(gpu, rows) == launched


@pytest.mark.parametrize("place", [0, 1], ids=["dout", "dlse"])
def test_a_backward_of_aligned_cotangents_is_not_that_of_others_of_other_lengths(place):
    def backward(gpu: standin.Gpu, rows: int, change) -> list[tuple]:
        results = attend(*leaves(rows), return_lse=True)
        cotangents = [torch.zeros_like(result) for result in results]
        cotangents[place] = change(cotangents[place])
        first = len(gpu.launches)
        torch.autograd.backward(results, cotangents)
        return told(gpu, first)

    with standin.gpu() as gpu:
        for change, then in ((off_by_one, torch.clone), (torch.clone, off_by_one)):
            backward(gpu, 70, change)
            after = backward(gpu, 50, then)
            forget()
            assert backward(gpu, 50, then) == after
            forget()


@pytest.mark.parametrize("name", ["q", "k", "v", "out", "dout"])
def test_a_known_backward_is_not_that_of_a_tensor_that_lies_elsewhere(name):
    """The stand-in refuses addresses that no kernel is compiled for."""
    with standin.gpu() as gpu:
        given, moved = dict(zip("qkv", leaves(50), strict=True)), {}

        def restore(t: Tensor) -> Tensor:
            return moved.get(t.data_ptr(), t)

        with torch.autograd.graph.saved_tensors_hooks(lambda t: t, restore):
            out = attend(**given)
        dout = torch.zeros_like(out)
        own = {**given, "out": out, "dout": dout}
        for is_moved in (False, False, True, True, False):
            tensor = off_by_one(own[name].detach()) if is_moved else own[name]
            moved[own[name].data_ptr()] = tensor.detach()
            first = len(gpu.launches)
            out.backward(tensor if name == "dout" else dout, retain_graph=True)
            found = [launches.places(launch).get(name) for launch in gpu.launches[first:]]
            places = {place.address for place in found if place is not None}
            assert places == {tensor.data_ptr()}


@pytest.mark.parametrize("name", ["q", "k", "v", "dout"])
def test_what_no_map_can_be_made_of_is_copied_densely_each_time(name):
    """Heads lie before rows in it, at an address that is no multiple of 16 bytes."""
    copied = []

    def moved(t: Tensor) -> Tensor:
        copied.append(off_by_one(t.transpose(1, 2)).transpose(1, 2))
        return copied[-1]

    with standin.gpu("H200") as gpu:
        for _ in range(2):
            given: dict[str, Any] = dict(zip("qkv", leaves(50), strict=True))
            place = given[name].data_ptr() if name in given else 0
            hooks = torch.autograd.graph.saved_tensors_hooks(
                lambda t: t, lambda t, place=place: moved(t) if t.data_ptr() == place else t
            )
            with hooks:
                out = attend(**given, backend="hopper")
            dout = torch.zeros_like(out)
            first = len(gpu.launches)
            out.backward(moved(dout) if name == "dout" else dout)
            places = launches.places(launches.the(gpu.launches[first:], "gradients"))
            assert places[name].address not in (copied[-1].data_ptr(), place)
            assert places[name].strides == {"b": 50 * 256, "h": 64, "r": 256}
            others = {"dout": dout, **given}
            del others[name]
            assert all(places[n].address == t.data_ptr() for n, t in others.items())
    assert len(copied) == 2


@pytest.mark.parametrize("name", ["out", "lse"])
@pytest.mark.parametrize("rows", [70, 50])
def test_a_result_that_a_hook_restored_with_gaps_is_copied_at_lengths_known_and_new(name, rows):
    restored = []

    def restore(t: Tensor) -> Tensor:
        if t.dim() == 3 and name == "lse":
            restored.append(t.transpose(0, 1).contiguous().transpose(0, 1))
        elif t.data_ptr() == place and name == "out":
            restored.append(torch.stack([t, t], -1)[..., 0])
        else:
            return t
        return restored[-1]

    place = -1
    with standin.gpu() as gpu:
        out = attend(*leaves(70))
        out.backward(torch.zeros_like(out))
        with torch.autograd.graph.saved_tensors_hooks(lambda t: t, restore):
            out = attend(*leaves(rows))
        place, first = out.data_ptr(), len(gpu.launches)
        out.backward(torch.zeros_like(out))
    (wrong,) = restored
    found = [places.get(name) for places in map(launches.places, gpu.launches[first:])]
    assert any(found) and wrong.data_ptr() not in [p.address for p in found if p is not None]


@contextmanager
def elsewhere(monkeypatch) -> Iterator[SimpleNamespace]:
    """Another device than the tensors' is the current one, until theirs is made that."""
    current = SimpleNamespace(index=1)

    @contextmanager
    def entered(_) -> Iterator[None]:
        before, current.index = current.index, None
        yield
        current.index = before

    with monkeypatch.context() as patch:
        patch.setattr(torch.cuda, "device", entered)
        patch.setattr(execute, "current_device", lambda: current.index)
        yield current


def test_a_call_on_another_device_is_told_the_same_places(monkeypatch):
    given: dict[str, Any] = dict(zip("qkv", leaves(50), strict=True))
    with standin.gpu() as gpu, elsewhere(monkeypatch) as current:
        out, lse = attend(**given, return_lse=True)
        cotangents = torch.zeros_like(out), torch.zeros_like(lse)
        tensors = (*given.values(), out, lse, *cotangents)
        known = {t.data_ptr(): number for number, t in enumerate(tensors)}
        seen = []
        for index in (1, None):
            current.index, first = index, len(gpu.launches)
            torch.autograd.backward((out, lse), cotangents, retain_graph=True)
            seen.append(
                [
                    {n: known.get(launch.arguments[n]) for n in launch.memory}
                    for launch in gpu.launches[first:]
                ]
            )
    assert seen[0] == seen[1]
    assert set(known.values()) <= {place for launch in seen[0] for place in launch.values()}


@pytest.mark.parametrize("device", ["meta", "cpu"])
def test_probabilities_are_made_on_the_device_of_the_call(device):
    q, k, v = (torch.zeros(1, 5, 2, 16) for _ in range(3))
    with standin.gpu(), torch.device(device):
        _, _, probs = attend(q, k, v, 0.5, return_attn_probs=True)
    assert probs.device == q.device and probs.dtype == q.dtype
